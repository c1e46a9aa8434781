"""Whole trainings whose settings change in every way that there is: each records the events that it always did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripted_runs import SCRIPTS, differing_leaves, record, shortened, stored


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_change_as_recorded(name: str, tiny_root: Path, tmp_path: Path) -> None:
    """Splits, losses, norms of gradients, answers and messages of 24 runs; ranks train in float32."""
    found = shortened(record(name, tiny_root, tmp_path))
    assert differing_leaves(found, stored(name), rel=1e-3 if "ranks" in name else 1e-7) == []
