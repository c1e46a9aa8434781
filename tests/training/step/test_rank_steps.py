"""Steps over three ranks (gloo), at any split of the batch, against the same steps on one device in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.rank_steps import CRITERIA, splits_of

pytestmark = pytest.mark.slow  # test_parallel_training.py and test_ranks.py train and sum over two ranks in every run


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("ranks") / "figures.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.rank_steps", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    return dict(json.loads(path.read_text()))


def test_losses_and_state_equal_one_device_at_every_split(figures: dict[str, Any]) -> None:
    assert {f"{name} in (8, 8, 5)" for name in CRITERIA} <= figures["errors"].keys()
    for title, (loss, norm, state) in figures["errors"].items():
        assert max(loss, norm, state) <= 1e-10, f"{title}: loss {loss}, gradient norm {norm}, state {state}"


def test_losses_of_50_steps_with_dropout_equal_one_device(figures: dict[str, Any]) -> None:
    """At every split over three ranks, uneven ones and ranks without samples among them, to 1e-12."""
    assert {f"{split} in (8, 5)" for split in splits_of(3)} <= figures["dropout"].keys()
    for title, (loss, norm, state) in figures["dropout"].items():
        assert loss <= 1e-12, title
        assert max(norm, state) <= 1e-10, title
