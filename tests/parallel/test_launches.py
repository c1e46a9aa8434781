"""Upper bounds of a step's operators and launches, on a thin DeepLabV3-ResNet50: what a step costs the host.

Before flat weights, and before one node per synchronised BatchNorm layer joined its parts, the operators were 831,
20443 on 3 devices, 50413 on 8, and 8960 in a rank. At the least, every replica dispatches the operators of the network:
470 of the 831, besides BatchNorm and the accumulation of gradients, which three replicas do together.
"""

from contextlib import nullcontext

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.gpu.batchnorm_kernels import kernels_on_the_cpu
from tests.support.gpu.launches import build_ddp_step, build_step, count


@pytest.mark.parametrize(
    ("num_devices", "has_kernels", "bounds"),
    [
        (1, False, (850, 480)),
        (3, False, (5200, 3070)),
        (3, True, (3935, 1930)),
        (8, True, (9060, 4630)),
        ("ddp", False, (3800, 2770)),
        ("ddp", True, (2420, 1580)),
    ],
)
def test_operators_of_a_step_stay_within_bounds(num_devices, has_kernels, bounds, capsys):
    if num_devices == "ddp":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with kernels_on_the_cpu() if has_kernels else nullcontext():
            counter = count((build_ddp_step() if num_devices == "ddp" else build_step(num_devices))[1])
    finally:
        if num_devices == "ddp":
            dist.destroy_process_group()
    with capsys.disabled():
        print(f"\n{num_devices}, {has_kernels}: {counter.dispatches} dispatches, {counter.total} launches")
    assert counter.dispatches <= bounds[0]
    assert counter.total <= bounds[1]
