"""Memory that the Triton launch allocates against what a memory plan counts for it, for the heads of every recipe."""

from collections import deque

import pytest
import torch

from segapp.losses import cross_entropy
from segapp.losses.fused import checks
from segapp.losses.fused.pixel_sums import PixelOptions
from segapp.memory.ledger import StorageLedger
from segapp.memory.simulated_devices import simulated_ledger

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch on Linux")

from segapp.losses.fused import triton_cross_entropy

HEADS = [  # C, h, w, H, W: those of the recipes, and of wider ranges
    (150, 128, 128, 512, 512), (11, 30, 40, 240, 320), (19, 96, 96, 768, 768), (19, 64, 128, 512, 1024),
    (19, 24, 48, 96, 192), (2, 32, 32, 512, 512), (2, 64, 64, 512, 512), (21, 60, 60, 480, 480),
    (150, 64, 64, 512, 512), (19, 400, 400, 512, 512), (19, 97, 193, 769, 1537), (320, 16, 16, 64, 64),
]  # fmt: skip


class NoKernel:
    def __getitem__(self, grid):
        return lambda *_, **__: None


def peak_mib(ledger, compute, *arguments):
    """Peak of what an operation allocates beside its arguments."""
    ledger.tag(arguments, "arguments")
    with ledger:
        kept = compute(*arguments)
    del kept
    (by_phase,) = ledger.peaks().values()
    return max(peak.total() - peak["arguments"] for peak in by_phase.values()) / 2**20


@pytest.mark.sampled(2)
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_plan_counts_what_the_launch_allocates(head, align_corners, monkeypatch):
    monkeypatch.setattr(triton_cross_entropy, "raise_reported", lambda: None)  # what no kernel wrote is no target
    monkeypatch.setattr(checks, "_reports", deque(maxlen=64))
    for kernel in ("loss_kernel", "gather_kernel", "bad_ids_kernel"):
        monkeypatch.setattr(triton_cross_entropy, kernel, NoKernel())
    C, h, w, H, W = head
    logits, target = torch.empty(4, C, h, w), torch.empty(4, H, W, dtype=torch.uint8)
    options = PixelOptions(align_corners, 255, label_smoothing=0.0)

    def launch(logits, target):
        return triton_cross_entropy.cross_entropy_by_triton(logits, target, None, options, with_gradient=True)

    launch(logits, target)  # makes the tables, which stay
    launched = peak_mib(StorageLedger(), launch, logits, target)
    of_plan = torch.empty_like(logits, device="meta", requires_grad=True), torch.empty_like(target, device="meta")
    planned = peak_mib(
        simulated_ledger(), lambda *tensors: cross_entropy._by_kernels(*tensors, None, options), *of_plan
    )
    assert launched == pytest.approx(planned, rel=0.002, abs=0.5)


def test_default_device_does_not_change_the_tables():
    with torch.device("meta"):
        row_starts, row_fractions, column_starts, column_fractions = triton_cross_entropy._tables(
            (7, 6), (35, 41), True, torch.float32, torch.device("cpu")
        )
    assert column_starts.tolist() == [0, 8, 16, 24, 32, 40, 41]
    assert [len(each) for each in (row_starts, row_fractions, column_fractions)] == [8, 35, 41]
    assert row_fractions.is_cpu
