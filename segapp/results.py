"""Results that functions of the Python API return.

In a notebook, each shows a table as the last line of a cell; histories and evaluations have `plot()`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from segapp.errors import SegappError
from segapp.scores import HEADLINES, SCORES, count_scored

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

_MOST_ROWS = 20
"""Rows of a table in a notebook; of more, the first and the last ones are shown."""


class _Score(property):
    """A score as a property of its result."""

    def __init__(self, doc: str) -> None:
        super().__init__(lambda result: result.scores[self._name])
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:

        def __get__(self, result: Any, owner: type | None = None) -> float | None: ...  # type: ignore[override]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class _Scored:
    """Scores of an evaluation.

    Attributes:
        scores: name -> score, for each name of `segapp.scores.SCORES`; None if a value does not exist: a mean over no
            class, a loss that was not finite, or the loss of an ensemble of models with different losses.
        iou: class -> IoU; None for a class that does not occur.
        num_images: number of evaluated images.
    """

    scores: dict[str, float | None]
    iou: dict[str, float | None]
    num_images: int | None = None

    miou = _Score("Mean IoU of the classes that occur in the targets or the predictions.")
    mean_dice = _Score("Mean Dice score (F1) of the classes.")
    miou_foreground = _Score("Mean IoU without the background; None for data without one.")
    mean_dice_foreground = _Score("Mean Dice score without the background; None for data without one.")
    pixel_accuracy = _Score("Share of the valid pixels with a correct prediction.")
    loss = _Score("Mean loss.")
    mean_precision = _Score("Mean precision of the classes.")
    mean_recall = _Score("Mean recall (class accuracy) of the classes.")
    frequency_weighted_iou = _Score("Mean IoU of the classes, weighted by their pixels.")

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.iou)

    @property
    def num_scored(self) -> int:
        """Number of classes that `miou` averages over."""
        return count_scored(list(self.iou.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Scored) and type(other) is type(self) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(tuple(self.scores.values()))

    def _compared(self) -> dict[str, Any]:
        return vars(self)

    def _headlines(self) -> str:
        return ", ".join(f"{name}={_shown(self.scores[name])}" for name in HEADLINES)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Evaluated(_Scored):
    """One evaluation during a training, with its scores.

    Attributes:
        epoch: counted from 1.
        step: optimizer updates made.
        train_loss: mean training loss of the epoch so far, as `segapp ls` shows it; None if it was not finite.
        val_s: seconds that it took.
    """

    epoch: int
    step: int
    train_loss: float | None
    val_s: float | None = None

    def __repr__(self) -> str:
        return f"Evaluated(epoch={self.epoch}, step={self.step}, {self._headlines()}, {self.num_classes} classes)"


class History(tuple[Evaluated, ...]):
    """The evaluations of a run, in order; a part of it, such as `history[-3:]`, is a `History` too."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary per evaluation, with a key `iou NAME` per class: `pandas.DataFrame(history.rows())`."""
        plain = ("epoch", "step", "train_loss", "num_images", "val_s", "num_scored")
        return [
            {**{name: getattr(row, name) for name in plain}, **row.scores}
            | {f"iou {name}": value for name, value in row.iou.items()}
            for row in self
        ]

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the losses and, on a second axis, mIoU and mean Dice by step; return the axes of the losses.

        Args:
            ax: axes of matplotlib to draw on; None: new ones.

        Raises:
            SegappError: matplotlib is not installed.
        """
        ax = _axes(ax)
        steps = [row.step for row in self]
        for label, values in (
            ("training loss", [row.train_loss for row in self]),
            ("validation loss", [row.loss for row in self]),
        ):
            ax.plot(steps, _drawn(values), marker=".", linestyle="--", label=label)
        scores = ax.twinx()
        for name, color in (("miou", "C2"), ("mean_dice", "C3")):
            scores.plot(steps, _drawn([row.scores[name] for row in self]), color, marker="o", label=SCORES[name].title)
        ax.set(xlabel="step", ylabel="loss")
        ax.locator_params(axis="x", integer=True)
        scores.set(ylabel="score", ylim=(0, 1))
        lines = [*ax.lines, *scores.lines]
        ax.legend(lines, [str(line.get_label()) for line in lines])
        return ax

    @overload
    def __getitem__(self, key: SupportsIndex) -> Evaluated: ...
    @overload
    def __getitem__(self, key: slice) -> History: ...
    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return History(found) if isinstance(key, slice) else found

    def __add__(self, other: Any) -> History:
        return History((*self, *other))

    def __repr__(self) -> str:
        return f"<History: {len(self)} evaluations, the last is {self[-1]!r}>" if self else "<History: no evaluation>"

    def _repr_html_(self) -> str:
        names = ("epoch", "step", "train_loss", *HEADLINES)
        return _table([{name: row[name] for name in names} for row in self.rows()])


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult:
    """Result of a training.

    Attributes:
        run: folder of the run.
        is_finished: False if it was stopped before its end.
        reason: why it ended.
        step: optimizer updates of the run, including the ones before a resume.
        history: all evaluations of the run, including the ones before a resume.
    """

    run: Path
    is_finished: bool
    reason: str
    step: int
    history: History

    @property
    def val(self) -> Evaluated | None:
        """The last evaluation; None without one."""
        return self.history[-1] if self.history else None

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the history; see `History.plot`."""
        return self.history.plot(ax=ax)

    def __repr__(self) -> str:
        return (
            f"TrainResult(run={str(self.run)!r}, is_finished={self.is_finished}, reason={self.reason!r}, "
            f"step={self.step},\n  history={self.history!r})"
        )

    def _repr_html_(self) -> str:
        head = f"{self.run}: {'finished' if self.is_finished else 'stopped'} at step {self.step}, {self.reason}"
        return f"<p>{html.escape(head)}</p>{self.history._repr_html_()}"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EvalResult(_Scored):
    """Result of an evaluation: everything that `segapp eval` prints; `print(result)` shows the same table.

    With groups of classes, `scores` has `groups_miou` too.

    Attributes:
        split: name of the data split.
        confusion: pixels (C, C); the row is the class of the target, the column the predicted class. With several
            classes per pixel (C, 2, 2).
        dice: class -> Dice score (F1); None for a class that does not occur, as in the next two.
        precision: class -> precision.
        recall: class -> recall.
        groups: group of classes -> its IoU; empty if the data set has no groups.
        checkpoints: the evaluated checkpoints; several of an ensemble.
    """

    split: str
    confusion: NDArray[np.int64]
    dice: dict[str, float | None]
    precision: dict[str, float | None]
    recall: dict[str, float | None]
    groups: dict[str, float | None]
    checkpoints: list[Path]
    text: str = field(default="")

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary of scores per class, worst IoU first: `pandas.DataFrame(result.rows())`."""
        columns = {"iou": self.iou, "dice": self.dice, "precision": self.precision, "recall": self.recall}
        names = sorted(self.iou, key=lambda name: (self.iou[name] is None, self.iou[name] or 0.0))
        return [{"class": name, **{key: values[name] for key, values in columns.items()}} for name in names]

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the IoU of each class as bars, the worst at the top, and return the axes.

        Args:
            ax: axes of matplotlib to draw on; None: new ones.

        Raises:
            SegappError: matplotlib is not installed.
        """
        ax = _axes(ax)
        rows = self.rows()[::-1]
        ax.barh([row["class"] for row in rows], _drawn([row["iou"] for row in rows]))
        ax.set(xlabel="IoU", xlim=(0, 1), title=f"{self.split}: mIoU {_shown(self.miou)}")
        return ax

    def _compared(self) -> dict[str, Any]:
        return {**vars(self), "confusion": self.confusion.tolist(), "text": ""}

    def __str__(self) -> str:
        """Return the lines that `segapp eval` prints."""
        return self.text

    def __repr__(self) -> str:
        facts = f"split={self.split!r}, num_images={self.num_images}, {self._headlines()}"
        return f"EvalResult({facts}, {self.num_classes} classes)"

    def _repr_html_(self) -> str:
        return f"{_table(self.rows())}<p>{html.escape(self.text.splitlines()[-1] if self.text else repr(self))}</p>"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PredictResult:
    """Result of a prediction of files.

    Attributes:
        paths: the files that were written, in the order of the images.
        problems: a sentence for each file that could not be read.
        notes: sentences about the prediction, such as the use of tiles.
        num_images: number of predicted images and frames.
        num_px: their pixels.
        seconds: duration.
    """

    paths: list[Path]
    problems: list[str]
    notes: list[str]
    num_images: int
    num_px: int
    seconds: float

    def __repr__(self) -> str:
        return (
            f"PredictResult({self.num_images} images and {self.num_px} pixels in {self.seconds:.1f} s, "
            f"{len(self.paths)} files written, {len(self.problems)} problems, {len(self.notes)} notes)"
        )

    def _repr_html_(self) -> str:
        words = [repr(self), *self.problems, *self.notes]
        return _table([{"file": str(path)} for path in self.paths]) + "".join(f"<p>{html.escape(w)}</p>" for w in words)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else str(value)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same keys as a table in HTML; of many rows the first and the last ones."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])
    lines = ["".join(f"<td>{html.escape(_shown(value))}</td>" for value in row.values()) for row in rows]
    if len(lines) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rest = f'<td colspan="{len(rows[0])}">… {len(lines) - 2 * half} more</td>'
        lines = [*lines[:half], rest, *lines[-half:]]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _drawn(values: Sequence[float | None]) -> list[float]:
    """Return the values to draw; NaN leaves a gap."""
    return [float("nan") if value is None else value for value in values]


def _axes(ax: Axes | None) -> Axes:
    """Return the given axes of matplotlib, or new ones."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError:
        raise SegappError("plot() needs matplotlib, which is not installed: run `pip install matplotlib`") from None
    return pyplot.subplots(layout="constrained")[1]
