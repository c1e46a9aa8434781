"""Real trackers on this machine: the data in TensorBoard, Weights & Biases and MLflow equal the events."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from segapp.config.load import config_of
from segapp.config.trust import name_trackers
from segapp.errors import ConfigError
from segapp.run.events import DeviceMemory, Memory, RunEnd, Step, Val
from segapp.run.folder import RunFolder
from segapp.training.trackers import TrackerListener, WandbTracker, make_trackers
from tests.support import ROOT
from tests.support.network import network
from tests.support.runs import events, merged, resume, train


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


@pytest.mark.parametrize(("monitor", "best"), [("miou", 0.25), ("loss", 0.5), ("dice:road", 2 / 3)])
def test_logged_values_are_finite_named_and_sent_once(monitor: str, best: float) -> None:
    notes = Notes()
    listener = TrackerListener("x", notes, ["road", "sky"], monitor)
    listener.handle(Step(epoch=1, step=3, loss=math.nan, lr=0.1))
    for step, miou in ((4, 0.25), (5, 0.125)):
        listener.handle(Val(epoch=1, step=step, loss=0.5 * (step - 3), miou=miou, iou=[2 * miou, None]))
    listener.handle(Memory(devices=[DeviceMemory(device="cuda:0", peak_mib=7.0), DeviceMemory()]))
    listener.handle(RunEnd(status="finished"))
    listener.close()
    listener.close()
    assert notes.told == [
        (3, {"train/lr": 0.1}),
        (4, {"val/loss": 0.5, "val/miou": 0.25, "val/num_scored": 1, "iou/road": 0.5}),
        (5, {"val/loss": 1.0, "val/miou": 0.125, "val/num_scored": 1, "iou/road": 0.25}),
        (5, {"memory/0_cuda:0_peak_mib": 7.0}),
        ("finished", {f"best_{monitor}": pytest.approx(best)}),
    ]


@pytest.mark.parametrize(
    ("monitor", "best", "expected"), [("miou", 0.8, 0.8), ("miou", 0.1, 0.25), ("loss", -0.2, 0.2)]
)
def test_best_before_a_resume_stays_the_best(monitor: str, best: float, expected: float) -> None:
    notes = Notes()
    listener = TrackerListener("x", notes, ["road", "sky"], monitor, best)
    listener.handle(Val(epoch=7, step=70, loss=0.5, miou=0.25, iou=[0.5, None]))
    listener.close()
    assert notes.told[-1] == ("failed", {f"best_{monitor}": expected})


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
    run = Mock(summary={})
    fake = Mock(init=Mock(return_value=run))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = WandbTracker(tmp_path, "project", {"optim.lr": 0.1}, "id", "name")
    asked = fake.init.call_args.kwargs
    given = [asked[key] for key in ("project", "name", "id", "resume", "config", "dir")]
    assert given == ["project", "name", "id", "allow", {"optim.lr": 0.1}, str(tmp_path)]
    tracker.scalars({"train/loss": 0.25}, 7)
    tracker.close(status, {"best_miou": 0.5})
    assert run.mock_calls == [call.log({"train/loss": 0.25}, step=7), call.finish(exit_code=exit_code)]
    assert run.summary == {"best_miou": 0.5}


def test_tensorboard_has_scalars_and_settings(tiny: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    assert train(merged(tiny, train={"epochs": 2, "batch_size": 5}, log={"tensorboard": True}), run) == 0
    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    found.Reload()
    assert [s.step for s in found.Scalars("train/loss")] == [e["step"] for e in events(run, "step")]
    assert found.Scalars("train/loss")[-1].value == pytest.approx(events(run, "step")[-1]["loss"], rel=1e-6)
    assert found.Scalars("val/miou")[-1].value == pytest.approx(events(run, "val")[-1]["miou"], rel=1e-6)
    assert "_hparams_/session_start_info" in found.summary_metadata


def without_wandb_variables(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


FILES = {
    "settings": "[DEFAULT]\nINSECURE_disable_SSL: yes\n[default]\nBase_URL = http://a.stranger\nHTTPS_proxy=http://b\n",
    "../config-defaults.yaml": "planted: {value: 1}",
    "../bin/git": "#!/bin/sh\ntouch asked\n",
    "../own/settings": "[default]\nhttp_proxy = http://own:1\n",
}


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_wandb_reads_nothing_of_the_folder(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")
    for name in (folder, "bin", "own"):
        (tmp_path / name).mkdir()
    for name, text in FILES.items():
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "bin" / "git").chmod(0o755)
    own = {"WANDB_MODE": "disabled", "WANDB_ENTITY": "me", "WANDB_CONFIG_DIR": str(tmp_path / "own")}
    without_wandb_variables(monkeypatch, **own, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)  # it is also the run folder
    found = []
    for make in (lambda: wandb.init(), lambda: WandbTracker(tmp_path, "tests", {}, "id", "name")._run):
        wandb.teardown()
        config, of = dict(make().config), wandb.setup().settings
        shown = (config, of.base_url, of.https_proxy, of.insecure_disable_ssl, of.http_proxy, of.entity)
        found.append((*shown, Path("asked").exists()))
        Path("asked").unlink(missing_ok=True)
    wandb.teardown()
    assert found[0] == ({"planted": 1}, "http://a.stranger", "http://b", True, "http://own:1", "me", True)
    assert found[1] == ({}, wandb.Settings().base_url, None, False, "http://own:1", "me", False)
    assert f"log.wandb does not read {folder}/settings, config-defaults.yaml in the" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["no key", "refused", "silent"])
def test_wandb_without_an_answer_continues_offline(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a terminal, where wandb would ask for a key and wait."""
    wandb = pytest.importorskip("wandb")
    server = socket.create_server(("127.0.0.1", 0))  # accepts connections into its queue and answers none
    port = 9 if fault == "refused" else server.getsockname()[1]
    key = {} if fault == "no key" else {"WANDB_API_KEY": "a" * 40}
    address = f"http://127.0.0.1:{port}"  # it is given up after a second here; another test reads the default
    without_wandb_variables(monkeypatch, WANDB_BASE_URL=address, WANDB_INIT_TIMEOUT="1", **key)
    monkeypatch.setattr("wandb.errors.term._sys_stderr_isatty", lambda: True)
    asked = Mock(side_effect=EOFError)
    monkeypatch.setattr("wandb.util.prompt_choices", asked)
    monkeypatch.setattr(sys, "stdin", Mock(isatty=lambda: True))
    wandb.teardown()
    start_s = time.monotonic()
    tracker = WandbTracker(tmp_path, "tests", {"optim.lr": 0.1}, "odd-7", "name")
    assert time.monotonic() - start_s < 60  # the limit of W&B is 90 s
    tracker.scalars({"train/loss": 0.25}, 7)
    tracker.close("finished", {})
    wandb.teardown()
    server.close()
    said = capsys.readouterr().err
    told = re.findall(r"log\.wandb continues offline \(.*\): upload the run later with wandb sync (\S+)", said)
    folder = Path(told[0])
    assert folder.parent == tmp_path / "wandb"
    assert b"train/loss" in (folder / "run-odd-7.wandb").read_bytes()
    assert asked.mock_calls == []


@pytest.mark.parametrize(("mode", "timeout"), [(None, None), (None, "30.5"), ("online", None), ("shared", "2")])
def test_mode_and_timeout_of_wandb_are_the_users(
    mode: str | None, timeout: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"WANDB_MODE": mode, "WANDB_INIT_TIMEOUT": timeout}
    without_wandb_variables(monkeypatch, **{name: value for name, value in given.items() if value is not None})
    fake = Mock(init=Mock(side_effect=[OSError("no route"), Mock(dir="w/files")]), Settings=dict, run=None)
    fake.Settings = type("Settings", (dict,), {"settings_workspace": "wandb/settings"})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    if mode is not None:
        with pytest.raises(OSError, match="no route"):
            WandbTracker(tmp_path, "tests", {}, "id", "name")
    else:
        WandbTracker(tmp_path, "tests", {}, "id", "name")
    asked = [each.kwargs["settings"] for each in fake.init.call_args_list]
    first = {} if mode is not None else {"init_timeout": float(timeout or 6)}
    plain = {"console": "off", "silent": True}
    assert asked == [plain | first, plain | {"mode": "offline"}][: 2 if mode is None else 1]
    assert fake.teardown.call_count == (mode is None)


def test_mlflow_without_an_answer_is_refused_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    server = socket.create_server(("127.0.0.1", 0))
    base = {"name": "x", "data": {"format": "voc", "root": "d"}}
    config = config_of(base, [f"log.mlflow=http://127.0.0.1:{server.getsockname()[1]}", "log.tensorboard=false"])
    start_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"log\.mlflow cannot be used: .*: correct it, or set log\.mlflow: null$"):
        make_trackers(config, RunFolder.create(path=tmp_path / "run"), ["a"], None)
    assert time.monotonic() - start_s < 15
    server.close()
    cured = config_of(config.model_dump(mode="json"), ["log.mlflow=null"])
    assert make_trackers(cured, RunFolder(tmp_path / "run"), ["a"], None) == []


@pytest.mark.slow
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
        subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, timeout=280, check=True)
        assert seen.take() == []


def test_mlflow_logs_the_whole_run_and_continues_on_resume(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    uri, run, working_directory = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "run", tmp_path / "elsewhere"
    working_directory.mkdir()
    monkeypatch.chdir(working_directory)
    monkeypatch.setenv("SEGAPP_TRACKERS", "")  # ends with the test what the user names in it
    config = merged(tiny, train={"epochs": 1, "batch_size": 5}, log={"mlflow": uri, "tensorboard": False})
    name_trackers(config.log)
    assert train(config, run) == 0
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tiny")
    (found,) = client.search_runs([experiment.experiment_id])
    told = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in told] == [(e["step"], pytest.approx(e["loss"])) for e in events(run, "step")]
    assert found.info.status == "FINISHED"
    assert found.data.params["optim.lr"] == "0.001"
    assert resume(config, run) == 0  # already complete
    assert client.get_run(found.info.run_id).info.status == "FINISHED"
    made = make_trackers(config, RunFolder(run), ["a"], 5)
    made[0].close()
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_missing_tracker_package_is_one_clear_error(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)  # as if it were not installed
    config = merged(tiny, log={"mlflow": "http://box", "tensorboard": False})
    with pytest.raises(ConfigError, match=r"^log\.mlflow needs the package mlflow-skinny: pip install mlflow-skinny$"):
        make_trackers(config, RunFolder.create(path=tmp_path / "run"), ["a"], None)
