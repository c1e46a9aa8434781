"""The font of the SVG pictures: DejaVu Sans Mono, with only the characters that they have.

A code host shows an SVG as an image, which loads nothing: the font is inside it. The fonts are stored, so that the
pictures do not depend on the version of fontTools.

python -m tests.support.mono_font --write   writes tests/support/fonts/, after a picture has a new character
"""

from __future__ import annotations

import base64
import functools
import html
import importlib.util
import re
import shutil
import sys
from pathlib import Path

from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont

FOLDER = Path(__file__).parent / "fonts"
WEIGHTS = {"normal": "mono.woff", "bold": "mono-bold.woff"}
FAMILY = "segapp mono"
_SOURCES = {"normal": "DejaVuSansMono.ttf", "bold": "DejaVuSansMono-Bold.ttf"}
_BRAILLE = range(0x2800, 0x2900)
_ASCII = range(0x20, 0x7F)


def style() -> str:
    """Return the rules of CSS that define the font `FAMILY`."""
    return "\n".join(
        f'@font-face {{ font-family: "{FAMILY}"; font-weight: {weight}; '
        f"src: url(data:font/woff;base64,{base64.b64encode((FOLDER / name).read_bytes()).decode()}) }}"
        for weight, name in WEIGHTS.items()
    )


@functools.cache
def characters(weight: str) -> frozenset[str]:
    """Return the characters of a stored font."""
    return frozenset(map(chr, TTFont(FOLDER / WEIGHTS[weight]).getBestCmap()))


def text_of(svg: str) -> str:
    """Return the characters that a picture shows, each once."""
    shown = html.unescape("".join(re.findall(r">([^<>]*)</t(?:ext|span)>", svg)))
    return "".join(sorted(c for c in set(shown) if c.isprintable()))


def write(text: str) -> None:
    """Write the fonts with the characters of a text and those of ASCII."""
    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None
    assert spec.origin is not None
    sources = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    FOLDER.mkdir(exist_ok=True)
    shutil.copy(sources / "LICENSE_DEJAVU", FOLDER / "LICENSE")
    codes = {*_ASCII, *map(ord, text)}
    for weight, name in WEIGHTS.items():
        font = TTFont(sources / _SOURCES[weight])
        _draw_braille(font, codes)
        options = Options(layout_features=[], hinting=False, name_IDs=[0, 13], name_legacy=True)
        options.drop_tables += ["FFTM", "GDEF", "GPOS", "GSUB", "kern"]
        subsetter = Subsetter(options)
        subsetter.populate(unicodes=codes)
        subsetter.subset(font)
        font.flavor = "woff"
        font.save(FOLDER / name)


def _draw_braille(font: TTFont, codes: set[int]) -> None:
    """Add the characters of braille, which the font lacks: two columns of four dots, at the height of a full block."""
    width, radius = font["hmtx"]["a"][0], 130
    top, bottom = font["hhea"].ascent, font["hhea"].descent
    for code in sorted(codes & set(_BRAILLE)):
        pen = TTGlyphPen(None)
        for bit in range(8):
            if code - _BRAILLE.start >> bit & 1:
                column, row = (bit // 3, bit % 3) if bit < 6 else (bit - 6, 3)
                x, y = width * (1 + 2 * column) // 4, round(top - (top - bottom) * (1 + 2 * row) / 8)
                pen.moveTo((x, y + radius))
                pen.qCurveTo((x + radius, y + radius), (x + radius, y))
                pen.qCurveTo((x + radius, y - radius), (x, y - radius))
                pen.qCurveTo((x - radius, y - radius), (x - radius, y))
                pen.qCurveTo((x - radius, y + radius), (x, y + radius))
                pen.closePath()
        name = f"braille{code:X}"
        font.setGlyphOrder([*font.getGlyphOrder(), name])
        font["glyf"][name] = pen.glyph()
        font["hmtx"][name] = (width, 0)
        for table in font["cmap"].tables:
            if table.isUnicode():
                table.cmap[code] = name


def main() -> None:
    """Write the fonts with the characters of the pictures that have them."""
    from tests.support.reference import PICTURES

    if "--write" in sys.argv[1:]:
        write("".join(map(text_of, (make() for make in PICTURES.values()))))


if __name__ == "__main__":
    main()
