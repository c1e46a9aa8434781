"""Upper bounds of the operators of a step, on a thin DeepLabV3-ResNet50: what a step costs the host in each mode.

With flat weights, and a node per synchronised BatchNorm layer that joins the parts. Before: (dispatches, launches) of
(831, 469), (20443, 13109), (50413, 32259) and, for a rank, (8960, 6188).

At the least, every replica dispatches the operators of the network: 470 of the 831, besides BatchNorm and the
accumulation of gradients, which three replicas do together.
"""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.gpu.batchnorm_kernels import kernels_on_the_cpu
from tests.support.gpu.launch_counts import build_ddp_step, build_step, count

BOUNDS = {
    "single": (850, 480),
    "dp x2": (4110, 2460),
    "dp x3": (5200, 3060),
    "dp x3, CUDA's kernels": (3935, 1920),
    "dp x8": (10620, 6050),
    "dp x8, CUDA's kernels": (9060, 4610),
    "ddp": (3800, 2770),
    "ddp, CUDA's kernels": (2420, 1580),
}


@pytest.fixture
def process_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def check(kind, build, capsys):
    _, step = build()
    counter = count(step)
    with capsys.disabled():
        print(f"\n{kind}: {counter.dispatches} dispatches, {counter.launches} launches")
    dispatches, launches = BOUNDS[kind]
    assert counter.dispatches <= dispatches
    assert counter.launches <= launches


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "replicas"), [("single", 1), ("dp x2", 2), ("dp x3", 3), ("dp x8", 8)])
def test_operators_of_a_step_stay_within_bounds(kind, replicas, capsys):
    check(kind, lambda: build_step(replicas), capsys)
    if replicas > 2:
        with kernels_on_the_cpu():
            check(f"{kind}, CUDA's kernels", lambda: build_step(replicas), capsys)


@pytest.mark.usefixtures("process_group")
def test_operators_of_a_rank_stay_within_bounds(capsys):
    check("ddp", build_ddp_step, capsys)
    with kernels_on_the_cpu():
        check("ddp, CUDA's kernels", build_ddp_step, capsys)
