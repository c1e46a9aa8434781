"""Prints a training's events as throttled lines."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from segapp.run.events import (
    Alert,
    Checkpoint,
    CommandAnswer,
    EpochStart,
    Event,
    Heartbeat,
    RunEnd,
    RunStart,
    Step,
    Val,
    Weights,
)
from segapp.run.words import duration, printable
from segapp.scores import HEADLINES, loss_text, score_named, scores_text
from segapp.training.signals import EXIT_STOPPED_AND_SAVED
from segapp.waiting import EVERY_S


def iou_table(classes: Sequence[str], iou: Sequence[float | None]) -> list[str]:
    """Return one aligned line per class, worst IoU first, absent classes last."""
    width = max((len(printable(name)) for name in classes), default=0)
    return [
        f"{printable(classes[i]):<{width}}  {'absent' if (value := iou[i]) is None else f'{value:.4f}'}"
        for i in worst_first(iou)
    ]


def worst_first(iou: Sequence[float | None]) -> list[int]:
    return sorted(range(len(iou)), key=lambda i: (iou[i] is None, iou[i] or 0.0))


class PlainReporter:
    """Prints a run's events."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = 2.0) -> None:
        self.stream = stream or sys.stdout
        self.is_error_shown = False
        self.interval_s = interval_s
        self._start: RunStart | None = None
        self._last_line_s = -1e9

    def handle(self, event: Event) -> None:
        match event:
            case RunStart():
                self._show_start(event)
            case Weights():
                for line in event.message.splitlines():
                    self._line(printable(line))
            case EpochStart(num_unfrozen=int(num_unfrozen)):
                self._line(f"epoch {event.epoch}: {num_unfrozen / 1e6:.2f} M frozen parameters are trained now")
            case Step():
                self._show_step(event)
            case Val():
                foreground = [] if self._start is None else list(map(printable, self._start.foreground))
                scores = scores_text({name: event.score(name) for name in HEADLINES}, event.iou, foreground)
                self._line(f"epoch {event.epoch}  val  {scores}{self._monitored(event, scores)}")
            case Heartbeat(num_evaluated=int(done)) if time.monotonic() - self._last_line_s >= EVERY_S:
                self._last_line_s = time.monotonic()
                self._line(f"evaluating: {done:,} of {event.num_images:,} images")
            case Checkpoint():
                best = " (best)" if event.is_best else ""
                self._line(f"saved {printable(event.path)} at step {event.step}{best}")
            case CommandAnswer():
                reason = f": {printable(event.reason)}" if event.reason else ""
                self._line(f"{printable(event.command)} by {printable(event.by)}: {event.status}{reason}")
            case Alert():
                self._line(f"alert: {printable(event.message)}")
            case RunEnd():
                # The command prints the error of a failed training.
                if event.status != "failed" or not self.is_error_shown:
                    again = "; --resume continues from it" if event.exit_code == EXIT_STOPPED_AND_SAVED else ""
                    self._line(f"{event.status}: {printable(event.reason or '')}{again}")

    def close(self) -> None:
        """Do nothing: every line is flushed."""

    def _line(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a closed pipe or terminal must not end a training
            print(text, file=self.stream, flush=True)

    def _show_start(self, event: RunStart) -> None:
        self._start = event
        resumed = event.resumed_from_step
        start = f", resumed at step {resumed}" if resumed is not None else ""
        length = f"{event.epochs} epochs" if event.steps is None else f"{event.steps} steps in {event.epochs} epochs"
        self._line(
            f"{event.num_params / 1e6:.2f} M parameters, {len(event.classes)} classes, "
            f"batch {event.batch_size}, {event.precision}, {length} of {event.steps_per_epoch} steps "
            f"on {', '.join(device.device for device in event.devices)}{start}"
        )
        if event.num_trainable is not None and event.num_trainable < event.num_params:
            until = "the whole run" if event.freeze_epochs is None else f"{event.freeze_epochs} epochs"
            self._line(f"{event.num_trainable / 1e6:.2f} M parameters are trained, the others frozen for {until}")

    def _monitored(self, event: Val, shown: str) -> str:
        """Return the score that selects the best checkpoint, to follow the scores that are shown, unless it is one."""
        start = self._start
        if start is None or start.monitor is None or start.monitor in HEADLINES:
            return ""
        title, value = printable(score_named(start.monitor).title), event.score(start.monitor, start.classes)
        return "" if title in shown else f"  {title} {loss_text(value, is_known=False)}"

    def _show_step(self, event: Step) -> None:
        if self._start is None:
            return
        now = time.monotonic()
        per_epoch = self._start.steps_per_epoch
        in_epoch = event.step - (event.epoch - 1) * per_epoch
        # The last step of an epoch is shown in any case, before the line of the evaluation.
        if now - self._last_line_s < self.interval_s and in_epoch < per_epoch:
            return
        self._last_line_s = now
        more = "".join(
            f"  {printable(name)} {loss_text(value, is_known=True, spec='.4g')}"
            for name, value in (event.terms or {}).items()
        )
        more += f"  skipped {event.skipped}" if event.skipped else ""
        self._line(
            f"epoch {event.epoch}/{self._start.epochs}  step {in_epoch}/{per_epoch}  "
            f"loss {loss_text(event.loss, is_known=True)}  lr {loss_text(event.lr, is_known=True, spec='.2e')}  "
            f"{event.images_per_s or 0:.1f} images/s  data wait {100 * (event.data_wait_frac or 0):.0f} %  "
            f"eta {duration(event.eta_epoch_s)} epoch, {duration(event.eta_run_s)} run{more}"
        )
