"""Signals to a training process set flags, which the loop reads where its state is consistent."""

from __future__ import annotations

import os
import signal

import pytest

from segapp.training.signals import StopRequest, StopSignals

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def test_stop_is_raised_where_the_loop_asks_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)  # the terminal was closed
        signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.is_set, signals.number) == (True, signal.SIGTERM)
        with pytest.raises(StopRequest, match=r"^SIGTERM$"):
            signals.check()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StopRequest, match=r"^SIGINT$"):
            signals.check()
    lines = capfd.readouterr().err.strip().split("\n\n")
    assert [line.partition(":")[0] for line in lines] == ["SIGTERM", "SIGINT"]
    assert "saving a checkpoint" in lines[0]
    assert "once more to exit immediately" in lines[1]
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_terminations_of_one_moment_are_one_request(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scheduler signals ranks and launchers, and launchers their ranks: the third would end a rank unsaved."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with StopSignals() as signals:
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.count, capfd.readouterr().err.count("SIGTERM"), ended) == (1, 1, [])
        monkeypatch.setattr("segapp.training.signals.ONE_TERM_S", 0.0)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_checkpoint_request_is_taken_once() -> None:
    forwarded: list[int] = []
    with StopSignals() as signals:
        signals.forward_checkpoint_requests(lambda: forwarded.append(1))
        assert not signals.take_checkpoint_request()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [signals.take_checkpoint_request() for _ in range(2)] == [True, False]
        assert not signals.is_set
    assert forwarded == [1]


def test_inactive_signals_leave_the_handlers_alone() -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    with StopSignals(is_active=False):
        assert [signal.getsignal(number) for number in HANDLED] == before
