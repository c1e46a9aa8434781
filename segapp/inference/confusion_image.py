"""The confusion matrix as a picture: rows are the targets' classes, shares of each row as shades."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from segapp.run.text import printable

PICTURE_SUFFIXES = (".png", ".svg")
_CELL_PX, _FONT_PX, _GAP_PX = 34, 12, 8
_LEGEND = "rows: target, columns: prediction, % of row"
_PAPER, _INK, _FULL = (255, 255, 255), (30, 30, 30), (20, 60, 130)


@dataclass(frozen=True)
class _Cell:
    left: int
    top: int
    share: float | None

    @property
    def color(self) -> tuple[int, int, int]:
        share = self.share or 0.0
        red, green, blue = (round(p + (f - p) * share) for p, f in zip(_PAPER, _FULL, strict=True))
        return red, green, blue

    @property
    def ink(self) -> tuple[int, int, int]:
        return _PAPER if (self.share or 0.0) > 0.5 else _INK

    @property
    def text(self) -> str:
        """Percent; nothing below half a percent."""
        return f"{100 * self.share:.0f}" if self.share is not None and self.share >= 0.005 else ""


class _Layout:
    def __init__(self, matrix: Tensor, names: Sequence[str]) -> None:
        self.names = [printable(name) for name in names]
        self._font = ImageFont.load_default(_FONT_PX)
        self.margin = round(max(self._font.getlength(name) for name in self.names)) + 2 * _GAP_PX + 2 * _FONT_PX
        self.side = self.margin + _CELL_PX * len(names) + _GAP_PX
        self._matrix = matrix

    def cells(self) -> Iterator[_Cell]:
        totals = self._matrix.sum(1).tolist()
        for i, row in enumerate(self._matrix.tolist()):
            for j, count in enumerate(row):
                share = count / totals[i] if totals[i] else None
                yield _Cell(self.margin + j * _CELL_PX, self.margin + i * _CELL_PX, share)

    def middle(self, number: int) -> int:
        return self.margin + number * _CELL_PX + _CELL_PX // 2


def draw_confusion(matrix: Tensor, names: Sequence[str], suffix: str) -> bytes:
    """A picture of the matrix; each cell says which percentage of the row's pixels was taken for the column's class.

    Args:
        matrix: int64 (C, C), rows the target's class.
        names: of the classes.
        suffix: .png or .svg.
    """
    layout = _Layout(matrix, names)
    return _svg(layout) if suffix == ".svg" else _png(layout)


def _svg(layout: _Layout) -> bytes:
    side = layout.side
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" width="{side}" height="{side}" '
        f'font-family="sans-serif" font-size="{_FONT_PX}"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for cell in layout.cells():
        x, y = cell.left + _CELL_PX // 2, cell.top + _CELL_PX // 2
        parts.append(
            f'<rect x="{cell.left}" y="{cell.top}" width="{_CELL_PX}" height="{_CELL_PX}" fill="rgb{cell.color}" '
            f'stroke="#ddd"/><text x="{x}" y="{y}" text-anchor="middle" dominant-baseline="central" '
            f'fill="rgb{cell.ink}">{cell.text}</text>'
        )
    near = layout.margin - _GAP_PX
    for number, name in enumerate(layout.names):
        at = layout.middle(number)
        label = f'dominant-baseline="central">{escape(name)}</text>'
        parts.append(f'<text x="{near}" y="{at}" text-anchor="end" {label}')
        parts.append(f'<text transform="translate({at} {near}) rotate(-90)" {label}')
    parts.append(f'<text x="{_GAP_PX}" y="{_FONT_PX + _GAP_PX}">{_LEGEND}</text></svg>\n')
    return "".join(parts).encode()


def _png(layout: _Layout) -> bytes:
    picture = Image.new("RGB", (layout.side, layout.side), _PAPER)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(_FONT_PX)
    for cell in layout.cells():
        box = (cell.left, cell.top, cell.left + _CELL_PX, cell.top + _CELL_PX)
        draw.rectangle(box, fill=cell.color, outline=(221, 221, 221))
        middle = (cell.left + _CELL_PX // 2, cell.top + _CELL_PX // 2)
        draw.text(middle, cell.text, fill=cell.ink, font=font, anchor="mm")
    near = layout.margin - _GAP_PX
    for number, name in enumerate(layout.names):
        draw.text((near, layout.middle(number)), name, fill=_INK, font=font, anchor="rm")
    sideways = Image.new("RGB", (near, _CELL_PX * len(layout.names)), _PAPER)
    pen = ImageDraw.Draw(sideways)
    for number, name in enumerate(layout.names):
        pen.text((0, number * _CELL_PX + _CELL_PX // 2), name, fill=_INK, font=font, anchor="lm")
    picture.paste(sideways.rotate(90, expand=True), (layout.margin, 0))
    draw.text((_GAP_PX, _GAP_PX), _LEGEND, fill=_INK, font=font)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
