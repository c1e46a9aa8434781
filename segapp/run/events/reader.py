"""Read events.jsonl while it is being written: as dicts, as events, or many `step` lines as their curve.

There are three depths with different costs per million lines: skimming takes 3 s of CPU, `parse_line` (JSON, and the
common fields of each line) 5 s, and `parse_event` (types of all fields) ten times as much. All accept the same lines,
except that only `parse_event` checks an event's own fields.
"""

import contextlib
import errno
import gc
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from segapp.run.events.types import EVENT_TYPES, FINAL_STATUSES, MAX_EVENTS_BYTES, MAX_LINE_BYTES, VERSION, Event
from segapp.run.files import open_of_run
from segapp.scores import as_float

_adapter: TypeAdapter[Event] = TypeAdapter(
    Annotated[Event, Field(discriminator="type")], config=ConfigDict(defer_build=True)
)


def parse_event(raw: dict[str, Any]) -> Event:
    """Return the event of a line's dict; ValueError if a field is missing or wrong, or the type is unknown."""
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
    # To isinstance, True is a number.
    has_frame = type(raw.get("v")) is int and type(seq) is int and isinstance(t, (int, float)) and t is not True
    if not has_frame or not isinstance(raw.get("type"), str):
        return None
    return raw


def is_known(raw: dict[str, Any]) -> bool:
    """Return True if this program supports the version and type of a line's dict."""
    return raw["v"] == VERSION and raw["type"] in EVENT_TYPES


def last_line_end(fd: int, end: int, least: int = 0) -> int:
    """Return the offset after the last newline between two offsets of a file; the lower one if there is none."""
    while end > least:
        start = max(least, end - 2**16)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return least


def _skip_hole(file: BinaryIO, offset: int) -> int:
    """Return the offset of the first byte from `offset` on that is not in a hole of a file, and seek it."""
    try:
        return file.seek(offset, os.SEEK_DATA)
    except OSError as error:
        return file.seek(0, os.SEEK_END) if error.errno == errno.ENXIO else file.seek(offset)


# Patterns are for the beginning of a line, in the order in which `EventWriter` writes its fields, and have a bounded
# length: a line may come from a stranger. JSON is parsed in a time that is linear in its bytes; a search is not.
_NUMBER = rb"-?\d{1,24}(?:\.\d{1,24})?(?:[eE][+-]?\d{1,3})?"
_STEP_LINE = re.compile(
    rb'\{"v":1,"seq":\d{1,20},"t":(%b),"type":"step","epoch":(\d{1,15}),"step":(\d{1,15}),"loss":(null|%b),'
    % (_NUMBER, _NUMBER)
)


_PART_BYTES = 2**21

FREQUENT_LINE = re.compile(
    rb'\{"v":1,"seq":\d{1,20},"t":%b,"type":"(?:memory"|heartbeat"|step","epoch":\d{1,15},"step":(\d{1,15}),)' % _NUMBER
)
"""The beginning of the line of a sample, or of a step, with its number."""


@dataclass
class StepRun:
    """Consecutive `step` events of one epoch, reduced to their curve."""

    epoch: int
    t: list[float] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    """Losses; nan for null."""
    last_line: bytes = b""

    @property
    def last(self) -> dict[str, Any] | None:
        """The last step, parsed; None if the line is damaged after its loss."""
        return parse_line(self.last_line)

    @property
    def split_text(self) -> bytes:
        """The split of the last step, unparsed, which is enough to detect a change."""
        start = self.last_line.find(b'"split":')
        return self.last_line[start : self.last_line.find(b"]", start)] if start >= 0 else b""


class StepColumn:
    """A number of the `step` events, a field or `terms.NAME`: (time, step, value) of each; nan for null."""

    def __init__(self, name: str) -> None:
        self._name, self._is_term = name.removeprefix("terms."), name.startswith("terms.")
        self.rows: list[tuple[float, int, float]] = []

    def take(self, raw: dict[str, Any] | None) -> None:
        """Add the value of a line's dict, if it is a step that has one."""
        if raw is None or raw["type"] != "step":
            return
        step, fields = raw.get("step"), raw.get("terms") if self._is_term else raw
        if isinstance(fields, dict) and self._name in fields and type(step) is int and 0 <= step < 2**53:
            self.rows.append((as_float(raw["t"]), step, as_float(fields[self._name])))


class EventReader:
    """Reads a growing `events.jsonl` incrementally; any content is safe.

    A last line without a newline is read when it is complete. Lines that are damaged, of an unknown type or of another
    version are skipped, and damaged ones counted. A missing file reads as empty. With `last_bytes`, the present content
    is skipped, except for about this much at its end (0: to wait for an answer).
    """

    def __init__(self, path: Path | str, *, last_bytes: int | None = None) -> None:
        self.path = Path(path)
        self.generation = 0
        """Increases if the file was replaced, truncated or removed: everything that was read before is invalid."""
        self.num_bad = 0
        """Damaged lines skipped."""
        self._fd = -1
        self._offset = 0
        self._is_skipping = False
        if last_bytes is not None and self._follow():
            end = os.fstat(self._fd).st_size - last_bytes
            self._offset = last_line_end(self._fd, end, max(0, end - MAX_LINE_BYTES))

    def read(self, max_bytes: int | None = None) -> list[Event]:
        """Return the validated events written since the last call; of about `max_bytes`, if given."""
        events = []
        for raw in self.read_raw(max_bytes):
            try:
                events.append(parse_event(raw))
            except ValidationError:
                self.num_bad += 1
        return events

    def read_raw(self, max_bytes: int | None = None) -> list[dict[str, Any]]:
        """Like `read`, but as dicts, about ten times as fast.

        Each has `v`, `seq`, `t` and a known `type`; the other fields are not validated.
        """
        return [raw for line in self._lines(max_bytes) if (raw := self._parse(line)) is not None]

    def read_skimmed(
        self, max_bytes: int | None = None, columns: Sequence[StepColumn] = ()
    ) -> list[dict[str, Any] | StepRun]:
        """Like `read_raw`, but with consecutive `step` events reduced to their curve: for long histories.

        Other numbers of the steps are added to `columns`.
        """
        items: list[dict[str, Any] | StepRun] = []
        run: StepRun | None = None
        for line in self._lines(max_bytes):
            found = _STEP_LINE.match(line) if line.endswith(b"}\n") else None
            is_joined = line.count(b'"type":') > 1 or line.count(b'{"v":') > 1  # by damage
            raw = self._parse(line) if found is None or is_joined or columns else None
            for column in columns:
                column.take(raw)
            if found is None or is_joined:
                if raw is not None:
                    items.append(raw)
                    run = None
                continue
            epoch = int(found[2])
            if run is None or run.epoch != epoch:
                run = StepRun(epoch)
                items.append(run)
            run.t.append(float(found[1]))
            run.step.append(int(found[3]))
            run.loss.append(math.nan if found[4] == b"null" else float(found[4]))
            run.last_line = line
        return items

    def read_column(self, column: StepColumn, max_bytes: int | None = None) -> None:
        """Add the values of the new `step` events to a column; other lines are not parsed."""
        for line in self._lines(max_bytes):
            if b'"step"' in line:
                column.take(self._parse(line))

    def skim(self, columns: Sequence[StepColumn] = ()) -> Iterator[list[dict[str, Any] | StepRun]]:
        """Yield the present events like `read_skimmed`, in parts, so that memory does not grow with the file."""
        is_collecting, left = gc.isenabled(), self.num_bytes_left
        gc.disable()  # millions of dicts without a cycle; the search for cycles would take a quarter of the time
        try:
            while left:
                yield self.read_skimmed(_PART_BYTES, columns)
                before, left = left, self.num_bytes_left
                if left >= before:  # an incomplete last line
                    return
        finally:
            if is_collecting:
                gc.enable()

    def read_kinds(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Yield the present events of rare types, one at a time; other parts of a long history are only searched."""
        words = [f'"{kind}"'.encode() for kind in kinds]
        while self._follow():
            before, part = self._offset, os.pread(self._fd, 2**20, self._offset)
            end = part.rfind(b"\n") + 1
            if end and not self._is_skipping and not any(word in part for word in words):
                self._offset += end
                continue
            for line in self._lines(end or len(part)):
                if any(word in line for word in words) and (raw := self._parse(line)) and raw["type"] in kinds:
                    yield raw
            if self._offset == before:  # the end, or an incomplete last line
                return

    @property
    def num_bytes_left(self) -> int:
        """Number of bytes of the file that have not been read."""
        return max(0, os.fstat(self._fd).st_size - self._offset) if self._follow() else 0

    def close(self) -> None:
        """Close the file; the next read opens it again and continues, if it is still the same file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()

    def _lines(self, max_bytes: int | None) -> Iterator[bytes]:
        """Yield whole lines from the current offset; one without an end is skipped in pieces, in bounded memory."""
        if not self._follow():
            return
        end = os.fstat(self._fd).st_size if max_bytes is None else self._offset + max_bytes
        # A separate buffer for each call: a writer may replace the incomplete last line in an older buffer.
        with contextlib.suppress(OSError), open(self._fd, "rb", closefd=False) as file:
            file.seek(self._offset)
            while self._offset < end:
                line = file.readline(MAX_LINE_BYTES)
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < MAX_LINE_BYTES:
                    return
                self._offset += len(line)
                if not is_whole:
                    self._offset = _skip_hole(file, self._offset)
                was_skipping, self._is_skipping = self._is_skipping, not is_whole
                if was_skipping and is_whole:
                    self.num_bad += 1
                elif is_whole:
                    yield line

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        """Return the event of a line; None if the line is damaged, which is counted, or not known to this program."""
        raw = parse_line(line)
        self.num_bad += raw is None
        return raw if raw is not None and is_known(raw) else None

    def _follow(self) -> bool:
        """Open the file, again if the path now names another one; return False if it does not exist."""
        try:
            there = os.stat(self.path)
            # A rewind replaces the file by a shorter one.
            if self._fd >= 0 and not (os.path.samestat(there, os.fstat(self._fd)) and there.st_size >= self._offset):
                self._start_again()
            if self._fd < 0:
                self._fd = open_of_run(self.path, max_bytes=MAX_EVENTS_BYTES)
        except OSError:
            if self._fd >= 0:
                self._start_again()
            return False
        return True

    def _start_again(self) -> None:
        self.close()
        self.generation += 1
        self._offset = 0
        self._is_skipping = False


def read_answers(raws: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the final answers (id -> status) among the events of `EventReader.read_raw`."""
    return {
        raw["id"]: raw["status"]
        for raw in raws
        if raw["type"] == "command" and raw.get("status") in FINAL_STATUSES and isinstance(raw.get("id"), str)
    }
