"""What ends a training that does not move any more: a GPU call that never returns, a rank that stalls, a dead disk.

The training thread reports its progress (`DeviceMemoryTracker.report_progress`); a thread of each rank looks. Where
nothing has moved for `train.hang_timeout_s`, every stack (this process, its data workers, the other ranks of this
machine) goes to `stacks.log` in the run folder, the state of the last step boundary is saved if it can be read, the
reason becomes an event, the data workers are killed, and the process leaves with the exit code of the cause.

SIGUSR2 asks for the stacks at any time, without ending anything.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from segapp.errors import DistributedError, RunError, StorageError, WorkerError
from segapp.run.events import Alert, RunEnd
from segapp.run.process import child_pids
from segapp.train.telemetry.device_memory import DeviceMemoryTracker
from segapp.train.telemetry.event_log import EventLog

START_S = 600.0
"""Until the first step, at least so long without progress is allowed: models are built, kernels chosen or compiled."""

_LOADER_S = 15.0
"""The loader may take so much longer than its own limit to end its workers."""

_RESCUE_S = 60.0
_TELL_S = 5.0
_OTHERS_S = 3.0
_WAIT_FOR_MAIN_S = 15.0
_LINE = re.compile(r"^rank (\d+) .*?: no progress for ([\d.]+) s in (\w+)", re.MULTILINE)

logger = logging.getLogger("segapp")


class Watchdog:
    """Looks whether the training thread of this rank gets on, for as long as it is entered.

    Args:
        folder: of the run.
        event_log: takes the reason; silent on ranks that write nothing.
        watch: where the training thread is.
        timeout_s: without progress; 0: never ends anything.
        data_timeout_s: how long a batch of the data workers may take; they have a limit of their own.
        num_workers: data workers of this process.
        rank: of this process.
        rank_pids: of every rank, (host, process id).
        end: leaves the process.
    """

    def __init__(
        self,
        folder: Path,
        event_log: EventLog,
        watch: DeviceMemoryTracker,
        *,
        timeout_s: float,
        data_timeout_s: float,
        num_workers: int,
        rank: int = 0,
        rank_pids: Sequence[tuple[str, int]] = (),
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.step: Callable[[], int | None] = lambda: None
        """Gives the number of steps so far."""
        self.first_step: int | None = None
        """Steps that were made before this process began; told by whoever begins, as a look may come too late."""
        self.save_last_boundary: Callable[[Callable[[], bool]], str | None] = lambda _: "nothing was there to save yet"
        """Saves the state of the last step boundary; gives why it could not."""
        self._path = folder / "stacks.log"
        self._folder, self._event_log, self._watch, self._end = folder, event_log, watch, end
        self._timeout_s, self._data_timeout_s, self._num_workers = timeout_s, data_timeout_s, num_workers
        self._rank, self._rank_pids = rank, rank_pids
        self._file = self._path.open("ab")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        # Data workers are forked from here, and so answer the signal too.
        faulthandler.register(signal.SIGUSR2, self._file, all_threads=True)
        if self._timeout_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        is_empty = self._file.tell() == 0
        self._file.close()
        if is_empty:
            with contextlib.suppress(OSError):
                if self._path.stat().st_size == 0:
                    self._path.unlink()

    def limit_s(self, place: str, *, has_stepped: bool) -> float:
        """How long the training thread may stay at a place without getting on, seconds.

        Args:
            place: as `DeviceMemoryTracker.report_progress` was told.
            has_stepped: whether this process has made a step.
        """
        if place == "read" and self._num_workers > 0:  # the loader looks after its workers itself
            return float("inf") if self._data_timeout_s == 0 else self._data_timeout_s + _LOADER_S
        return self._timeout_s if has_stepped else max(self._timeout_s, START_S)

    def _run(self) -> None:
        look_s = min(1.0, self._timeout_s / 10)
        seen_s, silent_s = 0.0, 0.0
        looked_s = time.monotonic()
        while not self._stop.wait(look_s):
            now_s = time.monotonic()
            # A process that was stopped, or a machine that slept, has not been silent meanwhile.
            silent_s += min(now_s - looked_s, 2 * look_s)
            looked_s = now_s
            if self._watch.last_progress_s != seen_s:
                seen_s, silent_s = self._watch.last_progress_s, 0.0
            place = self._watch.activity
            if silent_s >= self.limit_s(place, has_stepped=self.step() not in (None, self.first_step)):
                if self._report_hang(place, silent_s, lambda seen_s=seen_s: self._watch.last_progress_s == seen_s):  # type: ignore[misc]
                    return
                silent_s = 0.0

    def _report_hang(self, place: str, silent_s: float, is_still: Callable[[], bool]) -> bool:
        """Says what is known and ends the process; False where the training moved on meanwhile."""
        self._write_stacks(place, silent_s)
        if not is_still():
            return False
        if self._rank != 0:
            time.sleep(_WAIT_FOR_MAIN_S)  # the main rank, which hangs as well, says it; then the launcher ends all
            self._leave(DistributedError.exit_code)
            return True
        error = self._reason(place, silent_s)
        problem = self._rescued(place, is_still)
        saved = f"saved at step {self.step()}" if problem is None else f"not saved ({problem})"
        message = f"{error}; {saved}; --resume goes on from the newest checkpoint"
        _within(_TELL_S, lambda: self._tell(message, error.exit_code))
        with contextlib.suppress(OSError):
            os.write(2, f"error: {message}\n".encode())
        self._leave(error.exit_code)
        return True

    def _write_stacks(self, place: str, silent_s: float) -> None:
        """The stacks of this process, of its workers, and of the ranks on this machine."""
        header = (
            f"\nrank {self._rank} (process {os.getpid()} on {socket.gethostname()}), {time.strftime('%F %T')}: "
            f"no progress for {silent_s:.1f} s in {place}, step {self.step()}\n"
        )
        with contextlib.suppress(OSError, ValueError):
            self._file.write(header.encode())
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)
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
                latest = {m[1]: f"rank {m[1]} in {m[3]} for {m[2]} s" for m in _LINE.finditer(self._path.read_text())}
                where += f" ({', '.join(latest[rank] for rank in sorted(latest))})"
        advice = f"all stacks are in {self._path}; train.hang_timeout_s = {self._timeout_s:g}"
        if place == "read":
            return WorkerError(f"{where}: the storage of the data does not answer: {advice}")
        if place == "save":
            return StorageError(f"{where}: the disk of the run folder does not answer: {advice}")
        return DistributedError(f"{where}: a device or another rank does not answer: {advice}")

    def _rescued(self, place: str, is_still: Callable[[], bool]) -> str | None:
        if place in ("step", "save", "start"):
            return {"step": "it hangs in an update", "save": "the disk does not answer"}.get(
                place, "nothing to save yet"
            )
        answers: list[str | None] = []
        _within(_RESCUE_S, lambda: answers.append(self.save_last_boundary(is_still)))
        return answers[0] if answers else f"the state could not be read within {_RESCUE_S:g} s"

    def _tell(self, message: str, code: int) -> None:
        logger.error(message)
        self._event_log.emit(Alert(kind="hang", message=message, step=self.step()))
        self._event_log.emit(RunEnd(status="failed", reason=message, exit_code=code, step=self.step()))
        self._event_log.close()

    def _leave(self, code: int) -> None:
        for pid in child_pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._end(code)


def _within(timeout_s: float, act: Callable[[], object]) -> None:
    """Does something in a thread that is left behind if it takes too long: what hangs may hold a lock that it needs."""

    def guarded() -> None:
        try:
            act()
        except Exception:
            logger.exception("watchdog")

    thread = threading.Thread(target=guarded, name="watchdog-act", daemon=True)
    thread.start()
    thread.join(timeout_s)
