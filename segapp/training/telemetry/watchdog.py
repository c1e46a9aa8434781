"""Ends a training that hangs: a GPU call that never returns, a rank that stalls, a disk that does not answer.

The training thread reports its progress (`DeviceMemoryTracker.report_progress`); a thread of each rank checks it.
Without progress for `train.hang_timeout_s`, the stacks of this process, its data workers and the other ranks on this
machine are written to `stacks.log` in the run folder, the state of the last step boundary is saved if it can be read,
the reason is emitted as an event, the data workers are killed, and the process exits with the exit code of the cause.

SIGUSR2 writes the stacks at any time, without ending the training (`segapp.training.telemetry.stacks`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from segapp.errors import DistributedError, RunError, StorageError, WorkerError
from segapp.memory.counters import DeviceMemoryTracker
from segapp.run.events import Alert, RunEnd
from segapp.run.process import child_pids
from segapp.training.telemetry.event_log import EventLog
from segapp.training.telemetry.stacks import StackLog

START_S = 600.0
"""Minimum timeout until the first step: models are built, kernels selected or compiled."""

_LOADER_S = 15.0
"""Time for the loader to end its workers after its own timeout."""

_RESCUE_S = 60.0
_EMIT_S = 5.0
_OTHERS_S = 3.0
_WAIT_FOR_MAIN_S = 15.0
_LINE = re.compile(r"^rank (\d+) .*?: no progress for ([\d.]+) s in (\w+)", re.MULTILINE)

logger = logging.getLogger("segapp")


@dataclass(frozen=True)
class HangLimits:
    """Limits on the time that a training thread may make no progress.

    Attributes:
        timeout_s: Time without progress after which the training is ended; 0: never.
        data_timeout_s: Timeout of the loader for one batch of its workers; 0: none.
        num_workers: Data workers of this process.
    """

    timeout_s: float
    data_timeout_s: float = 0.0
    num_workers: int = 0


class Watchdog:
    """Context manager that checks the progress of this rank's training thread.

    Args:
        folder: The run folder.
        event_log: Takes the reason; without a writer on ranks that write nothing.
        device_memory: Progress and phase of the training thread.
        limits: When a training thread counts as hanging.
        rank: Rank of this process.
        rank_pids: (host, process id) of every rank.
        end: Exits the process with the given code.
    """

    def __init__(
        self,
        folder: Path,
        event_log: EventLog,
        device_memory: DeviceMemoryTracker,
        limits: HangLimits,
        *,
        rank: int = 0,
        rank_pids: Sequence[tuple[str, int]] = (),
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.step: Callable[[], int | None] = lambda: None
        self._first_step: int | None = None
        self._save_last_boundary: Callable[[Callable[[], bool]], str | None] = lambda _: "nothing was there to save yet"
        self._is_writing: Callable[[], bool] = lambda: False
        self._stacks = StackLog(folder / "stacks.log")
        self._folder, self._event_log, self._device_memory, self._end = folder, event_log, device_memory, end
        self._timeout_s, self._data_timeout_s = limits.timeout_s, limits.data_timeout_s
        self._num_workers = limits.num_workers
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

    def follow(
        self,
        step: Callable[[], int | None],
        save_last_boundary: Callable[[Callable[[], bool]], str | None],
        is_writing: Callable[[], bool],
    ) -> None:
        """Watch a training from now on.

        Args:
            step: returns the steps done; its present value is where this process began.
            save_last_boundary: saves the state of the last step boundary; returns why it could not.
            is_writing: returns True while a checkpoint is being written.
        """
        self._first_step = step()
        self.step, self._save_last_boundary, self._is_writing = step, save_last_boundary, is_writing

    def limit_s(self, place: str, *, has_stepped: bool) -> float:
        """Return the seconds without progress that are allowed in an activity."""
        if place == "read" and self._num_workers > 0:  # the loader has a timeout of its own
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
            if silent_s >= self.limit_s(place, has_stepped=self.step() not in (None, self._first_step)):
                if self._report_hang(place, silent_s, functools.partial(self._is_still, seen_s)):
                    return
                silent_s = 0.0

    def _is_still(self, seen_s: float) -> bool:
        return self._device_memory.last_progress_s == seen_s

    def _report_hang(self, place: str, silent_s: float, is_still: Callable[[], bool]) -> bool:
        """Report the hang and end the process; return False if the training made progress meanwhile."""
        self._write_stacks(place, silent_s)
        if not is_still():
            return False
        if self._rank != 0:
            time.sleep(_WAIT_FOR_MAIN_S)  # the main rank, which hangs too, reports it; then the launcher ends all ranks
            self._exit(DistributedError.exit_code)
            return True
        error = self._reason(place, silent_s)
        problem = self._save_problem(place, is_still)
        saved = f"saved at step {self.step()}" if problem is None else f"not saved ({problem})"
        message = f"{error}; {saved}; --resume goes on from the newest checkpoint"
        _within(_EMIT_S, lambda: self._emit(message, error.exit_code))
        with contextlib.suppress(OSError):
            os.write(2, f"error: {message}\n".encode())
        self._exit(error.exit_code)
        return True

    def _write_stacks(self, place: str, silent_s: float) -> None:
        """Write the stacks of this process, of its workers, and of the ranks on this machine."""
        header = (
            f"\nrank {self._rank} (process {os.getpid()} on {socket.gethostname()}), {time.strftime('%F %T')}: "
            f"no progress for {silent_s:.1f} s in {place}, step {self.step()}\n"
        )
        self._stacks.write(header)
        here = socket.gethostname()
        others = [pid for host, pid in self._rank_pids if host == here and pid != os.getpid()]
        for pid in [*child_pids(), *others]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR2)
        if others:
            time.sleep(_OTHERS_S)
        elif self._num_workers:
            time.sleep(0.2)

    def _reason(self, place: str, silent_s: float) -> RunError:
        where = f"no progress for {silent_s:.0f} s in {place} after step {self.step()}"
        if len(self._rank_pids) > 1:
            with contextlib.suppress(OSError):
                latest = {
                    m[1]: f"rank {m[1]} in {m[3]} for {m[2]} s" for m in _LINE.finditer(self._stacks.path.read_text())
                }
                where += f" ({', '.join(latest[rank] for rank in sorted(latest))})"
        advice = f"all stacks are in {self._stacks.path}; train.hang_timeout_s = {self._timeout_s:g}"
        if place == "read":
            return WorkerError(f"{where}: the storage of the data does not answer: {advice}")
        if self._is_disk_silent(place):
            return StorageError(f"{where}: the disk of the run folder does not answer: {advice}")
        return DistributedError(f"{where}: a device or another rank does not answer: {advice}")

    def _is_disk_silent(self, place: str) -> bool:
        """True if a save waits for the disk, and not for the state of another rank."""
        return place == "save" and (len(self._rank_pids) <= 1 or self._is_writing())

    def _save_problem(self, place: str, is_still: Callable[[], bool]) -> str | None:
        if self._is_disk_silent(place):
            return "the disk does not answer"
        if place in ("step", "start"):
            return "it hangs in an update" if place == "step" else "nothing to save yet"
        answers: list[str | None] = []
        _within(_RESCUE_S, lambda: answers.append(self._save_last_boundary(is_still)))
        return answers[0] if answers else f"the state could not be read within {_RESCUE_S:g} s"

    def _emit(self, message: str, code: int) -> None:
        logger.error(message)
        self._event_log.emit(Alert(kind="hang", message=message, step=self.step()))
        self._event_log.emit(RunEnd(status="failed", reason=message, exit_code=code, step=self.step()))
        self._event_log.close()

    def _exit(self, code: int) -> None:
        for pid in child_pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._end(code)


def _within(timeout_s: float, act: Callable[[], object]) -> None:
    """Run `act` in a thread, which is abandoned after the timeout: the hanging thread may hold a lock that it needs."""

    def guarded() -> None:
        try:
            act()
        except Exception:
            logger.exception("watchdog")

    thread = threading.Thread(target=guarded, name="watchdog-act", daemon=True)
    thread.start()
    thread.join(timeout_s)
