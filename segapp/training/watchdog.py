"""End a training that hangs: a GPU call that never returns, a rank that stalls, a disk that does not answer.

The training thread reports its progress (`DeviceMemoryTracker.report_progress`); a thread of each rank checks it.
Without progress for `train.hang_timeout_s`, the stacks of this process, its data workers and the other ranks on this
machine are written to `stacks.log` in the run folder. The reason is emitted as an event, the data workers are killed,
and the process exits with the exit code of the cause; the last checkpoint stays.

SIGUSR2 writes the stacks at any time, without ending the training (`StackLog`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from segapp.errors import DistributedError, RunError, StorageError, WorkerError
from segapp.memory.counters import DeviceMemoryTracker
from segapp.run.events import Alert, EventLog, RunEnd
from segapp.run.files import append_to_run, machine_id, read_of_run
from segapp.run.folder import RunFolder
from segapp.run.lock import child_pids

START_S = 600.0
"""Minimum timeout until the first step, because models are built, and kernels selected or compiled."""

_LOADER_S = 15.0
"""Time in which the loader can end its workers after its own timeout."""

_REPORT_S = 60.0
_EMIT_S = 5.0
_OTHERS_S = 3.0
_WAIT_FOR_MAIN_S = 15.0
logger = logging.getLogger("segapp")


def exchange_timeout_s(hang_timeout_s: float) -> float:
    """Return the timeout of an exchange between ranks, long enough that a hang is reported before it.

    Args:
        hang_timeout_s: timeout of the watchdog; 0: none, and then the result is a week.
    """
    return hang_timeout_s + _REPORT_S if hang_timeout_s > 0 else 7 * 86400.0


@dataclass(frozen=True)
class Hang:
    """A training thread without progress, as reported by its rank: one JSON line of `reports/hangs.jsonl`."""

    rank: int
    pid: int
    machine: str
    t: float
    """Time of the report, Unix seconds."""
    silent_s: float
    activity: str
    step: int | None

    def sentence(self) -> str:
        """Return the activity of the rank and its duration."""
        return f"rank {self.rank} in {self.activity} for {self.silent_s:.1f} s"


def read_hangs(path: Path, rank_pids: Sequence[tuple[str, int]]) -> list[Hang]:
    """Return the latest hang of each of these processes; incomplete lines and lines of other processes are left out."""
    found: dict[tuple[str, int], Hang] = {}
    with contextlib.suppress(OSError):
        for line in read_of_run(path).splitlines():
            with contextlib.suppress(ValueError, TypeError):
                hang = Hang(**json.loads(line))
                if (hang.machine, hang.pid) in rank_pids:
                    found[hang.machine, hang.pid] = hang
    return list(found.values())


class Watchdog:
    """Context manager that checks the progress of this rank's training thread.

    Args:
        timeout_s: Time without progress after which the training is ended; 0: never.
        data_timeout_s: Timeout of the loader for one batch of its workers; 0: none.
        rank_pids: (machine, process id) of every rank.
    """

    def __init__(
        self,
        folder: RunFolder,
        event_log: EventLog,
        device_memory: DeviceMemoryTracker,
        *,
        timeout_s: float,
        data_timeout_s: float = 0.0,
        num_workers: int = 0,
        step: Callable[[], int | None] = lambda: None,
        has_stepped: Callable[[], bool] = lambda: False,
        is_writing: Callable[[], bool] = lambda: False,
        rank: int = 0,
        rank_pids: Sequence[tuple[str, int]] = (),
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._stacks = StackLog(folder.stacks_of(rank), f"{rank_words(rank)}\n" if len(rank_pids) > 1 else "")
        self._hangs = folder.reports / "hangs.jsonl"
        self._where = f"{self._stacks.path}{f' and {folder.logs}' if len(rank_pids) > 1 else ''}"
        self._event_log, self._device_memory, self._end = event_log, device_memory, end
        self._timeout_s, self._data_timeout_s, self._num_workers = timeout_s, data_timeout_s, num_workers
        self._step, self._has_stepped = step, has_stepped
        self._is_writing = is_writing
        self._rank, self._rank_pids = rank, rank_pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._stacks.__enter__()
        if self._timeout_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._stacks.__exit__()

    def limit_s(self, place: str, *, has_stepped: bool) -> float:
        """Return the allowed seconds without progress in an activity."""
        if place == "read" and self._num_workers > 0:  # the loader has its own timeout
            return float("inf") if self._data_timeout_s == 0 else self._data_timeout_s + _LOADER_S
        return self._timeout_s if has_stepped else max(self._timeout_s, START_S)

    def _run(self) -> None:
        look_s = min(1.0, self._timeout_s / 10)
        seen_s, silent_s = 0.0, 0.0
        looked_s = time.monotonic()
        while not self._stop.wait(look_s):
            now_s = time.monotonic()
            # The time of a stopped process or a suspended machine does not count.
            silent_s += min(now_s - looked_s, 2 * look_s)
            looked_s = now_s
            if self._device_memory.last_progress_s != seen_s:
                seen_s, silent_s = self._device_memory.last_progress_s, 0.0
            place = self._device_memory.activity
            if silent_s >= self.limit_s(place, has_stepped=self._has_stepped()):
                self._write_stacks(place, silent_s)
                if self._device_memory.last_progress_s == seen_s:
                    self._end_hang(place, silent_s)
                    return
                silent_s = 0.0

    def _end_hang(self, place: str, silent_s: float) -> None:
        """Report the hang and end the process."""
        if self._rank != 0:
            time.sleep(_WAIT_FOR_MAIN_S)  # the main rank, which hangs too, reports it; then the launcher ends all ranks
            self._exit(DistributedError.exit_code)
            return
        error = self._reason(place, silent_s)
        _within(_EMIT_S, lambda: self._emit(str(error), error.exit_code))
        with contextlib.suppress(OSError):
            os.write(2, f"error: {error}; --resume continues from the newest checkpoint\n".encode())
        self._exit(error.exit_code)

    def _write_stacks(self, place: str, silent_s: float) -> None:
        """Write the stacks of this process, its workers, and the ranks on this machine, and the place of the hang."""
        hang = Hang(self._rank, os.getpid(), machine_id(), time.time(), silent_s, place, self._step())
        where = f"process {hang.pid} on {socket.gethostname()}"
        self._stacks.write(f"\n{time.strftime('%F %T')}: {hang.sentence()}, {where}\n")
        with contextlib.suppress(OSError):
            self._hangs.parent.mkdir(exist_ok=True)
            with append_to_run(self._hangs) as file:
                file.write(b"\n%b\n" % json.dumps(asdict(hang)).encode())  # the previous line may be incomplete
        here = machine_id()
        others = [pid for machine, pid in self._rank_pids if machine == here and pid != os.getpid()]
        for pid in [*child_pids(), *others]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR2)
        if others:
            time.sleep(_OTHERS_S)
        elif self._num_workers:
            time.sleep(0.2)

    def _reason(self, place: str, silent_s: float) -> RunError:
        where = f"no progress for {silent_s:.0f} s in {place} after step {self._step()}"
        if len(self._rank_pids) > 1:
            hangs = sorted(read_hangs(self._hangs, self._rank_pids), key=lambda hang: hang.rank)
            where += f" ({', '.join(hang.sentence() for hang in hangs)})" if hangs else ""
        advice = f"all stacks are in {self._where}; train.hang_timeout_s = {self._timeout_s:g}"
        kind: type[RunError] = DistributedError
        what = "a device or another rank"
        if place == "read":
            kind, what = WorkerError, "the storage of the data"
        elif place == "save" and (len(self._rank_pids) <= 1 or self._is_writing()):  # else it waits for another rank
            kind, what = StorageError, "the disk of the run folder"
        return kind(f"{where}: {what} does not answer: {advice}")

    def _emit(self, message: str, code: int) -> None:
        logger.error(message)
        self._event_log.emit(Alert(kind="hang", message=message, step=self._step()))
        self._event_log.emit(RunEnd(status="failed", reason=message, exit_code=code, step=self._step()))
        self._event_log.close()

    def _exit(self, code: int) -> None:
        for pid in child_pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._end(code)


def rank_words(rank: int) -> str:
    """Return the rank, its process and machine, and the round of the job, for the first line of its logs."""
    around = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"rank {rank}, round {around}, process {os.getpid()} on {socket.gethostname()} ({machine_id()})"


def _within(timeout_s: float, act: Callable[[], object]) -> None:
    """Run `act` in a thread that is abandoned after the timeout, because the hanging thread may hold a lock."""

    def guarded() -> None:
        try:
            act()
        except Exception:
            logger.exception("watchdog")

    thread = threading.Thread(target=guarded, name="watchdog-act", daemon=True)
    thread.start()
    thread.join(timeout_s)


class StackLog:
    """Context manager in which SIGUSR2 writes the stacks of this process; the training continues.

    `header` is written before the stacks of all threads.

    A signal handler can only write the stack of the thread that it interrupts: the other threads continue meanwhile,
    and the process crashes if one of them starts or ends while its stack is read. The handler writes this one stack,
    which shows the training thread even if it holds the interpreter lock forever. A thread that the signal wakes then
    writes the stacks of all threads while it holds the lock. Data workers are forked from this process and inherit only
    the handler: they call `signal.set_wakeup_fd(-1)`.

    Python handles signals only in the main thread; if the context is entered in another thread, there is only the
    handler. The stacks are appended to the file, and a file that stays empty is removed at the end.
    """

    def __init__(self, path: Path, header: str = "") -> None:
        self.path, self._header = path, header
        self._file: BinaryIO
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> StackLog:
        with contextlib.ExitStack() as exits:
            self.path.parent.mkdir(exist_ok=True)
            exits.callback(self._remove_if_empty)
            self._file = exits.enter_context(append_to_run(self.path))
            in_main = threading.current_thread() is threading.main_thread()
            if in_main:
                self._listen_for_signals(exits)
            faulthandler.register(signal.SIGUSR2, self._file, all_threads=False, chain=in_main)
            exits.callback(faulthandler.unregister, signal.SIGUSR2)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._exits.close()

    def _listen_for_signals(self, exits: contextlib.ExitStack) -> None:
        """Start the thread that writes all stacks; Python's own handler writes the signal's number into its pipe."""
        reading, writing = os.pipe()
        exits.callback(os.close, reading)
        exits.callback(os.close, writing)
        os.set_blocking(writing, False)
        listener = threading.Thread(target=self._listen, args=(reading,), name="stacks", daemon=True)
        listener.start()
        exits.callback(listener.join)
        exits.callback(os.write, writing, b"\0")
        exits.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
        previous = signal.signal(signal.SIGUSR2, lambda *_: None)  # called by faulthandler's
        exits.callback(signal.signal, signal.SIGUSR2, previous or signal.SIG_DFL)

    def write(self, header: str = "") -> None:
        """Append a header and the stacks of all threads; a full disk is ignored."""
        with contextlib.suppress(OSError, ValueError):
            self._file.write((header + self._header).encode())
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)

    def _listen(self, reading: int) -> None:
        while 0 not in (numbers := os.read(reading, 4096)):
            if signal.SIGUSR2 in numbers:
                self.write()

    def _remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()
