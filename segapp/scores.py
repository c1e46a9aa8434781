"""The table of an evaluation's scores, and their text form in all viewers.

A score in the table appears, without further code, in `segapp eval` and its JSON, in `val` events, the console,
trackers, `segapp status`, reports and the Python API, and may be `checkpoint.monitor`. A score with `is_headline` also
appears in comparisons and the charts of reports, and in lines and TUI panes that have room for a few scores.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """One number of an evaluation."""

    name: str
    """Name in events, JSON, config and Python."""
    title: str
    """Name in the TUI and in reports."""
    spec: str = ".4f"
    """Format of a finite value."""
    larger_is_better: bool = True
    """Direction, for the best checkpoint and the plateau schedule."""
    is_headline: bool = False
    """Shown even if there is room for only a few scores."""


SCORES: Mapping[str, Score] = {
    score.name: score
    for score in (
        Score("miou", "mIoU", is_headline=True),
        Score("mean_dice", "mean Dice", is_headline=True),
        Score("pixel_accuracy", "pixel accuracy", is_headline=True),
        Score("loss", "loss", larger_is_better=False, is_headline=True),
        Score("mean_precision", "mean precision"),
        Score("mean_recall", "mean recall"),
        Score("frequency_weighted_iou", "frequency-weighted IoU"),
    )
}
"""Name -> score, in the order in which they are shown. All but the loss are fields of `metrics.SegmentationScores`."""

HEADLINES: Mapping[str, Score] = {name: score for name, score in SCORES.items() if score.is_headline}


OTHER_HEADLINES = tuple(score for name, score in HEADLINES.items() if name not in ("miou", "loss"))
"""Scores next to mIoU, all of which are shares; mIoU and loss have separate places in tables and charts."""


def score_of(event: Mapping[str, Any], name: str) -> Any:
    """Return a score of a `val` event as stored in the file: a field of the event, or an entry of its `scores`."""
    return event[name] if name in event else (event.get("scores") or {}).get(name)


def scores_text(values: Mapping[str, float | None], iou: Sequence[float | None], *, has_loss: bool = True) -> str:
    """Return the headline scores of an evaluation, by name, as a line; a computed loss of None was not finite.

    >>> scores_text({"miou": 0.5, "pixel_accuracy": 0.75, "loss": None}, [0.5, None])
    'mIoU 0.5000 over 1 of 2 classes  mean Dice -  pixel accuracy 0.7500  loss not finite'
    """
    parts = []
    for name, score in HEADLINES.items():
        value = values.get(name)
        shown = loss_text(value, is_known=has_loss and name == "loss", spec=score.spec)
        over = f" over {of_classes(count_scored(iou), len(iou))}" if name == "miou" else ""
        parts.append(f"{score.title} {shown}{over}")
    return "  ".join(parts)


NOT_FINITE = "not finite"
"""Text for a number that was computed and was NaN or infinite; "-" is for a number that does not exist."""


def as_float(value: Any) -> float:
    """Return a number of an event as a float; nan for anything that is not a number."""
    if type(value) is float:
        return value
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.nan
    return math.nan


def count_scored(iou: Any) -> int:
    """Return the number of classes with an IoU in a `val` event, over which the mean is taken."""
    return sum(math.isfinite(as_float(value)) for value in iou) if isinstance(iou, Sequence) else 0


def of_classes(num_scored: int, num_classes: int) -> str:
    """Return the classes of a mean as text: 17 of 19 classes."""
    return f"{num_scored} of {num_classes} classes"


def with_count(shown: str, num_scored: int | None, num_classes: int | None) -> str:
    """Return a mean with the number of its classes, for a narrow column.

    >>> with_count("0.557", 17, 19), with_count("-", None, 19)
    ('0.557 (17/19)', '-')
    """
    if num_scored is None or shown == "-":
        return shown
    return f"{shown} ({num_scored}/{'?' if num_classes is None else num_classes})"


def loss_text(value: float | None, *, is_known: bool, spec: str = ".4f") -> str:
    """Return a loss as text; None means not finite if the loss is known, otherwise that it does not exist."""
    if value is None or not math.isfinite(value):
        return NOT_FINITE if is_known else "-"
    return format(value, spec)


def score_text(value: float | None) -> str:
    """Return a score with four decimals; "-" for None."""
    return "-" if value is None else f"{value:.4f}"


def is_best_candidate(miou: Any, loss: Any) -> bool:
    """Return True if an evaluation may be the best of a run: its mIoU and its loss are finite numbers."""
    return math.isfinite(as_float(miou)) and math.isfinite(as_float(loss))


def best_shown(values: Iterable[float | None]) -> frozenset[int]:
    """Return the positions of the best values in a row: the largest ones; values that are shown equal are equal.

    There is a best value only if another known value is shown as lower with three decimals.

    >>> sorted(best_shown([0.5, None, 0.7])), sorted(best_shown([None, 0.0])), sorted(best_shown([0.5, 0.5]))
    ([2], [], [])
    """
    known = {i: round(value, 3) for i, value in enumerate(values) if value is not None and math.isfinite(value)}
    best = max(known.values(), default=0.0)
    is_one_lower = any(value < best for value in known.values())
    return frozenset(i for i, value in known.items() if is_one_lower and value == best)


class EpochLoss:
    """The training loss of a run: the mean over the `step` events of its last epoch, without non-finite losses.

    The last epoch is the epoch of the last `step` event, so in an unfinished epoch it is the mean over the steps so
    far. Every viewer shows this number as the training loss.
    """

    def __init__(self) -> None:
        self.epoch: int | None = None
        """The epoch of the mean; None before the first step."""
        self._steps: list[int] = []
        self._losses: list[float] = []
        """The last losses, `_NUM_SINGLE` to twice as many; earlier ones are summed, because an epoch may be long."""
        self._sums: list[float] = []
        """Two floats: the sum of the others, and its rounding error."""
        self._num_summed = 0
        self._summed_to = 0
        """Step of the last summed loss."""

    def add(self, epoch: Any, steps: Sequence[int], losses: Iterable[Any]) -> None:
        """Add consecutive `step` events of an epoch; None or nan for a loss that was not finite."""
        if type(epoch) is not int:
            return
        if epoch != self.epoch:
            self.__init__()  # type: ignore[misc]
            self.epoch = epoch
        self._steps += steps
        self._losses += map(as_float, losses)
        if len(self._steps) >= 2 * _NUM_SINGLE:
            losses = [*self._sums, *filter(math.isfinite, self._losses[:-_NUM_SINGLE])]
            self._num_summed += len(losses) - len(self._sums)
            self._summed_to = self._steps[-_NUM_SINGLE - 1]
            total = math.fsum(losses)
            self._sums = [total, math.fsum([*losses, -total])]
            del self._steps[:-_NUM_SINGLE], self._losses[:-_NUM_SINGLE]

    def add_event(self, raw: dict[str, Any]) -> None:
        """Process an event: a `step`, or a `run_start` after which steps are repeated; others change nothing."""
        if raw["type"] == "step" and type(raw.get("step")) is int:
            self.add(raw.get("epoch"), [raw["step"]], [raw.get("loss")])
        elif raw["type"] == "run_start" and type(raw.get("resumed_from_step")) is int:
            self.drop_after(raw["resumed_from_step"])

    def drop_after(self, step: int) -> None:
        """Drop the steps after a step, which a resumed training repeats; all of them if some of these are summed."""
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            self._losses.pop()
        if not self._steps and (not self._num_summed or self._summed_to > step):
            self.__init__()  # type: ignore[misc]

    @property
    def mean(self) -> float | None:
        """The mean; None without a finite loss."""
        known = [*self._sums, *filter(math.isfinite, self._losses)]
        count = self._num_summed + len(known) - len(self._sums)
        return math.fsum(known) / count if count else None


_NUM_SINGLE = 4096
