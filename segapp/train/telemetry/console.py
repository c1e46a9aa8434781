"""The plain face of a training: throttled lines, and a progress bar where there is a terminal. It only reads events."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from segapp.run.text import printable


def format_duration(seconds: float | None) -> str:
    """Seconds as 0:07, 12:34 or 1:02:03; "-" for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def iou_table(classes: Sequence[str], iou: Sequence[float | None]) -> list[str]:
    """One aligned line a class, worst first, absent ones last."""
    width = max((len(printable(name)) for name in classes), default=0)
    order = sorted(range(len(classes)), key=lambda i: (iou[i] is None, iou[i] or 0.0))
    return [
        f"{printable(classes[i]):<{width}}  {'absent' if (value := iou[i]) is None else f'{value:.4f}'}" for i in order
    ]


def shown(value: float | None) -> str:
    """A part of the loss."""
    return "n/a" if value is None else f"{value:.4g}"


class PlainReporter:
    """Prints a run's events.

    Args:
        stream: where the lines go.
        interval_s: at least this long between two step lines.
    """

    def __init__(self, stream: TextIO | None = None, interval_s: float = 2.0) -> None:
        self.stream = stream or sys.stdout
        self.interval_s = interval_s
        self._bar: Any = None
        self._start: dict[str, Any] = {}
        self._last_line_s = -1e9

    def __call__(self, event: dict[str, Any]) -> None:
        """Takes one event as it stands in events.jsonl."""
        show = getattr(self, f"_show_{event['type']}", None)
        if show is not None:
            show(event)

    def close(self) -> None:
        """Takes the progress bar off the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        try:
            print(text, file=self.stream, flush=True)
        except (OSError, ValueError):  # a closed pipe or terminal must not end a training
            return
        if self._bar is not None:
            self._bar.refresh()

    def _show_run_start(self, event: dict[str, Any]) -> None:
        self._start = event
        resumed = event.get("resumed_from_step")
        start = f", resumed at step {resumed}" if resumed is not None else ""
        self._line(
            f"{event['num_params'] / 1e6:.2f} M parameters, {len(event['classes'])} classes, "
            f"batch {event['batch_size']}, {event['epochs']} epochs of {event['steps_per_epoch']} steps "
            f"on {', '.join(device['device'] for device in event['devices'])}{start}"
        )

    def _show_weights(self, event: dict[str, Any]) -> None:
        for line in event["message"].splitlines():
            self._line(printable(line))

    def _show_epoch_start(self, event: dict[str, Any]) -> None:
        self._open_bar(event["epoch"])

    def _open_bar(self, epoch: int) -> None:
        if not self.stream.isatty():
            return
        from tqdm import tqdm

        self.close()
        self._bar = tqdm(
            total=self._start["steps_per_epoch"],
            desc=f"epoch {epoch}/{self._start['epochs']}",
            unit="step",
            leave=False,
            file=self.stream,
            dynamic_ncols=True,
        )

    def _show_step(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        per_epoch = self._start["steps_per_epoch"]
        in_epoch = event["step"] - (event["epoch"] - 1) * per_epoch
        if self._bar is None:
            self._open_bar(event["epoch"])
        if self._bar is not None:
            self._bar.update(max(0, in_epoch - self._bar.n))
        if now - self._last_line_s < self.interval_s and in_epoch < per_epoch:
            return
        self._last_line_s = now
        loss = "n/a" if event["loss"] is None else f"{event['loss']:.4f}"
        more = "".join(f"  {printable(name)} {shown(value)}" for name, value in (event.get("terms") or {}).items())
        more += f"  skipped {event['skipped']}" if event.get("skipped") else ""
        self._line(
            f"epoch {event['epoch']}/{self._start['epochs']}  step {in_epoch}/{per_epoch}  loss {loss}  "
            f"lr {event['lr']:.2e}  {event['images_per_s'] or 0:.1f} images/s  "
            f"data wait {100 * (event['data_wait_frac'] or 0):.0f} %  "
            f"eta {format_duration(event['eta_epoch_s'])} epoch, {format_duration(event['eta_run_s'])} run{more}"
        )

    def _show_val(self, event: dict[str, Any]) -> None:
        miou = "n/a" if event["miou"] is None else f"{event['miou']:.4f}"
        loss = "n/a" if event["loss"] is None else f"{event['loss']:.4f}"
        accuracy = "n/a" if event["pixel_accuracy"] is None else f"{event['pixel_accuracy']:.4f}"
        self._line(f"epoch {event['epoch']}  val  mIoU {miou}  loss {loss}  pixel accuracy {accuracy}")

    def _show_checkpoint(self, event: dict[str, Any]) -> None:
        best = " (best)" if event.get("is_best") else ""
        self._line(f"saved {printable(event['path'])} at step {event['step']}{best}")

    def _show_command(self, event: dict[str, Any]) -> None:
        reason = f": {printable(event['reason'])}" if event.get("reason") else ""
        self._line(f"{printable(event['command'])} by {printable(event['by'])}: {event['status']}{reason}")

    def _show_alert(self, event: dict[str, Any]) -> None:
        self._line(f"alert: {printable(event['message'])}")

    def _show_run_end(self, event: dict[str, Any]) -> None:
        self.close()
        self._line(f"{event['status']}: {printable(event.get('reason') or '')}")
