"""The files for a GPU, tried on the CPU: every line that needs no card runs."""

import os
import subprocess
import sys

import pytest

from tests.gpu.figures_loss import TINY_SHAPES, loss_cases
from tests.support import ROOT


def test_ways_to_the_loss_agree_on_a_cpu():
    losses = {}
    for case in loss_cases("cpu"):
        if case.name.endswith((", ours", "interpolate + cross_entropy")):
            row = case.measure()
            assert row["repeats bitwise"]
            assert 0 < row["extra MiB"] < 8
            losses.setdefault((row["shape"], row["logits"]), []).append(row["loss"])
    assert len(losses) == len(TINY_SHAPES) + 1  # bfloat16 only for the first
    for ours, naive in losses.values():
        assert ours == pytest.approx(naive, rel=1e-5)


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
