"""Changes of settings that were requested and wait for the next epoch, and the split change that is on probation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from segapp.config import LiveSettings
from segapp.memory.judge import SplitJudge
from segapp.run.commands import ReceivedCommand
from segapp.run.events import EventLog, Gpu0Bsz
from segapp.training.control.inbox import Inbox

SPLIT_SETTINGS = frozenset({"gpu0_bsz", "gpu0_bsz_auto", "shares"})
"""The settings that decide about the split; a change of one of them replaces all."""

AUTO_ON = {"gpu0_bsz_auto": True}
"""The change that lets `gpu0_bsz` follow the measured memory."""

PROBATION_STEPS = 20
"""For so many steps after a change of the split, running out of memory reverts it."""


def with_changes(settings: LiveSettings, changes: Mapping[str, Any]) -> LiveSettings:
    """Return settings with some replaced; `gpu0_bsz` and `shares` exclude each other, and either switches auto off."""
    if "gpu0_bsz" in changes or "shares" in changes:
        changes = {"gpu0_bsz": None, "shares": None, "gpu0_bsz_auto": False, **changes}
    return settings.model_copy(update=dict(changes))


@dataclass
class PendingSet:
    """A change of settings that is not applied yet, or whose split is on probation."""

    received: ReceivedCommand | None
    """The `set` command; None for a move of `auto`."""
    changes: dict[str, Any]
    """New values of `LiveSettings`, by name."""
    notes: list[str] = field(default_factory=list)
    """Sentences that the final answer adds."""
    reason: str | None = None
    split: tuple[int, ...] | None = None
    predicted_mib: tuple[float | None, ...] = ()

    @property
    def is_split(self) -> bool:
        """True if it names a split; switching `auto` on does not."""
        return "gpu0_bsz" in self.changes or "shares" in self.changes

    @property
    def names(self) -> frozenset[str]:
        """The settings that it decides about."""
        return frozenset(self.changes) | (SPLIT_SETTINGS if SPLIT_SETTINGS & self.changes.keys() else frozenset())


@dataclass(frozen=True)
class SplitOutcome:
    """The part of a `gpu0_bsz` event that is not in the request."""

    old: LiveSettings
    """The settings before the change."""
    reason: str | None = None
    epoch: int | None = None
    """The epoch from which the change holds."""
    step: int | None = None
    """Updates made before the change."""
    split: Sequence[int] | None = None
    """Samples per device; None: as requested."""
    observed_mib: Sequence[float | None] | None = None


@dataclass
class SplitProbation:
    """A split change that was applied less than `PROBATION_STEPS` steps ago."""

    old: LiveSettings
    old_split: tuple[int, ...] | None
    epoch: int
    step: int
    """Updates made before the change."""
    sets: list[PendingSet]
    """The requests for the split; at most one."""
    steps_left: int = PROBATION_STEPS
    is_measured: bool = False
    """True once a full batch was trained with the split."""


class PendingSets:
    """The changes of settings that wait for the next epoch, in the order in which they were requested.

    Args:
        inbox: Takes the answers.
        event_log: Takes `gpu0_bsz` events.
        judge: Returns what decides about a split, for those events.
    """

    def __init__(self, inbox: Inbox, event_log: EventLog, judge: Callable[[], SplitJudge]) -> None:
        self._inbox, self._event_log, self._judge = inbox, event_log, judge
        self._sets: list[PendingSet] = []

    def __len__(self) -> int:
        return len(self._sets)

    def __iter__(self) -> Iterator[PendingSet]:
        return iter(list(self._sets))

    @property
    def has_split(self) -> bool:
        """True if one of them names a split."""
        return any(pending.is_split for pending in self._sets)

    def add(self, pending: PendingSet) -> None:
        """Append a change."""
        self._sets.append(pending)

    def take_all(self) -> list[PendingSet]:
        """Return all changes, and keep none."""
        taken, self._sets = self._sets, []
        return taken

    def merged(self, settings: LiveSettings) -> LiveSettings:
        """Return the settings with all changes made."""
        for pending in self._sets:
            settings = with_changes(settings, pending.changes)
        return settings

    def supersede(self, newer: PendingSet, settings: LiveSettings, step: int) -> None:
        """Remove from the waiting changes what a newer one decides about; cancel those of which nothing is left."""
        assert newer.received is not None
        reason = f"superseded by {newer.received.id}"
        for older in self:
            over = newer.names & older.changes.keys()
            if over == older.changes.keys():
                self.cancel(older, reason, settings, step)
            elif over:
                if older.is_split and over & SPLIT_SETTINGS:
                    self.emit_split("cancelled", older, SplitOutcome(settings, reason))
                older.notes.append(f"{', '.join(sorted(over))} was {reason}")
                older.changes = {name: value for name, value in older.changes.items() if name not in over}

    def cancel(self, pending: PendingSet, reason: str, settings: LiveSettings, step: int) -> None:
        """Remove a change and answer its command `cancelled`."""
        self._sets.remove(pending)
        if pending.is_split:
            self.emit_split("cancelled", pending, SplitOutcome(settings, reason))
        if pending.received is not None:
            self._inbox.answer(pending.received, "cancelled", reason, step)

    def answer_applied(self, pending: PendingSet, step: int, note: str | None = None) -> None:
        """Answer the command of a change `applied`, with its notes."""
        if pending.received is not None:
            reason = "; ".join([*pending.notes, *([note] if note else [])]) or None
            self._inbox.answer(pending.received, "applied", reason, step, pending.changes)

    def emit_split(
        self,
        status: Literal["pending", "applied", "cancelled", "reverted"],
        pending: PendingSet,
        outcome: SplitOutcome,
    ) -> None:
        """Emit a `gpu0_bsz` event about a change of the split."""
        old, shares = outcome.old, pending.changes.get("shares")
        split = pending.split if outcome.split is None else outcome.split
        self._event_log.emit(
            Gpu0Bsz(
                status=status,
                old=old.gpu0_bsz if old.shares is None else old.shares[0],
                new=pending.changes.get("gpu0_bsz") if shares is None else shares[0],
                split=None if split is None else list(split),
                predicted_mib=list(pending.predicted_mib) or None,
                observed_mib=None if outcome.observed_mib is None else list(outcome.observed_mib),
                epoch=outcome.epoch,
                reason=outcome.reason or pending.reason,
                reason_code="out_of_memory" if status == "reverted" else None,
                id=None if pending.received is None else pending.received.id,
                is_auto=bool(pending.changes.get("gpu0_bsz_auto", False)),
                step=outcome.step,
                judge=self._judge().to_json(),
            )
        )
