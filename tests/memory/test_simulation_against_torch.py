"""Simulated bytes beside the bytes that torch really allocated on the CPU, as its profiler counts them."""

import pytest

from tests.support.own_process import in_own_process
from tests.support.real_steps import beside_profiler, plan_row

pytestmark = pytest.mark.slow  # test_measured_on_h200.py holds the simulation to a measurement in every run


@pytest.mark.parametrize(
    "name", ["LR-ASPP MobileNetV3-L", "FCN ResNet-18", "FPN MobileNetV2", "Segformer MiT-B0", "PSPNet ResNet-18"]
)
def test_simulated_peak_is_within_1_percent_of_the_profiler(name):
    rows = in_own_process(beside_profiler, name, (4,), (2, 3), (3, 0, 2))
    for measured, simulated, _ in rows:
        assert simulated == pytest.approx(measured, rel=0.01), rows


@pytest.mark.parametrize("name", ["Segformer MiT-B0", "FPN MobileNetV2"])
def test_peak_of_recomputed_blocks_is_within_1_percent(name):
    """The first blocks that free a fifth of the memory, in a real step."""
    ((measured, simulated, blocks),) = in_own_process(beside_profiler, name, (4,), share=0.8)
    assert blocks
    assert simulated == pytest.approx(measured, rel=0.01)


def test_frozen_and_thawed_peaks_are_within_1_percent():
    rows = in_own_process(beside_profiler, "FPN frozen", (3,))
    (frozen, simulated, _), (thawed, simulated_thawed, _) = rows
    assert (simulated, simulated_thawed) == pytest.approx((frozen, thawed), rel=0.01)
    weights_mib = 11.18e6 * 4 / 2**20  # of ResNet-18: their gradients and their momentum
    assert thawed > frozen + 1.9 * weights_mib


def test_kernel_scratch_memory_is_missing_from_the_simulation():
    """The CPU's convolutions take scratch within one call for some shapes; the simulation is below, never above."""
    ((measured, simulated, _),) = in_own_process(beside_profiler, "Unet ResNet-18", (4,))
    assert simulated < measured < 1.06 * simulated


@pytest.mark.parametrize("name", ["LR-ASPP MobileNetV3-S", "EoMT ViT-Ti/16"])
def test_plan_is_within_1_percent_of_what_operators_return(name):
    row = in_own_process(plan_row, name, has_allocator=False)
    assert row["planned"] == pytest.approx(row["ledger"], rel=0.01), row
