"""The demo recipe over ten seeds, trained to its end."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.support.demo_band import NUM_STDS, SEEDS, miou_of, stored_bands, train_seeds

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
