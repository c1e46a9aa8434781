"""`segapp init --folds` and the sweep that it names: every image is validated once, and one page holds all folds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.drawn_folders import draw
from tests.support.programs import start
from tests.support.runs import events


@pytest.mark.slow
def test_sweep_that_init_names_trains_every_fold(tmp_path: Path) -> None:
    draw(tmp_path / "photos", [f"{number:03}" for number in range(4)], "images/{}.jpg", "masks/{}_mask.png")
    made = start("init", "photos", "--folds", "2", cwd=tmp_path, logs=tmp_path, SEGAPP_TEST_FORK="1").finish()
    assert made.returncode == 0, made.stderr
    words = made.stdout.splitlines()[-1].partition("; segapp ")[2].split()
    assert words == ["sweep", *(f"photos-fold{number}.yaml" for number in range(2))]
    small = ("train.epochs=1", "data.workers=0", "log.tensorboard=false")
    done = start(*words, *small, "--json", cwd=tmp_path, logs=tmp_path, SEGAPP_TEST_FORK="1").finish()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [run["state"] for run in found["runs"]] == ["finished"] * 2
    assert Path(tmp_path, found["page"]).is_file()
    folder = next((tmp_path / "runs").iterdir())
    assert sum(len(events(run, "val")) for run in folder.iterdir() if (run / "events.jsonl").is_file()) == 2
