"""When and how a checkpoint is saved: copied at a step boundary, written while training continues.

Training waits for the check and the copy of the state in memory. One thread writes the copy: it serializes and hashes
in one pass, syncs and renames. There is never a second writer. A due save is skipped while the last one is being
written, and until 20 times the duration of the last one, copy and write, has passed since it began. If a skipped state
is the best one, it is copied all the same, kept in memory and written before the next one: a resumed training takes the
best score from its checkpoint, so best.pt must not be older. A command, a stop and the end of the run always save. A
save that fails leaves the older checkpoints as they are, emits an alert, and is tried again with the present state.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from segapp.checkpoint.snapshot import snapshot
from segapp.checkpoint.training_state import require_finite, save_checkpoint
from segapp.errors import DiskFullError, NonFiniteError, StorageError
from segapp.failpoints import failpoint
from segapp.parallel.distributed import Ranks
from segapp.run.checkpoints import CheckpointEntry, CheckpointFacts
from segapp.run.events import Alert, Checkpoint, EventLog

SAVING_SHARE = 0.05
"""Due saves, each of them its copy and its write, take at most this share of the time."""

_REPORTED_GAP_S = 10.0
"""Skipped saves are reported, once, if due saves are at least 10 s apart."""

RETRY_S = 30.0
"""Seconds until a failed save is tried again; the time doubles after each failure, up to `MAX_RETRY_S`."""

MAX_RETRY_S = 600.0

SPACE_S = 600.0
"""Maximum time that the last save of a run waits for space on a full disk."""

_SPACE_LOOK_S, _SPACE_LINE_S = 10.0, 60.0
"""Seconds between two attempts in this time, and between two alerts."""

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
    is_best: bool = False

    @property
    def finished_epoch(self) -> int | None:
        return self.position.epoch - 1 if self.position.batch == 0 and self.position.epoch > 1 else None


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
    thread that writes emits events.
    """

    def __init__(
        self,
        folder: Path,
        rules: SaveRules,
        event_log: EventLog,
        ranks: Ranks,
        capture: Callable[[], Captured],
        *,
        during_save: Callable[[], AbstractContextManager[None]] = nullcontext,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder, self._rules, self._capture = folder, rules, capture
        self._event_log, self._ranks = event_log, ranks
        self._during_save, self._is_stopped = during_save, is_stopped
        self._begun: Position | None = None
        """The position of the last save that began and is not known to have failed; the same on every rank."""
        self._begun_s = time.monotonic()
        self.has_kept_best = False
        """True if the best state waits in memory for the next save; the same on every rank."""
        self._kept_best: Captured | None = None
        self._unwritten: list[Captured] = []
        """The states that the writer writes, in this order; after a failure, those that it has not written."""
        self._gap_s = 0.0
        """Time between the beginnings of two due saves: the copy and the write of the last one, over the share."""
        self._has_reported_skips = False
        self._retry_s = RETRY_S
        self._retry_at_s: float | None = None
        self._writer: threading.Thread | None = None
        self._written_since_s: float | None = None
        self._problem: Exception | None = None
        self._has_warned_of_grace = False
        self._waits_until_s: float | None = None
        """When the last save stops waiting for space; None: it does not wait."""
        self._space_line_s = -math.inf

    def is_due(self, step: int, finished_epoch: int | None = None) -> bool:
        """Return True if a save is due after this step, which may have ended an epoch; the same on every rank."""
        steps, epochs = self._rules.every_steps, self._rules.every_epochs
        is_epoch_due = finished_epoch is not None and epochs is not None and finished_epoch % epochs == 0
        return is_epoch_due or (steps is not None and step % steps == 0)

    def is_overdue(self) -> bool:
        """Return True if a failed or timed save can begin now; decided by the main rank."""
        # The clocks of the ranks differ, so one of them decides.
        if not self._ranks.is_main or self.written_for_s() is not None:
            return False
        now_s, every = time.monotonic(), self._rules.every_minutes
        is_time = every is not None and now_s - self._begun_s >= 60 * every
        return (is_time and self._is_affordable()) or (self._retry_at_s is not None and now_s >= self._retry_at_s)

    def is_affordable(self) -> bool:
        """Return True if a due save can begin now; every rank must call it."""
        return bool(self._ranks.from_main(self._is_affordable()))

    def written_for_s(self) -> float | None:
        """Return the seconds since the running write began; None while none runs. Safe in any thread."""
        since_s = self._written_since_s
        return None if since_s is None else time.monotonic() - since_s

    def begin_or_skip(self, *, is_best: bool = False) -> None:
        """Begin a due save, or skip it, with the best state kept in memory; every rank must call it."""
        if self.is_affordable():
            self.begin(is_best=is_best)
            return
        if is_best:
            with self._during_save():
                self.has_kept_best = True
                captured = replace(self._capture(), is_best=True)
                if self._ranks.is_main and self._is_finite(captured):
                    self._kept_best = None  # this copy gets its memory
                    self._kept_best = self._copied(captured)
        if self._gap_s >= _REPORTED_GAP_S and not self._has_reported_skips:
            self._has_reported_skips = True
            message = (
                f"a save takes {self._gap_s * SAVING_SHARE:.1f} s: the next checkpoints that are due are skipped until "
                f"{self._gap_s:.0f} s after that save began, and the best one is kept in memory"
            )
            self._event_log.emit(Alert(kind="checkpoint", message=message))

    def begin(self, *, is_best: bool = False, is_last: bool = False) -> None:
        """Begin a save; training waits for the copy, and for the writer if it is busy. Every rank must call it.

        `is_last`: wait for the write instead of copying the state.
        """
        with self._during_save():
            # One writer at a time, because a second copy of the state would need more memory.
            self.wait()
            began_s = time.perf_counter()
            captured = replace(self._capture(), is_best=is_best)
            self._begun, self._begun_s = replace(captured.position), time.monotonic()
            self._retry_at_s, self._problem, self.has_kept_best = None, None, False
            if self._ranks.is_main:
                is_finite = self._is_finite(captured)
                self._enqueue(None if not is_finite else captured if is_last else self._copied(captured))
                if self._unwritten:
                    copy_s, self._written_since_s = time.perf_counter() - began_s, time.monotonic()
                    writer = threading.Thread(target=self._write, args=(copy_s,), name="checkpoint", daemon=True)
                    try:
                        writer.start()
                        self._writer = writer
                    except RuntimeError:  # no memory for another thread: write in this one
                        self._write(copy_s)
            if is_last or failpoint("ckpt.background") == "sync":
                self.wait()

    def finish(self, position: Position, *, is_required: bool, waits_for_space: bool = False) -> None:
        """Wait for the writer, and save the state at `position` if it is not saved yet; every rank must call it.

        With `waits_for_space`, a full disk is tried again for at most `SPACE_S`, until a stop is requested.

        Raises:
            StorageError: `is_required`, and it could not be written; otherwise an alert is emitted.
            NonFiniteError: `is_required`, and a weight is not finite.
        """
        if self.wait() and self._begun == position:
            return
        self._waits_until_s = time.monotonic() + SPACE_S if waits_for_space else None
        while True:
            self.begin(is_last=True)
            if self.wait():
                return
            # Both answers are exchanged: a rank that left the loop on its own would leave the others waiting in
            # `begin`.
            if not self._ranks.from_main(self._waits_for_space()) or self._ranks.any_of(self._is_stopped())[0]:
                break
            again_s = time.monotonic() + _SPACE_LOOK_S
            # A stop request must not wait for the end of the pause.
            while time.monotonic() < again_s and not self._is_stopped():
                time.sleep(0.1)
        if is_required and self._problem is not None:
            raise self._problem

    def _waits_for_space(self) -> bool:
        is_full = isinstance(self._problem, DiskFullError) and self._waits_until_s is not None
        return is_full and time.monotonic() < (self._waits_until_s or 0.0) and not self._is_stopped()

    def wait(self) -> bool:
        """Wait for the writer; return True if the last save that was begun is committed. Every rank must call it."""
        while not self._ranks.from_main(self._join_writer(_EXCHANGE_S)):
            pass
        if self._ranks.from_main(self._problem is not None):
            self._begun = None
        return self._begun is not None

    def wait_for_writer(self) -> None:
        """Wait only for this rank's writer, and write the best state, because a training that fails ends next."""
        while not self._join_writer(_EXCHANGE_S):
            pass
        self._enqueue(None)
        self._write(0.0)

    def begin_asked(self, position: Position) -> None:
        """Begin a requested save, unless the state at `position` is saved; every rank must call it."""
        if not (self._begun == position and self.wait()):
            self.begin()

    def save_apart(self, position: Position) -> None:
        """Save the state at `position` unless it is saved; the next due save is no later. Every rank must call it."""
        if not (self._begun == position and self.wait()):
            due = self._begun_s, self._gap_s
            self.begin(is_last=True)
            self._begun_s, self._gap_s = due

    def outcome(self) -> tuple[bool, str | None]:
        """Return whether the last save is done, and why it failed; as the main rank sees it."""
        problem = None if self._problem is None else f"it could not be saved: {self._problem}"
        return self.written_for_s() is None, problem

    def _is_affordable(self) -> bool:
        """Return True if the writer is idle and the last save was long enough ago; known to the main rank."""
        if failpoint("ckpt.background") is not None:  # each due save is made
            return True
        return self.written_for_s() is None and time.monotonic() - self._begun_s >= self._gap_s

    def _is_finite(self, captured: Captured) -> bool:
        """Return True if the state can be saved; emit an alert if one of its numbers is not finite."""
        if failpoint("ckpt.capture") == "nan":
            name, weight = next(iter(captured.state["model"].items()))
            captured.state["model"][name] = weight.new_full(weight.shape, float("nan"))
        try:
            require_finite(captured.state)
        except NonFiniteError as error:
            self._problem = error
            self._event_log.emit(Alert(kind="checkpoint", message=str(error), step=captured.position.step))
            return False
        return True

    def _copied(self, captured: Captured) -> Captured:
        return replace(captured, state=snapshot(captured.state), position=replace(captured.position))

    def _enqueue(self, captured: Captured | None) -> None:
        """Let the writer, which must be idle, write the best state that is not on disk yet, and then `captured`."""
        best = next((save for save in (self._kept_best, *self._unwritten) if save is not None and save.is_best), None)
        self._kept_best = None
        if captured is not None and best is not None and best.position == captured.position:
            captured = replace(captured, is_best=True)
        # A new best state replaces the kept one, which then need not be written.
        is_replaced = captured is not None and captured.is_best
        self._unwritten = [save for save in (None if is_replaced else best, captured) if save is not None]

    def _join_writer(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`, in which signals are handled; return True if the writer is done."""
        if self._writer is not None:
            self._writer.join(timeout_s)
            if self._writer.is_alive():
                return False
            self._writer = None
        return True

    def _write(self, copy_s: float) -> None:
        began_s = time.monotonic()
        try:
            self._event_log.sync()  # a resume continues from this checkpoint: the events before it must be there
            while self._unwritten:
                captured, write_began_s = self._unwritten[0], time.perf_counter()
                at, epoch, is_best = captured.position, captured.finished_epoch, captured.is_best
                facts = CheckpointFacts(step=at.step, epoch=at.epoch, position=at.batch, metric=captured.metric)
                entry, messages = save_checkpoint(self._folder, captured.state, facts, is_best=is_best,
                                                  finished_epoch=epoch, keep=self._rules.keep)  # fmt: skip
                self._report(captured, entry, messages, copy_s, time.perf_counter() - write_began_s)
                # Only after the commit, so that a failed save is tried again.
                del self._unwritten[0]
            self._retry_s = RETRY_S
        except Exception as error:
            self._problem = error
            if self._waits_until_s is not None and self._waits_for_space():
                if began_s - self._space_line_s < _SPACE_LINE_S:
                    return
                self._space_line_s, left_s = began_s, max(0.0, self._waits_until_s - began_s)
                again = f"; the run has ended, and its last save waits for space, for at most {left_s:.0f} s"
            elif isinstance(error, StorageError):
                self._retry_at_s = time.monotonic() + self._retry_s
                again = f"; the older checkpoints stay, tried again in {self._retry_s:g} s"
                self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            else:
                again = f" (unexpected {type(error).__name__})"
            step = next((save.position.step for save in self._unwritten), None)
            self._event_log.emit(Alert(kind="checkpoint", message=f"{error}{again}", step=step))
        finally:
            self._gap_s = (copy_s + time.monotonic() - began_s) / SAVING_SHARE
            self._written_since_s = None

    def _report(
        self, captured: Captured, entry: CheckpointEntry, messages: Sequence[str], copy_s: float, save_s: float
    ) -> None:
        at, epoch = captured.position, captured.finished_epoch
        for message in messages:
            self._event_log.emit(Alert(kind="checkpoint", message=message, step=at.step))
        self._event_log.emit(
            Checkpoint(
                path="checkpoints/last.pt" if epoch is None else f"checkpoints/epoch_{epoch:04d}.pt",
                epoch=epoch or at.epoch,
                step=at.step,
                is_best=captured.is_best and entry.metric is not None,
                sha256=entry.sha256,
                size_bytes=entry.size_bytes,
                metric=captured.metric,
                save_s=save_s,
                copy_s=copy_s,
            )
        )
        grace_s = self._rules.grace_s
        if save_s + copy_s > grace_s and not self._has_warned_of_grace:
            self._has_warned_of_grace = True
            message = (
                f"a checkpoint takes {save_s + copy_s:.1f} s, longer than the {grace_s:g} s that lie between "
                "SIGTERM and SIGKILL (checkpoint.grace_s): raise the scheduler's grace period, or save more often"
            )
            self._event_log.emit(Alert(kind="grace", message=message, step=at.step))
