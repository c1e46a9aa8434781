"""The files for a GPU, tried on the CPU: every line that needs no card runs."""

import os
import subprocess
import sys

import pytest

from tests.gpu.figures_loss import TINY_SHAPES, loss_figures
from tests.support import ROOT


def test_figures_of_the_loss_run_on_a_cpu():
    rows = loss_figures("cpu")
    assert len(rows) == 2 * len(TINY_SHAPES)
    for row in rows:
        assert list(row)[:2] == ["shape", "logits"]
        assert row["ratio"] == row["ours ms"] / row["naive ms"]
        assert 0 < row["ours extra MiB"] < 8


@pytest.mark.slow
def test_gpu_tests_of_the_loss_pass_on_a_cpu():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/gpu/test_losses_gpu.py"],
        env={**os.environ, "SEGAPP_GPU_TESTS_ON": "cpu"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "sss " in done.stdout  # those about the card itself
