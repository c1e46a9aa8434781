"""When the watchdog ends a training: its limits by hand, on a clock that only the test moves; and `stacks.log`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from segapp.checkpoint.saver import Position
from segapp.errors import WorkerError
from segapp.memory.counters import DeviceMemoryTracker, device_info_of
from segapp.parallel import launch
from segapp.parallel.distributed import Ranks
from segapp.parallel.launch import Silence
from segapp.run.events import EventLog
from segapp.run.files import machine_id
from segapp.run.folder import RunFolder
from segapp.training import watchdog as module
from segapp.training.context import RunContext
from segapp.training.pulse import Liveness
from segapp.training.signals import StopSignals
from segapp.training.watchdog import StackLog, Watchdog
from tests.support.live_runs import wait_for


class Watched:
    """A watchdog whose loop runs in the test, and the seconds after which it reports a hang."""

    def __init__(self, folder: Path, timeout_s: float, **limits: Any) -> None:
        self.liveness = Liveness()
        memory = DeviceMemoryTracker([device_info_of(torch.device("cpu"))])
        context = RunContext(RunFolder(folder), EventLog(None), Ranks(), StopSignals(is_active=False), memory)
        self.dog = Watchdog(context, self.liveness, timeout_s=timeout_s, **limits)

    def reported_after(
        self, waits_s: Iterable[float], monkeypatch: pytest.MonkeyPatch, *, write: Callable[..., None] = lambda *_: None
    ) -> float | None:
        """Return the seconds of silence with which a hang was reported; None if it was not."""
        reported: list[float] = []
        now_s = 1000.0
        monkeypatch.setattr(launch, "time", types.SimpleNamespace(monotonic=lambda: now_s))
        self.dog._silence = Silence(self.dog._silence._longest_s)
        monkeypatch.setattr(self.dog, "_write_stacks", write)
        monkeypatch.setattr(self.dog, "_end_hang", lambda place, silent_s: reported.append(silent_s))
        for wait_s in waits_s:
            now_s += wait_s
            assert self.dog._look() == 1.0
        return reported[0] if reported else None


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path, 60.0)


@pytest.mark.parametrize(
    ("timeout_s", "data", "place", "limits_s"),
    [
        (60.0, (0.0, 0), "step", (600.0, 60.0)),
        (900.0, (0.0, 0), "step", (900.0, 900.0)),
        (60.0, (120.0, 2), "step", (600.0, 60.0)),
        (60.0, (120.0, 2), "read", (135.0, 135.0)),
        (60.0, (0.0, 2), "read", (math.inf, math.inf)),
        (60.0, (120.0, 0), "read", (600.0, 60.0)),
    ],
)
def test_limits_of_the_first_and_later_steps_by_hand(
    tmp_path: Path, timeout_s: float, data: tuple[float, int], place: str, limits_s: tuple[float, float]
) -> None:
    """`data` has the timeout and the number of data workers."""
    dog = Watched(tmp_path, timeout_s, data_timeout_s=data[0], num_workers=data[1]).dog
    assert (dog.limit_s(place, has_stepped=False), dog.limit_s(place, has_stepped=True)) == limits_s


@pytest.mark.parametrize(("timeout_s", "runs"), [(0.0, False), (0.5, True)])
def test_timeout_of_zero_watches_nothing(tmp_path: Path, timeout_s: float, runs: bool) -> None:
    def watches() -> bool:
        return "watchdog" in {thread.name for thread in threading.enumerate()}

    with Watched(tmp_path, timeout_s).dog.watching():
        assert watches() == runs
    assert not watches()


@pytest.mark.parametrize(("has_stepped", "limit_s"), [(True, 60), (False, 600)])
def test_training_hangs_after_its_timeout(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, has_stepped: bool, limit_s: int
) -> None:
    """The first look sees the last progress; the first step of a process, resumed or not, has ten minutes."""
    watched.liveness.has_stepped = has_stepped
    assert watched.reported_after([1.0] * limit_s, monkeypatch) is None
    assert watched.reported_after([1.0] * (limit_s + 1), monkeypatch) == limit_s


@pytest.mark.parametrize("place", ["eval", "read", "step"])
def test_stopped_data_worker_is_the_cause_of_a_hang(tmp_path: Path, place: str) -> None:
    with contextlib.ExitStack() as stack:
        running, stopped, ended = (stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(3))
        for process in (running, stopped, ended):
            stack.callback(process.kill)
        dog = Watched(tmp_path, 60.0, num_workers=2).dog
        assert "a stopped data worker" not in str(dog._reason(place, 60.0))
        ended.kill()
        stopped.send_signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
        reason = dog._reason(place, 60.0)
        assert type(reason) is WorkerError
        assert f"in {place} after step None: a stopped data worker (process {stopped.pid}) does not" in str(reason)
        assert "a stopped data worker" not in str(Watched(tmp_path, 60.0).dog._reason(place, 60.0)), (
            "without workers it is another's"
        )


def test_time_asleep_is_no_silence(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, or a machine that was suspended for an hour: one look that comes late counts two seconds."""
    watched.liveness.has_stepped = True
    asleep = [1.0] * 10 + [3600.0] + [1.0] * 10
    assert watched.reported_after(asleep, monkeypatch) is None
    assert watched.reported_after(asleep + [1.0] * 38, monkeypatch) is None
    assert watched.reported_after(asleep + [1.0] * 39, monkeypatch) == 60.0


def test_progress_ends_the_silence(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.liveness.has_stepped = True

    def waits() -> Iterator[float]:
        yield from [1.0] * 50
        watched.liveness.report_progress()
        yield from [1.0] * 50

    assert watched.reported_after(waits(), monkeypatch) is None
    written: list[float] = []

    def write(_: str, silent_s: float) -> None:
        written.append(silent_s)
        watched.liveness.report_progress()

    assert watched.reported_after([1.0] * 130, monkeypatch, write=write) is None
    assert written == [60.0, 60.0]


@pytest.mark.parametrize(
    ("num_ranks", "is_writing", "says", "exit_code"),
    [
        (1, False, "the disk of the run folder does not answer", 10),
        (1, True, "the disk of the run folder does not answer", 10),
        (2, True, "the disk of the run folder does not answer", 10),
        (2, False, "a device or another rank does not answer", 8),  # a save needs the state of every rank
    ],
)
def test_save_that_hangs_blames_the_disk_only_while_it_writes(
    tmp_path: Path, num_ranks: int, is_writing: bool, says: str, exit_code: int
) -> None:
    pids = [("elsewhere", number) for number in range(num_ranks)]
    watched = Watched(tmp_path, 0.0, rank_pids=pids)
    saver, progress = Mock(written_for_s=lambda: 0.0 if is_writing else None), Mock(position=Position(step=7))
    watched.liveness.training = progress, saver
    error = watched.dog._reason("save", 60.0)
    assert f"in save after step 7: {says}" in str(error)
    assert error.exit_code == exit_code


def test_other_ranks_of_this_machine_get_time_to_write_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, own = machine_id(), os.getpid()
    heard: list[int] = []
    slept: list[float] = []
    monkeypatch.setattr(module, "child_pids", lambda **_: [own + 1])
    monkeypatch.setattr(module.os, "kill", lambda pid, number: heard.append(pid))
    monkeypatch.setattr(module.time, "sleep", slept.append)
    for others in ([], [("elsewhere", own + 3)], [(here, own + 2), ("elsewhere", own + 3)]):
        ranks = [(here, own), *others]
        dog = Watched(tmp_path, 0.0, rank_pids=ranks).dog
        with dog.watching():  # 0: no thread
            dog._write_stacks("step", 61.0)
    assert heard == [own + 1, own + 1, own + 1, own + 2]
    assert slept == [module._OTHERS_S]


def test_stacks_are_kept_only_where_there_are_some(tmp_path: Path) -> None:
    for folder, text in ((tmp_path / "quiet", ""), (tmp_path / "earlier", "stacks of an earlier process\n")):
        folder.mkdir()
        (folder / "stacks.log").write_text(text)
        with StackLog(folder / "stacks.log"):
            pass
        assert (folder / "stacks.log").exists() == bool(text)
    with StackLog(tmp_path / "stacks.log") as stacks:
        stacks.write("rank 0\n")
    text = (tmp_path / "stacks.log").read_text()
    assert text.startswith("rank 0\n")
    assert "test_watchdog.py" in text


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_are_handled_as_before_at_the_end(tmp_path: Path, handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with StackLog(tmp_path / "stacks.log"):
            signal.raise_signal(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_in_another_thread_the_stack_of_the_main_one_is_written(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with ThreadPoolExecutor(1) as pool:
            stacks = pool.submit(StackLog(tmp_path / "stacks.log").__enter__).result()
            signal.raise_signal(signal.SIGUSR2)
            pool.submit(stacks.__exit__).result()
        signal.raise_signal(signal.SIGUSR2)  # ignored as before
    finally:
        signal.signal(signal.SIGUSR2, before)
    text = (tmp_path / "stacks.log").read_text()
    assert text.count("most recent call first") == 1
    assert "in test_in_another_thread_the_stack_of_the_main_one_is_written" in text
