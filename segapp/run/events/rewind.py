"""Which events a resumed training repeats: a pure question of where its checkpoint stands, not of the lines' order.

A checkpoint is written while training goes on, so its line comes after those of steps that it does not contain.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segapp.run.events.types import parse_line


@dataclass(frozen=True)
class RewindPoint:
    """Where a checkpoint stands.

    Args:
        step: optimizer updates done.
        epoch: the epoch it goes on in, from 1.
        batch: batches already used of that epoch.
        sha256: tells two checkpoints of one step apart; None where it is not known.
    """

    step: int
    epoch: int
    batch: int
    sha256: str | None = None


@dataclass
class Tail:
    """What of a file follows the first line that is repeated.

    Args:
        start: its offset; the size of the file where nothing is repeated.
        kept: the events behind it that stay, in order.
        dropped: the lines that go: those repeated, and damaged ones behind the first of them.
    """

    start: int
    kept: list[dict[str, Any]]
    dropped: list[bytes]


def split_tail(path: Path, point: RewindPoint) -> Tail:
    """Parts the events of a file into those that stay and those that training repeats from a point.

    Raises:
        OSError: it cannot be read.
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
    """Whether training repeats an event when it goes on from a point.

    Args:
        raw: the event.
        point: the checkpoint's.
        is_after_own: it stands behind the checkpoint's own line.
    """
    kind, step, epoch = raw["type"], raw.get("step"), raw.get("epoch")
    if kind == "step":
        return isinstance(step, int) and step > point.step
    if kind == "checkpoint":
        return isinstance(step, int) and (step > point.step or (step == point.step and is_after_own))
    if kind == "epoch_start":
        return isinstance(epoch, int) and epoch >= point.epoch + (point.batch > 0)
    if kind == "val":
        return isinstance(epoch, int) and epoch >= point.epoch
    return False


def _is_own(raw: dict[str, Any], point: RewindPoint) -> bool:
    is_same = raw["type"] == "checkpoint" and raw.get("step") == point.step
    return is_same and (point.sha256 is None or raw.get("sha256") in (None, point.sha256))


def _may_be_repeated(line: bytes) -> bool:
    """A quick look: most lines of a long run need no more."""
    return any(mark in line for mark in _MARKS)


_MARKS = (b'"type":"step"', b'"type":"checkpoint"', b'"type":"epoch_start"', b'"type":"val"')


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            yield offset, line
            offset += len(line)
