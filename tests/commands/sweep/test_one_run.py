"""One run of a sweep for schedulers: the list of the runs, tasks that train one run each, errors of the user."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import typer.main

from segapp.__main__ import main
from segapp.cli import app
from segapp.commands.sweep.plan import plan_sweep
from segapp.config import dump_config
from segapp.run.events import EventWriter, RunStart, Step
from segapp.run.folder import RunFolder
from segapp.run.sweep import SweepFolder
from tests.support.live_runs import seen, small, wait_for
from tests.support.programs import Program, start
from tests.support.runs import events

GRID = ("--config", "tiny.yaml", "seed=0..2", "train.epochs=1")


@pytest.fixture
def place(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.yaml").write_text(dump_config(small(tiny)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *words])
    return int(ended.value.code or 0)


def task(place: Path, index: int, *words: str, **env: str) -> Program:
    logs = place / f"task{index}"
    logs.mkdir(exist_ok=True)
    return start("sweep", *words, "--only", str(index), cwd=place, logs=logs, SEGAPP_TEST_FORK="1", **env)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "step")]


def test_dry_run_lists_runs_and_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(*GRID, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], [run["index"] for run in found["runs"]]) == ("tiny-sweep", [0, 1, 2])
    assert found["runs"][2] == {
        "index": 2,
        "name": "seed2",
        "folder": "runs/tiny-sweep/seed2",
        "state": "waiting",
        "settings": {"seed": 2, "train.epochs": 1},
        "words": ["train", "--config", "tiny.yaml", "seed=2", "train.epochs=1", "--run", "runs/tiny-sweep/seed2",
                  "--resume", "auto"],
    }  # fmt: skip
    command: Any = typer.main.get_command(app)
    train = command.commands["train"].make_context("train", found["runs"][2]["words"][1:]).params
    assert (train["run"], train["resume"]) == (Path("runs/tiny-sweep/seed2"), "auto")
    assert sweep(*GRID, "--dry-run", "--only", "1") == 0
    assert capsys.readouterr().out == "runs/tiny-sweep/seed1\n"
    assert sweep(*GRID, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["0", "runs/tiny-sweep/seed0", "waiting"]
    assert not (place / "runs").exists()


def test_wrong_words_are_refused_before_anything_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep(*GRID, "--only", "3", "--devices", "0,1") == 2
    assert sweep(*GRID, "--only", "3", "--dry-run") == 2
    assert "--only 3: the sweep has the runs 0 to 2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sweep(*GRID, "--only", "0") == 2
    assert "segapp launch" in capsys.readouterr().err
    assert not (place / "runs").exists()


def test_tasks_train_one_run_each_and_can_be_requeued(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both runs have the same course, and one of them is stopped and continued."""
    grid = ("--config", "tiny.yaml", "train.epochs=1", "eval.every_epochs=1,2")
    slow = task(place, 0, *grid, SEGAPP_FAILPOINTS="train.step=sleep:0.3")
    other = task(place, 1, *grid)
    folder = SweepFolder(place / "runs" / "tiny-sweep")
    stopped, whole = (folder.folder_of(f"every_epochs{number}").path for number in (1, 2))
    wait_for(lambda: len(seen(stopped, "step")) >= 2)
    slow.send(signal.SIGSTOP, to_group=True)  # the report may take longer than the run
    assert sweep("tiny-sweep", "--report") == 0, "the page bears runs that are still on their way"
    slow.send(signal.SIGTERM)
    slow.send(signal.SIGCONT, to_group=True)
    assert [each.finish().returncode for each in (slow, other)] == [75, 0]
    assert [folder.state_of(run) for run in folder.read().runs] == ["stopped", "finished"]
    with pytest.raises(SystemExit) as ended:
        main(["requeue-code", f"tiny-sweep/{stopped.name}", "75"])
    assert ended.value.code == 75
    assert task(place, 0, *grid).finish().returncode == 0
    assert losses(stopped) == losses(whole)
    assert sweep(*grid, "--only", "1") == 0
    assert "every_epochs2 has finished" in capsys.readouterr().out
    assert folder.progress().num_finished == 2


def test_failure_is_noted_and_forgotten_when_it_is_mended(place: Path, tiny_root: Path) -> None:
    missing = place / "later"
    words = ("--config", "tiny.yaml", "train.epochs=1", f"data.root={missing}", "--only", "0")
    folder = SweepFolder(place / "runs" / "tiny-sweep")

    def code() -> int | None:
        return start("sweep", *words, cwd=place, logs=place, SEGAPP_TEST_FORK="1").finish().returncode

    assert code() == 3
    assert (folder.read().runs[0].exit_code, folder.state_of(folder.read().runs[0])) == (3, "failed")
    missing.symlink_to(tiny_root)
    assert code() == 0
    assert (folder.read().runs[0].exit_code, folder.state_of(folder.read().runs[0])) == (None, "finished")


def test_page_bears_runs_that_vanish_and_start_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_sweep([*GRID[2:]], ["tiny.yaml"])
    plan.save()
    for name in ("seed0", "seed1"):
        with RunFolder.create(path=plan.folder.folder_of(name).path) as folder:
            folder.write_info()
    begun = RunStart(classes=["a"], num_params=7, batch_size=2, epochs=1, steps_per_epoch=5, devices=["cpu"])
    with EventWriter(plan.folder.folder_of("seed1").events) as writer:
        writer.write(begun)
        writer.write(Step(epoch=1, step=4, loss=1.0, lr=0.1))
        writer.write(begun.model_copy(update={"resumed_from_step": 2}))  # killed, and started again
    assert sweep("tiny-sweep", "--report") == 0
    assert "0 of 3" in capsys.readouterr().out
    assert plan.folder.page.stat().st_size > 2000
    assert plan.folder.progress().state == "stopped"
