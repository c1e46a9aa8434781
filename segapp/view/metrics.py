"""The metrics that the chart can show: their names, and their values over the steps of a run."""

from typing import NamedTuple

import numpy as np

from segapp.run.events import Val
from segapp.scores import HEADLINES
from segapp.view.evaluations import Floats
from segapp.view.history import LossHistory
from segapp.view.view import View

STEP_METRICS = {"lr": "learning rate", "grad_norm": "grad norm", "images_per_s": "images/s"}
"""Field of a `step` event -> title."""

VAL_METRICS = {name: score.title for name, score in HEADLINES.items() if name != "loss"}

NO_POINTS: Floats = np.empty((0, 2))

TERM, CLASS = "term ", "IoU "
"""Prefixes of the names of a loss term and of the IoU of a class."""


class Curve(NamedTuple):
    """A metric over the steps of a run."""

    history: LossHistory | None
    """Values of the steps; None for a metric of the evaluations."""
    points: Floats
    """Step and value of each evaluation that has one, float64 [evaluations, 2]."""


def metric_names(view: View) -> list[str]:
    """Return the metrics of a run, in the order of the key; the IoU of classes is chosen in their pane."""
    names = ["loss"]
    step = view.step
    names += [TERM + name for name in (step.terms or {})] if step is not None else []
    names += [name for name in VAL_METRICS if view.vals and view.vals[-1].score(name) is not None]
    names += [name for name in STEP_METRICS if step is None or getattr(step, name) is not None]
    return names


def metric_title(name: str) -> str:
    """Return the title of a metric."""
    return {**STEP_METRICS, **VAL_METRICS}.get(name, name)


def chart_title(metric: str) -> str:
    """Return the title of the chart: the metric with a capital letter."""
    title = metric_title(metric)
    return title if title.startswith("mIoU") else title[:1].upper() + title[1:]


def step_field(name: str) -> str | None:
    """Return the field of `step` events with a metric's values, `terms.NAME` for a term; None for other metrics."""
    if name in STEP_METRICS:
        return name
    return f"terms.{name.removeprefix(TERM)}" if name.startswith(TERM) else None


def curve_of(view: View, name: str, series: LossHistory | None) -> Curve:
    """Return a metric of a run; the series has the values of `step_field(name)` if there is one."""
    if name == "loss":
        return Curve(view.history, _points(view, view.vals.values("loss")))
    if step_field(name) is not None:
        return Curve(series or LossHistory(), NO_POINTS)
    if name in VAL_METRICS:
        return Curve(None, _points(view, view.vals.values(name)))
    index = view.classes.index(name.removeprefix(CLASS)) if name.removeprefix(CLASS) in view.classes else -1
    return Curve(None, _points(view, view.vals.class_iou(index)))


def _points(view: View, values: Floats) -> Floats:
    """Return step and value of each evaluation that has one, float64 [evaluations, 2]."""
    return np.stack([view.vals.values("step"), values], axis=1)[~np.isnan(values)]


def class_iou(val: Val | None, index: int) -> float | None:
    """Return the IoU of a class at an evaluation; None if it was absent, or there was no evaluation."""
    return val.iou[index] if val is not None and 0 <= index < len(val.iou) else None
