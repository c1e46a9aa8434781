"""The lines that a sweep prints while it runs."""

from __future__ import annotations

import time
from typing import Any, TextIO

from segapp.run.sweep import SweepRun
from segapp.run.words import duration, printable
from segapp.scores import count_scored, loss_text, of_classes
from segapp.training.signals import EXIT_STOPPED_AND_SAVED
from segapp.view.summary import small_view
from segapp.view.view import View, fold_events

INTERVAL_S = 10.0
"""Time between two lines of one training."""


class Overview:
    """Prints a line at each start and end of a training, and one every ten seconds while it runs."""

    def __init__(self, stream: TextIO, num_runs: int, num_done: int, num_slots: int) -> None:
        self._stream = stream
        self._num_runs, self._num_done, self._num_slots = num_runs, num_done, num_slots
        self._next_line_s: dict[str, float] = {}
        self._views: dict[str, View] = {}
        self._seconds: list[float] = []
        self._held: set[str] = set()
        self.num_failed = 0

    def line(self, text: str) -> None:
        """Print a line; a closed pipe or terminal does not end a sweep."""
        try:
            print(printable(text), file=self._stream, flush=True)
        except (OSError, ValueError):
            return

    def started(self, run: SweepRun, devices: str, *, is_resumed: bool) -> None:
        """Print that a training begins."""
        self._next_line_s[run.name] = time.monotonic() + INTERVAL_S
        self.line(f"{run.name}: {'resumed' if is_resumed else 'started'}{f' on {devices}' if devices else ''}")

    def held(self, run: SweepRun) -> None:
        """Print once that another trainer holds a run."""
        if run.name not in self._held:
            self._held.add(run.name)
            self.line(f"{run.name}: another process is training it; waiting for its end")

    def event(self, run: SweepRun, raw: dict[str, Any]) -> None:
        """Process an event of a training, and print its progress if it is time."""
        view = self._views.setdefault(run.name, small_view())
        fold_events(view, [raw])
        if raw["type"] == "step" and time.monotonic() >= self._next_line_s.get(run.name, 0.0):
            self._next_line_s[run.name] = time.monotonic() + INTERVAL_S
            epochs = view.start.epochs if view.start is not None else "?"
            self.line(
                f"{run.name}: epoch {raw.get('epoch')}/{epochs}  step {raw.get('step')}  "
                f"loss {loss_text(view.loss.mean, is_known=True)} (epoch mean)  mIoU {self._miou(run)}  "
                f"eta {duration(raw.get('eta_run_s'))}"
            )

    def ended(self, run: SweepRun, seconds: float, code: int) -> None:
        """Print that a training has finished or was stopped."""
        if code == 0:
            self._num_done += 1
            self._seconds += [seconds] if seconds else []
            self.line(f"{run.name}: ended after {duration(seconds)}, mIoU {self._miou(run)}; {self._rest()}")
        else:
            saved = "a checkpoint was saved" if code == EXIT_STOPPED_AND_SAVED else "there was nothing to save yet"
            self.line(f"{run.name}: stopped; {saved}")

    def failed(self, run: SweepRun, code: int, reason: str) -> None:
        """Print that a training has failed."""
        self._num_done += 1
        self.num_failed += 1
        self.line(f"{run.name}: failed with exit code {code}: {reason}; {self._rest()}")

    def _rest(self) -> str:
        left = self._num_runs - self._num_done
        if not left or not self._seconds:
            return f"{self._num_done} of {self._num_runs} done"
        rest_s = sum(self._seconds) / len(self._seconds) * left / self._num_slots
        return f"{self._num_done} of {self._num_runs} done, about {duration(rest_s)} left"

    def _miou(self, run: SweepRun) -> str:
        """Return the mIoU of a run's last evaluation, with its number of classes."""
        vals = self._views[run.name].vals if run.name in self._views else ()
        if not vals or vals[-1].miou is None:
            return "-"
        return f"{vals[-1].miou:.4f} over {of_classes(count_scored(vals[-1].iou), len(vals[-1].iou))}"
