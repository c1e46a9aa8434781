"""Selects the events that a resumed training repeats.

The step, epoch and batch of the checkpoint decide, not the order of the lines: a checkpoint is written while training
goes on, so its line comes after lines of steps that it does not contain.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segapp.run.events.decode import parse_line


@dataclass(frozen=True)
class RewindPoint:
    """The position of a checkpoint in the training.

    Args:
        step: Optimizer updates done.
        epoch: The epoch in which training continues, from 1.
        batch: Batches of that epoch already used.
        sha256: Distinguishes two checkpoints of one step; None if unknown.
        is_evaluated: True if the evaluation after that step is done, where the epoch does not tell.
    """

    step: int
    epoch: int
    batch: int
    sha256: str | None = None
    is_evaluated: bool = False


@dataclass
class Tail:
    """The part of a file from the first repeated line on.

    Args:
        start: Offset of that line; the size of the file if nothing is repeated.
        kept: The events behind it that stay, in order.
        dropped: The repeated lines, and damaged lines behind the first of them.
    """

    start: int
    kept: list[dict[str, Any]]
    dropped: list[bytes]


def split_tail(path: Path, point: RewindPoint) -> Tail:
    """Split the events of a file into those that stay and those that training repeats from a point.

    Raises:
        OSError: The file cannot be read.
    """
    tail = Tail(0, [], [])
    has_own_line = False
    for start, line in _lines(path):
        if not tail.dropped and not _may_be_repeated(line):
            tail.start = start + len(line)
            continue
        raw = parse_line(line.rstrip(b"\n"))
        is_own = raw is not None and _is_own(raw, point)
        is_gone = bool(tail.dropped) if raw is None else is_repeated(raw, point, is_after_own=has_own_line)
        has_own_line |= is_own
        if is_gone:
            tail.dropped.append(line.rstrip(b"\n"))
        elif not tail.dropped:
            tail.start = start + len(line)
        elif raw is not None:
            tail.kept.append(raw)
    return tail


def is_repeated(raw: dict[str, Any], point: RewindPoint, *, is_after_own: bool) -> bool:
    """Return True if training repeats an event when it continues from a point.

    `is_after_own` says that the event's line is behind the checkpoint's own `checkpoint` line.
    """
    kind, step, epoch = raw["type"], raw.get("step"), raw.get("epoch")
    if kind == "step":
        return isinstance(step, int) and step > point.step
    if kind == "checkpoint":
        return isinstance(step, int) and (step > point.step or (step == point.step and is_after_own))
    if kind == "epoch_start":
        return isinstance(epoch, int) and epoch >= point.epoch + (point.batch > 0)
    if kind == "val":
        is_later = isinstance(epoch, int) and epoch >= point.epoch
        return is_later and not (isinstance(step, int) and step < point.step + point.is_evaluated)
    return False


def _is_own(raw: dict[str, Any], point: RewindPoint) -> bool:
    is_same = raw["type"] == "checkpoint" and raw.get("step") == point.step
    return is_same and (point.sha256 is None or raw.get("sha256") in (None, point.sha256))


def _may_be_repeated(line: bytes) -> bool:
    """Return False if a substring test rules out that the line is repeated; avoids parsing most lines."""
    return any(mark in line for mark in _MARKS)


_MARKS = (b'"type":"step"', b'"type":"checkpoint"', b'"type":"epoch_start"', b'"type":"val"')


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            yield offset, line
            offset += len(line)
