"""The table of an evaluation's scores, the scores of single classes, and their text form in all viewers.

A score in the table appears, without further code, in `segapp eval` and its JSON, in `val` events, the console,
trackers, `segapp status`, reports and the Python API, and may be `checkpoint.monitor`. A score with `is_headline` also
appears in comparisons and the charts of reports, and in lines and TUI panes that have room for a few scores.

Scores of one class, `iou:NAME` and `dice:NAME`, may be `checkpoint.monitor` too. They are not stored: `score_by_name`
takes them from the IoU of the classes.
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
    larger_is_better: bool = True
    """Direction, for the best checkpoint and the plateau schedule."""
    is_headline: bool = False
    """Shown even if there is room for only a few scores."""


SCORES: Mapping[str, Score] = {
    score.name: score
    for score in (
        Score("miou", "mIoU", is_headline=True),
        Score("mean_dice", "mean Dice", is_headline=True),
        Score("miou_foreground", "foreground mIoU"),
        Score("mean_dice_foreground", "foreground Dice", is_headline=True),
        Score("pixel_accuracy", "pixel accuracy", is_headline=True),
        Score("loss", "loss", larger_is_better=False, is_headline=True),
        Score("mean_precision", "mean precision"),
        Score("mean_recall", "mean recall"),
        Score("frequency_weighted_iou", "frequency-weighted IoU"),
    )
}
"""Name -> score, in the order in which they are shown. The loss and the means over the foreground are computed apart;
all others are fields of `metrics.SegmentationScores`."""

FOREGROUND = ("miou_foreground", "mean_dice_foreground")
"""The means over all classes but the background; None for data without a background."""

HEADLINES: Mapping[str, Score] = {name: score for name, score in SCORES.items() if score.is_headline}


OTHER_HEADLINES = tuple(score for name, score in HEADLINES.items() if name not in ("miou", "loss"))
"""Scores next to mIoU, all of which are shares; mIoU and loss have separate places in tables and charts."""

CLASS_SCORES: Mapping[str, str] = {"iou": "IoU", "dice": "Dice"}
"""The kinds of scores of one class, by the word before the first colon of their names."""
CLASS_SCORE_PATTERN = rf"^({'|'.join(CLASS_SCORES)}):"


def is_background(name: str) -> bool:
    """Return True for the usual names of the class of pixels without an object, which gets no polygons."""
    return name.strip("_ ").lower() in {"background", "bg"}


def foreground_of(classes: Sequence[str]) -> Sequence[str]:
    """Return the names of all classes but the background, which is class 0 or none; empty without a background.

    >>> foreground_of(["_background_", "crack"]), foreground_of(["road", "background"])
    (['crack'], ())
    """
    return classes[1:] if classes and is_background(classes[0]) else ()


def score_named(name: str) -> Score:
    """Return a score of the table, a score of one class, or one that only a later version knows."""
    kind, _, class_name = name.partition(":")
    title = f"{CLASS_SCORES[kind]} of {class_name}" if kind in CLASS_SCORES else name
    return SCORES.get(name, Score(name, title))


def dice_of(iou: float | None) -> float | None:
    return 2 * iou / (1 + iou) if iou is not None and iou >= 0 else None


def foreground_means(iou: Sequence[float | None]) -> dict[str, float | None]:
    """Return the scores `FOREGROUND` from the IoU of all classes, of which the first is the background."""
    columns = iou[1:], map(dice_of, iou[1:])
    known = [[value for value in column if value is not None] for column in columns]
    return {name: sum(each) / len(each) if each else None for name, each in zip(FOREGROUND, known, strict=True)}


def table_of(scores: Any, foreground: Sequence[str], loss: float | None = None) -> dict[str, float | None]:
    """Return all scores of the table from `metrics.SegmentationScores`; without a `foreground`, its means are None."""
    apart = {"loss": loss, **(foreground_means(scores.iou) if foreground else dict.fromkeys(FOREGROUND))}
    return {name: apart[name] if name in apart else getattr(scores, name) for name in SCORES}


def score_by_name(
    name: str, values: Mapping[str, float | None], iou: Sequence[float | None], classes: Sequence[str]
) -> float | None:
    """Return a score of an evaluation; None if it does not exist.

    Args:
        name: a name in `SCORES`, or `iou:NAME` or `dice:NAME` for one class; everything after the first colon is the
            name of the class.
        values: the scores of the table.
        iou: IoU of each class.
        classes: names of the classes, in the order of `iou`.

    >>> score_by_name("dice:a:b", {}, [0.9, 0.5], ["a", "a:b"])
    0.6666666666666666
    """
    kind, _, class_name = name.partition(":")
    if kind not in CLASS_SCORES:
        return values.get(name)
    value = dict(zip(classes, iou, strict=False)).get(class_name)
    return dice_of(value) if kind == "dice" else value


def scored_of(name: str, iou: Sequence[Any]) -> tuple[int, int] | None:
    """Return the number of classes with an IoU that a mean averages over, and of all its classes; None for no mean."""
    averaged = iou[1:] if name in FOREGROUND else iou if name in ("miou", "mean_dice") else None
    return None if averaged is None else (count_scored(averaged), len(averaged))


def scores_text(
    values: Mapping[str, float | None],
    iou: Sequence[float | None],
    foreground: Sequence[str] = (),
    *,
    has_loss: bool = True,
) -> str:
    """Return the headline scores of an evaluation, by name, as a line; a computed loss of None was not finite.

    With a background and one other class, the Dice of that class replaces the pixel accuracy, which is high wherever
    the background is large.

    >>> scores_text({"miou": 0.5, "pixel_accuracy": 0.75, "loss": None}, [0.5, None])
    'mIoU 0.5000 over 1 of 2 classes  mean Dice -  pixel accuracy 0.7500  loss not finite'
    >>> scores_text({"miou": 0.5, "mean_dice_foreground": 0.25, "loss": 1.0}, [0.8, 0.2], ["crack"])
    'mIoU 0.5000 over 2 of 2 classes  mean Dice -  Dice of crack 0.2500  loss 1.0000'
    """
    parts = []
    for name, score in HEADLINES.items():
        shown = loss_text(values.get(name), is_known=has_loss and name == "loss")
        over = scored_of(name, iou)
        if name in FOREGROUND and len(foreground) == 1:
            parts.append(f"Dice of {foreground[0]} {shown}")
        elif name in FOREGROUND and foreground and over is not None:
            parts.append(f"{score.title} {shown} over {of_classes(*over, 'foreground classes')}")
        elif name == "miou" and over is not None:
            parts.append(f"{score.title} {shown} over {of_classes(*over)}")
        # The background fills most pixels, so the accuracy is high even if the class is never found.
        elif name not in FOREGROUND and not (name == "pixel_accuracy" and len(foreground) == 1):
            parts.append(f"{score.title} {shown}")
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


def of_classes(num_scored: int, num_classes: int, kind: str = "classes") -> str:
    """Return the classes of a mean as text: 17 of 19 classes, or of another kind of them."""
    return f"{num_scored} of {num_classes} {kind}"


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
    return "-" if value is None else f"{value:.4f}"


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
