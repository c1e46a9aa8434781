"""Events as lines of text, and whole events. Text from data is printable and literal."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size

from segapp.run import events
from segapp.run.words import dots, duration, learning_rate, number, plural, printable, share_text
from segapp.scores import NOT_FINITE, count_scored, with_count


class LogLine(NamedTuple):
    """One line of the events pane."""

    t: float
    kind: str
    """At most five letters; also selects the color."""
    text: str
    event: events.Event | None = None


def log_line(event: events.Event, classes: Sequence[str], previous: events.Val | None) -> LogLine | None:
    """Return the log line of an event; None for events that are not logged."""
    if isinstance(event, events.RunStart):
        kind, text = "start", _start(event)
    elif isinstance(event, events.Weights):
        kind, text = "load", printable(event.message.partition("\n")[0])
    elif isinstance(event, events.EpochStart):
        facts = f"lr {learning_rate(event.lr)}{f', split {dots(event.split)}' if event.split else ''}"
        kind, text = "epoch", f"{event.epoch} begins, {facts}"  # a line of this kind replaces the last one
        if event.num_unfrozen:
            number_text = f"{event.num_unfrozen / 1e6:.1f} M"
            kind, text = "model", f"{number_text} frozen parameters are unfrozen in epoch {event.epoch}, {facts}"
    elif isinstance(event, events.Val):
        kind, text = "val", _val(event, classes, previous)
    elif isinstance(event, events.Checkpoint):
        kind, text = "best" if event.is_best else "saved", _checkpoint(event)
    elif isinstance(event, events.CommandAnswer):
        kind, text = "ctl", printable(_answer(event))
    elif isinstance(event, events.Gpu0Bsz):
        if event.status == "cancelled" and event.id is not None:
            return None  # the line of the command reports it
        kind, text = "gpu0", _gpu0_bsz(event)
    elif isinstance(event, events.Settings):
        if event.topology is None and event.blocks is None:
            return None  # the line of the out-of-memory error reports it
        kind, text = "mem", f"{recomputed(event)}: {printable(event.reason)}"
        if event.topology is not None:
            kind, text = "ranks", printable(topology(event))
    elif isinstance(event, events.Oom):
        kind, text = "oom", printable(_oom(event))
    elif isinstance(event, events.Alert):
        kind, text = "alert", printable(event.message)
    elif isinstance(event, events.RunEnd):
        kind, text = "end", printable(f"{event.status}{f': {event.reason}' if event.reason else ''}")
    else:
        return None
    return LogLine(event.t, kind, text, event)


def loss(value: float | None, digits: int = 3) -> str:
    """Return the loss of an evaluation or a step that has been made; None means that it was not finite."""
    return NOT_FINITE if value is None or math.isnan(value) else number(value, digits)


def miou(val: events.Val) -> str:
    """Return the mIoU of an evaluation with the number of its classes: 0.557 (17/19)."""
    return with_count(number(val.miou), count_scored(val.iou), len(val.iou))


def best_miou(best: events.Val, last: events.Val) -> str:
    """Return the best mIoU: 0.557 e7; with the number of its classes if that differs from the last evaluation's."""
    has_same = (count_scored(best.iou), len(best.iou)) == (count_scored(last.iou), len(last.iou))
    return f"{number(best.miou) if has_same else miou(best)} e{best.epoch}"


def finished_line(best: str | None, run: str) -> str:
    """Return the result of a finished run and the next commands in one line; `run` is the argument that names it."""
    return f"{best or 'finished'} · segapp eval {run} · segapp report {run}"


def setup(settings: Mapping[str, Any]) -> str:
    """Return model, data and optimizer of a config: deeplabv3_resnet50 · cityscapes · adamw 0.014."""
    data, root = settings.get("data.format"), PurePath(str(settings.get("data.root"))).name
    optimizer = " ".join(str(settings[key]) for key in ("optim.name", "optim.lr") if key in settings)
    parts = settings.get("model.name"), root if data in ("folder", "list") else data, optimizer
    return printable(" · ".join(str(part) for part in parts if part))


def chosen(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the initial `weights` and the `bn_momentum` of a run as text, without unknown ones."""
    named = settings.get("model.weights") or settings.get("model.weights_backbone")
    # A custom model may load weights of its own.
    is_random = "model.weights" in settings and settings.get("model.library") != "python"
    momentum = settings.get("train.bn_momentum", "auto")  # auto: no process has resolved it yet
    found = {
        "weights": printable(str(named)) if named else "random" if is_random else "",
        "bn_momentum": f"{momentum:g}" if isinstance(momentum, float) else "of the model" if momentum is None else "",
    }
    return {key: text for key, text in found.items() if text}


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


def _start(event: events.RunStart) -> str:
    devices = [printable(" ".join(filter(None, (device.machine, device.device)))) for device in event.devices]
    precision = "" if event.precision is None else f" {printable(event.precision)},"
    what = (
        f"{plural(len(event.classes), 'class')}, {event.num_params / 1e6:.1f} M parameters, batch {event.batch_size},"
        f"{precision} {plural(event.epochs, 'epoch')} of {plural(event.steps_per_epoch, 'step')}"
        f" on {', '.join(devices)}"
    )
    return what if event.resumed_from_step is None else f"resumed at step {event.resumed_from_step}: {what}"


def _val(event: events.Val, classes: Sequence[str], previous: events.Val | None) -> str:
    is_same = previous is not None and count_scored(previous.iou) == count_scored(event.iou)
    parts = [f"e{event.epoch} mIoU {number(event.miou) if is_same else miou(event)}"]
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


def _answer(event: events.CommandAnswer) -> str:
    canceller = re.fullmatch(r"by [0-9a-f]+ of (.+)", event.reason or "")
    if event.status == "cancelled" and canceller is not None:
        return f"{event.command.removeprefix('set ')} {event.status} by {canceller[1]}"
    reason = f": {event.reason}" if event.reason else ""
    return f"{event.by}: {event.command} {event.status}{reason}"


def in_full(line: LogLine) -> str:
    """Return the text of a line of the log, in sentences for the answer to a command."""
    event = line.event
    if not isinstance(event, events.CommandAnswer):
        return line.text
    at_step = f" at step {event.step}" if event.step is not None else ""
    reason = f": {event.reason}" if event.reason else ""
    return printable(f"{event.by} sent {event.command}. It was {event.status}{at_step}{reason}.")


def _oom(event: events.Oom) -> str:
    wanted = f", {event.requested_mib:.0f} MiB requested" if event.requested_mib is not None else ""
    return f"{event.device} out of memory in {event.phase} after step {event.step}{wanted}: {event.action}"


def topology(event: events.Settings, *, with_reason: bool = True) -> str:
    """Return the ranks of a resume on other devices: 2 ranks on 1 machine (before: 3 on 2): without node2 cpu."""
    ranks = event.topology
    if ranks is None:
        return ""
    split = f", split {dots(event.split)}" if event.split else ""
    again = f", restart {ranks.round}" if ranks.round else ""
    now = f"{plural(ranks.ranks, 'rank')} on {plural(ranks.machines, 'machine')}"
    reason = f": {event.reason}" if with_reason else ""
    return f"{now} (before: {ranks.old_ranks} on {ranks.old_machines}){split}{again}{reason}"


def recomputed(event: events.Settings) -> str:
    """Return how many blocks each device recomputes: 8 of 12 blocks recomputed, or 4·8 of 12."""
    counts = [len(names) for names in event.blocks or ()]
    shown = dots(counts) if len(set(counts)) > 1 else str(max(counts, default=0))
    return f"{shown} of {event.num_blocks} blocks recomputed"


def _checkpoint(event: events.Checkpoint) -> str:
    size = f", {event.size_bytes / 1e6:.0f} MB" if event.size_bytes else ""
    took = f" in {event.save_s:.1f} s" if event.save_s is not None else ""
    name = printable(event.path).removeprefix("checkpoints/")
    return f"{name} at step {event.step} of epoch {event.epoch}{size}{took}"


def _gpu0_bsz(event: events.Gpu0Bsz) -> str:
    change = f"gpu0_bsz {share_text(event.old)} → {share_text(event.new)}"
    when = f" at epoch {event.epoch}" if event.epoch is not None and event.status in ("pending", "applied") else ""
    split = f", split {dots(event.split)}" if event.split else ""
    reason = f": {printable(event.reason)}" if event.reason else ""
    return f"{change} {event.status}{when}{split}{reason}"


def event_text(event: events.Event) -> str:
    """Return the fields of an event that have a value, each as `name: value`, without its times and colors."""
    fields = event.model_dump(exclude={"v", "seq", "t", "palette"}, exclude_none=True)
    if topic := fields.pop("topic", None):
        fields["more"] = f"segapp docs {topic}"
    text = "\n".join(f"{name}: {value}" for name, value in fields.items())
    return "\n".join(map(printable, text.splitlines()))
