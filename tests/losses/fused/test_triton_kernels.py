"""The CUDA kernels without a GPU: interpreted against float64, and compiled by Triton for a pretended card."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch on Linux")

from tests.support.gpu import compiled_kernels


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
