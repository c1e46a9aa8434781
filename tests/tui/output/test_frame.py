"""The codes that a frame writes, against those of Textual: a terminal that reads either shows the same cells."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from rich.cells import cached_cell_len, cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.geometry import Region
from textual.strip import Strip

from segapp.tui.output.frame import Frame

WIDTH, HEIGHT = 40, 6
STYLES = [
    Style.parse(text)
    for text in (
        "#ff0000 on #101010", "#00ff00 on #101010", "bold #00ff00 on #101010", "red", "default on blue", "none",
        "underline bold", "reverse #123456",
    )
]  # fmt: skip


class Cells:
    """A terminal: its cells, from text, moves of the cursor and colours."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], tuple[str, str, str, frozenset[str]]] = {}
        self._x = self._y = 0
        self._front, self._back, self._set = "", "", frozenset[str]()

    def read(self, codes: str) -> None:
        for text, numbers, kind in re.findall(r"([^\x1b\n]+)|\x1b\[([\d;]*)([Hm])", codes):
            if text:
                for char in text:
                    self.cells[self._y, self._x] = (char, self._front, self._back, self._set)
                    self._x += cell_len(char)
            elif kind == "H":
                self._y, self._x = (int(number) - 1 for number in numbers.split(";"))
            else:
                self._style(numbers.split(";"))

    def _style(self, numbers: list[str]) -> None:
        while numbers:
            number = numbers.pop(0)
            if number in ("38", "48"):
                length = 4 if numbers[0] == "2" else 2
                color, numbers = ";".join(numbers[:length]), numbers[length:]
                self._front, self._back = (color, self._back) if number == "38" else (self._front, color)
            elif number in ("", "0"):
                self._front, self._back, self._set = "", "", frozenset()
            elif int(number) >= 30:
                is_front, color = int(number) // 10 in (3, 9), "" if number in ("39", "49") else number
                self._front, self._back = (color, self._back) if is_front else (self._front, color)
            else:
                self._set |= {number}


def strip(rng: np.random.Generator, width: int) -> Strip:
    edges = [0, *sorted(rng.choice(np.arange(1, width), min(3, width - 1), replace=False).tolist()), width]
    letters = "abc █⣿│" if rng.random() < 0.9 else "ab漢"
    segments = []
    for a, b in pairwise(edges):
        text = ""
        while cell_len(text) < b - a:
            text += str(rng.choice(list(letters)))
        text = text if cell_len(text) == b - a else "x" * (b - a)
        segments.append(Segment(text, STYLES[int(rng.integers(len(STYLES)))]))
    return Strip(segments, width)


def updates(rng: np.random.Generator, num: int) -> list[CompositorUpdate]:
    found: list[CompositorUpdate] = [
        LayoutUpdate([[strip(rng, WIDTH)] for _ in range(HEIGHT)], Region(0, 0, WIDTH, HEIGHT))
    ]
    chops = [{0: strip(rng, 15), 15: strip(rng, WIDTH - 15)} for _ in range(HEIGHT)]
    for _ in range(num):
        y, x = int(rng.integers(HEIGHT)), int(rng.choice([0, 15]))
        chops = [dict(line) for line in chops]
        if rng.random() < 0.8:
            chops[y][x] = strip(rng, 15 if x == 0 else WIDTH - 15)
        spans = [(row, 0, int(rng.choice([WIDTH, 22]))) for row in sorted({y, int(rng.integers(HEIGHT))})]
        found.append(ChopsUpdate(chops, spans, [[15, WIDTH]] * HEIGHT))
    return found


@pytest.mark.parametrize("system", ["truecolor", "256", "standard"])
def test_terminal_shows_what_textual_would_write(system: str) -> None:
    rng, frame = np.random.default_rng(0), Frame()
    console = Console(color_system=system, force_terminal=True)  # type: ignore[arg-type]
    ours, theirs = Cells(), Cells()
    for style in STYLES:
        style._ansi = None  # codes of another system
    for update in updates(rng, 200):
        ours.read(frame.updated(update).render_segments(console))
        for line in getattr(update, "chops", []):
            for piece in line.values():
                piece._render_cache = None
        theirs.read(update.render_segments(console))
        assert ours.cells == theirs.cells


def test_only_the_cells_that_differ_are_written() -> None:
    style, frame = STYLES[0], Frame()
    line = [Strip([Segment("loss 0.5312 after 17 steps of an epoch of 60", style)])]
    frame.write(LayoutUpdate([line], Region(0, 0, 44, 1)), ColorSystem.TRUECOLOR)
    new = Strip([Segment("loss 0.5298 after 17 steps of an epoch of 61", style)])
    codes = frame.write(ChopsUpdate([{0: new}], [(0, 0, 44)], [[44]]), ColorSystem.TRUECOLOR)
    assert re.findall(r"\x1b\[1;(\d+)H[^\x1b]*(?:\x1b\[[\d;]*m)?([^\x1b]+)", codes) == [("9", "298"), ("44", "1")]
    assert frame.write(ChopsUpdate([{0: new}], [(0, 0, 44)], [[44]]), ColorSystem.TRUECOLOR) == ""


def test_redrawn_screen_is_written_in_full() -> None:
    frame, update = Frame(), LayoutUpdate([[Strip([Segment("abc", STYLES[0])])]], Region(0, 0, 3, 1))
    assert frame.write(update, ColorSystem.TRUECOLOR) == frame.write(update, ColorSystem.TRUECOLOR) != ""


def test_texts_shown_once_are_not_kept() -> None:
    frame, kept = Frame(), []
    cached_cell_len.cache_clear()  # of what other tests measured
    for step in range(1000):
        old = Strip([Segment(f"step {step:5d}: loss 0.5312", STYLES[0])])
        frame.write(ChopsUpdate([{0: old}], [(0, 0, 10)], [[24]]), ColorSystem.TRUECOLOR)
        kept.append(cached_cell_len.cache_info().currsize)
    assert kept[20] - kept[0] == 20  # cut at a span: rich measures the text, and keeps it
    assert max(kept) - kept[0] < 512
