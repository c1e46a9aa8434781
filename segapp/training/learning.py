"""What the evaluations of a training say about its learning: alerts that name the keys to change. Pure."""

import contextlib
import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

from segapp.config.load import config_of
from segapp.config.options import LOSSES
from segapp.errors import ConfigError, some_names
from segapp.run.events import Alert, RunStart, Val, parse_event
from segapp.scores import score_named

Reason = Literal["one_class", "unpredicted", "overfitting"]

NUM_UNPREDICTED = 3
"""Evaluations in a row in which a class has an IoU of 0. One or two say little: scores of neighboring evaluations of a
short run jump (mIoU 0.81, 0.53, 0.94), and a rare class is often learned after the others."""
NUM_NO_BETTER = 5
"""Evaluations in a row without a better score: more than a jump, and few enough to stop a run that no longer gains."""
LEAST_FALL = 0.1
"""Share by which the training loss falls over these evaluations. At the end of a schedule it falls by less than the
noise of its mean, and a score that stays is then no sign of overfitting."""


class LearningWatch:
    """Folds the evaluations of a run, in order; each alert is raised at most once, also across resumes.

    Args:
        start: the classes and the monitored score.
        config: the config as plain values.
    """

    def __init__(self, start: RunStart, config: Mapping[str, Any]) -> None:
        self._start, self._score = start, score_named(start.monitor or "miou")
        self._has_one_class_per_pixel = config["data"]["multilabel"] is None
        self._moves = _moves(start, config)
        self._unpredicted = [0] * len(start.classes)
        """Evaluations in a row in which no pixel of a class of the masks was predicted right, by class."""
        self._num_one_class = 0
        self._best = -math.inf
        """The best score before the recent evaluations."""
        self._recent: deque[tuple[float, float]] = deque()
        """The score, larger is better, and the training loss of the last evaluations; -inf and nan if unknown."""
        self._told: set[str] = set()
        """Reasons of the alerts that were raised, except for `unpredicted`."""
        self._told_classes: set[str] = set()
        """Classes that an alert has named as never predicted."""

    def replay(self, raws: Iterable[dict[str, Any]], step: int) -> None:
        """Fold the `val` and `alert` events of a run that resumes after a step."""
        vals: list[Val] = []
        for raw in raws:
            with contextlib.suppress(ValueError):  # a damaged line says nothing
                event = parse_event(raw)
                if isinstance(event, Val):
                    vals.append(event)
                elif isinstance(event, RunStart) and event.resumed_from_step is not None:
                    vals = [val for val in vals if val.step <= event.resumed_from_step]  # the others are repeated
                elif isinstance(event, Alert) and event.kind == "learning":
                    self._note(event)
        for val in vals:
            if val.step <= step:
                self._fold(val)

    def observe(self, val: Val, frequency: Sequence[float | None] = (), *, is_last: bool = False) -> list[Alert]:
        """Fold an evaluation, and return new alerts.

        Args:
            val: the evaluation.
            frequency: share of the validation pixels, by class; empty if unknown.
            is_last: True at the end of the run, where one evaluation is enough for an alert about a single class.
        """
        self._fold(val)
        shown = {name: _with_share(name, share) for name, share in zip_longest(self._start.classes, frequency)}
        counts = dict(zip(self._start.classes, self._unpredicted, strict=True))
        found: list[Alert] = []

        def tell(reason: Reason, classes: Sequence[str], message: str) -> None:
            alert = Alert(kind="learning", reason=reason, classes=list(classes), message=message, step=val.step)
            found.append(alert)
            self._note(alert)

        if self._num_one_class >= (1 if is_last else NUM_UNPREDICTED) and "one_class" not in self._told:
            only = next(name for name, value in zip(shown, val.precision or (), strict=True) if value is not None)
            silent = [name for name, count in counts.items() if count]
            others = some_names([shown[name] for name in silent], 4)
            text = f"every pixel is predicted as {shown[only]}, but the masks have other classes, {others}"
            tell("one_class", silent, f"{text}: {self._moves}")
        for name, count in counts.items():
            if count >= NUM_UNPREDICTED and name not in self._told_classes:
                text = f"{shown[name]} has an IoU of 0 in {count} evaluations in a row"
                tell("unpredicted", [name], f"{text}: {self._moves}")
        fall = self._fall_without_gain()
        # A class that is never predicted keeps the score down, which is not overfitting.
        if fall is not None and not any(self._unpredicted) and "overfitting" not in self._told:
            seen = f"the training loss fell by {fall:.0%} in {NUM_NO_BETTER} evaluations without a better"
            move = "set train.early_stop, augment more (data.scale, data.photometric), or train fewer steps"
            tell("overfitting", [], f"{seen} {self._score.title}: the model overfits: {move}")
        return found

    def _note(self, alert: Alert) -> None:
        """Keep what an alert says; the classes of a single class everywhere get no alerts of their own."""
        self._told |= {alert.reason or ""} - {"unpredicted"}
        self._told_classes |= set(alert.classes or ())

    def _fold(self, val: Val) -> None:
        value = val.score(self._score.name, self._start.classes)
        sign = 1 if self._score.larger_is_better else -1
        loss = math.nan if val.steps_loss is None else val.steps_loss
        self._recent.append((-math.inf if value is None else sign * value, loss))
        if len(self._recent) > NUM_NO_BETTER:
            self._best = max(self._best, self._recent.popleft()[0])
        unknown: list[float | None] = [None] * len(self._unpredicted)  # a line may have neither
        predicted, in_masks = ([share is not None for share in each or unknown] for each in (val.precision, val.recall))
        self._unpredicted = [
            count + 1 if share == 0 else 0
            for count, share in zip(self._unpredicted, val.recall or unknown, strict=True)
        ]
        is_one = self._has_one_class_per_pixel and sum(predicted) == 1 and sum(in_masks) > 1
        self._num_one_class = self._num_one_class + 1 if is_one else 0

    def _fall_without_gain(self) -> float | None:
        """Return the share by which the training loss fell while the score did not improve; None if it did."""
        if len(self._recent) < NUM_NO_BETTER or not math.isfinite(self._best) or self._best >= 1:  # 1: nothing to gain
            return None
        scores, losses = zip(*self._recent, strict=True)
        fall = (losses[0] - losses[-1]) / abs(losses[0]) if losses[0] else 0.0
        return fall if max(scores) <= self._best and fall > LEAST_FALL else None


def _with_share(name: str, share: float | None) -> str:
    """Return a class with its share of the validation pixels: 'crack' (1.6 % of the validation pixels)."""
    return repr(name) if share is None else f"{name!r} ({100 * share:.2g} % of the validation pixels)"


def _moves(start: RunStart, config: Mapping[str, Any]) -> str:
    """Return the changes to try, the most helpful first; only those that the config lacks and accepts."""
    data, loss, train = config["data"], config["loss"], config["train"]
    has_overlap = any(LOSSES[term["name"]].is_overlap for term in (loss, *loss["plus"]) if term["name"] in LOSSES)
    sampling = "foreground" if start.foreground else "class-balanced"
    words = [
        *([] if has_overlap else ["loss.plus=[{name: dice}]"]),
        *(["loss.class_weights=enet"] if loss["class_weights"] is None else []),
        *([f"data.sampling={sampling}"] if data["sampling"] == "uniform" else []),
    ]
    accepted = []
    for word in words:
        try:
            config_of(copy.deepcopy(dict(config)), [word])
        except ConfigError:
            continue
        accepted.append(f"'{word}'" if " " in word else word)
    length = "train.epochs" if train["steps"] is None else "train.steps"
    return f"try {', then '.join([*accepted, f'a larger {length}', 'another optim.lr'])}"
