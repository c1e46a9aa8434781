"""A whole event as labelled lines of text: all its fields, and the command that acts on it. No widgets."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from segapp.run.events import Event, Gpu0Bsz, Oom, RunEnd, Val
from segapp.run.words import printable, share_text
from segapp.scores import NOT_FINITE, count_scored, of_classes

_FRAME = {"v", "seq", "t", "type"}


class Detail(NamedTuple):
    """One labelled text; it may have several lines."""

    label: str
    text: str


def event_details(event: Event, run: str) -> list[Detail]:
    """Return everything that an event says, the command last.

    Args:
        event: The event.
        run: Name of the run, for the command.
    """
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.t))
    return [
        Detail("event", f"{event.type}, line {event.seq} of events.jsonl, {clock}"),
        *(
            Detail(name.replace("_", " "), text)
            for name in type(event).model_fields
            if name not in _FRAME and (text := _field_text(event, name))
        ),
        *(Detail("next", command) for command in _commands(event, run)),
    ]


def details_text(details: list[Detail]) -> str:
    """Return details as plain text, for the clipboard."""
    return "".join(f"{label}: {text}\n" for label, text in details)


def _commands(event: Event, run: str) -> Iterator[str]:
    name = shlex.quote(printable(run))
    if isinstance(event, RunEnd) and event.status != "finished":
        yield f"segapp train --resume {name}"
    if isinstance(event, Oom) and event.path:
        yield f"segapp plan --run {name}"
    if isinstance(event, Gpu0Bsz) and event.status == "reverted" and event.old is not None:
        yield f"segapp ctl {name} set gpu0_bsz={share_text(event.old)}"


def _field_text(event: Event, name: str) -> str:
    value = getattr(event, name)
    if name == "loss" and value is None:
        return NOT_FINITE
    text = _text(value)
    if name == "miou" and isinstance(event, Val) and text:
        return f"{text} over {of_classes(count_scored(event.iou), len(event.iou))}"
    return text


def _text(value: Any) -> str:
    """Return a field's value as text; empty for None and empty collections."""
    if value is None:
        return ""
    if isinstance(value, BaseModel):
        return ", ".join(f"{name} {text}" for name, field in value if (text := _text(field)))
    if isinstance(value, dict):
        return "\n".join(f"{printable(str(name))}: {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        is_plain = all(isinstance(item, int | float | None) for item in value)
        return (", " if is_plain else "\n").join("-" if item is None else _text(item) for item in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "\n".join(printable(line) for line in str(value).splitlines())
