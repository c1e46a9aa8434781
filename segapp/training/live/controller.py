"""Handle the commands to a running training: check each one, carry it out between two steps, and answer it once.

The main rank reads and checks commands. `PendingRequests`, the requests to carry out, is the same on every rank. The
training loop calls `handle_commands`, carries requests out at points where its state is consistent, and reports back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from segapp.config.sections import AUTO_ON, LiveSettings, automatic
from segapp.memory.counters import DeviceMemoryTracker
from segapp.memory.split_check import SplitChecker
from segapp.run.commands import SETTINGS, CancelCommand, ReceivedCommand, SetCommand, StopCommand
from segapp.run.events import Alert, EventLog, Gpu0Bsz
from segapp.run.words import dots
from segapp.training.context import DeviceLocations
from segapp.training.inbox import FinalStatus, Inbox
from segapp.training.live.apply import BatchSplit, RecomputableBlocks
from segapp.training.live.changes import Change, ChangeRecord, Effects
from segapp.training.live.start import Start
from segapp.training.progress import TrainingPosition


@dataclass
class PendingRequests:
    """The requests to carry out, the same on every rank."""

    is_paused: bool = False
    stop: Literal["now", "epoch"] | None = None
    wants_checkpoint: bool = False


class CommandController:
    """Handles the commands of one training, and applies the changes of its settings.

    Args:
        start: the settings of the first step, from which the network was divided as far as that is possible.
    """

    def __init__(
        self,
        inbox: Inbox,
        event_log: EventLog,
        batch_split: BatchSplit,
        device_memory: DeviceMemoryTracker,
        start: Start,
        *,
        blocks: RecomputableBlocks,
    ) -> None:
        self.inbox, self.batch_split, self.blocks = inbox, batch_split, blocks
        self.record, self.requests = start.record, PendingRequests()
        self._event_log, self._device_memory = event_log, device_memory
        self._open: dict[str, list[ReceivedCommand]] = {"pause": [], "checkpoint": [], "stop": []}
        self._has_full_batch = False
        """True if a full batch was trained since the peaks were reset."""
        if self.settings != start.configured and not batch_split.apply(self.settings):
            message = f"{self.settings.split} is impossible on these devices: the split of the config is used"
            event_log.emit(Alert(kind="settings", message=message))
            self.record = replace(self.record, settings=start.configured)
            batch_split.apply(start.configured)
        blocks.change("config", self.settings.recompute)

    @property
    def settings(self) -> LiveSettings:
        return self.record.settings

    @property
    def live(self) -> dict[str, Any]:
        """The settings in force that commands can change, as `set` takes them."""
        values = self.settings.model_dump(include={*SETTINGS})
        return {**values, "gpu0_bsz": "auto", "shares": None} if self.settings.is_auto else values

    def split_checker(self) -> SplitChecker:
        """Return the checker of splits, with the memory that the devices now have for this run."""
        return replace(self.batch_split.checker, usable_mib=tuple(self._device_memory.usable_mib()))

    def handle_commands(self, commands: Sequence[ReceivedCommand], position: TrainingPosition) -> None:
        """Answer or accept commands, in the order of sending; only the main rank receives any."""
        for received in commands:
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
        # The pause was requested before and has not begun, so both commands wait for it.
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
            if self.requests.stop == "epoch":  # a second `stop` waits with the first
                self.answer_all("stop", "cancelled", f"superseded by {received.id}: stop", position.step)
            self.requests.stop = "now"
        else:
            self.requests.stop = self.requests.stop or "epoch"
            self.inbox.answer(received, "accepted", f"after epoch {position.epoch}", position.step)
        self._open["stop"].append(received)

    def _handle_cancel(self, received: ReceivedCommand, command: CancelCommand, position: TrainingPosition) -> None:
        reason, before = f"by {received.id} of {received.by}", self.record.waiting
        self._become(*self.record.cancel(command.id, reason), step=position.step)
        is_any = self.record.waiting != before
        stops = [each for each in self._open["stop"] if command.id in (None, each.id)]
        # A stop that was requested for now has begun, and cannot be canceled.
        if self.requests.stop == "epoch" and stops:
            self._open["stop"] = [each for each in self._open["stop"] if each not in stops]
            self.requests.stop = "epoch" if self._open["stop"] else None
            for each in stops:
                self.inbox.answer(each, "cancelled", reason, position.step)
            is_any = True
        if is_any:
            self.inbox.answer(received, "applied", None, position.step)
        else:
            what = "no command is pending" if command.id is None else f"{command.id} is not pending"
            self.inbox.answer(received, "rejected", f"{what}: there is nothing to cancel", position.step)

    def _handle_set(self, received: ReceivedCommand, command: SetCommand, position: TrainingPosition) -> None:
        if position.next_epoch > position.epochs:
            reason = f"settings change between epochs, and epoch {position.epoch} is the last one"
            self.inbox.answer(received, "rejected", reason, position.step)
            return
        change = Change(command.new_settings, received=received, id=received.id)
        reason, is_new = f"from epoch {position.next_epoch} on", True
        if command.split is not None:
            checked = self.split_checker().check(command.split)
            problem = checked.rejection(force=command.force)
            if problem is not None:
                self.inbox.answer(received, "rejected", problem, position.step)
                return
            change = replace(change, split=checked.split, predicted_mib=checked.predicted_mib)
            is_new = checked.level != "no change"
            reason += f": split {dots(checked.split)}, {checked.level}: {checked.reason}"
        if command.recompute is not None:
            if self.blocks.problem is not None and command.recompute == "all":
                self.inbox.answer(received, "rejected", f"recompute=all: {self.blocks.problem}", position.step)
                return
            change = replace(change, notes=(self.blocks.describe(command.recompute),))
            reason += f", with {change.notes[0]}"
        is_auto = self.settings.is_auto
        if is_auto and change.is_split:
            change = replace(change, notes=(*change.notes, "auto is switched off"))
            reason += "; auto is switched off"
        has_no_effect = (
            "auto is on already"
            if change.values == AUTO_ON and is_auto
            else "this split is already in use"
            if change.is_split and not is_new and len(change.values) == 1 and not is_auto
            else None
        )
        if has_no_effect is not None:
            # The present setting is wanted, so an earlier request for another one must not come into force.
            self._become(*self.record.superseded_by(change), step=position.step)
            self.inbox.answer(received, "applied", has_no_effect, position.step, {})
        else:
            self._become(*self.record.request(change, reason, position.next_epoch), step=position.step)

    def _become(self, record: ChangeRecord, effects: Effects, *, step: int) -> None:
        """Take over a record of changes, and carry out the effects on inbox and events."""
        self.record = record
        for effect in effects:
            if isinstance(effect, Gpu0Bsz):
                facts = {"live": self.live, "is_auto": self.settings.is_auto, "checker": self.split_checker().to_json()}
                self._event_log.emit(effect.model_copy(update=facts))
            # Nobody waits for the answer to a change by auto or of a replay.
            elif effect.change.received is not None:
                values = effect.change.values if effect.status == "applied" else None
                at = step if effect.step is None else effect.step
                self.inbox.answer(effect.change.received, effect.status, effect.reason, at, values)

    def num_open(self, kind: str) -> int:
        return len(self._open[kind])

    def answer_all(
        self, kind: str, status: FinalStatus, reason: str | None, step: int, first: int | None = None
    ) -> None:
        """Answer the open commands of a kind, pause, checkpoint or stop: all, or the `first` ones."""
        waiting = self._open[kind][:first]
        self._open[kind] = self._open[kind][len(waiting) :]
        for received in waiting:
            self.inbox.answer(received, status, reason, step)

    def answer_at_end(self, position: TrainingPosition, reason: str, *, is_finished: bool) -> None:
        """Answer all commands that are open at the end of the training.

        Unless the run is finished, `set` commands stay in the inbox for the resumed training.
        """
        self.answer_all("stop", "applied", reason, position.step)
        self.answer_all("checkpoint", "applied", f"saved at step {position.step}, at the end", position.step)
        self.answer_all("pause", "cancelled", reason, position.step)
        for received in (*self.inbox.take(is_due=True), *self.inbox.take(is_due=True)):  # the urgent ones, and others
            command = received.command
            if command is not None and command.kind in ("stop", "checkpoint"):
                self.inbox.answer(received, "applied", reason, position.step)
            elif is_finished or not isinstance(command, SetCommand):
                self.inbox.answer(received, "rejected", received.problem or reason, position.step)
        if is_finished:
            untested = [] if self.record.trial is None else self.record.trial.confirmed_untested()
            record, effects = self.record.cancel(None, reason)
            self._become(record, [*untested, *effects], step=position.step)
        self.inbox.remove_answered(1.0)

    def state_dict(self, locations: DeviceLocations) -> dict[str, Any]:
        """Return plain values for a checkpoint, from which `live.start.start_of` continues."""
        trial = self.record.trial
        return {
            "settings": self.settings.model_dump(),
            "trial": None if trial is None else trial.to_state(),
            "splits": self.batch_split.state_dict(),
            "devices": locations.to_state(self.batch_split.current),
        }

    def add_automatic_changes(self, step: int, *, is_frozen: bool = False) -> None:
        """Add changes of a replay or of `auto` to the requested settings, before an epoch begins after `step` updates.

        `is_frozen`: parameters are frozen that will be trained later, which needs more memory; `auto` changes nothing.
        """
        record = self.record.with_due_replays(step)
        has_replays = record.replays != self.record.replays
        if not (has_replays or is_frozen) and record.requested.is_auto:
            # The request of a person has precedence.
            has_split = any(change.is_split for change in record.waiting)
            move = None if has_split else self.split_checker().best_move()
            if move is not None and move.split is not None:
                values = automatic(move.split[0])
                change = Change(values, "auto", reason=move.reason, split=move.split, predicted_mib=move.predicted_mib)
                record = replace(record, waiting=(*record.waiting, change))
        self._become(record, [], step=step)

    def apply(self, settings: LiveSettings, position: TrainingPosition) -> None:
        """Apply settings at the start of an epoch, on every rank."""
        old, old_split = self.settings, self.batch_split.current
        self._change_blocks(settings)
        if not self.batch_split.apply(settings):
            settings = settings.with_split(old.split, is_auto=False)
        splits = old_split, self.batch_split.current
        self._become(*self.record.begin_epoch(settings, splits, position.epoch, position.step), step=position.step)

    def adopt(self, settings: LiveSettings) -> None:
        """Let settings hold from the next step on, without a command."""
        self._change_blocks(settings)
        if settings.num_pieces > self.settings.num_pieces:
            self._discard_peaks()
        self.record = replace(self.record, settings=settings)

    def take_due_fallbacks(self, step: int) -> LiveSettings:
        """Return the settings with the fallbacks of a replay that hold after `step` updates."""
        due = self.record.with_due_fallbacks(step)
        self.record = replace(due, settings=self.settings)
        return due.settings

    def _change_blocks(self, settings: LiveSettings) -> None:
        if self.blocks.change(self.settings.recompute, settings.recompute):
            self._discard_peaks()

    def _discard_peaks(self) -> None:
        self.batch_split.clear_peaks()
        self.restart_peaks()

    def restart_peaks(self) -> None:
        """Measure the peaks of the steps from now on, without what was done before."""
        self._device_memory.reset_observed()
        self._has_full_batch = False

    @property
    def recomputed(self) -> tuple[tuple[str, ...], ...]:
        return self.blocks.of(self.settings.recompute)

    def predicted_mib(self) -> tuple[float | None, ...]:
        """Return the peaks under the present split, as measured or, with the config's blocks, as planned; else none."""
        split, peaks = self.batch_split.current, self.batch_split.checker.peaks
        if split is not None and peaks.measured:
            return peaks.peak_mib(split)
        plan, is_shared = self.batch_split.saved_plan, self._device_memory.is_shared
        has_own_blocks = self.settings.recompute == "config"
        return () if plan is None else plan.predicted_mib(split, has_own_blocks=has_own_blocks, is_shared=is_shared)

    def after_step(self, split: Sequence[int], num_samples: int, step: int) -> None:
        """Confirm a new split after its first full batch, and keep it for good after `REVERTIBLE_STEPS` steps."""
        is_full, trial = num_samples == self.batch_split.batch_size, self.record.trial
        self._has_full_batch |= is_full
        if trial is not None:
            observed = self._record_peaks(split) if is_full and not trial.is_measured else None
            self._become(*self.record.after_step(tuple(split), observed), step=step)

    def after_epoch(self) -> None:
        """Record the peaks of the epoch's training under its split, before the evaluation raises them."""
        if self._has_full_batch and self.batch_split.current is not None:
            self._record_peaks(self.batch_split.current)

    def measured_mib(self) -> list[float | None] | None:
        """Record the peaks of this epoch's training so far, as known on this rank.

        Return each device's highest peak under the present split; None without a split or a full batch so far.
        """
        split = self.batch_split.current
        if split is None or self._device_memory.is_shared:  # logical devices without budgets share one peak
            return None
        if self._has_full_batch:
            self.batch_split.record_peaks(split, self._device_memory.observed_mib()[: len(split)])
        measured = self.batch_split.checker.peaks.measured.get(split)
        return None if measured is None else list(measured)

    def _record_peaks(self, split: Sequence[int]) -> list[float | None]:
        observed = self.batch_split.gathered(self._device_memory.observed_mib()[: len(split)])
        if not self._device_memory.is_shared:
            self.batch_split.record_peaks(split, observed)
        return observed

    def revert_split(self, problem: str, step: int) -> str | None:
        """Revert to the previous split if the present one, which ran out of memory, is recent.

        Return a sentence about the two splits; None if the split is not recent, and then nothing was changed.
        """
        trial, failed = self.record.trial, self.batch_split.current or ()
        reverted = self.record.revert(failed, problem)
        if trial is None or reverted is None:
            return None
        record, effects, done = reverted
        self.batch_split.record_failure(failed, trial.old_split)
        self.batch_split.apply(record.settings)
        self.restart_peaks()
        self._become(record, effects, step=step)
        return done
