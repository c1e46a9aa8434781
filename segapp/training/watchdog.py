"""End a training that hangs: a GPU call that never returns, a rank that stalls, a disk that does not answer.

The training thread reports its progress (`Liveness.report_progress`); a thread of each rank checks it.
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import BinaryIO

from segapp.errors import DistributedError, RunError, StorageError, WorkerError
from segapp.parallel.launch import Silence, end_process
from segapp.run.events import Alert, RunEnd
from segapp.run.files import append_to_run, machine_id
from segapp.run.lock import child_pids
from segapp.training.context import RunContext
from segapp.training.pulse import Liveness
from segapp.waiting import repeated

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


@dataclass
class Watchdog:
    """Checks the progress of this rank's training thread."""

    context: RunContext
    liveness: Liveness
    _: KW_ONLY
    timeout_s: float
    """Time without progress after which the training is ended; 0: never."""
    data_timeout_s: float = 0.0
    """Timeout of the loader for one batch of its workers; 0: none."""
    num_workers: int = 0
    rank_pids: Sequence[tuple[str, int]] = ()
    """(machine, process id) of every rank."""

    def __post_init__(self) -> None:
        folder, self._rank = self.context.folder, self.context.ranks.rank
        header = f"{rank_words(self._rank)}\n" if len(self.rank_pids) > 1 else ""
        self._stacks = StackLog(folder.stacks_of(self._rank), header)
        self._where = f"{self._stacks.path}{f' and {folder.logs}' if len(self.rank_pids) > 1 else ''}"
        self._look_s = min(1.0, self.timeout_s / 10)
        self._silence = Silence(2 * self._look_s)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        looks = repeated("watchdog", self._look, self._look_s) if self.timeout_s > 0 else contextlib.nullcontext()
        with self._stacks, looks:
            yield

    def limit_s(self, place: str, *, has_stepped: bool) -> float:
        if place == "read" and self.num_workers > 0:  # the loader has its own timeout
            return float("inf") if self.data_timeout_s == 0 else self.data_timeout_s + _LOADER_S
        return self.timeout_s if has_stepped else max(self.timeout_s, START_S)

    def _look(self) -> float:
        seen_s, place = self.liveness.last_progress_s, self.liveness.activity
        self._silence.note({place: seen_s})
        silent_s = self._silence.silent_s[place]
        if silent_s >= self.limit_s(place, has_stepped=self.liveness.has_stepped):
            self._write_stacks(place, silent_s)
            if self.liveness.last_progress_s == seen_s:
                self._end_hang(place, silent_s)
        return self._look_s

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
        others = [pid for machine, pid in self.rank_pids if machine == here and pid != os.getpid()]
        for pid in [*child_pids(), *others]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR2)
        if others:
            # The signal only starts the others' writing, and this process ends next.
            time.sleep(_OTHERS_S)
        elif self.num_workers:
            time.sleep(0.2)

    def _reason(self, place: str, silent_s: float) -> RunError:
        where = f"no progress for {silent_s:.0f} s in {place} after step {self.liveness.step()}"
        advice = f"all stacks are in {self._where}; train.hang_timeout_s = {self.timeout_s:g}"
        kind: type[RunError] = DistributedError
        what = "a device or another rank"
        if self.num_workers and (stopped := child_pids(are_stopped=True)):
            # The trainer may be receiving from it, in an evaluation too, where the loader's own timeout does not count.
            kind, what = WorkerError, f"a stopped data worker (process {stopped[0]})"
        elif place == "read":
            kind, what = WorkerError, "the storage of the data"
        elif place == "save" and (len(self.rank_pids) <= 1 or self.liveness.saving_s() is not None):
            # A save that writes nothing waits for another rank.
            kind, what = StorageError, "the disk of the run folder"
        return kind(f"{where}: {what} does not answer: {advice}")

    def _emit(self, message: str, code: int) -> None:
        logger.error(message)
        step = self.liveness.step()
        self.context.event_log.emit(Alert(kind="hang", message=message, step=step))
        self.context.event_log.emit(RunEnd(status="failed", reason=message, exit_code=code, step=step))
        self.context.event_log.close()


def rank_words(rank: int) -> str:
    """Return the rank, its process and machine, and the round of the job, for the first line of its logs."""
    around = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"rank {rank}, round {around}, process {os.getpid()} on {socket.gethostname()} ({machine_id()})"


@dataclass
class StackLog:
    """Context manager in which SIGUSR2 writes the stack of this process's main thread; the training continues.

    `header` is written before the stacks of all threads.

    A signal handler can only write the stack of the thread that it interrupts: the other threads continue meanwhile,
    and the process crashes if one of them starts or ends while its stack is read. The main thread trains; its stack is
    written even if it holds the interpreter lock forever. Data workers are forked from this process and inherit the
    handler. The stacks are appended to the file, and a file that stays empty is removed at the end.
    """

    path: Path
    header: str = ""

    def __enter__(self) -> StackLog:
        self.path.parent.mkdir(exist_ok=True)
        self._file: BinaryIO = append_to_run(self.path)
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
            self._file.write((header + self.header).encode())
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)
