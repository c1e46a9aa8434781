"""The CUDA kernels without a GPU: interpreted against float64, and compiled by Triton for a pretended card."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT

triton = pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch on Linux")

import triton.language as tl  # noqa: E402

from tests.support.gpu import compiled_kernels  # noqa: E402


@pytest.mark.parametrize(
    ("every", "cases"), [(400, "1"), pytest.param(1, "256", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_interpreted_kernels_match_reference(every, cases):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.gpu.kernel_cases", str(every)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{cases} cases"


@triton.jit
def subtract_one(pointer, number):
    tl.store(pointer, (number - 1).to(tl.int64))


def test_pretended_card_specialises_a_1_as_triton_does():
    """The old offset of the gather kernel: Triton passes a 1 as a Python integer, which has no `to`."""
    with compiled_kernels.pretend_card(90) as card:
        subtract_one[(1,)](torch.zeros(1, dtype=torch.int64), 2, enable_fp_fusion=True)
        with pytest.raises(Exception, match="'int' object has no attribute 'to'"):
            subtract_one[(1,)](torch.zeros(1, dtype=torch.int64), 1, enable_fp_fusion=True)
    assert [usage.kernel for usage in card.usages] == ["subtract_one"]


@pytest.mark.slow
@pytest.mark.parametrize("case", compiled_kernels.cases(), ids=str)
def test_kernels_compile_for_every_card_without_spills(case):
    """Registers and warps are what `BlockShape` says of them."""
    usages = compiled_kernels.usages_of(case)
    assert [usage.kernel for usage in usages] == ["loss_kernel", "gather_kernel", "bad_ids_kernel"]
    for usage in usages:
        assert usage.stack_bytes == 0
        assert usage.registers * 32 * usage.num_warps <= 65536
        assert usage.options.enable_fp_fusion


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", [("gfx942", 64), ("gfx1100", 32)], ids=lambda target: target[0])
@pytest.mark.parametrize("num_classes", [19, 150])
def test_loss_kernel_compiles_for_amd_without_spills(target, num_classes):
    assembly = compiled_kernels.amd_assembly(num_classes, *target)
    (spilled,) = re.findall(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    (shared,) = re.findall(r"\.group_segment_fixed_size:\s*(\d+)", assembly)
    assert int(spilled) == 0
    assert int(shared) <= 64 << 10, "the local memory of a compute unit"
