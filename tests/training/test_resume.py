"""A run that is killed or stopped anywhere and resumed ends bitwise like the run that was never interrupted."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segapp.config import RunConfig, dump_config
from segapp.errors import CheckpointError, DataError, NonFiniteError
from segapp.inference.evaluate import Evaluation
from segapp.run.files import hash_file
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest, plan_request, taken_note
from segapp.session.session import run_session
from segapp.training import signals
from segapp.view.runs import run_state
from tests.support.runs import differing, events, merged, segapp, train


def final_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    return state


def course(folder: Path) -> list[tuple[Any, ...]]:
    """Every step and evaluation as the events tell them, without times."""
    steps = [(e["step"], e["epoch"], e["loss"], e["lr"], e["grad_norm"]) for e in events(folder, "step")]
    return steps + [(e["step"], e["epoch"], e["loss"], e["miou"], tuple(e["iou"])) for e in events(folder, "val")]


def assert_same_run(folder: Path, reference: Path) -> None:
    assert course(folder) == course(reference)
    assert differing(final_state(folder), final_state(reference)) == []


@pytest.fixture(scope="module")
def reference(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    folder = tmp_path_factory.mktemp("reference") / "run"
    config = merged(
        {
            "name": "tiny",
            "seed": 3,
            "data": {
                "format": "folder",
                "root": str(tiny_root),
                "classes": ["ground", "box", "disc"],
                "crop_px": [32, 32],
                "workers": 0,
            },
            "model": {  # small, with BatchNorm and dropout
                "library": "smp",
                "name": "PSPNet",
                "encoder": "tu-test_resnet",
                "options": {"encoder_depth": 3, "psp_out_channels": 32, "psp_dropout": 0.2},
            },
            "optim": {"name": "adamw", "lr": 0.001},
            "schedule": {"warmup_steps": 3},
            "train": {"epochs": 3, "batch_size": 2, "accumulate": 2, "ema": 0.9},
            "checkpoint": {"every_steps": 1},
            "log": {"every_steps": 1, "tensorboard": False},
        }
    )
    assert train(config, folder) == 0
    return config, folder


def stop_at(monkeypatch: pytest.MonkeyPatch, visit: int) -> None:
    """Sends this process SIGTERM at the n-th look at the stop flag."""
    looks = iter(range(1, 10_000))

    def is_set(self: signals.StopSignals) -> bool:
        if next(looks) == visit:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.count > 0

    monkeypatch.setattr(signals.StopSignals, "is_set", property(is_set))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("visit", [3, 4, 8, 22, *(pytest.param(n, marks=pytest.mark.slow) for n in (12, 15))])
def test_run_stopped_at_any_safe_point_resumes_bitwise(
    reference: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visit: int
) -> None:
    config, uninterrupted = reference
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, visit)
        assert train(config, folder) == signals.EXIT_STOPPED_AND_SAVED
    assert events(folder, "run_end")[-1]["status"] == "stopped"
    stopped_at = final_state(folder)["position"]["step"]
    assert stopped_at < final_state(uninterrupted)["position"]["step"]
    assert resume(config, folder) == 0
    assert_same_run(folder, uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    visit=st.integers(1, 30),
    seed=st.integers(0, 2**31 - 1),
    parallel=st.sampled_from([{"mode": "single"}, {"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": 0}]),
)
def test_any_seed_and_mode_stopped_anywhere_resumes_bitwise(
    reference: tuple[RunConfig, Path],
    tmp_path_factory: pytest.TempPathFactory,
    visit: int,
    seed: int,
    parallel: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("any")
    config = merged(reference[0].model_dump(mode="json"), seed=seed, parallel=parallel, train={"epochs": 2})
    assert train(config, folder / "whole") == 0
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, visit)
        nothing_to_save = 128 + signal.SIGTERM  # at the first visit
        assert train(config, folder / "run") in (0, signals.EXIT_STOPPED_AND_SAVED, nothing_to_save)
    assert resume(config, folder / "run") == 0
    assert_same_run(folder / "run", folder / "whole")


def resume(config: RunConfig, folder: Path) -> int:
    return run_session(TrainRequest(config, RunFolder(folder)))


def write_config(config: RunConfig, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    return path


@pytest.mark.slow
def test_run_killed_five_times_resumes_bitwise(reference: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, uninterrupted = reference
    path = write_config(config, tmp_path)
    # In the first epoch, right at its end, inside a save, in the middle of the second, and in the third epoch.
    for failpoint in ("train.step=3:kill", "train.step=2:kill", "ckpt.before_rename=2:kill", "train.step=2:kill"):
        result = segapp(
            "train",
            "--config",
            path,
            "--run",
            "run",
            "--resume",
            cwd=tmp_path,
            SEGAPP_FAILPOINTS=f"{failpoint};ckpt.background=each",
        )
        assert result.returncode == -signal.SIGKILL, result.stderr
    result = segapp("train", "--config", path, "--run", "run", "--resume", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_run_with_workers_killed_at_random_resumes_bitwise(
    reference: tuple[RunConfig, Path], tmp_path: Path, seed: int
) -> None:
    config, uninterrupted = reference
    path = write_config(config, tmp_path)
    rng = random.Random(seed)
    command = [
        sys.executable,
        "-m",
        "segapp",
        "train",
        "--config",
        str(path),
        "--run",
        "run",
        "--resume",
        "data.workers=2",
    ]
    for _ in range(20):
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            if process.wait(rng.uniform(6, 14)) == 0:
                break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.returncode == 0
    expected = final_state(uninterrupted)
    found = final_state(tmp_path / "run")
    found["config"]["data"]["workers"] = 0
    found["checkpoint"]["config_hash"] = expected["checkpoint"]["config_hash"]  # it counts the workers too
    assert differing(found, expected) == []
    assert course(tmp_path / "run") == course(uninterrupted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loading", [{"workers": 2, "cache": "disk"}, {"workers": "auto", "cache": "ram"}])
def test_workers_and_caches_do_not_change_the_losses(
    loading: dict[str, object],
    reference: tuple[RunConfig, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, uninterrupted = reference
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = config.data.model_copy(update=loading)
    assert train(config.model_copy(update={"data": data}), tmp_path / "run") == 0
    assert course(tmp_path / "run") == course(uninterrupted)


def test_finished_run_continues_with_more_epochs(reference: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, _ = reference
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"name": "constant"})})
    longer = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 4})})
    assert train(config, tmp_path / "run") == 0
    assert resume(config, tmp_path / "run") == 0  # already complete: nothing happens
    steps = len(events(tmp_path / "run", "step"))
    assert resume(longer, tmp_path / "run") == 0
    assert [e["epoch"] for e in events(tmp_path / "run", "val")] == [1, 2, 3, 4]
    assert len(events(tmp_path / "run", "step")) == steps // 3 * 4


def continued(config: RunConfig, from_run: Path, name: str, folder: Path) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Continues in another folder; returns number, loss and learning rate of each step, and what is said of them."""
    assert train(config, folder, checkpoint=from_run / "checkpoints" / name) == 0
    said = [e["message"] for e in events(folder, "alert") if e["kind"] == "schedule" and "step" in e]
    return [(e["step"], e["loss"], e["lr"]) for e in events(folder, "step")], said


@pytest.mark.slow
def test_wsd_is_made_longer_without_a_jump(reference: tuple[RunConfig, Path], tmp_path: Path) -> None:
    """Two epochs of which the second decays, made three: as planned so from the first on, or with an alert."""
    config, _ = reference
    wsd = {"name": "wsd", "warmup_steps": 3, "options": {"decay_ratio": 0.5}}
    shorter, longer = (
        merged(config.model_dump(mode="json"), schedule=wsd, train={"epochs": epochs}) for epochs in (2, 3)
    )
    assert train(shorter, tmp_path / "shorter") == 0
    assert train(longer, tmp_path / "longer") == 0
    planned = [(e["step"], e["loss"], e["lr"]) for e in events(tmp_path / "longer", "step")]
    per_epoch = len(planned) // 3
    stable, said = continued(longer, tmp_path / "shorter", "epoch_0001.pt", tmp_path / "stable")
    assert stable == planned[per_epoch:]
    assert said == []
    decayed, said = continued(longer, tmp_path / "shorter", "epoch_0002.pt", tmp_path / "decayed")
    assert [lr for *_, lr in decayed] == [lr for *_, lr in planned[2 * per_epoch :]]
    first, last = decayed[0], events(tmp_path / "shorter", "step")[-1]
    assert said == [
        f"train.epochs=3: the learning rate of step {first[0]} is {first[2]:.3g}, under the old length the run ended "
        f"at {last['lr']:.3g}: put train.epochs=2 back, or, since the decay began after step {per_epoch}, resume from "
        "a checkpoint up to that step"
    ]


def test_poly_made_longer_says_the_old_and_new_rate(reference: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, finished = reference
    longer = merged(config.model_dump(mode="json"), train={"epochs": 4})
    steps, said = continued(longer, finished, "last.pt", tmp_path / "run")
    last = events(finished, "step")[-1]
    assert len(said) == 1
    assert (
        f"step {steps[0][0]} is {steps[0][2]:.3g}, under the old length the run ended at {last['lr']:.3g}:" in said[0]
    )
    assert "put train.epochs=3 back; a run with schedule.name=wsd" in said[0]


def test_resume_with_incompatible_config_names_the_keys(reference: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, uninterrupted = reference
    other = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 0.5})})
    plan = TrainRequest(other, run=tmp_path / "run", checkpoint=uninterrupted / "checkpoints" / "last.pt")
    with pytest.raises(CheckpointError, match=r"optim\.lr: 0\.001 -> 0\.5"):
        run_session(plan)
    other = config.model_copy(update={"model": config.model.model_copy(update={"encoder": "resnet18"})})
    with pytest.raises(CheckpointError, match=r"model\.encoder"):
        run_session(TrainRequest(other, run=tmp_path / "run2", checkpoint=uninterrupted / "checkpoints" / "last.pt"))


@pytest.mark.parametrize(
    "words",
    [("optim.lr=0.5",), ("model.encoder=resnet18",), ("data.root=/nowhere",), ("data.classes=[a, b, c]",)],
    ids=lambda words: words[0].partition("=")[0],
)
def test_refused_resume_changes_nothing_on_disk(
    reference: tuple[RunConfig, Path], tmp_path: Path, words: tuple[str, ...]
) -> None:
    shutil.copytree(reference[1], tmp_path / "run")
    before = contents(tmp_path / "run")
    state = run_state(tmp_path / "run")
    with pytest.raises((CheckpointError, DataError)):
        run_session(plan_request(None, words, None, str(tmp_path / "run")))
    assert contents(tmp_path / "run") == before
    assert run_state(tmp_path / "run") == state == "finished"


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
    raw["train"]["epochs"], raw["log"]["every_steps"] = 50, 7
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(raw))
    request = plan_request(str(tmp_path / "other.yaml"), ["log.every_steps=9"], None, str(tmp_path / "run"))
    assert request.config.train.epochs == epochs
    assert request.config.log.every_steps == 9
    assert request.note is not None
    assert request.note.splitlines() == [
        f"changed: log.every_steps: {config.log.every_steps} -> 9",
        f"kept from the run: train.epochs: {epochs} (the file has 50); name the key on the command line to change it",
    ]
    raw["optim"]["lr"] = 0.5
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(CheckpointError, match=r"optim\.lr"):
        run_session(plan_request(str(tmp_path / "other.yaml"), [], None, str(tmp_path / "run")))


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
    request = plan_request("tiny.yaml", [], None, "auto")
    assert (request.folder and request.folder.name, request.note) == ("tiny-2", "resuming runs/tiny-2")
    assert plan_request(None, [], None, "auto").folder.path == Path("runs/other")
    for name in ("tiny-2", "tiny"):
        shutil.rmtree(f"runs/{name}")
    killed = plan_request("tiny.yaml", [], None, "auto").folder
    assert killed is not None
    assert killed.name == "tiny-4", "it begins anew there"
    shutil.rmtree("runs/tiny-4")
    assert plan_request("tiny.yaml", [], None, "auto").note == "nothing to resume yet: a new training begins"


def test_new_run_says_whose_name_is_taken(reference: tuple[RunConfig, Path]) -> None:
    request = TrainRequest(reference[0])
    assert taken_note(request, RunFolder.create("tiny")) is None
    note = taken_note(request, RunFolder.create("tiny"))
    assert note == "runs/tiny is another run: this one is tiny-2; to continue the other, add --resume"
    assert taken_note(TrainRequest(reference[0], run=Path("runs/x")), RunFolder.create(path="runs/x")) is None


def test_damaged_last_falls_back_with_an_alert(reference: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, uninterrupted = reference
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    for path in (folder / "checkpoints").rglob("*"):
        if (
            path.is_file()
            and path.stat().st_size > 100_000
            and hash_file(path) == hash_file(uninterrupted / "checkpoints" / "last.pt")
        ):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    assert resume(config, folder) == 0
    assert any("went back" in alert["message"] for alert in events(folder, "alert"))
    assert_same_run(folder, uninterrupted)


@pytest.mark.slow
def test_early_stop_ends_the_run_after_its_evaluations(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.5, 0.4, 0.6, 0.6, 0.5, 0.9, 0.9])  # the best is the third; the next two are not better
    monkeypatch.setattr(Evaluation, "monitored", lambda *_: next(scores))
    config = merged(tiny, train={"epochs": 7, "early_stop": 2})
    assert train(config, tmp_path / "run") == 0
    assert [event["epoch"] for event in events(tmp_path / "run", "val")] == [1, 2, 3, 4, 5]
    assert "no better miou for 2 evaluations" in events(tmp_path / "run", "run_end")[-1]["reason"]


def test_consecutive_bad_steps_stop_with_finite_checkpoint(tiny: dict[str, Any], tmp_path: Path) -> None:
    rates = {"optim": {"name": "sgd", "lr": 1e30}, "schedule": {"warmup_steps": 0}}
    config = merged(tiny, train={"steps": 20}, eval={"every_steps": 20}, **rates)
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        train(config, tmp_path / "run")
    state = final_state(tmp_path / "run")
    assert int(state["bad_steps"]) >= 10
    assert all(torch.isfinite(v).all() for v in state["model"].values() if v.is_floating_point())
    end = events(tmp_path / "run", "run_end")[-1]
    assert (end["status"], end["exit_code"]) == ("failed", 5)
