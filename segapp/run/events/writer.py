"""Append events to events.jsonl, remove events that a resumed training repeats, and pass events to listeners.

Repeated events are recognized by the step, epoch and batch of the checkpoint, not by the order of the lines: a
checkpoint is written while training continues, so its line comes after lines of steps that it does not contain.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from segapp.failpoints import failpoint
from segapp.run.events.reader import FREQUENT_LINE, last_line_end, parse_line
from segapp.run.events.types import EVENT_TYPES, MAX_EVENTS_BYTES, MAX_LINE_BYTES, VERSION, Alert, AsNull, Event
from segapp.run.files import append_to_run, open_of_run, storage_errors_of, write_all, write_atomic

_DURABLE = frozenset({"run_start", "checkpoint", "run_end"})
_EXPENDABLE = frozenset({"step", "memory", "heartbeat"})


class EventWriter:
    """Appends events to a file, each with one `write` call; a full disk does not stop the training.

    An incomplete last line from a crash is cut off first. Events that cannot be written stay in memory (at most
    `max_pending`; beyond that, `step`, `memory` and `heartbeat` events are dropped first, and counted) and are written
    in order when the disk has space again. It is thread-safe within the process that holds the run's lock.

    Raises:
        StorageError: The file cannot be opened.
    """

    def __init__(self, path: Path | str, *, max_pending: int = 10_000) -> None:
        self.path = Path(path)
        self.problem: str | None = None
        """Why events are waiting in memory; None if the last write succeeded."""
        self.num_dropped = 0
        """Events dropped because too many were waiting, since the last alert about them."""
        self._max_pending = max_pending
        self._pending: deque[dict[str, Any]] = deque()
        self._retry_at_s = 0.0
        self._alerted_fields: set[str] = set()
        self._lock = threading.RLock()
        self._fd = -1
        with storage_errors_of("open", self.path):
            self._open()

    @property
    def num_pending(self) -> int:
        """Events waiting in memory for the disk."""
        with self._lock:  # so that an event that another thread is writing is not counted
            return len(self._pending)

    def write(self, event: Event) -> None:
        """Append an event; its non-finite numbers are written as null, with an `alert` per field."""
        with self._lock:
            if self._fd < 0:
                raise ValueError(f"{self.path.name} is closed")
            body = event.model_dump()
            body["t"] = round(time.time(), 6)
            fields = sorted(set(_null_non_finite(body, event.type)))
            if self._make_room(event.type):
                self._pending.append(body)
                # On a full disk, not every step waits for a failing write.
                if self.problem is None or time.monotonic() >= self._retry_at_s:
                    self.flush()
            for field in fields:
                if field not in self._alerted_fields:
                    self._alerted_fields.add(field)
                    self.alert("non_finite", f"{field} was not finite and is written as null", step=body.get("step"))

    def alert(self, kind: str, message: str, *, step: int | None = None) -> None:
        """Append an `alert`."""
        self.write(Alert(kind=kind, message=message, step=step))

    def flush(self) -> bool:
        """Write the waiting events in order, until one cannot be written; return True if all events are in the file."""
        with self._lock:
            had_problem = self.problem
            while self._pending:
                try:
                    self._write_line(self._pending[0])
                except OSError as error:
                    self.problem = error.strerror or str(error)
                    self._retry_at_s = time.monotonic() + 1.0
                    return False
                # Removed only after it was written, so that a failure keeps the order.
                self._pending.popleft()
            self.problem = None
            if had_problem is not None:
                lost = f"; {self.num_dropped} events were dropped" if self.num_dropped else ""
                message = f"events could not be written for a while: {had_problem}{lost}"
                with contextlib.suppress(OSError):
                    body = Alert(kind="storage", message=message).model_dump()
                    self._write_line({**body, "t": round(time.time(), 6)})
                    self.num_dropped = 0
            return True

    def sync(self) -> None:
        """Make the events in the file survive a power cut; a failure is left to the next write.

        Other threads may write meanwhile; they do not wait for the disk.
        """
        with contextlib.suppress(OSError):
            with self._lock:
                fd = os.dup(self._fd)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Write the waiting events, if possible, and close the file; idempotent."""
        with self._lock:
            if self._fd < 0:
                return
            self.flush()
            with contextlib.suppress(OSError):
                os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rewind(
        self, step: int, *, epoch: int, batch: int, sha256: str | None = None, is_evaluated: bool = False
    ) -> int:
        """Remove the events that training repeats when it continues from a checkpoint; return their number.

        The `step`, `epoch_start`, `val` and `checkpoint` lines that the checkpoint does not contain are moved to
        `events.rewound.jsonl`. The rest keeps its order and is renumbered. If there are no such lines, or if the file
        cannot be replaced (an `alert` reports it), the file is not changed.
        """
        with self._lock:
            self.flush()
            try:
                return self._move_repeated(RewindPoint(step, epoch, batch, sha256, is_evaluated))
            except OSError as error:
                reason = error.strerror or str(error)
                message = f"the events after step {step} could not be removed from {self.path.name}: {reason}"
                self.alert("storage", message)
                return 0

    def _move_repeated(self, point: RewindPoint) -> int:
        """Move the lines that training repeats, and damaged ones after the first of them, to another file.

        The lines are read one at a time, because a long run has a million of them.
        """
        with open(open_of_run(self.path), "rb") as file:
            start, has_own_line = find_repeated(file, point)
            if start is None:
                return 0
            num_dropped = 0

            def kept() -> Iterator[bytes]:
                nonlocal has_own_line, num_dropped
                file.seek(0)
                for at in range(0, start, 2**20):
                    yield file.read(min(2**20, start - at))
                seq = _last_seq(file.fileno(), start)
                for line in _pieces(file):
                    raw = parse_line(line)
                    if raw is None or is_repeated(raw, point, is_after_own=has_own_line):
                        rewound.write(line)
                        num_dropped += 1
                    else:
                        seq += 1
                        yield _encode({**raw, "seq": seq})
                    has_own_line |= is_own_line(raw, point)
                # The moved lines are durable before the file without them replaces it.
                rewound.flush()
                os.fsync(rewound.fileno())

            with append_to_run(self.path.with_name("events.rewound.jsonl")) as rewound:
                write_atomic(self.path, kept(), point="events.rewind")
        os.close(self._fd)
        self._open()
        return num_dropped

    def _open(self) -> None:
        self._fd = open_of_run(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, max_bytes=MAX_EVENTS_BYTES)
        self.last_seq, self._size = _repair_tail(self._fd)
        self._is_torn = False

    def _make_room(self, kind: str) -> bool:
        """Return False if too many events wait for another of this type; drop an older one if that makes room."""
        if len(self._pending) < self._max_pending:
            return True
        self.num_dropped += 1
        oldest = next((i for i, waiting in enumerate(self._pending) if waiting["type"] in _EXPENDABLE), None)
        if oldest is None or kind in _EXPENDABLE:
            return False
        del self._pending[oldest]
        return True

    def _write_line(self, body: dict[str, Any]) -> None:
        line = _encode({"v": VERSION, "seq": self.last_seq + 1, "t": body["t"], "type": body["type"], **_fields(body)})
        failpoint("events.before_write")
        if self._is_torn:  # a write failed, perhaps within a line
            os.ftruncate(self._fd, self._size)
        self._is_torn = True
        write_all(self._fd, line)
        self._is_torn = False
        self.last_seq += 1
        self._size += len(line)
        if body["type"] in _DURABLE:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)


def _fields(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a type; those that readers require are kept as null, others without a value are left out."""
    required = _REQUIRED[body["type"]]
    return {key: value for key, value in body.items() if key not in _FRAME and (value is not None or key in required)}


_FRAME = frozenset({"v", "seq", "t", "type"})
_REQUIRED = {
    name: {
        key
        for key, field in model.model_fields.items()
        if field.is_required() or field.json_schema_extra == AsNull.json_schema_extra
    }
    for name, model in EVENT_TYPES.items()
}


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _null_non_finite(value: Any, name: str) -> Iterator[str]:
    """Set every non-finite number in a tree of dicts and lists to None; yield the names of their fields."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(items):
        child_name = f"{name}.{key}" if isinstance(key, str) else name
        if isinstance(child, float) and not math.isfinite(child):
            value[key] = None
            yield child_name
        elif isinstance(child, (dict, list)):
            yield from _null_non_finite(child, child_name)


def _repair_tail(fd: int) -> tuple[int, int]:
    """Cut off an incomplete last line, or add a missing newline; return the last event's `seq` and the size."""
    size = os.fstat(fd).st_size
    end = last_line_end(fd, size)
    if end < size:
        tail = os.pread(fd, min(size - end, MAX_LINE_BYTES), end)
        if parse_line(tail) is not None:
            write_all(fd, b"\n")
            size += 1
        else:
            os.ftruncate(fd, end)
            size = end
    return _last_seq(fd, size), size


def _last_seq(fd: int, end: int) -> int:
    """Return the `seq` of the last readable event in the first `end` bytes; 0 if there is none."""
    rest = b""  # the end of a line that begins before the part
    while end > 0:
        start = max(0, end - 2**20)
        rest, *lines = (os.pread(fd, end - start, start) + rest).split(b"\n")
        for line in (*lines[::-1], *([] if start else [rest])):
            if (raw := parse_line(line)) is not None:
                return int(raw["seq"])
        rest, end = rest[:MAX_LINE_BYTES], start
    return 0


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; one that is longer than an event may be is yielded in pieces."""
    return iter(lambda: file.readline(MAX_LINE_BYTES), b"")


@dataclass(frozen=True)
class RewindPoint:
    """The position of a checkpoint in the training."""

    step: int
    """Number of finished optimizer updates."""
    epoch: int
    """The epoch in which training continues, from 1."""
    batch: int
    """Number of batches of that epoch that were already used."""
    sha256: str | None = None
    """Hash that distinguishes two checkpoints of the same step; None if unknown."""
    is_evaluated: bool = False
    """True if the evaluation after that step is done, in case the epoch does not tell."""


def find_repeated(file: BinaryIO, point: RewindPoint) -> tuple[int | None, bool]:
    """Return the offset of the first line that training repeats, None without one.

    The second value is True if the checkpoint's own line is before it.
    """
    offset, has_own_line = 0, False
    for line in _pieces(file):
        found = FREQUENT_LINE.match(line)
        # Most lines are early steps, for which no JSON need be parsed.
        if found is None or int(found[1] or 0) > point.step:
            raw = parse_line(line)
            if raw is not None and is_repeated(raw, point, is_after_own=has_own_line):
                return offset, has_own_line
            has_own_line |= is_own_line(raw, point)
        offset += len(line)
    return None, has_own_line


def is_own_line(raw: dict[str, Any] | None, point: RewindPoint) -> bool:
    """Return True for the `checkpoint` event of the checkpoint itself."""
    return (
        raw is not None
        and raw["type"] == "checkpoint"
        and raw.get("step") == point.step
        and (point.sha256 is None or raw.get("sha256") in (None, point.sha256))
    )


def is_repeated(raw: dict[str, Any], point: RewindPoint, *, is_after_own: bool) -> bool:
    """Return True if training repeats an event when it continues from a point.

    `is_after_own`: the event's line comes after the checkpoint's own `checkpoint` line.
    """
    kind, step, epoch = raw["type"], raw.get("step"), raw.get("epoch")
    if kind == "step":
        return isinstance(step, int) and step > point.step
    if kind == "checkpoint":
        return isinstance(step, int) and (step > point.step or (step == point.step and is_after_own))
    if kind == "epoch_start":
        # Within an epoch, training continues after its `epoch_start`, which is not written again.
        return isinstance(epoch, int) and epoch >= point.epoch + (point.batch > 0)
    if kind == "val":
        is_later = isinstance(epoch, int) and epoch >= point.epoch
        return is_later and not (isinstance(step, int) and step < point.step + point.is_evaluated)
    return False


class EventListener(Protocol):
    """Shows or forwards events; never changes the training."""

    def handle(self, event: Event) -> None:
        """Handle one event."""

    def close(self) -> None:
        """Flush and release files and connections."""


class EventLog:
    """Writes each event, except on ranks without a writer, and passes it to the listeners (console, trackers)."""

    def __init__(self, writer: EventWriter | None, listeners: Iterable[EventListener] = ()) -> None:
        self.writer = writer
        self._listeners = list(listeners)
        self.told: tuple[int | None, float] = (None, 0.0)
        """The newest step that an event named, and the monotonic time of the event."""

    def add_listeners(self, listeners: Iterable[EventListener]) -> None:
        """Add listeners, which get the events from now on."""
        self._listeners += listeners

    def emit(self, event: Event) -> None:
        """Write one event and pass it to the listeners."""
        if self.writer is not None:
            self.writer.write(event)
        if (step := getattr(event, "step", None)) is not None:
            self.told = step, time.monotonic()
        for listener in self._listeners:
            listener.handle(event)

    def sync(self) -> None:
        """Make the events written so far survive a power cut."""
        if self.writer is not None:
            self.writer.sync()

    def close(self) -> None:
        """Write pending events; close the file and the listeners."""
        if self.writer is not None:
            self.writer.close()
        for listener in self._listeners:
            listener.close()
