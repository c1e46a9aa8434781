"""What a running training was asked for: judged when it is heard, done at its place, answered once.

The main rank reads and judges commands; `PendingRequests`, what is left to do, is the same on every rank. The trainer
calls `handle_commands` in its loop, carries requests out where its state is whole, and reports that it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from segapp.config import LiveSettings, ParallelConfig
from segapp.run.commands import CancelCommand, ReceivedCommand, SetCommand, StopCommand
from segapp.run.events import Alert, Gpu0Bsz
from segapp.train.control.batch_split import AUTO_ON, BatchSplitController, with_split
from segapp.train.control.inbox import FinalStatus, Inbox
from segapp.train.telemetry.device_memory import DeviceMemoryTracker
from segapp.train.telemetry.event_log import EventLog

_SHARES = {"gpu0_bsz", "gpu0_bsz_auto", "shares"}

TRIAL_STEPS = 20
"""For so many steps after a change of the split, running out of memory takes it back."""


@dataclass(frozen=True)
class TrainingPosition:
    """Where the training is when it hears a command."""

    epoch: int
    step: int
    next_epoch: int
    """The epoch whose beginning is the next one to come."""
    epochs: int


@dataclass
class PendingRequests:
    """What is left to do, the same on every rank."""

    is_paused: bool = False
    stop: Literal["now", "epoch"] | None = None
    wants_checkpoint: bool = False
    settings: LiveSettings | None = None
    """From the next epoch on; None: as they are."""


@dataclass
class PendingSet:
    """A `set` that waits, or waits to be seen at work."""

    received: ReceivedCommand | None
    """None where `auto` wishes."""
    changes: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    reason: str | None = None
    split: tuple[int, ...] | None = None
    predicted_mib: tuple[float | None, ...] = ()

    @property
    def is_split(self) -> bool:
        """Whether it changes the shares."""
        return "gpu0_bsz" in self.changes or "shares" in self.changes

    @property
    def names(self) -> set[str]:
        """The settings that it decides about."""
        is_share = self.is_split or "gpu0_bsz_auto" in self.changes
        return set(self.changes) | (_SHARES if is_share else set())


@dataclass
class SplitProbation:
    """A split that was applied a moment ago."""

    old: LiveSettings
    new: LiveSettings
    old_split: tuple[int, ...] | None
    epoch: int
    step: int
    sets: list[PendingSet]
    steps_left: int = TRIAL_STEPS
    is_seen: bool = False
    """Whether a full batch was made with it."""


class CommandController:
    """The wishes for one training.

    Args:
        inbox: where they come from.
        event_log: takes `gpu0_bsz` and `alert` events.
        batch_split: the shares.
        watch: the memory.
        settings: those that the run begins with.
    """

    def __init__(
        self,
        inbox: Inbox,
        event_log: EventLog,
        batch_split: BatchSplitController,
        watch: DeviceMemoryTracker,
        settings: LiveSettings,
    ) -> None:
        self.inbox, self.event_log, self.batch_split, self.watch = inbox, event_log, batch_split, watch
        self.settings = settings
        self.requests = PendingRequests()
        self._open: dict[str, list[ReceivedCommand]] = {"pause": [], "checkpoint": [], "stop": []}
        self._sets: list[PendingSet] = []
        self._trial: SplitProbation | None = None
        self._has_full_batch = False
        """Whether a full batch was made since the peaks began to count anew."""
        self._replay: list[tuple[int, dict[str, Any]]] = []

    # --- hearing ---------------------------------------------------------------------------------------------------

    def handle_commands(self, position: TrainingPosition) -> None:
        """Judges every command that waits; on the main rank only."""
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
        for waiting in [each for each in self._sets if each.received and command.id in (None, each.received.id)]:
            self._drop_set(waiting, "cancelled", reason, position)
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
            what = "nothing waits to be applied" if command.id is None else f"{command.id} does not wait to be applied"
            self.inbox.answer(received, "rejected", what, position.step)

    def _handle_set(self, received: ReceivedCommand, command: SetCommand, position: TrainingPosition) -> None:
        pending = PendingSet(received, dict(command.changes))
        is_auto = (self.requests.settings or self.settings).gpu0_bsz_auto
        if position.next_epoch > position.epochs:
            reason = f"settings change between epochs, and {position.epoch} is the last"
            self.inbox.answer(received, "rejected", reason, position.step)
            return
        reason = f"from epoch {position.next_epoch} on"
        is_new_split = False
        if pending.is_split:
            verdict, pending.changes = self.batch_split.judge(pending.changes, self.watch.usable_mib())
            problem = verdict.reason if not verdict.is_possible else None
            if verdict.level == "won't fit" and not command.force:
                problem = f"won't fit: {verdict.reason}: or insist with force"
            if problem is not None:
                self.inbox.answer(received, "rejected", problem, position.step)
                return
            pending.split, pending.predicted_mib = verdict.split, verdict.predicted_mib
            is_new_split = verdict.level != "no change"
            reason = f"{reason}: split {_shown(verdict.split)}, {verdict.level}: {verdict.reason}"
            if is_auto and pending.is_split:
                pending.notes.append("auto is switched off")
                reason += "; auto is switched off"
        self._supersede(pending, position)
        if pending.changes == AUTO_ON and is_auto:
            self.inbox.answer(received, "applied", "auto is on already", position.step)
        elif pending.is_split and not is_new_split and len(pending.changes) == 1 and not is_auto:
            self.inbox.answer(received, "applied", "this split is in force already", position.step)
        else:
            self._sets.append(pending)
            self.inbox.accept(received, reason, position.step)
            if pending.is_split:
                self._emit_split("pending", pending, epoch=position.next_epoch)
        self._update_pending_settings()

    def _supersede(self, pending: PendingSet, position: TrainingPosition) -> None:
        """Takes what a newer request says anew out of those that wait."""
        assert pending.received is not None
        by = f"superseded by {pending.received.id}"
        for older in list(self._sets):
            over = pending.names & older.changes.keys()
            if not over:
                continue
            if over == older.changes.keys():
                self._drop_set(older, "cancelled", by, position)
                continue
            if older.is_split and over & _SHARES:
                self._emit_split("cancelled", older, reason=by)
            older.notes.append(f"{', '.join(sorted(over))} was {by}")
            older.changes = {name: value for name, value in older.changes.items() if name not in over}

    def _drop_set(self, waiting: PendingSet, status: FinalStatus, reason: str, position: TrainingPosition) -> None:
        self._sets.remove(waiting)
        if waiting.is_split:
            self._emit_split("cancelled", waiting, reason=reason)
        if waiting.received is not None:
            self.inbox.answer(waiting.received, status, reason, position.step)

    def _update_pending_settings(self) -> None:
        """What the waiting wishes come to, in the order in which they came."""
        settings = self.settings
        for pending in self._sets:
            settings = with_split(settings, pending.changes)
        self.requests.settings = settings if self._sets else None

    # --- what the trainer has done ---------------------------------------------------------------------------------

    def answer_all(self, kind: str, status: FinalStatus, reason: str | None, step: int) -> None:
        """Answers every open command of a kind: pause, checkpoint or stop."""
        waiting, self._open[kind] = self._open[kind], []
        for received in waiting:
            self.inbox.answer(received, status, reason, step)

    def answer_checkpoints(self, step: int, problem: str | None) -> None:
        """The checkpoint that was wished for is saved, or could not be."""
        if problem is None:
            self.answer_all("checkpoint", "applied", f"checkpoints/last.pt at step {step}", step)
        else:
            self.answer_all("checkpoint", "rejected", problem, step)

    def schedule_replay(self, changes: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Apply changes of settings again, for a training that goes back to a checkpoint written before them.

        Args:
            changes: step after which each change was applied, and the new values (`inbox.applied_after`).
        """
        self._replay = list(changes)

    def restore_settings(self, settings: LiveSettings, saved: Mapping[str, Any], config: ParallelConfig) -> None:
        """Takes over the settings of a checkpoint; a split that the config names anew goes before that.

        Args:
            settings: as they were saved.
            saved: the `parallel` section of the checkpoint's config.
            config: the present one; where it says `auto`, the number that this steering began with holds.
        """
        is_auto = config.gpu0_bsz == "auto"
        number = self.settings.gpu0_bsz if is_auto else config.gpu0_bsz
        start = {"gpu0_bsz": number, "gpu0_bsz_auto": is_auto, "shares": config.shares}
        wished = {"gpu0_bsz": config.gpu0_bsz, "shares": config.shares}
        kept = settings
        if any(saved.get(name) != value for name, value in wished.items()):
            kept = with_split(settings, start)
            later = [(at, {n: v for n, v in changes.items() if n not in _SHARES}) for at, changes in self._replay]
            self._replay = [(at, changes) for at, changes in later if changes]
        if not self.batch_split.apply(kept):
            message = f"gpu0_bsz={kept.gpu0_bsz}, shares={kept.shares} is impossible here: the config's split holds"
            self.event_log.emit(Alert(kind="settings", message=message))
            kept = with_split(kept, start)
            self.batch_split.apply(kept)
        self.settings = kept

    def settings_for_step(self, step: int) -> LiveSettings:
        """The settings for the epoch that begins after `step` updates."""
        if any(at <= step for at, _ in self._replay):
            settings = self.settings
            for _, changes in [each for each in self._replay if each[0] <= step]:
                settings = with_split(settings, changes)
            self._replay = [each for each in self._replay if each[0] > step]
            for pending in self._sets:
                settings = with_split(settings, pending.changes)
            return settings
        settings = self.requests.settings or self.settings
        if settings.gpu0_bsz_auto and not any(pending.is_split for pending in self._sets):
            move = self.batch_split.auto_move(self.watch.usable_mib())
            if move is not None:
                changes = {"gpu0_bsz": move.gpu0_bsz, **AUTO_ON}
                self._sets.append(PendingSet(None, changes, [], move.reason, move.split, move.predicted_mib))
                settings = with_split(settings, changes)
        return settings

    def apply(self, settings: LiveSettings, position: TrainingPosition) -> None:
        """Puts settings into force, at the boundary of an epoch, on every rank."""
        old, old_split = self.settings, self.batch_split.current
        sets, self._sets, self.requests.settings = self._sets, [], None
        if not self.batch_split.apply(settings):
            settings = with_split(settings, {"gpu0_bsz": old.gpu0_bsz, "shares": old.shares})
        self.settings = settings
        is_new_split = self.batch_split.current != old_split
        for pending in [each for each in sets if not (is_new_split and each.is_split)]:
            self._answer_applied(pending, position.step)
        if is_new_split:
            self.confirm_untested()
            proving = [each for each in sets if each.is_split]
            self._trial = SplitProbation(old, settings, old_split, position.epoch, position.step, proving)

    def after_step(self, split: Sequence[int], num_samples: int, step: int) -> None:
        """A step was made: the first full batch after a change proves it."""
        self._has_full_batch |= num_samples == self.batch_split.batch_size
        trial = self._trial
        if trial is None:
            return
        trial.steps_left -= 1
        if not trial.is_seen and num_samples == self.batch_split.batch_size:
            trial.is_seen = True
            observed = self._record_peaks(split)
            for pending in trial.sets:
                self._emit_split(
                    "applied", pending, trial.old, split=split, observed=observed, epoch=trial.epoch, step=trial.step
                )
                self._answer_applied(pending, trial.step, f"split {_shown(split)}")
        if trial.steps_left <= 0 and trial.is_seen:
            self._trial = None

    def after_epoch(self) -> None:
        """The training of an epoch is done, and its evaluation to come: its peaks are those of its split."""
        if self._has_full_batch and self.batch_split.current is not None:
            self._record_peaks(self.batch_split.current)
        self._has_full_batch = False

    def _record_peaks(self, split: Sequence[int]) -> list[float | None]:
        observed = self.watch.observed_mib()[: len(split)]
        if not self.watch.is_shared:  # logical devices without budgets: nobody can say whose memory it is
            self.batch_split.record_peaks(split, observed)
        return observed

    def revert_split(self, problem: str, step: int) -> str | None:
        """Goes back to the last good split, because the present one ran out of memory.

        Returns:
            What was done, in words; None where the present one is not new: then nothing was.
        """
        trial = self._trial
        if trial is None or trial.old_split is None:
            return None
        self._trial = None
        failed = self.batch_split.current or ()
        self.batch_split.record_failure(failed, trial.old_split)
        restored = {
            "gpu0_bsz": trial.old.gpu0_bsz,
            "shares": trial.old.shares,
            "gpu0_bsz_auto": self.settings.gpu0_bsz_auto or trial.old.gpu0_bsz_auto,
        }
        self.settings = with_split(self.settings, restored)
        self.batch_split.apply(self.settings)
        self._update_pending_settings()
        done = f"split {_shown(failed)} needs too much, split {_shown(trial.old_split)} is back"
        reason = f"out of memory: {done} ({problem})"
        for pending in trial.sets:
            self._emit_split(
                "reverted", pending, trial.old, split=trial.old_split, observed=None, epoch=trial.epoch, reason=reason
            )
            if not trial.is_seen and pending.received is not None:
                self.inbox.answer(pending.received, "rejected", reason, step)
        return done

    def confirm_untested(self) -> None:
        """A change that no full batch was made with is applied all the same."""
        if self._trial is not None and not self._trial.is_seen:
            for pending in self._trial.sets:
                self._answer_applied(pending, self._trial.step, "no full batch was made with it")

    def answer_at_end(self, position: TrainingPosition, reason: str, *, is_finished: bool) -> None:
        """Answers what the end of the training answers.

        A request for settings outlives a stop: the training that goes on takes it up.
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
            for waiting in list(self._sets):
                self._drop_set(waiting, "cancelled", reason, position)

    def _answer_applied(self, pending: PendingSet, step: int, note: str | None = None) -> None:
        if pending.received is None:
            return
        notes = [*pending.notes, *([note] if note else [])]
        self.inbox.answer(pending.received, "applied", "; ".join(notes) or None, step)

    def _emit_split(
        self,
        status: Literal["pending", "applied", "cancelled", "reverted"],
        pending: PendingSet,
        old: LiveSettings | None = None,
        *,
        split: Sequence[int] | None = None,
        observed: Sequence[float | None] | None = None,
        epoch: int | None = None,
        reason: str | None = None,
        step: int | None = None,
    ) -> None:
        old = self.settings if old is None else old
        shares = pending.changes.get("shares")
        chosen = split if split is not None else pending.split
        self.event_log.emit(
            Gpu0Bsz(
                status=status,
                old=old.gpu0_bsz if old.shares is None else old.shares[0],
                new=pending.changes.get("gpu0_bsz") if shares is None else shares[0],
                split=None if chosen is None else list(chosen),
                predicted_mib=list(pending.predicted_mib) or None,
                observed_mib=None if observed is None else list(observed),
                epoch=epoch,
                reason=reason or pending.reason,
                reason_code="out_of_memory" if status == "reverted" else None,
                id=None if pending.received is None else pending.received.id,
                is_auto=bool(pending.changes.get("gpu0_bsz_auto", False)),
                step=step,
            )
        )


def _shown(split: Sequence[int] | None) -> str:
    return "·".join(map(str, split)) if split else "-"
