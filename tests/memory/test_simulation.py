"""Simulations of every kind of training, and the relations between their peaks."""

import functools
import json
import subprocess
import sys

import pytest

from segapp.losses.overlap import HELD_BYTES, SORT_BYTES
from tests.support import ROOT
from tests.support.simulated_cases import TRAININGS

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.slow,  # test_simulation_against_torch.py holds the simulation to a measurement in every run
]

PARAMS_MIB = 1.1e6 * 4 / 2**20  # LR-ASPP on MobileNetV3-Small, about


@functools.cache
def simulated(what):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.simulated_cases", what],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def phases(training):
    """Return the phases of each device of a simulated training; the first call simulates its whole group."""
    return simulated("default" if training in TRAININGS else "more")[training]


def peak(training, device=0):
    return max(mib for mib, _ in phases(training)[device].values())


def kinds(training, phase, device=0):
    return phases(training)[device][phase][1]


def test_affine_model_is_within_1_percent_on_unseen_splits():
    rows = simulated("affine")
    assert len(rows) == 12
    for model, split, predicted, truth in rows:
        for i, (a, b) in enumerate(zip(predicted, truth, strict=True)):
            assert a == pytest.approx(b, rel=0.01, abs=0.5), (model, split, i)


def test_half_precision_needs_about_half_the_activations():
    full = kinds("plain", "backward")["activations"]
    for training in ("amp-fp16", "amp-bf16", "fp16"):
        assert 0.45 * full < kinds(training, "backward")["activations"] < 0.62 * full, training
    weights = kinds("plain", "step")["weights"]
    assert kinds("fp16", "step")["masters"] == pytest.approx(weights, rel=0.05)  # all but BatchNorm's
    assert kinds("fp16", "step")["weights"] < 0.6 * weights


def test_optimizer_ema_and_masters_count_as_weight_copies():
    weights = kinds("plain", "step")["weights"]
    assert kinds("plain", "step")["optimizer"] == pytest.approx(weights, rel=0.02)
    assert kinds("adamw", "step")["optimizer"] == pytest.approx(2 * weights, rel=0.02)
    assert kinds("ema", "step")["average"] == pytest.approx(weights, rel=0.05)
    assert kinds("plain", "step")["gradients"] == pytest.approx(weights, rel=0.02)
    assert peak("accumulate") - peak("plain") == pytest.approx(weights, rel=0.1)


def test_no_criterion_needs_three_full_resolution_tensors():
    for training in ("ohem", "dice", "focal"):
        assert peak(training) < peak("plain") + 8 * 32, training  # a few bands of 32 MiB
    assert peak("lovasz") < peak("plain") + 1.1 * (HELD_BYTES + SORT_BYTES) / 2**20


def test_device_memory_follows_its_role():
    dp = phases("dp")
    assert "optimizer" in dp[0]["backward"][1]
    assert all("optimizer" not in device["backward"][1] and "replicas" in device["backward"][1] for device in dp[1:])
    assert peak("dp", 2) > peak("dp", 1)
    assert "activations" not in kinds("dp without gpu 0", "backward")
    # A replica's SyncBatchNorm keeps no more than BatchNorm does.
    assert peak("dp", 2) == pytest.approx(peak("dp plain batchnorm", 2), rel=0.02)


def test_ddp_without_bucket_views_holds_gradients_twice():
    weights = kinds("linknet", "step")["weights"]
    assert kinds("ddp", "step")["gradients"] == pytest.approx(weights, rel=0.02)
    assert kinds("ddp without views", "step")["buckets"] == pytest.approx(weights, rel=0.02)
    assert "buckets" not in kinds("ddp", "step")


def test_model_mode_divides_the_weights():
    whole = kinds("linknet", "step")["weights"]
    parts = [kinds("model", "step", device)["weights"] for device in range(2)]
    assert sum(parts) == pytest.approx(whole, rel=0.01)
    assert min(parts) > 0
    assert max(peak("model", device) for device in range(2)) < peak("linknet")


def test_windows_need_less_than_whole_images():
    assert kinds("slide", "eval")["evaluation"] < kinds("eval", "eval")["evaluation"]
    assert "average" in kinds("tta", "eval")
