"""The process of a training: which ranks it watches."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from segapp.train import session
from segapp.train.telemetry.event_log import EventLog


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
