"""What the terminal shows, cell by cell; of an update only the cells that differ are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from rich.cells import cached_cell_len
from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.strip import Strip

_WIDER = re.compile(r"[^ -~\u00a0-\u00ac\u00ae-\u02ff\u0370-\u0377\u2010-\u2027\u2190-\u21ff\u2500-\u28ff]")
"""A character that may not be one cell wide."""

_LEAST_GAP = 8
"""Unchanged cells that are skipped: a move of the cursor takes about as many bytes."""

_NUM_UPDATES = 256
"""Updates after which the widths that rich keeps are dropped."""

_PLAIN = Style()


class Piece(NamedTuple):
    """Part of a row."""

    x: int
    y: int
    strip: Strip


class Cells(NamedTuple):
    """Neighbouring cells of a row."""

    chars: list[str]
    """One character each; an empty string where a cell of the terminal is not known."""
    styles: list[Style]


class Frame:
    """The cells of the terminal, as far as they are known: those behind a wide character are not."""

    def __init__(self) -> None:
        self._rows: dict[int, Cells] = {}
        self._num_updates = 0

    def updated(self, update: RenderableType | None) -> RenderableType | None:
        """Return an update that writes what an update changes, or all of it if it covers the whole screen.

        Textual's own update writes whole widgets and sets each colour anew: about six times the bytes.
        """
        if isinstance(update, LayoutUpdate | ChopsUpdate):
            return _FrameUpdate(self, update)  # type: ignore[return-value]  # as Textual's own updates
        return update

    def write(self, update: LayoutUpdate | ChopsUpdate, system: ColorSystem) -> str:
        """Return the codes that bring the terminal up to date."""
        self._num_updates += 1
        if self._num_updates % _NUM_UPDATES == 0:
            cached_cell_len.cache_clear()  # the text of a run hardly recurs: rich would come to hold 4096 rows of it
        if isinstance(update, LayoutUpdate):
            self._rows.clear()
        codes: list[str] = []
        style = _PLAIN
        for x, y, strip in _pieces(update):
            cells = _cells(strip)
            if cells is None:
                self._rows.pop(y, None)
                codes.append(f"{_transition(style, _PLAIN, system)}\x1b[{y + 1};{x + 1}H{_whole(strip, system)}")
                style = _PLAIN
                continue
            for first, last in _stretches(self._put(x, y, cells)):
                codes.append(f"\x1b[{y + 1};{x + first + 1}H")
                for new, group in groupby(range(first, last + 1), cells.styles.__getitem__):
                    codes += (_transition(style, new, system), *(cells.chars[i] for i in group))
                    style = new
        return "".join([*codes, _transition(style, _PLAIN, system)])

    def _put(self, x: int, y: int, cells: Cells) -> list[int]:
        """Keep cells; return the indices of those that the terminal does not show yet."""
        row = self._rows.setdefault(y, Cells([], []))
        end = x + len(cells.chars)
        missing = max(0, end - len(row.chars))
        row.chars.extend([""] * missing)
        row.styles.extend([_PLAIN] * missing)
        known = row.chars[x:end], row.styles[x:end]
        row.chars[x:end], row.styles[x:end] = cells
        pairs = zip(known[0], cells.chars, known[1], cells.styles, strict=True)
        return [i for i, (old, new, a, b) in enumerate(pairs) if old != new or (a is not b and a != b)]


class _FrameUpdate(CompositorUpdate):
    """An update that is compared with the frame when it is written."""

    def __init__(self, frame: Frame, update: LayoutUpdate | ChopsUpdate) -> None:
        self._frame, self._update = frame, update

    def render_segments(self, console: Console) -> str:
        """Return the codes for the terminal."""
        return self._frame.write(self._update, console._color_system or ColorSystem.TRUECOLOR)


def _pieces(update: LayoutUpdate | ChopsUpdate) -> Iterator[Piece]:
    if isinstance(update, LayoutUpdate):
        for y, line in enumerate(update.strips, update.region.y):
            yield Piece(update.region.x, y, Strip.join(line))
        return
    for y, x1, x2 in update.spans:
        for end, (x, strip) in zip(update.chop_ends[y], update.chops[y].items(), strict=False):
            if strip is not None and x <= x2 and end > x1:
                yield Piece(x, y, strip if x >= x1 and end <= x2 else strip.crop(0, min(end, x2) - x))


def _cells(strip: Strip) -> Cells | None:
    """Return the cells of a strip; None if it has characters that are wider or narrower than one, or links."""
    cells = Cells([], [])
    for text, style, _ in strip:
        if _WIDER.search(text) or (style is not None and style.link):
            return None
        cells.chars.extend(text)
        cells.styles.extend([style or _PLAIN] * len(text))
    return cells


def _whole(strip: Strip, system: ColorSystem) -> str:
    return "".join(Strip.render_style(style or _PLAIN, text, system) for text, style, _ in strip)


def _stretches(changed: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of the indices that are close together."""
    if not changed:
        return
    first = last = changed[0]
    for i in changed[1:]:
        if i - last > _LEAST_GAP:
            yield first, last
            first = i
        last = i
    yield first, last


@lru_cache(4096)
def _transition(before: Style, after: Style, system: ColorSystem) -> str:
    """Return the codes that turn one style into another: of the colours that differ, where the attributes are equal."""
    if before == after:
        return ""
    if before._attributes & before._set_attributes != after._attributes & after._set_attributes:
        return f"\x1b[0;{codes}m" if (codes := Strip.render_ansi(after, system)) else "\x1b[0m"
    changes: list[str] = []
    for old, new, is_foreground in ((before.color, after.color, True), (before.bgcolor, after.bgcolor, False)):
        if old != new:
            default = ("39" if is_foreground else "49",)
            changes += new.downgrade(system).get_ansi_codes(is_foreground) if new is not None else default
    return f"\x1b[{';'.join(changes)}m"
