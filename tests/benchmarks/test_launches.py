"""Process CPU and operators of a step on a thin DeepLabV3-ResNet50, for one device and for replicas. Asserts no time.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_launches.py
"""

import pytest
import torch

from tests.support.gpu.launch_counts import build_step, count, least_cpu_s

pytestmark = pytest.mark.benchmark


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_host_cost_of_a_step(replicas, capsys):
    torch.set_num_threads(1)
    net, step = build_step(replicas)
    counter = count(step)
    with capsys.disabled():
        print(
            f"\n{replicas} replicas of {len(list(net.modules()))} modules: {least_cpu_s(step, 20) * 1e3:.1f} ms of"
            f" process CPU a step, {counter.dispatches} dispatches, {counter.launches} launches"
        )
