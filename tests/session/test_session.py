"""The process of a training: which ranks it watches, and how it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from segapp.assembly.data import image_sizes_of
from segapp.assembly.devices import DevicePlan
from segapp.datasets import cache
from segapp.errors import (
    ConfigError,
    DataError,
    DistributedError,
    OutOfMemoryError,
    StorageError,
    WorkerError,
)
from segapp.memory.counters import DeviceInfo
from segapp.parallel.distributed import DistributedSetupError, Ranks
from segapp.parallel.launch import STORE_VARIABLE
from segapp.run.files import machine_id
from segapp.run.folder import RunFolder
from segapp.session import ranks, session
from segapp.session.failures import outcome_of
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.training.context import RunContext
from segapp.training.signals import StopRequest
from tests.support.own_parts import DROPOUT
from tests.support.runs import events, merged, resume, train


def test_cache_that_a_resume_chooses_anew_changes_nothing(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At first, the ten training images fit, but not the four validation images, too; then, none fit."""
    fixed = {
        **tiny,
        "model": DROPOUT,
        "schedule": {"name": "constant"},
        "train": {**tiny["train"], "bn_momentum": None},
    }
    config, first = (merged(fixed, train={"epochs": epochs}) for epochs in (2, 1))
    plain = merged(fixed, train={"epochs": 2}, data={"cache": "none"})
    assert train(plain, tmp_path / "plain") == 0
    assert "data.cache" not in capsys.readouterr().out
    train_px, val_px = (sum(h * w for h, w in image_sizes_of(config.data, split, 99)) for split in ("train", "val"))
    monkeypatch.setattr(cache, "RESERVE_BYTES", 0)
    said = []
    for free_px, request in (
        (train_px + val_px - 1, TrainRequest(first, run=tmp_path / "auto")),
        (val_px - 1, TrainRequest(config, RunFolder(tmp_path / "auto"))),
    ):
        monkeypatch.setattr(cache, "available_bytes", lambda free_px=free_px: 4 * 4 * free_px)
        assert run_session(request) == 0
        said += [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "decoded, the" in line]
    assert said == ["data.cache = ram", *["data.cache = none"] * 3]
    for kind in ("step", "val"):
        losses = [[event["loss"] for event in events(tmp_path / name, kind)] for name in ("plain", "auto")]
        assert losses[0] == losses[1]


class MiddleRank(Ranks):
    """Rank 1 of three, to which the first and the last rank have told their values."""

    def __init__(self, first: Any, last: Any) -> None:
        super().__init__()
        self.rank, self.world_size, self.first, self.last = 1, 3, first, last

    def gather(self, value: Any) -> list[Any]:
        return [self.first, value, self.last]


def test_devices_of_three_ranks_keep_rank_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one, two and two devices; the first is on another machine, the last on this one."""
    monkeypatch.setattr(session, "machine_id", lambda: "here")
    monkeypatch.setattr(socket, "gethostname", lambda: "b")
    theirs = [
        [DeviceInfo(name, pid=pid) for name, pid in pairs] for pairs in ([("x:1", 41)], [("x:0", 43), ("x:2", 44)])
    ]
    ranks = MiddleRank((theirs[0], "there", "a"), (theirs[1], "here", "b"))
    plan = DevicePlan("ddp", (torch.device("cpu"), torch.device("meta")), "")
    infos, locations = session._device_infos(plan, ranks, None)
    told: list[Any] = [(info.device, info.is_own, info.pid, info.machine) for info in infos]
    assert told == [
        ("x:1", False, None, "a"),
        ("cpu", True, os.getpid(), "b"),
        ("meta", True, os.getpid(), "b"),
        ("x:0", False, 43, "b"),
        ("x:2", False, 44, "b"),
    ]
    assert (locations.names, locations.num_machines) == (("a x:1", "b cpu", "b meta", "b x:0", "b x:2"), 2)
    monkeypatch.setattr(session, "limit_gpus", lambda _, devices, first: told.append((*devices, first)))
    limited, _ = session._device_infos(plan, ranks, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert told[5:] == [(*plan.devices, 1)]
    assert [info.total_mib for info in limited] == [1.0, 2.0, 3.0, 4.0, 5.0]
    session._check_same_split((1, 2, 3), MiddleRank(("a", (1, 2, 3)), ("c", (1, 2, 3))))
    with pytest.raises(ConfigError, match=r"is \[1, 3, 2\] on c and \[1, 2, 3\] on a, b: "):
        session._check_same_split((1, 2, 3), MiddleRank(("a", (1, 2, 3)), ("c", (1, 3, 2))))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_of_the_log_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "append_to_run", lambda path: path.open("ab"))  # which refuses devices
    with session._logging_to(types.SimpleNamespace(log_of=lambda _: Path("/dev/full"))):  # type: ignore[arg-type]
        logging.getLogger("segapp").error("a line")
    assert "Traceback" not in capsys.readouterr().err


def test_run_stopped_before_its_first_save_begins_anew(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_until_a_signal(_: Any, context: RunContext, *__: Any, **___: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        context.signals.check()
        raise AssertionError("the signal was not noticed")

    config, folder = merged({**tiny, "model": DROPOUT}, train={"epochs": 1, "batch_size": 5}), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(session, "build_trainer", build_until_a_signal)
        assert train(config, folder) == 128 + signal.SIGTERM
    (end,) = events(folder, "run_end")
    assert (end["status"], end["exit_code"]) == ("stopped", 128 + signal.SIGTERM)
    assert end["reason"] == "SIGTERM: nothing was there to save yet"
    assert resume(config, folder) == 0
    assert "the run has no checkpoint yet: it begins anew" in capsys.readouterr().out
    assert [(end["status"], end["exit_code"]) for end in events(folder, "run_end")[1:]] == [("finished", 0)]
    assert len(events(folder, "step")) == 2


@pytest.mark.parametrize(
    ("ended_by", "is_saved", "outcome", "code"),
    [
        ("3 epochs", True, ("finished", "3 epochs", None, None), 0),
        (None, True, ("finished", None, None, None), 0),
        (StopRequest("SIGTERM", "signal"), True, ("stopped", "SIGTERM: a checkpoint was saved", "signal", None), 75),
        (StopRequest("asked"), False, ("stopped", "asked: nothing was there to save yet", "command", None), 143),
        (WorkerError("a worker\n died"), True, ("failed", "a worker died", None, "hangs#a-data-worker-died"), 7),
        (DataError(2001 * "x"), False, ("failed", 2000 * "x", None, "data-refused"), 3),
        (KeyboardInterrupt(), True, ("stopped", "KeyboardInterrupt: nothing was saved", "signal", None), 130),
    ],
)
def test_each_end_of_a_training_has_its_code(
    ended_by: BaseException | str | None, is_saved: bool, outcome: tuple[str | None, ...], code: int
) -> None:
    found = outcome_of(ended_by, is_saved=is_saved, signal_number=signal.SIGTERM)
    assert (found.status, found.reason, found.stopped_by, found.topic) == outcome
    assert found.exit_code == code


def test_each_rank_has_a_log_that_begins_with_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    folder = RunFolder.create("tiny", path=tmp_path / "run")
    for rank in (0, 12):
        with session._logging_to(folder, rank, session.rank_words(rank)):
            logging.getLogger("segapp").error("a line")
    with session._logging_to(folder):  # a training without ranks
        logging.getLogger("segapp").error("its line")
    for rank, path in ((0, folder.log), (12, folder.path / "logs" / "rank-0012.log")):
        first, second, *rest = path.read_text().splitlines()
        assert [line.rpartition(" ERROR ")[2] for line in rest] == ["segapp: its line"] * (rank == 0)
        assert f" rank {rank}, round 3, process {os.getpid()} on {socket.gethostname()} ({machine_id()})" in first
        assert second.endswith(" ERROR segapp: a line")


def test_rank_waits_for_a_folder_that_its_disk_shows_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(session, "_FOLDER_S", 0.0)
    with pytest.raises(
        StorageError, match=r"run: rank 1, on \S+, cannot see this run folder of rank 0: name a folder with"
    ):
        session._wait_for_folder(folder, 1)
    monkeypatch.undo()
    threading.Timer(0.2, folder.path.mkdir).start()
    session._wait_for_folder(folder, 1)


@pytest.mark.parametrize(
    ("devices", "environ", "device", "backend"),
    [
        ("auto", {}, None, None),
        ("auto", {ranks.RANK_DEVICES: "[]"}, "cuda:1", None),
        (["cuda:0", "cuda:1"], {}, "cuda:1", None),
        (["cuda:0", "cuda:0"], {}, "cuda:0", "gloo"),
        (["cuda:0", "cuda:1", "cuda:0"], {"LOCAL_WORLD_SIZE": "3"}, "cuda:1", "gloo"),
        (["cuda:0", "cuda:1"], {"LOCAL_WORLD_SIZE": "4"}, "cuda:1", "gloo"),
        (["cuda:0", "cuda:0"], {"LOCAL_WORLD_SIZE": "1"}, "cuda:0", None),
    ],
)
def test_rank_takes_its_device_and_shares_it_through_gloo(
    tiny: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    devices: Any,
    environ: dict[str, str],
    device: str | None,
    backend: str | None,
) -> None:
    """The one that config or launcher chose; NCCL refuses ranks that share a GPU: "Duplicate GPU detected"."""
    asked: list[dict[str, Any]] = []

    def join(**options: Any) -> None:
        asked.append({name: value for name, value in options.items() if name != "note"})
        raise DistributedSetupError("no peers")

    monkeypatch.setattr(ranks, "init_from_env", join)
    for name in ("LOCAL_WORLD_SIZE", ranks.RANK_DEVICES):
        monkeypatch.delenv(name, raising=False)
    started = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", STORE_VARIABLE: "store"}
    for name, value in {**started, **environ}.items():
        monkeypatch.setenv(name, value)
    config = merged(tiny, parallel={"mode": "ddp", "devices": devices})
    planned = ["cuda:0", "cuda:1"] if devices == "auto" else devices
    plan = DevicePlan("ddp", tuple(map(torch.device, planned)), "")
    with pytest.raises(DistributedError, match="no peers"), ranks.joined_ranks(config, plan):
        pass
    assert asked == [{"device": device and torch.device(device), "backend": backend}]


@pytest.mark.parametrize("devices", ["auto", ["cpu", "cpu"]])
@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_number_of_a_launcher_that_is_none_is_named(
    name: str, devices: Any, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", STORE_VARIABLE: "store"}
    for each, value in {**started, name: "1(x2)"}.items():
        monkeypatch.setenv(each, value)
    config = merged(tiny, parallel={"mode": "ddp", "devices": devices})
    plan = DevicePlan("ddp", (torch.device("cpu"), torch.device("cpu")), "")
    refused = pytest.raises(DistributedError, match=rf"{name}='1\(x2\)' is not a number: start the program with")
    with refused, ranks.joined_ranks(config, plan):
        pass


@pytest.mark.parametrize("steps", [[0], [0, 2], []], ids=["in the first step", "and in a later one", "without a way"])
def test_ranks_start_again_while_they_report_a_way(
    steps: list[int], tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    lessons = iter(steps)
    plan = DevicePlan("ddp", tuple(map(torch.device, ("cuda:2", "cpu", "cuda:0"))), "as named", "so many")

    def launch(command: list[str], num_ranks: int, *, env: dict[str, str]) -> int:
        with patch.dict(os.environ, {**env, "RANK": "2", "WORLD_SIZE": "3"}):
            assert ranks.devices_of_launcher() == plan
        commands.append(command)
        step = next(lessons, None)
        if step is not None:
            reports = RunFolder(tmp_path / "run").reports
            reports.mkdir(exist_ok=True)
            (reports / f"rank_1_step_{step}.json").write_text(
                json.dumps({"step": step, "reason": "full", "fallbacks": {"num_pieces": 2}})
            )
        return 0 if step is None and steps else OutOfMemoryError.exit_code

    monkeypatch.setattr(ranks, "launch_local", launch)
    monkeypatch.setattr(session, "plan_devices", lambda _: plan)
    config = merged(tiny, parallel={"mode": "ddp"})
    code = run_session(TrainRequest(config, run=tmp_path / "run"), ["--debug", "train"])
    assert code == (0 if steps else OutOfMemoryError.exit_code)
    again = ["-m", "segapp", "--debug", "train", "--plain", "--resume", str(tmp_path / "run")]
    assert commands[1:] == [again] * len(steps)
