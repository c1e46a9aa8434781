"""The process of a training: which ranks it watches, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segapp.run.folder import RunFolder
from segapp.train import session
from segapp.train.process.context import RunContext
from segapp.train.request import TrainRequest
from segapp.train.session import run_session
from segapp.train.telemetry.event_log import EventLog
from tests.support.runs import events, merged


def test_only_other_ranks_of_this_machine_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[tuple[list[int], int]] = []

    def end_with_peers(pids: list[int], exit_code: int, _before: Callable[[], None]) -> Callable[[], None]:
        watched.append((pids, exit_code))
        return lambda: None

    monkeypatch.setattr(session, "end_with_peers", end_with_peers)
    here, own = socket.gethostname(), os.getpid()
    for elsewhere in ([], [("elsewhere", own + 1), ("elsewhere", own)]):
        session._watch_peers(EventLog(None), [(here, own), *elsewhere], None)()  # type: ignore[arg-type]
    assert watched == []
    ranks = [(here, own + 1), ("elsewhere", own + 2), (here, own), (here, own + 3)]
    session._watch_peers(EventLog(None), ranks, None)  # type: ignore[arg-type]
    assert watched == [([own + 1, own + 3], session.DistributedError.exit_code)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_of_the_log_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with session._logging_to(types.SimpleNamespace(log=Path("/dev/full"))):  # type: ignore[arg-type]
        logging.getLogger("segapp").error("a line")
    assert "Traceback" not in capsys.readouterr().err


def test_run_stopped_before_its_first_save_begins_anew(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_until_a_signal(_: Any, context: RunContext, *__: Any, **___: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        context.signals.check()
        raise AssertionError("the signal was not noticed")

    config, folder = merged(tiny, train={"epochs": 1, "batch_size": 5}), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(session, "build_trainer", build_until_a_signal)
        assert run_session(TrainRequest(config, run=folder)) == 128 + signal.SIGTERM
    (end,) = events(folder, "run_end")
    assert (end["status"], end["exit_code"]) == ("stopped", 128 + signal.SIGTERM)
    assert end["reason"] == "SIGTERM: nothing was there to save yet"
    assert run_session(TrainRequest(config, RunFolder(folder))) == 0
    assert "the run has no checkpoint yet: it begins anew" in capsys.readouterr().out
    assert [(end["status"], end["exit_code"]) for end in events(folder, "run_end")[1:]] == [("finished", 0)]
    assert len(events(folder, "step")) == 2
