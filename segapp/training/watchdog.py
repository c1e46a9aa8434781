"""End a training that hangs: a GPU call that never returns, a rank that stalls, a disk that does not answer.

The training thread reports its progress (`DeviceMemoryTracker.report_progress`); a thread of each rank checks it.
Without progress for `train.hang_timeout_s`, the stacks of this process, its data workers and the other ranks on this
machine are written to `stacks.log` in the run folder. The reason is emitted as an event, the data workers are killed,
and the process exits with the exit code of the cause; the last checkpoint stays.

SIGUSR2 writes the stack of the main thread at any time, without ending the training (`StackLog`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from segapp.errors import DistributedError, RunError, StorageError, WorkerError
from segapp.parallel.launch import end_process
from segapp.run.events import Alert, RunEnd
from segapp.run.files import append_to_run, machine_id
from segapp.run.lock import child_pids
from segapp.training.context import RunContext

START_S = 600.0
"""Minimum timeout until the first step, because models are built, and kernels selected or compiled."""

_LOADER_S = 15.0
"""Time in which the loader can end its workers after its own timeout."""

_REPORT_S = 60.0
_OTHERS_S = 3.0
_WAIT_FOR_MAIN_S = 15.0
logger = logging.getLogger("segapp")


def exchange_timeout_s(hang_timeout_s: float) -> float:
    """Return the timeout of an exchange between ranks, long enough that a hang is reported before it.

    Args:
        hang_timeout_s: timeout of the watchdog; 0: none, and then the result is a week.
    """
    return hang_timeout_s + _REPORT_S if hang_timeout_s > 0 else 7 * 86400.0


class Watchdog:
    """Context manager that checks the progress of this rank's training thread.

    Args:
        timeout_s: Time without progress after which the training is ended; 0: never.
        data_timeout_s: Timeout of the loader for one batch of its workers; 0: none.
        rank_pids: (machine, process id) of every rank.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        timeout_s: float,
        data_timeout_s: float = 0.0,
        num_workers: int = 0,
        step: Callable[[], int | None] = lambda: None,
        has_stepped: Callable[[], bool] = lambda: False,
        is_writing: Callable[[], bool] = lambda: False,
        rank_pids: Sequence[tuple[str, int]] = (),
    ) -> None:
        folder, self._rank, self._rank_pids = context.folder, context.ranks.rank, rank_pids
        header = f"{rank_words(self._rank)}\n" if len(rank_pids) > 1 else ""
        self._stacks = StackLog(folder.stacks_of(self._rank), header)
        self._where = f"{self._stacks.path}{f' and {folder.logs}' if len(rank_pids) > 1 else ''}"
        self._event_log, self._device_memory = context.event_log, context.device_memory
        self._timeout_s, self._data_timeout_s, self._num_workers = timeout_s, data_timeout_s, num_workers
        self._step, self._has_stepped = step, has_stepped
        self._is_writing = is_writing
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
            end_process(DistributedError.exit_code)
        error = self._reason(place, silent_s)
        with contextlib.suppress(OSError):
            os.write(2, f"error: {error}; --resume continues from the newest checkpoint\n".encode())
        end_process(error.exit_code, lambda: self._emit(str(error), error.exit_code))

    def _write_stacks(self, place: str, silent_s: float) -> None:
        """Write the stacks of this process, its workers, and the ranks on this machine, and the place of the hang."""
        where = f"process {os.getpid()} on {socket.gethostname()}"
        what = f"rank {self._rank} in {place} for {silent_s:.1f} s"
        self._stacks.write(f"\n{time.strftime('%F %T')}: {what}, {where}\n")
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


def rank_words(rank: int) -> str:
    """Return the rank, its process and machine, and the round of the job, for the first line of its logs."""
    around = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"rank {rank}, round {around}, process {os.getpid()} on {socket.gethostname()} ({machine_id()})"


class StackLog:
    """Context manager in which SIGUSR2 writes the stack of this process's main thread; the training continues.

    `header` is written before the stacks of all threads.

    A signal handler can only write the stack of the thread that it interrupts: the other threads continue meanwhile,
    and the process crashes if one of them starts or ends while its stack is read. The main thread trains; its stack is
    written even if it holds the interpreter lock forever. Data workers are forked from this process and inherit the
    handler. The stacks are appended to the file, and a file that stays empty is removed at the end.
    """

    def __init__(self, path: Path, header: str = "") -> None:
        self.path, self._header = path, header
        self._file: BinaryIO

    def __enter__(self) -> StackLog:
        self.path.parent.mkdir(exist_ok=True)
        self._file = append_to_run(self.path)
        faulthandler.register(signal.SIGUSR2, self._file, all_threads=False)
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.unregister(signal.SIGUSR2)
        self._file.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()

    def write(self, header: str = "") -> None:
        """Append a header and the stacks of all threads; a full disk is ignored."""
        with contextlib.suppress(OSError, ValueError):
            self._file.write((header + self._header).encode())
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)
