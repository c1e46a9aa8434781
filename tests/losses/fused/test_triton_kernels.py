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

from tests.support.gpu import kernel_sass, kernel_usage  # noqa: E402
from tests.support.gpu.fake_cuda_driver import pretend_card  # noqa: E402


def interpret(every):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.gpu.kernel_cases", str(every)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sampled_interpreted_kernels_match_reference():
    assert "cases" in interpret(400)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_interpreted_kernels_match_reference():
    assert interpret(1).strip() == "256 cases"


@triton.jit
def subtract_one(pointer, number):
    tl.store(pointer, (number - 1).to(tl.int64))


def test_pretended_card_specialises_a_1_as_triton_does():
    """The old offset of the gather kernel: Triton passes a 1 as a Python integer, which has no `to`."""
    with pretend_card(90) as card:
        subtract_one[(1,)](torch.zeros(1, dtype=torch.int64), 2, enable_fp_fusion=True)
        with pytest.raises(Exception, match="'int' object has no attribute 'to'"):
            subtract_one[(1,)](torch.zeros(1, dtype=torch.int64), 1, enable_fp_fusion=True)
    assert [usage.kernel for usage in card.usages] == ["subtract_one"]


def check_usage(cases, most_spilled_bytes):
    """Compile every case, print its registers, and hold it to what `BlockShape` says of them."""
    for line in kernel_usage.header():
        print(line)
    for case in cases:
        usages = kernel_usage.usages_of(case)
        print(kernel_usage.row(case, usages))
        assert [usage.kernel for usage in usages] == ["loss_kernel", "gather_kernel", "bad_ids_kernel"]
        for usage in usages:
            assert usage.stack_bytes <= most_spilled_bytes, (case, usage)
            assert usage.registers * 32 * usage.num_warps <= 65536, (case, usage)
            assert usage.options.enable_fp_fusion, (case, usage)


@pytest.mark.slow
def test_kernels_compile_for_every_card_without_spills():
    print()
    check_usage(kernel_usage.default_cases(), 0)


@pytest.mark.slow
def test_kernel_issues_fewer_instructions_than_the_padded_one():
    name = "2 x 19, 1024 x 2048, scale 4"
    now, before = kernel_sass.cost_of(kernel_sass.SIZES[name], 90), kernel_sass.BEFORE[name][90]
    assert now.row < 0.6 * before[0]
    assert now.whole < 0.3 * before[1]
    assert now.traffic_mb < 0.75 * before[2]


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", kernel_usage.CLASSES)
@pytest.mark.timeout(3600)
def test_kernels_compile_in_every_specialisation(num_classes):
    print()
    check_usage([case for case in kernel_usage.all_cases() if case.num_classes == num_classes], 64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", [("gfx942", 64), ("gfx1100", 32)], ids=lambda target: target[0])
@pytest.mark.parametrize("num_classes", [19, 150])
def test_loss_kernel_compiles_for_amd_without_spills(target, num_classes):
    assembly = kernel_usage.amd_assembly(num_classes, *target)
    (spilled,) = re.findall(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    (shared,) = re.findall(r"\.group_segment_fixed_size:\s*(\d+)", assembly)
    assert int(spilled) == 0
    assert int(shared) <= 64 << 10, "the local memory of a compute unit"
