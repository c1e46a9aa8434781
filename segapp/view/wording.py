"""Events as lines of text, and numbers as text. Text from data is printable and literal."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from segapp.run.events import (
    Alert,
    Checkpoint,
    CommandAnswer,
    EpochStart,
    Event,
    Gpu0Bsz,
    Oom,
    RunEnd,
    RunStart,
    Val,
    Weights,
)
from segapp.run.scores import NOT_FINITE, count_scored, with_count
from segapp.run.words import printable
from segapp.view.evaluations import PastVal


class LogLine(NamedTuple):
    """One line of the events pane."""

    t: float
    kind: str
    """At most five letters; also selects the colour."""
    text: str
    event: Event | None = None
    """The whole event."""


def log_line(event: Event, classes: Sequence[str], previous: Val | PastVal | None) -> LogLine | None:
    """Return the log line of an event; None for events that are not logged."""
    line = _line(event, classes, previous)
    return None if line is None else line._replace(event=event)


def _line(event: Event, classes: Sequence[str], previous: Val | PastVal | None) -> LogLine | None:
    if isinstance(event, RunStart):
        return LogLine(event.t, "start", _start(event))
    if isinstance(event, Weights):
        return LogLine(event.t, "load", printable(event.message.partition("\n")[0]))
    if isinstance(event, EpochStart):
        split = f", split {dots(event.split)}" if event.split else ""
        thawed = f", {event.num_thawed / 1e6:.1f} M frozen parameters thaw" if event.num_thawed else ""
        return LogLine(event.t, "epoch", f"{event.epoch} begins, lr {learning_rate(event.lr)}{split}{thawed}")
    if isinstance(event, Val):
        return LogLine(event.t, "val", _val(event, classes, previous))
    if isinstance(event, Checkpoint):
        return LogLine(event.t, "best" if event.is_best else "saved", _checkpoint(event))
    if isinstance(event, CommandAnswer):
        return LogLine(event.t, "ctl", printable(_answer(event)))
    if isinstance(event, Gpu0Bsz):
        is_answered = event.status == "cancelled" and event.id is not None  # by the line of the command
        return None if is_answered else LogLine(event.t, "gpu0", _gpu0_bsz(event))
    if isinstance(event, Oom):
        return LogLine(event.t, "oom", printable(_oom(event)))
    if isinstance(event, Alert):
        return LogLine(event.t, "alert", printable(event.message))
    if isinstance(event, RunEnd):
        reason = f": {event.reason}" if event.reason else ""
        return LogLine(event.t, "end", printable(f"{event.status}{reason}"))
    return None


def number(value: float | None, digits: int = 3) -> str:
    """Return a loss or score with about `digits` significant digits; "-" for None and nan."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        decimals = max(0, digits - max(1, math.floor(math.log10(abs(value))) + 1)) if abs(value) >= 1 else digits
        return f"{value:.{decimals}f}"
    return _short_exponent(f"{value:.{max(0, digits - 2)}e}")


def loss(value: float | None, digits: int = 3) -> str:
    """Return the loss of an evaluation or a step that has been made: one that is None was not finite."""
    return NOT_FINITE if value is None or math.isnan(value) else number(value, digits)


def miou(val: Val | PastVal) -> str:
    """Return the mIoU of an evaluation with the number of its classes: 0.557 (17/19)."""
    return with_count(number(val.miou), count_scored(val.iou), len(val.iou))


def best_miou(best: Val | PastVal, last: Val | PastVal) -> str:
    """Return the best mIoU: 0.557 e7; with the number of its classes if that differs from the last evaluation's."""
    has_same = (count_scored(best.iou), len(best.iou)) == (count_scored(last.iou), len(last.iou))
    return f"{number(best.miou) if has_same else miou(best)} e{best.epoch}"


def learning_rate(value: float | None) -> str:
    """Return 0.0099 as 9.9e-3."""
    return "-" if value is None or not math.isfinite(value) else _short_exponent(f"{value:.1e}")


def duration(seconds: float | None) -> str:
    """Return seconds as 45s, 4m05s, 7h26m or 3d04h; "-" for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    seconds = round(max(seconds, 0.0))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 86_400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    return f"{min(seconds // 86_400, 9999)}d{seconds % 86_400 // 3600:02}h"


def age(seconds: float | None) -> str:
    """Return an age as 0.4s ago, 12s ago or 3m10s ago."""
    if seconds is None:
        return "no data"
    return f"{seconds:.1f}s ago" if seconds < 9.95 else f"{duration(seconds)} ago"


def gib(mib: float | None) -> str:
    """Return MiB as GiB with one decimal; "n/a" if unknown."""
    if mib is None or not math.isfinite(mib):
        return "n/a"
    return f"{mib / 1024:.1f}" if mib < 99.95 * 1024 else f"{mib / 1024:.0f}"


def memory_text(mib: float | None) -> str:
    """Return MiB as GiB with one decimal, less than 1 GiB as `312M`; "n/a" if unknown."""
    return f"{mib:.0f}M" if mib is not None and 0 < mib < 1023.5 else gib(mib)


def percent(frac: float | None) -> str:
    """Return 0.96 as 96%; "n/a" for None."""
    return "n/a" if frac is None or not math.isfinite(frac) else f"{100 * frac:.0f}%"


def dots(split: Sequence[int] | None) -> str:
    """Return a split as 4·10·9·9."""
    return "·".join(map(str, split)) if split else "-"


def share_text(value: int | None) -> str:
    """Return a `gpu0_bsz` as text: "even" for None."""
    return "even" if value is None else str(value)


def fit_cells(text: str, width: int) -> str:
    """Return the text in exactly `width` cells: cut with an ellipsis, or padded; wide characters count as two."""
    if width <= 0:
        return ""
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…"
    return set_cell_size(text, width)


def clip(text: str, width: int) -> str:
    """Return the text in at most `width` cells."""
    return text if cell_len(text) <= width else fit_cells(text, width)


def plural(count: int, word: str) -> str:
    """Return `1 class`, `2 classes`."""
    ending = "" if count == 1 else "es" if word.endswith("s") else "s"
    return f"{count} {word}{ending}"


def _short_exponent(text: str) -> str:
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"


def _start(event: RunStart) -> str:
    devices = [printable(device.device) for device in event.devices]
    what = (
        f"{plural(len(event.classes), 'class')}, {event.num_params / 1e6:.1f} M parameters, batch {event.batch_size},"
        f" {plural(event.epochs, 'epoch')} of {plural(event.steps_per_epoch, 'step')} on {', '.join(devices)}"
    )
    return what if event.resumed_from_step is None else f"resumed at step {event.resumed_from_step}: {what}"


def _val(event: Val, classes: Sequence[str], previous: Val | PastVal | None) -> str:
    parts = [f"e{event.epoch} mIoU {miou(event)}"]
    if previous is not None and previous.miou is not None and event.miou is not None:
        parts[0] += f" ({event.miou - previous.miou:+.3f})"
    parts.append(f"loss {loss(event.loss)}")
    known = [(value, i) for i, value in enumerate(event.iou) if value is not None and i < len(classes)]
    if known:
        value, i = min(known)
        parts.append(f"worst {classes[i]} {number(value)}")
    if event.val_s is not None:
        parts.append(duration(event.val_s))
    return ", ".join(parts)


def _answer(event: CommandAnswer) -> str:
    canceller = re.fullmatch(r"by [0-9a-f]+ of (.+)", event.reason or "")
    if event.status == "cancelled" and canceller is not None:
        return f"{event.command.removeprefix('set ')} cancelled by {canceller[1]}"
    reason = f": {event.reason}" if event.reason else ""
    return f"{event.by}: {event.command} {event.status}{reason}"


def _oom(event: Oom) -> str:
    wanted = f", {event.requested_mib:.0f} MiB wanted" if event.requested_mib is not None else ""
    return f"{event.device} out of memory in {event.phase} after step {event.step}{wanted}: {event.action}"


def _checkpoint(event: Checkpoint) -> str:
    size = f", {event.size_bytes / 1e6:.0f} MB" if event.size_bytes else ""
    took = f" in {event.save_s:.1f} s" if event.save_s is not None else ""
    name = printable(event.path).removeprefix("checkpoints/")
    return f"{name} at step {event.step} of epoch {event.epoch}{size}{took}"


def _gpu0_bsz(event: Gpu0Bsz) -> str:
    change = f"gpu0_bsz {share_text(event.old)} → {share_text(event.new)}"
    when = f" at epoch {event.epoch}" if event.epoch is not None and event.status in ("pending", "applied") else ""
    split = f", split {dots(event.split)}" if event.split else ""
    reason = f": {printable(event.reason)}" if event.reason else ""
    return f"{change} {event.status}{when}{split}{reason}"
