"""Signals end a process whose main thread waits in C or in the kernel; long waits print lines."""

from __future__ import annotations

import functools
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from segapp import waiting
from tests.support import ROOT

LOCKED = """
    import ctypes, signal, threading, time
    from segapp.training.signals import StopSignals
    from segapp.waiting import watch_signals

    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    watch_signals()
"""
"""A program whose second lock of the mutex is a call of C that a signal does not end, as a wait for another rank is."""


def started(code: str) -> subprocess.Popen[str]:
    """Start the program, and return it after its line "ready"."""
    words = [sys.executable, "-c", textwrap.dedent(LOCKED) + textwrap.dedent(code)]
    program = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    time.sleep(0.5)  # it is in the call by then
    return program


@pytest.mark.faults
def test_third_signal_ends_a_stop_in_a_call_of_c() -> None:
    program = started("""
    with StopSignals():
        print("ready", flush=True)
        libc.pthread_mutex_lock(mutex)
    """)
    for _ in range(3):
        program.send_signal(signal.SIGINT)
        time.sleep(0.8)
    out, _ = program.communicate(timeout=20)
    assert program.returncode == 130
    assert [line[:26] for line in out.split("\n") if line] == [
        "SIGINT: stopping after thi",
        "SIGINT: still saving; send",
    ]


@pytest.mark.faults
def test_signal_in_a_call_of_c_counts_once() -> None:
    program = started("""
    with StopSignals() as signals:
        print("ready", flush=True)
        threading.Timer(2.5, libc.pthread_mutex_unlock, (mutex,)).start()
        libc.pthread_mutex_lock(mutex)
        time.sleep(0.2)
        print(signals.count, signals.signal_name, flush=True)
        signal.raise_signal(signal.SIGTERM)
        print(signals.count, signals.signal_name, flush=True)
    """)
    program.send_signal(signal.SIGINT)
    out, _ = program.communicate(timeout=20)
    assert [line for line in out.splitlines() if line[:1].isdigit()] == ["1 SIGINT", "2 SIGTERM"]


@pytest.mark.faults
@pytest.mark.parametrize("is_begun", [False, True])
def test_stop_before_the_training_ends_the_process(is_begun: bool) -> None:
    program = started(f"""
    import os
    with StopSignals(end_start=lambda code: {is_begun} or os._exit(code)):
        print("ready", flush=True)
        libc.pthread_mutex_lock(mutex)
    """)
    began_s = time.monotonic()
    program.send_signal(signal.SIGTERM)
    if is_begun:
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(3)
        program.kill()
    else:
        assert program.wait(20) == 143
        assert time.monotonic() - began_s < 5  # 0.8 s on an idle machine
    program.communicate()


@pytest.mark.faults
def test_signal_that_no_thread_takes_is_handled_elsewhere() -> None:
    """As in a read of a network file system: no thread that could take the signal, which stays pending."""
    program = started("""
    def handle(number, frame):
        print(number, frame is None, flush=True)
        raise SystemExit(9)
    signal.signal(signal.SIGTERM, handle)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)
    """)
    program.send_signal(signal.SIGTERM)
    out, _ = program.communicate(timeout=20)
    assert (out, program.returncode) == ("15 True\n", 9)


def test_repeated_call_is_made_until_the_body_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Its time is part of the interval, and an error, after which a second passes, does not end it."""
    times_s, has_three = [time.monotonic()], threading.Event()

    def call() -> float:
        times_s.append(time.monotonic())
        if len(times_s) == 2:
            raise ZeroDivisionError
        if len(times_s) == 3:
            time.sleep(1.0)
            return 1.1
        has_three.set()
        return 0.1

    with waiting.repeated("work", call, first_s=0.1):
        assert has_three.wait(20)
    count = len(times_s)
    first_s, after_error_s, second_s = (later - at for at, later in itertools.pairwise(times_s[:4]))
    assert 0.1 <= first_s < 1.0
    assert after_error_s >= 1.0
    assert 1.1 <= second_s < 2.1, "the second of the call is part of it"
    assert [record.message for record in caplog.records] == ["work"]
    assert "work" not in {thread.name for thread in threading.enumerate()}
    time.sleep(0.2)
    assert len(times_s) == count


def test_long_work_prints_lines_and_fast_work_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (waiting.FIRST_S, waiting.EVERY_S) == (10, 30)
    monkeypatch.setattr(waiting, "EVERY_S", 0.3)
    monkeypatch.setattr(waiting, "FIRST_S", 0.2)
    done = iter(range(7, 99))
    with waiting.lines_while(lambda: f"reading {next(done)} of 99 masks", first_s=0.1):
        time.sleep(0.55)
    asked: list[str] = []
    outer = functools.partial(waiting.lines_while, lambda: asked.append("outer") or "", first_s=0.1)
    for inner in ("inner", ""):
        with outer(), waiting.lines_while(lambda inner=inner: inner, first_s=0.1):  # type: ignore[misc]
            time.sleep(0.25)
            assert asked == []  # later it may be: a busy machine
    with waiting.lines_while(lambda: "never", first_s=0.5):
        pass
    threads = [thread for thread in threading.enumerate() if thread.name == "lines"]
    assert not [thread for thread in threads if thread.join(2) is None and thread.is_alive()]
    lines = ["reading 7 of 99 masks", "reading 8 of 99 masks", "inner"]
    assert capsys.readouterr() == ("", "".join(f"{line} (0 s so far)\n" for line in lines))
