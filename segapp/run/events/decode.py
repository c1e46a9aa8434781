"""Decodes the lines of events.jsonl: bytes to a dict, to an event, or many `step` lines to their curve.

There are three depths because of their cost, per million lines: `skim_block` takes 2 s of CPU, `parse_line` (JSON, and
the fields of every line) 5 s, and `parse_event` (types of all fields) ten times that. All accept the same lines, except
that only `parse_event` checks an event's own fields.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic_core import from_json

from segapp.older import EVENT_KEYS, renamed
from segapp.run.events.types import EVENT_TYPES, VERSION, Event

_adapter: TypeAdapter[Event] = TypeAdapter(
    Annotated[Event, Field(discriminator="type")], config=ConfigDict(defer_build=True)
)


def parse_event(raw: dict[str, Any]) -> Event:
    """Return the event of a line's dict.

    Raises:
        ValueError: A field is missing or has a wrong type, or the type is unknown.
    """
    return _adapter.validate_python(raw)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the dict of one line; None if the line is damaged or not an event."""
    try:
        raw = from_json(line, allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        return None
    if not isinstance(raw, dict):
        return None
    seq, t = raw.get("seq"), raw.get("t")
    has_frame = type(raw.get("v")) is int and type(seq) is int and isinstance(t, (int, float)) and t is not True
    if not has_frame or not isinstance(raw.get("type"), str):
        return None
    return renamed(raw, EVENT_KEYS[raw["type"]]) if raw["type"] in EVENT_KEYS else raw


def is_known(raw: dict[str, Any]) -> bool:
    """True if this program reads events of the version and type of a line's dict."""
    return raw["v"] == VERSION and raw["type"] in EVENT_TYPES


def last_line_end(fd: int) -> int:
    """Return the offset behind the last newline of a file; 0 if it has none."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 2**16)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


# The first fields of a step stand in the order in which `EventWriter` writes them.
_STEP_LINE = re.compile(
    rb'(\{"v":1,"seq":[0-9]+,"t":(-?[0-9][0-9.eE+-]*+),"type":"step","epoch":[0-9]+,"step":([0-9]{1,15}),"loss":'
    rb"(null|-?[0-9][0-9.eE+-]*+),.*+(?<=\}))\n"
)
_ONCE_A_LINE = ((b"{", b'{"v":'), (b"y", b'"type":'))
"""In most `step` lines the byte stands only in the word beside it, and is counted in half the time."""


_EPOCH = re.compile(rb'"type":"step","epoch":([0-9]{1,9}),')


class StepRun(NamedTuple):
    """Consecutive `step` events, reduced to their curve."""

    t: list[float]
    step: list[int]
    loss: list[float]
    """nan where it was null."""
    last_line: bytes
    """The last of the lines, as bytes."""

    @property
    def last(self) -> dict[str, Any] | None:
        """The last step, parsed; None if the line is damaged behind its loss."""
        raw = parse_line(self.last_line)
        return raw if raw is not None and raw["type"] == "step" else None

    @property
    def epoch(self) -> int | None:
        """The epoch of the last step, which is that of all of them: an `epoch_start` line divides epochs."""
        found = _EPOCH.search(self.last_line)
        return None if found is None else int(found[1])

    @property
    def split_text(self) -> bytes:
        """The split of the last step, unparsed: enough to detect a change."""
        start = self.last_line.find(b'"split":')
        return self.last_line[start : self.last_line.find(b"]", start)] if start >= 0 else b""


def step_column(field: str) -> re.Pattern[bytes]:
    """Return the pattern of a number in `step` lines: groups t, step, value.

    Args:
        field: Name of the field, or `terms.NAME` for a term of the loss.
    """
    inside, _, name = field.rpartition(".")
    key = re.escape(json.dumps(name or field).encode())
    where = rb'[^\n]*?"terms":\{[^}\n]*?' if inside else rb"[^\n]*?"
    return re.compile(
        rb'"t":(-?\d[\d.eE+-]*+),"type":"step","epoch":\d+,"step":(\d{1,15}),'
        + where
        + key
        + rb":(null|-?\d[\d.eE+-]*+)"
    )


def skim_block(block: bytes) -> Iterator[StepRun | bytes]:
    """Split whole lines into runs of `step` events and the lines between them, in order.

    Yields:
        A `StepRun`, or the bytes of other lines (also damaged steps), to be parsed in full.
    """
    parts = _STEP_LINE.split(block)
    between, lines = parts[0::5], parts[1::5]
    others = [piece for piece in between if piece]
    rest = b"\n".join(others)
    is_whole = all(
        any(block.count(mark) == len(lines) + rest.count(mark) for mark in either) for either in _ONCE_A_LINE
    )
    if not is_whole or not all(piece.endswith(b"\n") for piece in others):
        yield block  # damage joined two lines: only the full parser can tell the good from the bad
        return
    try:
        t, step, loss = (_numbers(parts[group::5]) for group in (2, 3, 4))
    except ValueError:  # such as 1.2.3
        yield block
        return
    if None in loss:
        loss = [float("nan") if value is None else value for value in loss]
    start = 0
    ends = [i for i, piece in enumerate(between) if piece]
    if not between[-1]:
        ends.append(len(lines))
    for end in ends:
        if end > start:
            yield StepRun(t[start:end], step[start:end], loss[start:end], lines[end - 1])
        if between[end]:
            yield between[end]
        start = end


def _numbers(texts: list[bytes]) -> list[Any]:
    numbers: list[Any] = from_json(b"[%b]" % b",".join(texts))  # a third of the time of float() one by one
    return numbers
