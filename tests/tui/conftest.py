"""Runs that tests of the screen share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded_runs import RecordedRun


@pytest.fixture
def fresh(tmp_path: Path) -> Any:
    """Return a short live run that a test may change."""
    run = RecordedRun(tmp_path / "run", steps_per_epoch=20, epochs=8)
    run.epoch()
    run.train(5)
    run.shift_to_now()
    run.hold()
    yield run
    run.folder.release()
