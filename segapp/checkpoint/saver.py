"""When and how a checkpoint is saved: copied at a step boundary, written while training continues.

Training waits for the copy of the state in memory. One thread then writes it: check, serialize, hash, fsync, read back,
rename. There is never a second writer: a save that falls due by steps or by time while the last one is still being
written is postponed until that one is done; a save at the end of an epoch, for a command or for a stop waits for it.
A save that fails leaves the older checkpoints as they are, emits an alert, and is tried again with the present state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from segapp.checkpoint.snapshot import snapshot
from segapp.checkpoint.training_state import SavedCheckpoint, save_checkpoint
from segapp.errors import NonFiniteError, StorageError
from segapp.failpoints import failpoint
from segapp.parallel.distributed import Ranks
from segapp.run.checkpoints import CheckpointFacts
from segapp.run.events import Alert, Checkpoint, EventLog

RETRY_S = 30.0
"""Seconds until a failed save is tried again; the time doubles after each failure, up to `MAX_RETRY_S`."""

MAX_RETRY_S = 600.0

_EXCHANGE_S = 5.0
"""Ranks that wait for the writer meet in a collective at least this often, so that none times out."""


@dataclass
class Position:
    """The position of a training."""

    epoch: int = 1
    batch: int = 0
    """Finished micro-batches of the epoch."""
    step: int = 0
    """Number of updates in total."""
    is_evaluated: bool = False
    """True if an evaluation has run after the last update."""


@dataclass(frozen=True)
class Captured:
    """The state that a save writes."""

    state: dict[str, Any]
    position: Position
    metric: float | None


@dataclass(frozen=True)
class SaveRules:
    """When checkpoints other than the best and the last are saved, and how many are kept; None: never."""

    every_epochs: int | None = None
    every_steps: int | None = None
    every_minutes: float | None = None
    keep: int = 3
    """Number of `epoch_*.pt` files that are kept."""
    grace_s: float = 30.0
    """Seconds between a scheduler's SIGTERM and SIGKILL; a save that takes longer raises an alert."""


class CheckpointSaver:
    """Saves checkpoints; every rank has one, the main rank writes.

    Every rank must call `capture` at the same time. `during_save` is a context for the time that training waits. The
    thread that writes emits events, and calls `on_written` with the seconds of each write. A failed save is tried
    again after `retry_s`.
    """

    def __init__(
        self,
        folder: Path,
        rules: SaveRules,
        event_log: EventLog,
        ranks: Ranks,
        capture: Callable[[], Captured],
        *,
        config_hash: str = "",
        during_save: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_written: Callable[[float], None] = lambda _: None,
        retry_s: float = RETRY_S,
    ) -> None:
        self._folder, self._rules, self._capture, self._config_hash = folder, rules, capture, config_hash
        self._event_log, self._ranks = event_log, ranks
        self._during_save, self._on_written = during_save, on_written
        self._begun: Position | None = None
        """The position of the last save that began and is not known to have failed; the same on every rank."""
        self._begun_s = time.monotonic()
        self._is_postponed = False
        self._first_retry_s = self._retry_s = retry_s
        self._retry_at_s: float | None = None
        self._writer: threading.Thread | None = None
        self._written_since_s: float | None = None
        self._problem: Exception | None = None
        self._has_warned_of_grace = False

    def is_due(self, step: int, finished_epoch: int | None = None) -> bool:
        """Return True if a save is due after this step, which may have ended an epoch; the same on every rank."""
        steps, epochs = self._rules.every_steps, self._rules.every_epochs
        is_epoch_due = finished_epoch is not None and epochs is not None and finished_epoch % epochs == 0
        return is_epoch_due or (steps is not None and step % steps == 0)

    def is_overdue(self) -> bool:
        """Return True if a postponed, failed or timed save can begin now; decided by the main rank."""
        if not self._ranks.is_main or self.written_for_s() is not None:
            return False
        now_s, every = time.monotonic(), self._rules.every_minutes
        is_time = every is not None and now_s - self._begun_s >= 60 * every
        return self._is_postponed or is_time or (self._retry_at_s is not None and now_s >= self._retry_at_s)

    def is_fresh(self, age_s: float) -> bool:
        """Return True if the last save began at most `age_s` seconds ago."""
        return self._begun is not None and time.monotonic() - self._begun_s <= age_s

    def written_for_s(self) -> float | None:
        """Return the seconds since the running write began; None while none runs. Safe in any thread."""
        since_s = self._written_since_s
        return None if since_s is None else time.monotonic() - since_s

    def begin_or_postpone(self) -> None:
        """Begin a save, or postpone it while the last one is still being written; every rank must call it."""
        if self._ranks.from_main(self.written_for_s() is not None):
            self._is_postponed = True
        else:
            self.begin()

    def begin(self, *, finished_epoch: int | None = None, is_best: bool = False) -> None:
        """Begin a save; training waits for the copy, and for the writer if it is busy. Every rank must call it."""
        self._save(finished_epoch, is_best, is_last=False)

    def finish(self, position: Position, *, is_required: bool) -> None:
        """Wait for the writer, and save the state at `position` if it is not saved yet; every rank must call it.

        StorageError: `is_required`, and it could not be written; otherwise an alert is emitted.
        NonFiniteError: `is_required`, and a weight is not finite.
        """
        if not self.is_saved(position):
            self._save(None, False, is_last=True)
            if not self.is_saved(position) and is_required and self._problem is not None:
                raise self._problem

    def is_saved(self, position: Position) -> bool:
        """Wait for the writer; return True if the state at `position` is committed. Every rank must call it."""
        return self.wait() and self._begun == position

    def wait(self) -> bool:
        """Wait for the writer; return True if the last save that was begun is committed. Every rank must call it."""
        while not self._ranks.from_main(self._join_writer(_EXCHANGE_S)):
            pass
        if self._ranks.from_main(self._problem is not None):
            self._begun = None
        return self._begun is not None

    def wait_for_writer(self) -> None:
        """Wait only for this rank's writer, because a training that fails closes its event log next."""
        while not self._join_writer(_EXCHANGE_S):
            pass

    def begin_asked(self, position: Position) -> None:
        """Begin a requested save, unless the state at `position` is saved; every rank must call it."""
        if not (self._begun == position and self.wait()):
            self.begin()

    def outcome(self) -> tuple[bool, str | None]:
        """Return whether the last save is done, and why it failed; as the main rank sees it."""
        problem = None if self._problem is None else f"it could not be saved: {self._problem}"
        return self.written_for_s() is None, problem

    def save_last_boundary(self, captured: Captured, is_still: Callable[[], bool]) -> str | None:
        """Save a state, which may share the model's tensors, from another thread while the training thread hangs.

        `is_still` returns True while the training thread has not moved; if it has, the copy may be inconsistent.
        Returns why the state could not be saved; None if it is saved.
        """
        state = snapshot(captured.state)
        if not is_still():
            return "the training moved on"
        if not self._join_writer(_EXCHANGE_S):
            return "another checkpoint is still being written"
        if self._begun == captured.position and self._problem is None:
            return None
        self._problem = None
        self._write(Captured(state, captured.position, captured.metric), None, False, 0.0)
        return None if self._problem is None else str(self._problem)

    def _save(self, finished_epoch: int | None, is_best: bool, *, is_last: bool) -> None:
        with self._during_save():
            self.wait()
            began_s = time.perf_counter()
            captured = self._capture()
            self._begun, self._begun_s = replace(captured.position), time.monotonic()
            self._is_postponed, self._retry_at_s, self._problem = False, None, None
            if self._ranks.is_main:
                state = captured.state if is_last else snapshot(captured.state)
                if failpoint("ckpt.capture") == "nan":
                    next(iter(state["model"].values())).fill_(float("nan"))
                captured = Captured(state, self._begun, captured.metric)
                self._start_writer(captured, finished_epoch, is_best, time.perf_counter() - began_s)
            if is_last or failpoint("ckpt.background") == "sync":
                self.wait()

    def _start_writer(self, captured: Captured, finished_epoch: int | None, is_best: bool, copy_s: float) -> None:
        self._written_since_s = time.monotonic()
        arguments = (captured, finished_epoch, is_best, copy_s)
        writer = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        try:
            writer.start()
            self._writer = writer
        except RuntimeError:  # no memory for another thread: write in this one
            self._write(*arguments)

    def _join_writer(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`, in which signals are handled; return True if the writer is done."""
        if self._writer is not None:
            self._writer.join(timeout_s)
            if self._writer.is_alive():
                return False
            self._writer = None
        return True

    def _write(self, captured: Captured, finished_epoch: int | None, is_best: bool, copy_s: float) -> None:
        at = captured.position
        try:
            self._event_log.sync()  # a resume continues from this checkpoint: the events before it must be there
            facts = CheckpointFacts(
                step=at.step, epoch=at.epoch, position=at.batch, metric=captured.metric, config_hash=self._config_hash
            )
            options: Any = {"is_best": is_best, "finished_epoch": finished_epoch, "keep": self._rules.keep}
            saved = save_checkpoint(self._folder, captured.state, facts, **options)
            self._on_written(saved.save_s)
            self._tell(saved, captured, finished_epoch, copy_s)
            self._retry_s = self._first_retry_s
        except Exception as error:
            self._problem = error
            again = ""
            if isinstance(error, StorageError):
                self._retry_at_s = time.monotonic() + self._retry_s
                again = f"; training continues, the older checkpoints stay, tried again in {self._retry_s:g} s"
                self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            elif not isinstance(error, NonFiniteError):
                again = f" (unexpected {type(error).__name__})"
            self._event_log.emit(Alert(kind="checkpoint", message=f"{error}{again}", step=at.step))
        finally:
            self._written_since_s = None

    def _tell(self, saved: SavedCheckpoint, captured: Captured, finished_epoch: int | None, copy_s: float) -> None:
        at = captured.position
        for message in saved.messages:
            self._event_log.emit(Alert(kind="checkpoint", message=message, step=at.step))
        self._event_log.emit(
            Checkpoint(
                path=saved.event_path,
                epoch=at.epoch if finished_epoch is None else finished_epoch,
                step=at.step,
                is_best=saved.is_best,
                sha256=saved.entry.sha256,
                size_bytes=saved.entry.size_bytes,
                metric=captured.metric,
                save_s=saved.save_s,
                copy_s=copy_s,
            )
        )
        grace_s = self._rules.grace_s
        if saved.save_s + copy_s > grace_s and not self._has_warned_of_grace:
            self._has_warned_of_grace = True
            message = (
                f"a checkpoint takes {saved.save_s + copy_s:.1f} s, longer than the {grace_s:g} s that lie between "
                "SIGTERM and SIGKILL (checkpoint.grace_s): raise the scheduler's grace period, or save more often"
            )
            self._event_log.emit(Alert(kind="grace", message=message, step=at.step))
