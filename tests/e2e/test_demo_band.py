"""Long runs of the demo recipe: ten seeds, and one seed on one device, on two logical devices and over two ranks."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from segapp.config import dump_config
from tests.support.demo_band import NUM_STDS, SEEDS, demo, epoch_losses, miou_of, stored_bands, train_seeds
from tests.support.runs import events, segapp, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_demo_stays_in_its_band_over_ten_seeds(tmp_path: Path) -> None:
    runs = train_seeds(tmp_path)
    stored = stored_bands()["miou"]
    found = [miou_of(run) for run in runs]
    assert min(found) > stored["low"], found
    assert max(found) < stored["high"], found
    # The difference of two means of ten values has sqrt(2 / 10) of their standard deviation.
    limit = NUM_STDS * stored["std"] * (2 / len(SEEDS)) ** 0.5
    assert statistics.mean(found) == pytest.approx(stored["mean"], abs=limit), found


def test_dp_and_ddp_of_the_demo_lie_in_the_band_of_one_device(tmp_path: Path) -> None:
    """The rounding of float32 grows over hundreds of steps: first the losses agree, in the end only the bands hold."""
    split = ["parallel.devices=[cpu, cpu]", "parallel.gpu0_bsz=1"]
    assert train(demo(0, "parallel.mode=single"), tmp_path / "single") == 0
    assert train(demo(0, "parallel.mode=dp", *split), tmp_path / "dp") == 0
    (tmp_path / "ddp.yaml").write_text(dump_config(demo(0, "parallel.mode=ddp", *split)))
    done = segapp("train", "--plain", "--config", "ddp.yaml", "--run", "ddp", cwd=tmp_path, timeout_s=3000)
    assert done.returncode == 0, done.stderr
    stored = stored_bands()
    single = [step["loss"] for step in events(tmp_path / "single", "step")]
    for mode in ("single", "dp", "ddp"):
        run = tmp_path / mode
        assert stored["miou"]["low"] < miou_of(run) < stored["miou"]["high"], mode
        for epoch, (loss, band) in enumerate(zip(epoch_losses(run), stored["loss_of_epochs"], strict=True), start=1):
            assert band["low"] < loss < band["high"], f"{mode}, epoch {epoch}"
        losses = [step["loss"] for step in events(run, "step")]
        if mode != "ddp":  # each rank draws the dropout of its own images
            assert losses[:5] == pytest.approx(single[:5], rel=1e-5), mode
    assert [events(tmp_path / mode, "step")[0]["split"] for mode in ("dp", "ddp")] == [[1, 3], [1, 3]]
