"""Reading a long history fast: of the many `step` lines only the numbers of a curve, of everything else all.

A million lines take a few seconds to parse in full, which is long to look at an empty screen. Steps make up nearly
all of them, and their first fields always stand in the order in which `EventWriter` writes them.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from segapp.run.events.types import parse_line

_STEP_LINE = re.compile(
    rb'(\{"v":1,"seq":\d+,"t":(-?\d[\d.eE+-]*+),"type":"step","epoch":\d+,"step":(\d{1,15}),"loss":'
    rb"(null|-?\d[\d.eE+-]*+),.*+)\n"
)
_ONCE_A_LINE = (b'{"v":', b'"type":')


class StepRun(NamedTuple):
    """Consecutive `step` events, reduced to their curve."""

    t: list[float]
    step: list[int]
    loss: list[float]
    """nan where it was null."""
    last_line: bytes
    """The last of them as it lies in the file."""

    @property
    def last(self) -> dict[str, Any] | None:
        """The last of them in full; None where its end is damaged, or makes it something else."""
        raw = parse_line(self.last_line)
        return raw if raw is not None and raw["type"] == "step" else None

    @property
    def split_text(self) -> bytes:
        """The split of the last of them, unparsed: enough to see that it has changed."""
        start = self.last_line.find(b'"split":')
        return self.last_line[start : self.last_line.find(b"]", start)] if start >= 0 else b""


def skim_block(block: bytes) -> Iterator[StepRun | bytes]:
    """Parts whole lines into runs of steps and what lies between them, in order.

    Args:
        block: whole lines, each with its newline.

    Yields:
        A `StepRun`, or the bytes of other lines (damaged steps among them) for a full look.
    """
    parts = _STEP_LINE.split(block)
    between, lines = parts[0::5], parts[1::5]
    others = [piece for piece in between if piece]
    is_whole = all(block.count(mark) == len(lines) + sum(p.count(mark) for p in others) for mark in _ONCE_A_LINE)
    if not is_whole or not all(piece.endswith(b"\n") for piece in others):
        yield block  # a damage glued lines together: the full parser sorts the good from the bad
        return
    try:
        t = list(map(float, parts[2::5]))
        loss = _losses(parts[4::5])
    except ValueError:  # such as 1.2.3
        yield block
        return
    step = list(map(int, parts[3::5]))
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


def _losses(texts: list[bytes]) -> list[float]:
    try:
        return list(map(float, texts))
    except ValueError:
        return [float("nan") if text == b"null" else float(text) for text in texts]
