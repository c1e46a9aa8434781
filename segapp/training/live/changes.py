"""The changes of the settings that may change while a run trains, and the settings that follow from them.

Pure: no torch, no files. A function takes a `ChangeRecord` and returns a new one with the effects to carry out, in
order. Commands, `auto`, out-of-memory errors and resumes are the causes of changes. To divide batches, to choose
blocks, to answer and to report are their effects (`live.apply`, `live.controller`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from segapp.chunks import SPLIT_NAMES, Split
from segapp.config.sections import FALLBACKS, SPLIT_SETTINGS, LiveSettings
from segapp.run.commands import ReceivedCommand
from segapp.run.events import Gpu0Bsz
from segapp.run.words import dots

REVERTIBLE_STEPS = 20
"""Number of steps after a change of the split in which running out of memory reverts it."""


@dataclass(frozen=True)
class Change:
    """A change of settings, from its request until it is answered."""

    values: Mapping[str, Any]
    """The new settings by name."""
    cause: Literal["command", "auto", "replay"] = "command"
    """replay: it was applied after the checkpoint that the training continues from, and is applied again in silence."""
    received: ReceivedCommand | None = None
    """The command, which is answered; None for others, and after a resume, which reads an unanswered command again."""
    id: str | None = None
    """Of the command, also after a resume."""
    notes: tuple[str, ...] = ()
    """Sentences for the final answer."""
    reason: str | None = None
    split: Split | None = None
    predicted_mib: tuple[float | None, ...] = ()

    @property
    def is_split(self) -> bool:
        """True if it sets a split; switching `auto` on does not."""
        return not SPLIT_NAMES.isdisjoint(self.values)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.values) | (SPLIT_SETTINGS if SPLIT_SETTINGS & self.values.keys() else frozenset())


class Answered(NamedTuple):
    """Effect: the command of a change is answered."""

    change: Change
    status: Literal["accepted", "applied", "rejected", "cancelled"]
    reason: str | None = None
    step: int | None = None
    """None: the present one."""


Effects = list[Answered | Gpu0Bsz]


def _event(
    change: Change,
    status: Literal["pending", "applied", "cancelled", "reverted"],
    old: LiveSettings,
    reason: str | None = None,
    split: Sequence[int] | None = None,
    **more: Any,
) -> Gpu0Bsz:
    """Return the event of a change of the split; `split`: the one that holds now, if it is not the requested one."""
    requested, split = LiveSettings().with_changes(change.values), split or change.split
    return Gpu0Bsz(
        status=status,
        old=old.split.first,
        new=requested.split.first,
        split=None if split is None else list(split),
        predicted_mib=list(change.predicted_mib) or None,
        reason=reason or change.reason,
        id=change.id,
        **more,
    )


def _applied(change: Change, note: str | None = None, step: int | None = None) -> Answered:
    return Answered(change, "applied", "; ".join(filter(None, [*change.notes, note])) or None, step)


@dataclass(frozen=True)
class Trial:
    """A split that began less than `REVERTIBLE_STEPS` steps ago; an out-of-memory error reverts it."""

    change: Change | None
    """The request, which is answered after a full batch unless it is a replay; None on other ranks."""
    old: LiveSettings
    old_split: Split | None
    epoch: int
    step: int
    """Updates made before it."""
    steps_left: int = REVERTIBLE_STEPS
    is_measured: bool = False
    """True once a full batch was trained with the split."""

    def to_state(self) -> dict[str, Any]:
        change = None if self.change is None else {**vars(self.change), "received": None}
        return {**vars(self), "change": change, "old": self.old.model_dump()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Trial:
        change = None if state["change"] is None else Change(**state["change"])
        return Trial(**{**state, "change": change, "old": LiveSettings(**state["old"])})

    def confirmed_untested(self) -> Effects:
        """Return the answer if another split, or the end, comes before a full batch."""
        if self.is_measured or self.change is None:
            return []
        return [_applied(self.change, "no full batch was trained with it", self.step)]


class Replay(NamedTuple):
    """A change that was applied after the checkpoint that the training continues from, and is applied again."""

    step: int
    """Updates made before it."""
    values: Mapping[str, Any]
    id: str | None = None
    """Of its command."""

    @property
    def is_fallback(self) -> bool:
        """True if an out-of-memory error caused it: it holds from a step, the others from an epoch."""
        return not self.values.keys().isdisjoint(FALLBACKS)

    def without(self, names: Collection[str]) -> Replay:
        return self._replace(values={name: value for name, value in self.values.items() if name not in names})


@dataclass(frozen=True)
class ChangeRecord:
    """The settings in force, the changes that wait for the next epoch, and the split that is on trial.

    Ranks other than the main one have no waiting changes: they take over the settings that the main rank requests.
    """

    settings: LiveSettings
    waiting: tuple[Change, ...] = ()
    """In the order of the requests."""
    trial: Trial | None = None
    replays: tuple[Replay, ...] = ()
    """In the order of their steps."""

    @property
    def requested(self) -> LiveSettings:
        """The settings of the next epoch."""
        settings = self.settings
        for change in self.waiting:
            settings = settings.with_changes(change.values)
        return settings

    def request(self, change: Change, reason: str, epoch: int) -> tuple[ChangeRecord, Effects]:
        """Let a change wait for the next epoch, number `epoch`; cancel what it replaces of waiting changes."""
        record, effects = self.superseded_by(change)
        effects.append(Answered(change, "accepted", reason))
        if change.is_split:
            effects.append(_event(change, "pending", self.settings, epoch=epoch))
        return replace(record, waiting=(*record.waiting, change)), effects

    def superseded_by(self, newer: Change) -> tuple[ChangeRecord, Effects]:
        """Remove from the waiting changes the settings of a newer one; cancel changes that become empty."""
        reason = f"superseded by {newer.id}"
        kept: list[Change] = []
        effects: Effects = []
        for older in self.waiting:
            over = newer.names & older.values.keys()
            if over == older.values.keys():
                effects += self._cancelled(older, reason)
                continue
            if over:
                # Viewers show a pending split until an event ends it.
                if older.is_split and over & SPLIT_SETTINGS:
                    effects.append(_event(older, "cancelled", self.settings, reason))
                left = {name: value for name, value in older.values.items() if name not in over}
                note = f"{', '.join(sorted(over))} was {reason}"
                older = replace(older, values=left, notes=(*older.notes, note))
            kept.append(older)
        return replace(self, waiting=tuple(kept)), effects

    def cancel(self, command_id: str | None, reason: str) -> tuple[ChangeRecord, Effects]:
        """Cancel the waiting change of a command, or of every command if it is None."""
        gone = [each for each in self.waiting if each.received and command_id in (None, each.id)]
        effects = [effect for change in gone for effect in self._cancelled(change, reason)]
        return replace(self, waiting=tuple(each for each in self.waiting if each not in gone)), effects

    def _cancelled(self, change: Change, reason: str) -> Effects:
        report = [_event(change, "cancelled", self.settings, reason)] if change.is_split else []
        return [*report, Answered(change, "cancelled", reason)]

    def with_due_replays(self, step: int) -> ChangeRecord:
        """Let the replays that are due after `step` updates wait for this epoch, before all other changes."""
        due = [each for each in self.replays if each.step <= step and not each.is_fallback]
        later = tuple(each for each in self.replays if each not in due)
        again = (Change(each.values, "replay", id=each.id) for each in due)
        return replace(self, waiting=(*again, *self.waiting), replays=later)

    def with_due_fallbacks(self, step: int) -> ChangeRecord:
        """Let the fallbacks that were adopted after at most `step` updates hold again."""
        due = [each for each in self.replays if each.step <= step and each.is_fallback]
        settings = self.settings
        for each in due:
            settings = settings.with_changes(each.values)
        return replace(self, settings=settings, replays=tuple(each for each in self.replays if each not in due))

    def begin_epoch(
        self, settings: LiveSettings, splits: tuple[Split | None, Split | None], epoch: int, step: int
    ) -> tuple[ChangeRecord, Effects]:
        """Let the requested settings hold, and the waiting changes be applied; a new split is on trial.

        `splits`: the split before and the split now.
        """
        is_new = splits[1] != splits[0]
        effects: Effects = []
        newest = next((each for each in reversed(self.waiting) if is_new and each.is_split), None)
        for change in self.waiting:
            if change is newest:
                continue  # it is answered after a full batch
            if change.is_split and change.cause != "replay":
                effects.append(_event(change, "applied", self.settings, split=splits[1], epoch=epoch, step=step))
            effects.append(_applied(change, step=step))
        trial = self.trial
        if is_new:
            effects += [] if trial is None else trial.confirmed_untested()
            trial = Trial(newest, self.settings, splits[0], epoch, step)
        return replace(self, settings=settings, waiting=(), trial=trial), effects

    def after_step(self, split: Split, observed_mib: Sequence[float | None] | None) -> tuple[ChangeRecord, Effects]:
        """Confirm a split after its first full batch, whose peaks are `observed_mib`, and end its trial in time."""
        trial = self.trial
        if trial is None:
            return self, []
        effects: Effects = []
        if observed_mib is not None and not trial.is_measured:
            trial = replace(trial, is_measured=True)
            if trial.change is not None and trial.change.cause != "replay":
                measured: Any = {"epoch": trial.epoch, "step": trial.step, "observed_mib": list(observed_mib)}
                effects.append(_event(trial.change, "applied", trial.old, split=split, **measured))
                effects.append(_applied(trial.change, f"split {dots(split)}", trial.step))
        trial = replace(trial, steps_left=trial.steps_left - 1)
        # Short batches do not use the whole split, so a trial lasts at least until a full one was measured.
        is_over = trial.steps_left <= 0 and trial.is_measured
        return replace(self, trial=None if is_over else trial), effects

    def revert(self, failed: Split, problem: str) -> tuple[ChangeRecord, Effects, str] | None:
        """Let the split before hold again if the present one, which ran out of memory, is on trial; else None.

        The last value is a sentence about the two splits.
        """
        trial = self.trial
        if trial is None or trial.old_split is None:
            return None
        # That a split failed is no request to switch auto off.
        is_auto = self.settings.is_auto or trial.old.is_auto
        record = replace(self, settings=self.settings.with_split(trial.old.split, is_auto=is_auto), trial=None)
        done = f"split {dots(failed)} does not fit: back to split {dots(trial.old_split)}"
        reason = f"out of memory: {done} ({problem})"
        effects: Effects = []
        if trial.change is not None:
            effects.append(_event(trial.change, "reverted", trial.old, reason, trial.old_split, epoch=trial.epoch))
            rest = {name: value for name, value in trial.change.values.items() if name not in SPLIT_SETTINGS}
            # The rest holds from the first step of the split on, also in a resume from before it.
            answer = Answered(replace(trial.change, values=rest), "applied" if rest else "rejected", reason, trial.step)
            # A measured split was answered, and a command gets one final answer.
            effects += [] if trial.is_measured else [answer]
        return record, effects, done
