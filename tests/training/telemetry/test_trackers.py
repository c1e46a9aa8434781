"""Real trackers on this machine: the data in TensorBoard, Weights & Biases and MLflow equal the events."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segapp.config.trust import name_trackers
from segapp.errors import ConfigError
from segapp.run.events import DeviceMemory, Memory, RunEnd, Step, Val
from segapp.run.folder import RunFolder
from segapp.training import trackers
from segapp.training.trackers import TrackerListener, WandbTracker, make_trackers
from tests.support import ROOT
from tests.support.network import network
from tests.support.runs import events, merged, train


class Notes:
    """A tracker that records its calls."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[Any] = []
        self.fails = fails

    def scalars(self, values: Any, step: int) -> None:
        if self.fails:
            raise ConnectionError("no \x1b[31mroute\nto host")
        self.told.append((step, dict(values)))

    def close(self, status: str, best: Any) -> None:
        self.told.append((status, dict(best)))


def test_logged_values_are_finite_named_and_sent_once(tmp_path: Path) -> None:
    notes = Notes()
    listener = TrackerListener("x", notes, ["road", "sky"])
    listener.handle(Step(epoch=1, step=3, loss=math.nan, lr=0.1))
    listener.handle(Val(epoch=1, step=4, loss=0.5, miou=0.25, iou=[0.5, None]))
    listener.handle(Memory(devices=[DeviceMemory(device="cuda:0", peak_mib=7.0), DeviceMemory()]))
    listener.handle(RunEnd(status="finished"))
    listener.close()
    listener.close()
    assert notes.told == [
        (3, {"train/lr": 0.1}),
        (4, {"val/loss": 0.5, "val/miou": 0.25, "val/num_scored": 1, "iou/road": 0.5}),
        (4, {"memory/0_cuda:0_peak_mib": 7.0}),
        ("finished", {"best_miou": 0.25}),
    ]


def test_failing_tracker_is_disabled_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes(fails=True)
    listener = TrackerListener("wandb", notes, [])
    for step in range(3):
        listener.handle(Step(epoch=1, step=step, loss=1.0, lr=None))
    listener.close()
    said = capsys.readouterr().err
    assert said.count("wandb is switched off") == 1
    assert "\x1b" not in said
    assert notes.told == []


@pytest.mark.parametrize(("status", "exit_code"), [("finished", 0), ("stopped", 1), ("failed", 1)])
def test_wandb_run_ends_as_the_training_did(
    status: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    run = types.SimpleNamespace(summary={}, finish=lambda exit_code: ended.append(exit_code))
    fake = types.SimpleNamespace(init=lambda **_: run, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    WandbTracker(tmp_path, "project", {}, "id", "name").close(status, {"best_miou": 0.5})
    assert (ended, run.summary) == ([exit_code], {"best_miou": 0.5})


def test_tensorboard_has_scalars_and_settings(tiny: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    assert train(merged(tiny, train={"epochs": 2}, log={"tensorboard": True}), run) == 0
    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    found.Reload()
    assert [s.step for s in found.Scalars("train/loss")] == [e["step"] for e in events(run, "step")]
    assert found.Scalars("train/loss")[-1].value == pytest.approx(events(run, "step")[-1]["loss"], rel=1e-6)
    assert found.Scalars("val/miou")[-1].value == pytest.approx(events(run, "val")[-1]["miou"], rel=1e-6)
    assert "_hparams_/session_start_info" in found.summary_metadata


def level_db_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log in blocks of 32 KiB, the first 7 bytes short; parts have crc, length, kind."""
    at, waiting = 0, b""
    while at + 7 <= len(log):
        room = 32768 - (at + 7) % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", log[at + 4 : at + 7])
        waiting += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield waiting
            waiting = b""


def finished_history(file: Path) -> list[dict[str, str]]:
    """Return the history of an offline run, by key, once wandb's own process has written the end of the file."""
    from wandb.proto import wandb_internal_pb2

    for _ in range(300):
        history, is_finished = [], False
        for data in level_db_records(file.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            is_finished |= record.WhichOneof("record_type") == "exit"
            if record.history.item:
                history.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
        if is_finished:
            return history
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def test_settings_of_wandb_in_a_folder_name_no_server(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = (
        "import sys; from pathlib import Path; from segapp.training.trackers import WandbTracker; "
        "WandbTracker(Path(sys.argv[1]), 'tests', {}, 'id', 'name')"
    )
    (tmp_path / "run").mkdir()
    with network(tmp_path / "network") as seen:
        environ = {**os.environ, **seen.env, "PYTHONPATH": str(ROOT), "WANDB_API_KEY": "a" * 40}
        environ |= dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
        environ |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "WANDB_INIT_TIMEOUT": "2"}
        for folder in (tmp_path, tmp_path / "run"):
            (folder / "wandb").mkdir()
            (folder / "wandb" / "settings").write_text(f"[default]\nbase_url = http://{seen.address}\n")
        words = [sys.executable, "-c", code, str(tmp_path / "run")]
        done = subprocess.run(
            words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False
        )
        assert "set WANDB_BASE_URL" in done.stderr
        assert [each for each in seen.take() if each.startswith("connection")] == []


def test_mlflow_sends_no_statistics(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    code = (
        "import sys; from segapp.training.trackers import MlflowTracker; "
        "MlflowTracker(sys.argv[1], 'tests', {}, 'id', 'name').close('finished', {})"
    )
    with network(tmp_path / "network") as seen:
        environ = {**os.environ, **seen.env, "PYTHONPATH": f"{seen.env['PYTHONPATH']}{os.pathsep}{ROOT}"}
        environ = {name: value for name, value in environ.items() if "CI" not in name and "PYTEST" not in name}
        words = [sys.executable, "-c", code, f"sqlite:///{tmp_path}/mlflow.db"]
        subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, timeout=100, check=True)
        assert seen.take() == []


@pytest.mark.slow
def test_wandb_offline_logs_the_whole_run(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SEGAPP_TRACKERS", "")  # ends with the test what the user names in it
    run, config = tmp_path / "run", merged(tiny, train={"epochs": 1}, log={"wandb": "tests", "tensorboard": False})
    name_trackers(config.log)
    assert train(config, run) == 0
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    history = finished_history(file)
    losses = [float(line["train/loss"]) for line in history if "train/loss" in line]
    assert losses == pytest.approx([e["loss"] for e in events(run, "step")])


@pytest.mark.slow
def test_mlflow_logs_the_whole_run_and_continues_on_resume(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    uri, run, working_directory = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "run", tmp_path / "elsewhere"
    working_directory.mkdir()
    monkeypatch.chdir(working_directory)
    monkeypatch.setenv("SEGAPP_TRACKERS", "")  # as above
    config = merged(tiny, train={"epochs": 1}, log={"mlflow": uri, "tensorboard": False})
    name_trackers(config.log)
    assert train(config, run) == 0
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tiny")
    (found,) = client.search_runs([experiment.experiment_id])
    told = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in told] == [(e["step"], pytest.approx(e["loss"])) for e in events(run, "step")]
    assert found.info.status == "FINISHED"
    assert found.data.params["optim.lr"] == "0.001"
    made = make_trackers(config, RunFolder(run), ["a"], 5)
    made[0].close()
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_missing_tracker_package_is_one_clear_error(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    monkeypatch.setattr(trackers, "WandbTracker", absent)
    config = merged(tiny, log={"wandb": "tests", "tensorboard": False})
    with pytest.raises(ConfigError, match="pip install wandb"):
        make_trackers(config, RunFolder.create(path=tmp_path / "run"), ["a"], None)
