"""Real images in a terminal: detect support, and make the codes of Kitty's graphics protocol and of sixel.

The package textual-image also supports both protocols, but it writes to stdout, whereas the TUI is drawn on stderr, and
it queries the terminal while it is imported.
"""

import contextlib
import fcntl
import os
import re
import select
import struct
import sys
import termios
import time
import tty
import unicodedata
from base64 import b64encode
from io import BytesIO
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

_QUESTIONS = b"\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\\x1b[16t\x1b[c"
"""Queries for Kitty's protocol, the cell size, and the attributes; every terminal answers the last one."""
_ATTRIBUTES = re.compile(rb"\x1b\[\?([\d;]*)c")
_CELL_SIZE = re.compile(rb"\x1b\[6;(\d+);(\d+)t")
_USUAL_CELL_PX = 10, 20
_LONG_RUN = re.compile(r"(.)\1{3,}")

KITTY_COLORS = (215, 95, 0), (95, 215, 0), (95, 0, 215)
"""Colors that represent Kitty's images; they are in the palette of 256 colors."""
_PLACEHOLDER = "\U0010eeee"
_COMPOSED = "\u0306\u0307\u0308\u0309\u030a\u030b\u030c\u030f\u0311\u0313\u0314\u0342\u0653\u0654"
ROW_MARKS = [
    mark
    for mark in map(chr, range(0x305, 0x82D))
    if unicodedata.combining(mark) == 230 and not unicodedata.decomposition(mark) and mark not in _COMPOSED
]
"""Kitty's signs for the rows 0, 1, ... of an image: combining marks that no letter uses."""


class Graphics(NamedTuple):
    """The protocol with which a terminal shows images."""

    protocol: Literal["kitty", "sixel"]
    first_cell_px: tuple[int, int]
    """Width and height of a cell at the time of the query."""

    @property
    def cell_px(self) -> tuple[int, int]:
        """Present width and height of a cell, since the user may have changed the font size."""
        with contextlib.suppress(OSError):
            rows, columns, width, height = struct.unpack("4H", fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8)))
            if 0 < columns <= width and 0 < rows <= height:
                return width // columns, height // rows
        return self.first_cell_px


def find_graphics(timeout_s: float = 1.0) -> Graphics | None:
    """Ask the terminal which protocol it supports; None if it supports none, or does not answer in time.

    Call it before Textual reads the terminal. Keys that are pressed meanwhile are lost.
    """
    source, sink = sys.__stdin__, sys.__stderr__
    assert source is not None
    assert sink is not None
    answer, deadline_s, mode = b"", time.monotonic() + timeout_s, termios.tcgetattr(source)
    try:
        tty.setcbreak(source, termios.TCSANOW)
        os.write(sink.fileno(), _QUESTIONS)
        while not _ATTRIBUTES.search(answer):
            left_s = deadline_s - time.monotonic()
            read = os.read(source.fileno(), 4096) if select.select([source], [], [], max(0.0, left_s))[0] else b""
            if not read:
                break
            answer += read
    finally:
        termios.tcsetattr(source, termios.TCSANOW, mode)
    return parse_answer(answer)


def parse_answer(answer: bytes) -> Graphics | None:
    """Return the protocol in a terminal's answer.

    Sixel comes first, because some terminals with sixel support Kitty's protocol without its placeholders in the text.
    """
    attributes, cell = _ATTRIBUTES.search(answer), _CELL_SIZE.search(answer)
    cell_px = (int(cell[2]), int(cell[1])) if cell else _USUAL_CELL_PX
    if attributes is None or 0 in cell_px:
        return None
    if b"4" in attributes[1].split(b";")[1:]:
        return Graphics("sixel", cell_px)
    return Graphics("kitty", cell_px) if b"\x1b_Gi=31;OK" in answer else None


def kitty_codes(image: Any, number: int, cells: tuple[int, int]) -> str:
    """Return the codes that send a Pillow image to the terminal, for this number of placeholder columns and rows."""
    file = BytesIO()
    image.save(file, "PNG")
    data = b64encode(file.getvalue()).decode()
    edges = [*range(0, len(data), 4096), len(data)]
    keys = f"a=T,U=1,f=100,q=2,i={number},c={cells[0]},r={cells[1]},"
    parts = [(keys if start == 0 else "", int(end < len(data)), data[start:end]) for start, end in pairwise(edges)]
    return "".join(f"\x1b_G{keys}m={has_more};{part}\x1b\\" for keys, has_more, part in parts)


def kitty_rows(cells: tuple[int, int]) -> list[str]:
    """Return the text that Kitty replaces by an image: the text's color is the number of the image.

    The first cell of a row names the row and column 0; the cells to its right continue it.
    """
    return [_PLACEHOLDER + mark + ROW_MARKS[0] + _PLACEHOLDER * (cells[0] - 1) for mark in ROW_MARKS[: cells[1]]]


def sixel_codes(image: Any) -> str:
    """Return a Pillow RGB image in the sixel format of DEC's terminals, with at most 256 colors."""
    drawn = image.quantize(256)
    pixels, palette = np.asarray(drawn), drawn.getpalette()
    height, width = pixels.shape
    colors = [
        f"#{i};2;" + ";".join(str(round(value / 2.55)) for value in palette[3 * i : 3 * i + 3])
        for i in np.unique(pixels).tolist()
    ]
    bands = (_sixel_band(pixels[top : top + 6]) for top in range(0, height, 6))
    return f'\x1bP0;1q"1;1;{width};{height}' + "".join(colors) + "-".join(bands) + "\x1b\\"


def _sixel_band(band: NDArray[np.uint8]) -> str:
    """Return up to six rows of pixels: per color, a character per column whose bits are its pixels."""
    bits, columns = np.zeros((256, band.shape[1]), np.uint8), np.arange(band.shape[1])
    for row, colors in enumerate(band):
        bits[colors, columns] += 1 << row
    lines = {i: (bits[i] + 63).tobytes().decode().rstrip("?") for i in np.unique(band).tolist()}
    return "$".join(f"#{i}" + _LONG_RUN.sub(lambda run: f"!{len(run[0])}{run[1]}", line) for i, line in lines.items())
