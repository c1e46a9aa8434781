"""Memory that the Triton launch allocates against what a memory plan counts for it, for the heads of every recipe."""

import json
import subprocess
import sys
from collections import deque

import pytest
import torch

from segapp.losses import cross_entropy
from segapp.losses.fused import checks
from segapp.losses.fused.reference import CrossEntropySettings
from segapp.memory.ledger import StorageLedger
from segapp.memory.simulated_devices import simulated_ledger
from tests.support import ROOT

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch on Linux")

from segapp.losses.fused import triton_cross_entropy

RECIPES = {  # config: C, h, w, H, W of each head
    "ade20k": [(150, 128, 128, 512, 512)],
    "camvid": [(11, 30, 40, 240, 320)],
    "cityscapes": [(19, 96, 96, 768, 768)],
    "cityscapes-fast": [(19, 96, 96, 768, 768)],
    "cityscapes-pspnet": [(19, 64, 128, 512, 1024)],
    "demo": [(19, 24, 48, 96, 192)],
    "folder": [(2, 32, 32, 512, 512), (2, 64, 64, 512, 512)],
    "voc": [(21, 60, 60, 480, 480)],
}
"""camvid-distill has camvid's heads; `test_heads_are_those_of_the_recipes` holds the others."""
OTHERS = [(150, 64, 64, 512, 512), (19, 400, 400, 512, 512), (19, 97, 193, 769, 1537), (320, 16, 16, 64, 64)]
HEADS = sorted({head for heads in RECIPES.values() for head in heads} | set(OTHERS))


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
    options = CrossEntropySettings(align_corners, 255, 0.0)

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


HEADS_OF = """
import json, sys
from segapp.config import load_config
from segapp.losses import cross_entropy
from segapp.memory.peaks import SimulationJob
from segapp.planning.simulate import build_simulator
compute, seen = cross_entropy.upsample_cross_entropy, {}
def spy(logits, target, **options):
    chosen = cross_entropy.choose_implementation(logits, target)
    seen[(*logits.shape[1:], *target.shape[1:], str(logits.dtype), chosen)] = None
    return compute(logits, target, **options)
cross_entropy.upsample_cross_entropy = spy
build_simulator(load_config(sys.argv[1])).run(SimulationJob("single", (2,)))
print(json.dumps(list(seen)))
"""
"""In a process of its own: a simulation registers devices that other tests must not see."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_heads_are_those_of_the_recipes(name):
    command = [sys.executable, "-W", "ignore", "-c", HEADS_OF, str(ROOT / "configs" / f"{name}.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    heads = json.loads(done.stdout.splitlines()[-1])
    assert [tuple(head[:5]) for head in heads] == RECIPES[name]
    assert all(head[5:] == ["torch.float32", "triton"] for head in heads)
