"""Handle the commands to a running training: check each one, carry it out between two steps, and answer it once.

The main rank reads and checks commands. `PendingRequests`, the requests to carry out, is the same on every rank. The
training loop calls `handle_commands`, carries requests out at points where its state is consistent, and reports back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from segapp.config import LiveSettings, RecomputeChoice
from segapp.errors import ConfigError
from segapp.memory.counters import DeviceMemoryTracker
from segapp.memory.split_check import SplitChecker
from segapp.models.blocks import find_blocks
from segapp.parallel import recomputed_blocks, set_recompute
from segapp.parallel.recompute import is_recomputable
from segapp.run.commands import CancelCommand, ReceivedCommand, SetCommand, StopCommand
from segapp.run.events import Alert, EventLog, Gpu0Bsz
from segapp.run.words import dots
from segapp.training.batch_split import BatchSplitController
from segapp.training.inbox import FinalStatus, Inbox
from segapp.training.progress import TrainingPosition


class RecomputableBlocks:
    """The blocks of a network that the backward pass can recompute; `LiveSettings.recompute` chooses among them.

    Args:
        model: the network, in which the blocks of the config, or of the memory plan, are already chosen.
        num_devices: number of devices of a `DataParallelModel`; else 1.
        problem: why no other blocks can be chosen; None if they can.
    """

    def __init__(self, model: nn.Module, num_devices: int = 1, problem: str | None = None) -> None:
        self._model = model
        self._configured = recomputed_blocks(model, num_devices=num_devices)
        self.names: tuple[str, ...] = ()
        try:
            self.names = tuple(name for name, block in find_blocks(model).items() if is_recomputable(block))
        except ConfigError as error:  # `checkpoint_blocks` of a custom network without recomputation
            problem = problem or str(error)
        self.problem = problem or (None if self.names else "the model has no blocks")

    def of(self, choice: RecomputeChoice) -> tuple[tuple[str, ...], ...]:
        """Return the names of the chosen blocks for each device; only with `config` may devices differ."""
        if choice == "config":
            return self._configured
        return (self.names if choice == "all" else (),) * len(self._configured)

    def describe(self, choice: RecomputeChoice) -> str:
        which = {"off": "no blocks", "all": f"all {len(self.names)} blocks", "config": "the blocks of train.recompute"}
        return f"{which[choice]} recomputed in the backward pass"

    def has_kept(self, choice: RecomputeChoice) -> bool:
        """Return True if a device keeps the activations of a block that could be recomputed."""
        return self.problem is None and self.of(choice) != self.of("all")

    def change(self, old: RecomputeChoice, new: RecomputeChoice) -> bool:
        """Recompute the blocks of a new choice from the next step on; return True if they are other blocks."""
        is_new = self.of(new) != self.of(old)
        if is_new:
            set_recompute(self._model, self.of(new))
        return is_new


SPLIT_SETTINGS = frozenset({"gpu0_bsz", "gpu0_bsz_auto", "shares"})
"""The settings that determine the split; a change of one of them replaces all."""

AUTO_ON = {"gpu0_bsz_auto": True}
"""The change that lets `gpu0_bsz` follow the measured memory."""

REVERTIBLE_STEPS = 20
"""Number of steps after a change of the split in which running out of memory reverts it."""


def with_changes(settings: LiveSettings, changes: Mapping[str, Any]) -> LiveSettings:
    """Return settings with some replaced; `gpu0_bsz` and `shares` exclude each other, and each switches auto off."""
    if "gpu0_bsz" in changes or "shares" in changes:
        changes = {"gpu0_bsz": None, "shares": None, "gpu0_bsz_auto": False, **changes}
    return settings.model_copy(update=dict(changes))


@dataclass
class PendingChange:
    """A change of settings that is not applied yet, or whose split is still a `RecentSplit`."""

    received: ReceivedCommand | None
    """The `set` command; None for a change by `auto`."""
    changes: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """Sentences for the final answer."""
    reason: str | None = None
    split: tuple[int, ...] | None = None
    predicted_mib: tuple[float | None, ...] = ()

    @property
    def is_split(self) -> bool:
        """True if it sets a split; switching `auto` on does not."""
        return "gpu0_bsz" in self.changes or "shares" in self.changes

    @property
    def names(self) -> frozenset[str]:
        """The settings that it determines."""
        return frozenset(self.changes) | (SPLIT_SETTINGS if SPLIT_SETTINGS & self.changes.keys() else frozenset())


@dataclass
class RecentSplit:
    """A split that was applied less than `REVERTIBLE_STEPS` steps ago; an out-of-memory error reverts it."""

    old: LiveSettings
    old_split: tuple[int, ...] | None
    epoch: int
    step: int
    """Updates made before the change."""
    requested_by: list[PendingChange]
    """The change that requested the split; at most one."""
    steps_left: int = REVERTIBLE_STEPS
    is_measured: bool = False
    """True once a full batch was trained with the split."""


@dataclass
class PendingRequests:
    """The requests to carry out, the same on every rank."""

    is_paused: bool = False
    stop: Literal["now", "epoch"] | None = None
    wants_checkpoint: bool = False
    settings: LiveSettings | None = None
    """From the next epoch on; None: unchanged."""


class CommandController:
    """Handles the commands of one training, and holds its current settings.

    `replay` has changes of settings to apply again (`inbox.applied_after`), for a training that goes back to an earlier
    checkpoint: the step after which each was applied, and the new values.
    """

    def __init__(
        self,
        inbox: Inbox,
        event_log: EventLog,
        batch_split: BatchSplitController,
        device_memory: DeviceMemoryTracker,
        settings: LiveSettings,
        *,
        recompute: RecomputableBlocks,
        replay: Sequence[tuple[int, dict[str, Any]]] = (),
    ) -> None:
        self.inbox, self.batch_split, self.recompute = inbox, batch_split, recompute
        self.settings = settings
        self.requests = PendingRequests()
        self._event_log, self._device_memory = event_log, device_memory
        self._open: dict[str, list[ReceivedCommand]] = {"pause": [], "checkpoint": [], "stop": []}
        self._pending: list[PendingChange] = []
        """The changes of settings that wait for the next epoch, in the order of the requests."""
        self._recent_split: RecentSplit | None = None
        self._has_full_batch = False
        """True if a full batch was trained since the peaks were reset."""
        self._replay = list(replay)

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
            self.inbox.answer(received, "accepted", f"after epoch {position.epoch}", position.step)
        self._open["stop"].append(received)

    def _handle_cancel(self, received: ReceivedCommand, command: CancelCommand, position: TrainingPosition) -> None:
        reason, is_any = f"by {received.id} of {received.by}", False
        for pending in list(self._pending):
            if pending.received is not None and command.id in (None, pending.received.id):
                self._cancel(pending, reason, position.step)
                is_any = True
        stops = [each for each in self._open["stop"] if command.id in (None, each.id)]
        if self.requests.stop == "epoch" and stops:
            self._open["stop"] = [each for each in self._open["stop"] if command.id not in (None, each.id)]
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
            reason = f"settings change between epochs, and epoch {position.epoch} is the last one"
            self.inbox.answer(received, "rejected", reason, position.step)
            return
        pending = PendingChange(received, command.new_settings)
        reason, is_new = f"from epoch {position.next_epoch} on", True
        if command.asks_for_split:
            checked = self.split_checker().check(command.gpu0_bsz, command.shares)
            problem = checked.rejection(force=command.force)
            if problem is not None:
                self.inbox.answer(received, "rejected", problem, position.step)
                return
            pending.split, pending.predicted_mib = checked.split, checked.predicted_mib
            is_new = checked.level != "no change"
            reason += f": split {dots(checked.split)}, {checked.level}: {checked.reason}"
        if command.recompute is not None:
            if self.recompute.problem is not None and command.recompute == "all":
                self.inbox.answer(received, "rejected", f"recompute=all: {self.recompute.problem}", position.step)
                return
            pending.notes.append(self.recompute.describe(command.recompute))
            reason += f", with {pending.notes[-1]}"
        is_auto = self.settings.gpu0_bsz_auto
        if is_auto and pending.is_split:
            pending.notes.append("auto is switched off")
            reason += "; auto is switched off"
        self._supersede(pending, position.step)
        if pending.changes == AUTO_ON and is_auto:
            self.inbox.answer(received, "applied", "auto is on already", position.step, {})
        elif pending.is_split and not is_new and len(pending.changes) == 1 and not is_auto:
            self.inbox.answer(received, "applied", "this split is already in use", position.step, {})
        else:
            self._pending.append(pending)
            self.inbox.answer(received, "accepted", reason, position.step)
            if pending.is_split:
                self._emit_split("pending", pending, self.settings, epoch=position.next_epoch)
        self._update_pending_settings()

    def _update_pending_settings(self) -> None:
        self.requests.settings = self._with_pending(self.settings) if self._pending else None

    def _with_pending(self, settings: LiveSettings) -> LiveSettings:
        for pending in self._pending:
            settings = with_changes(settings, pending.changes)
        return settings

    def _supersede(self, newer: PendingChange, step: int) -> None:
        """Remove from the waiting changes the settings of a newer one; cancel changes that become empty."""
        assert newer.received is not None
        reason = f"superseded by {newer.received.id}"
        for older in list(self._pending):
            over = newer.names & older.changes.keys()
            if over == older.changes.keys():
                self._cancel(older, reason, step)
            elif over:
                if older.is_split and over & SPLIT_SETTINGS:
                    self._emit_split("cancelled", older, self.settings, reason)
                older.notes.append(f"{', '.join(sorted(over))} was {reason}")
                older.changes = {name: value for name, value in older.changes.items() if name not in over}

    def _cancel(self, pending: PendingChange, reason: str, step: int) -> None:
        """Remove a waiting change and answer its command `cancelled`."""
        self._pending.remove(pending)
        if pending.is_split:
            self._emit_split("cancelled", pending, self.settings, reason)
        if pending.received is not None:
            self.inbox.answer(pending.received, "cancelled", reason, step)

    def _answer_applied(self, pending: PendingChange, step: int, note: str | None = None) -> None:
        if pending.received is not None:
            notes = "; ".join(filter(None, [*pending.notes, note])) or None
            self.inbox.answer(pending.received, "applied", notes, step, pending.changes)

    def _emit_split(
        self,
        status: Literal["pending", "applied", "cancelled", "reverted"],
        pending: PendingChange,
        old: LiveSettings,
        reason: str | None = None,
        *,
        epoch: int | None = None,
        step: int | None = None,
        split: Sequence[int] | None = None,
        observed_mib: Sequence[float | None] | None = None,
    ) -> None:
        """Emit a `gpu0_bsz` event about a change from the settings `old`; None: use the request's value."""
        shares, split = pending.changes.get("shares"), pending.split if split is None else split
        self._event_log.emit(
            Gpu0Bsz(
                status=status,
                old=old.gpu0_bsz if old.shares is None else old.shares[0],
                new=pending.changes.get("gpu0_bsz") if shares is None else shares[0],
                split=None if split is None else list(split),
                predicted_mib=list(pending.predicted_mib) or None,
                observed_mib=None if observed_mib is None else list(observed_mib),
                epoch=epoch,
                reason=reason or pending.reason,
                id=None if pending.received is None else pending.received.id,
                is_auto=bool(pending.changes.get("gpu0_bsz_auto", False)),
                step=step,
                judge=self.split_checker().to_json(),
            )
        )

    def answer_all(self, kind: str, status: FinalStatus, reason: str | None, step: int) -> None:
        """Answer every open command of a kind: pause, checkpoint or stop."""
        waiting, self._open[kind] = self._open[kind], []
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
            self.confirm_untested()
            for pending in list(self._pending):
                self._cancel(pending, reason, position.step)
        self.inbox.remove_answered(1.0)

    def restore_settings(
        self,
        settings: LiveSettings,
        saved: Mapping[str, Any],
        present: Mapping[str, Any],
        *,
        is_replanned: bool = False,
    ) -> None:
        """Restore the settings of a checkpoint; a split that was changed in the config since takes precedence.

        `saved` is the `parallel` section of the checkpoint's config, `present` the section of the present config. The
        split with which this controller began is used if `gpu0_bsz` is auto, the list is for another number of devices,
        or the split was planned anew because the checkpoint has another number of devices (`is_replanned`).
        """
        began, is_auto = self.settings, present["gpu0_bsz"] == "auto"
        fits = present["shares"] is None or len(present["shares"]) == len(self.batch_split.current or ())
        configured = {
            "gpu0_bsz": began.gpu0_bsz if is_auto or is_replanned or not fits else present["gpu0_bsz"],
            "gpu0_bsz_auto": settings.gpu0_bsz_auto if is_replanned else is_auto,
            "shares": present["shares"] if fits and not is_replanned else began.shares,
        }
        restored = settings
        if is_replanned or any(saved.get(name) != present[name] for name in ("gpu0_bsz", "shares")):
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
        self._change_recompute(restored.recompute)
        self.settings = restored

    def add_automatic_changes(self, step: int, *, is_frozen: bool = False) -> None:
        """Add changes of a replay or of `auto` to the requested settings, before an epoch begins after `step` updates.

        `is_frozen`: parameters are frozen that will be trained later, which needs more memory; `auto` changes nothing.
        """
        settings = self.requests.settings or self.settings
        if any(at <= step for at, _ in self._replay):
            settings = self.settings
            for _, changes in (due for due in self._replay if due[0] <= step):
                settings = with_changes(settings, changes)
            self._replay = [(at, changes) for at, changes in self._replay if at > step]
            self.requests.settings = self._with_pending(settings)
            return
        if settings.gpu0_bsz_auto and not is_frozen and not any(pending.is_split for pending in self._pending):
            move = self.split_checker().best_move()
            if move is not None:
                changes = {"gpu0_bsz": move.gpu0_bsz, **AUTO_ON}
                self._pending.append(PendingChange(None, changes, [], move.reason, move.split, move.predicted_mib))
                self.requests.settings = with_changes(settings, changes)

    def apply(self, settings: LiveSettings, position: TrainingPosition) -> None:
        """Apply settings at the start of an epoch, on every rank."""
        old, old_split = self.settings, self.batch_split.current
        changes, self._pending, self.requests.settings = self._pending, [], None
        self._change_recompute(settings.recompute)
        if not self.batch_split.apply(settings):
            settings = with_changes(settings, {"gpu0_bsz": old.gpu0_bsz, "shares": old.shares})
        self.settings = settings
        is_new_split = self.batch_split.current != old_split
        for pending in changes:
            if not (is_new_split and pending.is_split):
                self._answer_applied(pending, position.step)
        if is_new_split:
            self.confirm_untested()
            requested_by = [pending for pending in changes if pending.is_split]
            self._recent_split = RecentSplit(old, old_split, position.epoch, position.step, requested_by)

    def adopt_recompute(self, choice: RecomputeChoice) -> None:
        """Choose the blocks that are recomputed from the next step on, without a command."""
        self._change_recompute(choice)
        self.settings = self.settings.model_copy(update={"recompute": choice})
        self._update_pending_settings()

    def _change_recompute(self, choice: RecomputeChoice) -> None:
        if self.recompute.change(self.settings.recompute, choice):
            self.batch_split.clear_peaks()

    @property
    def recomputed(self) -> tuple[tuple[str, ...], ...]:
        return self.recompute.of(self.settings.recompute)

    def predicted_mib(self) -> tuple[float | None, ...]:
        """Return the peaks under the present split, as measured or, with the config's blocks, as planned; else none."""
        split, peaks = self.batch_split.current, self.batch_split.checker.peaks
        if split is not None and peaks.measured:
            return peaks.peak_mib(split)
        plan = self.batch_split.saved_plan if self.recomputed == self.recompute.of("config") else None
        return () if plan is None else plan.predicted_mib(split)

    def after_step(self, split: Sequence[int], num_samples: int, step: int) -> None:
        """Confirm a new split after its first full batch, and keep it for good after `REVERTIBLE_STEPS` steps."""
        is_full = num_samples == self.batch_split.batch_size
        self._has_full_batch |= is_full
        recent = self._recent_split
        if recent is None:
            return
        recent.steps_left -= 1
        if is_full and not recent.is_measured:
            recent.is_measured = True
            observed = self._record_peaks(split)
            at: Any = {"epoch": recent.epoch, "step": recent.step}
            for pending in recent.requested_by:
                self._emit_split("applied", pending, recent.old, **at, split=split, observed_mib=observed)
                self._answer_applied(pending, recent.step, f"split {dots(split)}")
        if recent.steps_left <= 0 and recent.is_measured:
            self._recent_split = None

    def after_epoch(self) -> None:
        """Record the peaks of the epoch's training under its split, before the evaluation raises them."""
        if self._has_full_batch and self.batch_split.current is not None:
            self._record_peaks(self.batch_split.current)
        self._has_full_batch = False

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
        recent = self._recent_split
        if recent is None or recent.old_split is None:
            return None
        self._recent_split = None
        failed = self.batch_split.current or ()
        self.batch_split.record_failure(failed, recent.old_split)
        old = recent.old
        is_auto = self.settings.gpu0_bsz_auto or old.gpu0_bsz_auto
        restored = {"gpu0_bsz": old.gpu0_bsz, "shares": old.shares, "gpu0_bsz_auto": is_auto}
        self.settings = with_changes(self.settings, restored)
        self.batch_split.apply(self.settings)
        self._update_pending_settings()
        done = f"split {dots(failed)} does not fit: back to split {dots(recent.old_split)}"
        reason = f"out of memory: {done} ({problem})"
        for pending in recent.requested_by:
            self._emit_split("reverted", pending, old, reason, epoch=recent.epoch, split=recent.old_split)
            if not recent.is_measured and pending.received is not None:
                self.inbox.answer(pending.received, "rejected", reason, step)
        return done

    def confirm_untested(self) -> None:
        """Answer a split change with `applied`, although no full batch was trained with it."""
        if self._recent_split is not None and not self._recent_split.is_measured:
            for pending in self._recent_split.requested_by:
                self._answer_applied(pending, self._recent_split.step, "no full batch was trained with it")
