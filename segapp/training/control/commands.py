"""Handling of the commands sent to a running training: check each one, carry it out at its boundary, answer it once.

The main rank reads and checks commands. `PendingRequests`, what is left to carry out, is the same on every rank. The
training loop calls `handle_commands`, carries requests out at points where its state is consistent, and reports back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from segapp.config import LiveSettings
from segapp.memory.counters import DeviceMemoryTracker
from segapp.memory.judge import SplitJudge, format_split
from segapp.run.commands import CancelCommand, ReceivedCommand, SetCommand, StopCommand
from segapp.run.events import Alert, EventLog
from segapp.training.control.batch_split import BatchSplitController
from segapp.training.control.inbox import FinalStatus, Inbox
from segapp.training.control.pending_sets import (
    AUTO_ON,
    SPLIT_SETTINGS,
    PendingSet,
    PendingSets,
    SplitOutcome,
    SplitProbation,
    with_changes,
)


@dataclass(frozen=True)
class TrainingPosition:
    """The position of the training when it handles a command."""

    epoch: int
    step: int
    next_epoch: int
    """The epoch that begins next."""
    epochs: int


@dataclass
class PendingRequests:
    """The requests that are left to carry out, the same on every rank."""

    is_paused: bool = False
    stop: Literal["now", "epoch"] | None = None
    wants_checkpoint: bool = False
    settings: LiveSettings | None = None
    """From the next epoch on; None: unchanged."""


class CommandController:
    """Handles the commands of one training, and holds its current settings.

    Args:
        inbox: Gives the commands and takes the answers.
        event_log: Takes `gpu0_bsz` and `alert` events.
        batch_split: The split of the batch over the devices.
        device_memory: Measures the memory of the devices.
        settings: The settings that the run begins with.
        replay: Changes of settings to apply again (`inbox.applied_after`), for a training that goes back to a
            checkpoint written before them: the step after which each was applied, and the new values.
    """

    def __init__(
        self,
        inbox: Inbox,
        event_log: EventLog,
        batch_split: BatchSplitController,
        device_memory: DeviceMemoryTracker,
        settings: LiveSettings,
        *,
        replay: Sequence[tuple[int, dict[str, Any]]] = (),
    ) -> None:
        self.inbox, self.batch_split = inbox, batch_split
        self.settings = settings
        self.requests = PendingRequests()
        self._event_log, self._device_memory = event_log, device_memory
        self._open: dict[str, list[ReceivedCommand]] = {"pause": [], "checkpoint": [], "stop": []}
        self._sets = PendingSets(inbox, event_log, self.judge)
        self._probation: SplitProbation | None = None
        self._has_full_batch = False
        """True if a full batch was trained since the peaks were reset."""
        self._replay = list(replay)

    def judge(self) -> SplitJudge:
        """Return what decides about a split now, with the memory that the devices have for this run."""
        return self.batch_split.judge_with(self._device_memory.usable_mib())

    # --- commands ----------------------------------------------------------------------------------------------------

    def handle_commands(self, position: TrainingPosition) -> None:
        """Handle every command that waits in the inbox; on the main rank only."""
        for received in self.inbox.take():
            command = received.command
            if command is None:
                self.inbox.answer(received, "rejected", received.problem, position.step)
            elif isinstance(command, SetCommand):
                self._handle_set(received, command, position)
            elif isinstance(command, StopCommand):
                self._handle_stop(received, command, position)
            elif isinstance(command, CancelCommand):
                self._handle_cancel(received, command, position)
            elif command.kind == "checkpoint":
                self.requests.wants_checkpoint = True
                self._open["checkpoint"].append(received)
            else:
                self._handle_pause(received, position, is_pause=command.kind == "pause")

    def _handle_pause(self, received: ReceivedCommand, position: TrainingPosition, *, is_pause: bool) -> None:
        if is_pause and not self.requests.is_paused:
            self.requests.is_paused = True
            self._open["pause"].append(received)
        elif is_pause and self._open["pause"]:
            self._open["pause"].append(received)
        elif is_pause:
            self.inbox.answer(received, "applied", "it was paused already", position.step)
        else:
            note = None if self.requests.is_paused else "it was not paused"
            self.answer_all("pause", "cancelled", "resumed before it took effect", position.step)
            self.requests.is_paused = False
            self.inbox.answer(received, "applied", note, position.step)

    def _handle_stop(self, received: ReceivedCommand, command: StopCommand, position: TrainingPosition) -> None:
        if command.when == "now":
            self.answer_all("stop", "cancelled", f"superseded by {received.id}: stop", position.step)
            self.requests.stop = "now"
        else:
            self.requests.stop = self.requests.stop or "epoch"
            self.inbox.accept(received, f"after epoch {position.epoch}", position.step)
        self._open["stop"].append(received)

    def _handle_cancel(self, received: ReceivedCommand, command: CancelCommand, position: TrainingPosition) -> None:
        reason, is_any = f"by {received.id} of {received.by}", False
        for pending in self._sets:
            if pending.received is not None and command.id in (None, pending.received.id):
                self._sets.cancel(pending, reason, self.settings, position.step)
                is_any = True
        stops = [each for each in self._open["stop"] if command.id in (None, each.id)]
        if self.requests.stop == "epoch" and stops:
            self._open["stop"] = [each for each in self._open["stop"] if each not in stops]
            self.requests.stop = "epoch" if self._open["stop"] else None
            for each in stops:
                self.inbox.answer(each, "cancelled", reason, position.step)
            is_any = True
        self._update_pending_settings()
        if is_any:
            self.inbox.answer(received, "applied", None, position.step)
        else:
            what = "no command is pending" if command.id is None else f"{command.id} is not pending"
            self.inbox.answer(received, "rejected", f"{what}: there is nothing to cancel", position.step)

    def _handle_set(self, received: ReceivedCommand, command: SetCommand, position: TrainingPosition) -> None:
        if position.next_epoch > position.epochs:
            reason = f"settings change between epochs, and {position.epoch} is the last"
            self.inbox.answer(received, "rejected", reason, position.step)
            return
        pending = PendingSet(received, command.new_settings)
        reason, is_new = f"from epoch {position.next_epoch} on", True
        if command.asks_for_split:
            verdict = self.judge().verdict(command.gpu0_bsz, command.shares)
            problem = verdict.rejection(force=command.force)
            if problem is not None:
                self.inbox.answer(received, "rejected", problem, position.step)
                return
            pending.split, pending.predicted_mib = verdict.split, verdict.predicted_mib
            is_new = verdict.level != "no change"
            reason += f": split {format_split(verdict.split)}, {verdict.level}: {verdict.reason}"
        is_auto = self.settings.gpu0_bsz_auto
        if is_auto and pending.is_split:
            pending.notes.append("auto is switched off")
            reason += "; auto is switched off"
        self._sets.supersede(pending, self.settings, position.step)
        if pending.changes == AUTO_ON and is_auto:
            self.inbox.answer(received, "applied", "auto is on already", position.step, {})
        elif pending.is_split and not is_new and len(pending.changes) == 1 and not is_auto:
            self.inbox.answer(received, "applied", "this split is in force already", position.step, {})
        else:
            self._sets.add(pending)
            self.inbox.accept(received, reason, position.step)
            if pending.is_split:
                outcome = SplitOutcome(self.settings, epoch=position.next_epoch)
                self._sets.emit_split("pending", pending, outcome)
        self._update_pending_settings()

    def _update_pending_settings(self) -> None:
        merged = self._sets.merged(self.settings)
        self.requests.settings = merged if self._sets else None

    def request_checkpoint(self) -> None:
        """Request a checkpoint at the next safe point, as SIGUSR1 does."""
        self.requests.wants_checkpoint = True

    def take_checkpoint_request(self) -> bool:
        """Return True if a checkpoint is requested, and clear the request."""
        is_requested, self.requests.wants_checkpoint = self.requests.wants_checkpoint, False
        return is_requested

    def adopt_requests(self, requests: PendingRequests) -> None:
        """Take over the pending requests of the main rank."""
        self.requests = requests

    # --- answers -----------------------------------------------------------------------------------------------------

    def answer_all(self, kind: str, status: FinalStatus, reason: str | None, step: int) -> None:
        """Answer every open command of a kind: pause, checkpoint or stop."""
        waiting, self._open[kind] = self._open[kind], []
        for received in waiting:
            self.inbox.answer(received, status, reason, step)

    def answer_checkpoints(self, step: int, problem: str | None) -> None:
        """Answer the open checkpoint commands."""
        if problem is None:
            self.answer_all("checkpoint", "applied", f"checkpoints/last.pt at step {step}", step)
        else:
            self.answer_all("checkpoint", "rejected", problem, step)

    def answer_at_end(self, position: TrainingPosition, reason: str, *, is_finished: bool) -> None:
        """Answer all commands that are open at the end of the training.

        Args:
            position: Of the training.
            reason: Why it ends.
            is_finished: The run is complete. Otherwise `set` commands stay in the inbox for the resumed training.
        """
        self.answer_all("stop", "applied", reason, position.step)
        self.answer_all("checkpoint", "applied", f"saved at step {position.step}, at the end", position.step)
        self.answer_all("pause", "cancelled", reason, position.step)
        for received in self.inbox.take(is_last=True):
            command = received.command
            if command is not None and command.kind in ("stop", "checkpoint"):
                self.inbox.answer(received, "applied", reason, position.step)
            elif is_finished or not isinstance(command, SetCommand):
                self.inbox.answer(received, "rejected", received.problem or reason, position.step)
        if is_finished:
            self.confirm_untested()
            for pending in self._sets:
                self._sets.cancel(pending, reason, self.settings, position.step)

    # --- settings ----------------------------------------------------------------------------------------------------

    def restore_settings(self, settings: LiveSettings, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
        """Restore the settings of a checkpoint; a split that was changed in the config since takes precedence.

        Args:
            settings: As saved.
            saved: The `parallel` section of the checkpoint's config.
            present: The same section of the present config; where `gpu0_bsz` is `auto`, the number that this controller
                began with holds.
        """
        is_auto = present["gpu0_bsz"] == "auto"
        number = self.settings.gpu0_bsz if is_auto else present["gpu0_bsz"]
        configured = {"gpu0_bsz": number, "gpu0_bsz_auto": is_auto, "shares": present["shares"]}
        restored = settings
        if any(saved.get(name) != present[name] for name in ("gpu0_bsz", "shares")):
            restored = with_changes(settings, configured)
            later = [
                (at, {n: v for n, v in changes.items() if n not in SPLIT_SETTINGS}) for at, changes in self._replay
            ]
            self._replay = [(at, changes) for at, changes in later if changes]
        if not self.batch_split.apply(restored):
            split = f"gpu0_bsz={restored.gpu0_bsz}, shares={restored.shares}"
            message = f"{split} is impossible on these devices: the split of the config is used"
            self._event_log.emit(Alert(kind="settings", message=message))
            restored = with_changes(restored, configured)
            self.batch_split.apply(restored)
        self.settings = restored

    def settings_for_step(self, step: int, *, is_thawing: bool = False) -> LiveSettings:
        """Return the settings for the epoch that begins after `step` updates.

        Args:
            step: updates so far.
            is_thawing: frozen parameters are trained from this epoch on, which needs more memory than was measured.
        """
        thaw_move = self.batch_split.thaw_move() if is_thawing else None
        replayed = [changes for at, changes in self._replay if at <= step]
        if replayed:
            self._replay = [(at, changes) for at, changes in self._replay if at > step]
            settings = self.settings
            for changes in replayed:
                settings = with_changes(settings, changes)
            return self._sets.merged(settings)
        settings = self.requests.settings or self.settings
        if settings.gpu0_bsz_auto and not self._sets.has_split:
            move = thaw_move or self.judge().best_move()
            if move is not None:
                changes = {"gpu0_bsz": move.gpu0_bsz, **AUTO_ON}
                self._sets.add(PendingSet(None, changes, [], move.reason, move.split, move.predicted_mib))
                settings = with_changes(settings, changes)
        return settings

    def apply(self, settings: LiveSettings, position: TrainingPosition) -> None:
        """Apply settings at the start of an epoch, on every rank."""
        old, old_split = self.settings, self.batch_split.current
        sets, self.requests.settings = self._sets.take_all(), None
        if not self.batch_split.apply(settings):
            settings = with_changes(settings, {"gpu0_bsz": old.gpu0_bsz, "shares": old.shares})
        self.settings = settings
        is_new_split = self.batch_split.current != old_split
        for pending in sets:
            if not (is_new_split and pending.is_split):
                self._sets.answer_applied(pending, position.step)
        if is_new_split:
            self.confirm_untested()
            on_probation = [pending for pending in sets if pending.is_split]
            self._probation = SplitProbation(old, old_split, position.epoch, position.step, on_probation)

    # --- split on probation ------------------------------------------------------------------------------------------

    def after_step(self, split: Sequence[int], num_samples: int, step: int) -> None:
        """Confirm a new split after its first full batch, and end its probation after `PROBATION_STEPS` steps."""
        is_full = num_samples == self.batch_split.batch_size
        self._has_full_batch |= is_full
        probation = self._probation
        if probation is None:
            return
        probation.steps_left -= 1
        if is_full and not probation.is_measured:
            probation.is_measured = True
            observed = self._record_peaks(split)
            outcome = SplitOutcome(
                probation.old, epoch=probation.epoch, step=probation.step, split=split, observed_mib=observed
            )
            for pending in probation.sets:
                self._sets.emit_split("applied", pending, outcome)
                self._sets.answer_applied(pending, probation.step, f"split {format_split(split)}")
        if probation.steps_left <= 0 and probation.is_measured:
            self._probation = None

    def after_epoch(self) -> None:
        """Record the peaks of the epoch's training under its split, before the evaluation raises them."""
        if self._has_full_batch and self.batch_split.current is not None:
            self._record_peaks(self.batch_split.current)
        self._has_full_batch = False

    def measured_mib(self) -> list[float | None] | None:
        """Record the peaks of this epoch's training so far, as far as this rank knows them, and return them.

        Returns:
            The highest peak of each device under the split in force; None if there is no split or no full batch yet.
        """
        split = self.batch_split.current
        if split is None or self._device_memory.is_shared:  # logical devices without budgets share one peak
            return None
        if self._has_full_batch:
            self.batch_split.record_peaks(split, self._device_memory.observed_mib()[: len(split)])
        measured = self.batch_split.judge.peaks.measured.get(split)
        return None if measured is None else list(measured)

    def _record_peaks(self, split: Sequence[int]) -> list[float | None]:
        observed = self.batch_split.gathered(self._device_memory.observed_mib()[: len(split)])
        if not self._device_memory.is_shared:
            self.batch_split.record_peaks(split, observed)
        return observed

    def revert_split(self, problem: str, step: int) -> str | None:
        """Revert to the previous split if the present one is on probation, because it ran out of memory.

        Returns:
            A sentence about the two splits; None if the split is not on probation: nothing was changed.
        """
        probation = self._probation
        if probation is None or probation.old_split is None:
            return None
        self._probation = None
        failed = self.batch_split.current or ()
        self.batch_split.record_failure(failed, probation.old_split)
        old = probation.old
        is_auto = self.settings.gpu0_bsz_auto or old.gpu0_bsz_auto
        restored = {"gpu0_bsz": old.gpu0_bsz, "shares": old.shares, "gpu0_bsz_auto": is_auto}
        self.settings = with_changes(self.settings, restored)
        self.batch_split.apply(self.settings)
        self._update_pending_settings()
        done = f"split {format_split(failed)} does not fit: back to split {format_split(probation.old_split)}"
        outcome = SplitOutcome(
            old, f"out of memory: {done} ({problem})", epoch=probation.epoch, split=probation.old_split
        )
        for pending in probation.sets:
            self._sets.emit_split("reverted", pending, outcome)
            if not probation.is_measured and pending.received is not None:
                self.inbox.answer(pending.received, "rejected", outcome.reason, step)
        return done

    def confirm_untested(self) -> None:
        """Answer a split change `applied` although no full batch was trained with it."""
        if self._probation is not None and not self._probation.is_measured:
            for pending in self._probation.sets:
                self._sets.answer_applied(pending, self._probation.step, "no full batch was trained with it")
