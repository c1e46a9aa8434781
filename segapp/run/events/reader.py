"""Reads events.jsonl while it is being written: bytes to a dict, to an event, or many `step` lines to their curve.

There are three depths because of their cost, per million lines: `skim_block` takes 2 s of CPU, `parse_line` (JSON, and
the fields of every line) 5 s, and `parse_event` (types of all fields) ten times that. All accept the same lines, except
that only `parse_event` checks an event's own fields.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from segapp.older import EVENT_KEYS, renamed
from segapp.run.events.types import (
    EVENT_TYPES,
    FINAL_STATUSES,
    MAX_LINE_BYTES,
    VERSION,
    Event,
)

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


class EventReader:
    """Reads a growing `events.jsonl` in pieces; any content is safe.

    A last line without a newline is read once it is complete. Lines that are damaged, of an unknown type or of another
    version are skipped and counted. A missing file reads as empty.

    Args:
        path: The file.
        from_end: Skip the present content (to wait for an answer).
    """

    def __init__(self, path: Path | str, *, from_end: bool = False) -> None:
        self.path = Path(path)
        self.generation = 0
        """Increases when the file was replaced, truncated or removed: what was read before is void."""
        self.num_bad = 0
        """Damaged lines skipped."""
        self.num_unknown = 0
        """Lines of an unknown type or version skipped."""
        self._fd = -1
        self._offset = 0
        self._is_skipping = False
        if from_end and self._follow():
            self._offset = last_line_end(self._fd)

    def read(self, max_bytes: int | None = None) -> list[Event]:
        """Return the events written since the last call, parsed and validated.

        Args:
            max_bytes: Read about this much at most; None reads to the end.
        """
        events = []
        for raw in self.read_raw(max_bytes):
            try:
                events.append(parse_event(raw))
            except ValidationError:
                self.num_bad += 1
        return events

    def read_raw(self, max_bytes: int | None = None) -> list[dict[str, Any]]:
        """Return the events written since the last call as dicts: about ten times as fast as `read`.

        Each has `v`, `seq`, `t` and a known `type`; the other fields are not validated.

        Args:
            max_bytes: Read about this much at most; None reads to the end.
        """
        return [raw for block in self._blocks(max_bytes) for raw in self._parse_block(block)]

    def read_skimmed(self, max_bytes: int | None = None) -> list[dict[str, Any] | StepRun]:
        """Like `read_raw`, but with consecutive `step` events reduced to their curve: for long histories.

        Args:
            max_bytes: Read about this much at most; None reads to the end.
        """
        items: list[dict[str, Any] | StepRun] = []
        for block in self._blocks(max_bytes):
            for part in [block] if self._is_skipping else skim_block(block):
                if isinstance(part, StepRun):
                    items.append(part)
                else:
                    items.extend(self._parse_block(part))
        return items

    def read_column(self, field: re.Pattern[bytes], max_bytes: int | None = None) -> list[tuple[float, int, float]]:
        """Return time, step and value of a number in the new `step` events; nan where it was null.

        Args:
            field: From `step_column`.
            max_bytes: Read about this much at most; None reads to the end.
        """
        found = []
        for block in self._blocks(max_bytes):
            for t, step, value in field.findall(block):
                with contextlib.suppress(ValueError):  # such as 1.2.3
                    found.append((float(t), int(step), math.nan if value == b"null" else float(value)))
        return found

    @property
    def num_bytes_left(self) -> int:
        """Bytes of the file that were not read yet."""
        return max(0, os.fstat(self._fd).st_size - self._offset) if self._follow() else 0

    def close(self) -> None:
        """Close the file; the next read opens it again and continues, if it is still the same file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()

    def _blocks(self, max_bytes: int | None) -> Iterator[bytes]:
        """Yield whole lines from the current offset, at most a few megabytes at a time."""
        if not self._follow():
            return
        left = max_bytes if max_bytes is not None else os.fstat(self._fd).st_size - self._offset
        left = max(left, 1)
        while left > 0:
            block = self._read_block(min(left, 4 * 2**20))
            if not block:
                return
            left -= len(block)
            yield block

    def _follow(self) -> bool:
        """Open the file, again if the path now names another one; return False if there is none."""
        try:
            there = os.stat(self.path)
        except OSError:
            if self._fd >= 0:
                self._start_again()
            return False
        if self._fd >= 0:
            here = os.fstat(self._fd)
            if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or there.st_size < self._offset:
                self._start_again()
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                return False
        return True

    def _start_again(self) -> None:
        self.close()
        self.generation += 1
        self._offset = 0
        self._is_skipping = False

    def _read_block(self, num_bytes: int) -> bytes:
        """Return whole lines from the current offset, at least one if there is one, else empty bytes."""
        while True:
            try:
                block = os.pread(self._fd, num_bytes, self._offset)
            except OSError:
                return b""
            end = block.rfind(b"\n") + 1
            if end:
                self._offset += end
                return block[:end]
            if len(block) < num_bytes:
                return b""
            if num_bytes > MAX_LINE_BYTES:
                self._is_skipping = True
                self._offset += len(block)
                num_bytes = 4 * 2**20
            else:
                num_bytes *= 4

    def _parse_block(self, block: bytes) -> Iterator[dict[str, Any]]:
        lines = block.split(b"\n")
        lines.pop()
        if self._is_skipping:
            self._is_skipping = False
            self.num_bad += 1
            del lines[0]
        for line in lines:
            raw = parse_line(line)
            if raw is None:
                self.num_bad += 1
            elif not is_known(raw):
                self.num_unknown += 1
            else:
                yield raw


def read_answers(raws: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the final answers (id -> status) among the events of `EventReader.read_raw`."""
    return {
        raw["id"]: raw["status"]
        for raw in raws
        if raw["type"] == "command" and raw.get("status") in FINAL_STATUSES and isinstance(raw.get("id"), str)
    }
