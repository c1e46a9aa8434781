"""A run that is stopped anywhere and resumed ends bitwise like the run that was never interrupted."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from segapp import failpoints
from segapp.config import RunConfig
from segapp.errors import CheckpointError, ConfigError, DataError
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest, open_folder, plan_request
from segapp.session.session import run_session
from segapp.training.signals import EXIT_STOPPED_AND_SAVED
from segapp.view.runs import run_state
from tests.support.runs import MODEL, differing, events, final_state, merged, resume, train


def course(folder: Path) -> list[tuple[Any, ...]]:
    """Every step and evaluation as the events tell them, without times."""
    steps = [(e["step"], e["epoch"], e["loss"], e["lr"], e["grad_norm"]) for e in events(folder, "step")]
    return steps + [(e["step"], e["epoch"], e["loss"], e["miou"], tuple(e["iou"])) for e in events(folder, "val")]


def assert_same_run(folder: Path, reference: Path) -> None:
    assert course(folder) == course(reference)
    assert differing(final_state(folder), final_state(reference)) == []


def stopped_and_resumed(config: RunConfig, folder: Path, failpoint: str) -> None:
    """Train, stop by SIGTERM at a visit to a failpoint such as `train.step=4`, and resume."""
    failpoints.arm(f"{failpoint}:term")
    assert train(config, folder) == EXIT_STOPPED_AND_SAVED
    failpoints.arm("")
    assert events(folder, "run_end")[-1]["status"] == "stopped"
    assert resume(config, folder) == 0


def test_best_of_another_monitor_is_forgotten(base: dict[str, Any], tmp_path: Path) -> None:
    """A loss, counted downward, is below every mIoU: with the best mIoU kept, no evaluation would be the best."""
    plateau = {"name": "plateau", "options": {"patience": 1, "gamma": 0.5}}
    config = merged(base, train={"epochs": 1}, schedule=plateau)
    assert train(config, tmp_path / "run") == 0
    config = merged(base, train={"epochs": 2}, schedule=plateau, checkpoint={"monitor": "loss"})
    assert resume(config, tmp_path / "run") == 0
    first, second = events(tmp_path / "run", "val")
    assert first["miou"] > 0
    state = final_state(tmp_path / "run")
    assert state["best"] == {"value": pytest.approx(-second["loss"]), "epoch": 2, "evaluations_since": 0}
    assert state["plateau"]["best"] == pytest.approx(second["loss"])
    assert [event["is_best"] for event in events(tmp_path / "run", "checkpoint")][-1]
    assert [event["monitor"] for event in events(tmp_path / "run", "run_start")] == ["miou", "loss"]


@pytest.fixture(scope="module")
def reference(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """Three epochs of three steps: micro-batches of two of ten images, the last step has one; BatchNorm and dropout."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    config = merged(
        base,
        model=MODEL,
        optim={"name": "adamw", "lr": 0.001},
        schedule={"name": "poly", "warmup_steps": 3},
        train={"epochs": 3, "batch_size": 2, "accumulate": 2, "ema": 0.9},
        checkpoint={"every_steps": 1},
    )
    assert train(config, folder) == 0
    return config, folder


@pytest.mark.parametrize(
    "failpoint",
    [
        "train.device=7",  # the first micro-batch of a step
        "train.device=8",
        "eval.batch=1",
        pytest.param("train.step=6", marks=pytest.mark.slow),
        pytest.param("ckpt.before_fsync=1", marks=pytest.mark.slow),
    ],
)
def test_run_stopped_at_any_safe_point_resumes_bitwise(
    reference: tuple[RunConfig, Path], tmp_path: Path, failpoint: str
) -> None:
    config, uninterrupted = reference
    stopped_and_resumed(config, tmp_path / "run", failpoint)
    assert_same_run(tmp_path / "run", uninterrupted)
    assert 0 < events(tmp_path / "run", "run_start")[1]["resumed_from_step"] < 9


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["optim.lr=0.5", "model.encoder=resnet18"],
            "  model.encoder: 'tu-test_resnet' -> 'resnet18'\n  optim.lr: 0.001 -> 0.5",
        ),
        (["data.root=/nowhere"], "data root /nowhere does not exist"),
        (["data.classes=[a, b, c]"], "data.classes"),
    ],
)
def test_refused_resume_names_the_key_and_changes_nothing(
    reference: tuple[RunConfig, Path], tmp_path: Path, words: list[str], named: str
) -> None:
    shutil.copytree(reference[1], tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises((CheckpointError, DataError), match=re.escape(named)):
        run_session(plan_request(None, words, None, str(tmp_path / "run")))
    assert contents(tmp_path / "run") == before
    assert run_state(tmp_path / "run") == "finished"


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_resume_with_a_config_file_keeps_what_the_run_began_with(
    reference: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, finished = reference
    shutil.copytree(finished, tmp_path / "run")
    raw = config.model_dump(mode="json")
    epochs = raw["train"]["epochs"]
    raw["train"]["epochs"], raw["log"]["every_steps"], raw["checkpoint"]["keep"] = 50, 7, 9
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(raw))
    request = plan_request(str(tmp_path / "other.yaml"), ["log.every_steps=9"], None, str(tmp_path / "run"))
    assert request.config.train.epochs == epochs
    assert request.config.log.every_steps == 9
    assert request.note is not None
    assert request.note.splitlines() == [
        f"changed: log.every_steps: {config.log.every_steps} -> 9",
        "kept from the run: checkpoint.keep: 3 (the file has 9); name the key on the command line to change it",
        f"kept from the run: train.epochs: {epochs} (the file has 50); name the key on the command line to change it",
    ]


def test_plain_resume_takes_the_newest_run_with_a_checkpoint(reference: tuple[RunConfig, Path]) -> None:
    config, finished = reference
    Path("tiny.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    for age, name in enumerate(["other", "tiny-4", "tiny-3", "tiny-2", "tiny"]):
        shutil.copytree(finished, f"runs/{name}")
        for file in ("run.json", "lock"):
            os.utime(f"runs/{name}/{file}", (2e9 - age, 2e9 - age))
    for name in ("tiny-4", "tiny-3"):  # killed before the first checkpoint; failed before the first step
        shutil.rmtree(f"runs/{name}/checkpoints")
    Path("runs/tiny-3/events.jsonl").write_text('{"type":"run_end","status":"failed"}\n')
    shutil.copytree("runs/tiny-2", "runs/tiny-512")
    (run_512 := Path("runs/tiny-512/config.yaml")).write_text(
        run_512.read_text().replace("name: tiny", "name: tiny-512")
    )
    os.utime("runs/tiny-512/lock", (3e9, 3e9))
    request = plan_request("tiny.yaml", [], None, "auto")
    assert (request.folder and request.folder.name, request.note) == ("tiny-2", "resuming runs/tiny-2")
    assert plan_request(None, [], None, "auto").folder.path == Path("runs/tiny-512")
    shutil.rmtree("runs/tiny-512")
    assert plan_request(None, [], None, "auto").folder.path == Path("runs/other")
    for name in ("tiny-2", "tiny"):
        shutil.rmtree(f"runs/{name}")
    killed = plan_request("tiny.yaml", [], None, "auto").folder
    assert killed is not None
    assert killed.name == "tiny-4", "it begins anew there"
    shutil.rmtree("runs/tiny-4")
    assert plan_request("tiny.yaml", [], None, "auto").note == "nothing to resume yet: a new training begins"


def test_any_file_of_a_run_s_checkpoints_continues_it(reference: tuple[RunConfig, Path]) -> None:
    _, finished = reference
    (file, *_) = sorted((finished / "checkpoints" / "objects").iterdir())
    for path in (file, finished / "checkpoints" / "best.pt"):
        request = plan_request(None, [], None, str(path))
        assert request.folder is not None
        assert (request.folder.path, request.checkpoint) == (finished.resolve(), path)
    shutil.copy(file, copy := finished / "copy.pt")
    with pytest.raises(ConfigError, match="--config FILE is missing"):
        plan_request(None, [], None, str(copy))
    copy.unlink()


def test_run_that_ended_early_is_complete(base: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    """Until it may wait for more evaluations."""
    config = merged(base, optim={"lr": 1e-12}, train={"epochs": 9, "early_stop": 2}, schedule={"name": "constant"})
    assert train(config, tmp_path / "run") == 0
    epochs = [event["epoch"] for event in events(tmp_path / "run", "val")]
    assert len(epochs) < 9
    before = len(events(tmp_path / "run", "step"))
    capsys.readouterr()
    said = "already complete: no better miou for 2 evaluations; raise train.early_stop to train on"
    for num_epochs in (9, len(epochs)):  # in the second case, no epoch is left either
        shorter = merged(config.model_dump(mode="json"), train={"epochs": num_epochs})
        assert resume(shorter, tmp_path / "run") == 0
        assert said in capsys.readouterr().out
    assert [event["epoch"] for event in events(tmp_path / "run", "val")] == epochs
    assert len(events(tmp_path / "run", "step")) == before
    assert resume(merged(config.model_dump(mode="json"), train={"early_stop": 3}), tmp_path / "run") == 0
    assert len(events(tmp_path / "run", "val")) > len(epochs)


def test_new_run_says_whose_name_is_taken(
    reference: tuple[RunConfig, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    request, note = TrainRequest(reference[0]), "runs/tiny is another run: this one is tiny-2; to continue the other, "
    named, resumed = replace(request, run=Path("runs/x")), replace(request, folder=RunFolder(Path("runs/y")))
    requests = (request, request, named, resumed)
    paths = ("runs/tiny", "runs/tiny-2", "runs/x", "runs/y")
    for each, path, said in zip(requests, paths, ("", f"{note}add --resume\n", "", ""), strict=True):
        assert open_folder(each).path == Path(path)
        assert capsys.readouterr().out == said
    assert not Path("runs/y").exists()
