"""Sweeps as real processes with real signals: stopped, killed, resumed bit for bit, failures told and retried."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from segapp.checkpoint.training_state import load_checkpoint
from segapp.config import dump_config
from segapp.run.process import is_alive
from segapp.run.state import run_state
from segapp.run.sweep import SweepFolder
from tests.support.live_runs import seen, small, wait_for
from tests.support.programs import Program, start
from tests.support.runs import differing, events

GRID = ("seed=0,1", "train.epochs=2")
SLOW = {"SEGAPP_FAILPOINTS": "train.step=sleep:0.15"}


def sweep(cwd: Path, *words: str, **env: str) -> Program:
    return start("sweep", *words, cwd=cwd, logs=cwd, SEGAPP_TEST_FORK="1", **env)


@pytest.fixture
def place(tiny: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(dump_config(small(tiny)))
    return tmp_path


def steps(folder: Path) -> int:
    return len(seen(folder, "step"))


def test_stopped_and_killed_sweep_resumes_bit_for_bit(place: Path) -> None:
    whole = sweep(place, "whole", "--config", "tiny.yaml", *GRID, "--devices", "cpu,cpu", OMP_NUM_THREADS="1")
    folder = SweepFolder(place / "runs" / "tiny-sweep")
    first, second = (folder.folder_of(name) for name in ("seed0", "seed1"))

    stopped = sweep(place, "--config", "tiny.yaml", *GRID, **SLOW)
    wait_for(lambda: steps(first.path) >= 3)
    assert folder.is_locked()
    refused = sweep(place, "--config", "tiny.yaml", *GRID).finish()
    assert (refused.returncode, "is in use by another process" in refused.stderr) == (9, True)
    stopped.send(signal.SIGINT)
    done = stopped.finish()
    assert done.returncode == 75, done.stderr
    assert events(first.path, "run_end")[-1]["status"] == "stopped"
    assert not second.path.exists()
    assert "seed0: stopped; a checkpoint was saved" in done.stdout
    num_before = steps(first.path)

    killed = sweep(place, "tiny-sweep", **SLOW)
    wait_for(lambda: steps(second.path) >= 3)
    assert run_state(first.path) == "finished"
    assert "seed0: resumed" in killed.stdout
    killed.send(signal.SIGKILL)
    holder = second.read_holder()
    assert holder is not None
    wait_for(lambda: not is_alive(holder))
    assert events(second.path, "run_end")[-1]["status"] == "stopped"  # by the signal at its parent's death

    rest = sweep(place, "tiny-sweep", "--json").finish()
    assert rest.returncode == 0, rest.stderr
    found = json.loads(rest.stdout)
    assert [run["state"] for run in found["runs"]] == ["finished", "finished"]
    assert found["settings"][0]["best_miou"]["count"] == 2
    assert "seed1: resumed" in rest.stderr
    assert num_before < steps(first.path) == 10
    assert Path(place, found["page"]).stat().st_size > 2000

    assert whole.finish().returncode == 0
    for name in ("seed0", "seed1"):
        resumed, at_once = (load_checkpoint(place / "runs" / of / name).state for of in ("tiny-sweep", "whole"))
        for key in ("model", "optimizer", "ema"):
            assert differing(resumed.get(key), at_once.get(key)) == []
        assert [e["loss"] for e in events(place / "runs" / "whole" / name, "step")] == [
            e["loss"] for e in events(place / "runs" / "tiny-sweep" / name, "step")
        ]
    starts = [events(place / "runs" / "whole" / name, "run_start")[0]["t"] for name in ("seed0", "seed1")]
    ends = [events(place / "runs" / "whole" / name, "run_end")[0]["t"] for name in ("seed0", "seed1")]
    assert max(starts) < min(ends)  # both at the same time


def test_failed_run_is_told_and_retried_only_when_asked(place: Path, tiny_root: Path) -> None:
    missing = place / "later"
    words = ("--config", "tiny.yaml", "train.epochs=1", f"data.root={missing},{tiny_root}")
    failed = sweep(place, *words).finish()
    assert failed.returncode == 1, failed.stderr
    assert "failed with exit code 3" in failed.stdout
    folder = SweepFolder(place / "runs" / "tiny-sweep")
    runs = folder.read().runs
    assert [folder.state_of(run) for run in runs] == ["failed", "finished"]
    assert runs[0].exit_code == 3
    assert str(missing) in str(runs[0].reason)
    assert folder.progress().state == "failed"

    again = sweep(place, *words).finish()
    assert again.returncode == 1
    assert "failed before (" in again.stdout
    assert "started" not in again.stdout

    os.symlink(tiny_root, missing)
    retried = sweep(place, *words, "--retry").finish()
    assert retried.returncode == 0, retried.stdout
    assert folder.read().runs[0].exit_code is None
    assert folder.progress().state == "finished"

    listed = start("ls", cwd=place, logs=place).finish().stdout.splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [["tiny-sweep", "finished", "2/2"]]
    inside = start("ls", "tiny-sweep", "--json", cwd=place, logs=place).finish().stdout
    assert [run["name"] for run in json.loads(inside)] == [f"tiny-sweep/{run.name}" for run in runs]
    status = json.loads(start("status", "tiny-sweep", "--json", cwd=place, logs=place).finish().stdout)
    assert status["sweep"] == {"runs": 2, "finished": 2, "failed": 0, "running": 0}
    assert start("report", f"tiny-sweep/{runs[1].name}", "--no-images", cwd=place, logs=place).finish().returncode == 0
