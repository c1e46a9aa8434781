"""The figures of the pages are what the code draws, in a light and a dark theme, and load nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import io
import re
from pathlib import Path

import numpy as np
import pytest
from fontTools.ttLib import TTFont
from PIL import Image

from segapp.assembly.pairs import build_pairs, build_scheme
from segapp.config import load_config
from segapp.datasets.images.reading import read_image
from segapp.datasets.masks import read_mask
from segapp.docs.pages import FOLDER
from tests.support import ROOT, pictures

PICTURES = FOLDER / "pictures"
SVGS = sorted(PICTURES.glob("*.svg"))
MAX_FONTS = 40 * 1024
DATA = load_config(ROOT / "configs/demo.yaml", [f"data.root={ROOT / 'data/demo'}"]).data
SCHEME, PAIR = build_scheme(DATA), build_pairs(DATA, "val")[0]


def test_figure_of_masks_shows_the_demo_data() -> None:
    """An image, its mask in an image viewer, the mask in colors, and its ignored pixels, 6 px apart."""
    page, ids = np.array(Image.open(PICTURES / "masks.png")), read_mask(PAIR.mask, SCHEME)
    is_ignored, (height, width) = ids == SCHEME.ignore_index, ids.shape
    colors = np.array([*SCHEME.palette, (0, 0, 0)], np.uint8)[np.where(is_ignored, len(SCHEME.palette), ids)]
    in_a_viewer = np.array(Image.open(PAIR.mask))
    as_viewed, ignored = (np.repeat(each[..., None], 3, 2) for each in (in_a_viewer, is_ignored * 255))
    for part, (row, column) in zip(
        (read_image(PAIR.image), as_viewed, colors, ignored), ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True
    ):
        top, left = row * (height + 6), column * (width + 6)
        np.testing.assert_array_equal(page[top : top + height, left : left + width], part)


def test_figure_of_a_prediction_shows_the_demo_data() -> None:
    svg = (PICTURES / "prediction.svg").read_text(encoding="utf-8")
    image, colors = (
        Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r'"data:image/png;base64,([^"]+)"', svg)
    )
    labels, target = np.array(colors), read_mask(PAIR.mask, SCHEME)
    assert np.array_equal(np.array(image), read_image(PAIR.image))
    assert np.mean((labels == target)[target != SCHEME.ignore_index]) > 0.8  # a random model: 0.1
    legend = re.findall(r'<rect class="swatch"[^>]* fill="#(\w+)"/><text[^>]*>([^<]*)<', svg)
    shown = [(bytes(SCHEME.palette[i]).hex(), SCHEME.names[i]) for i in np.unique(labels)]
    assert [(color, html.unescape(name)) for color, name in legend] == shown
    assert np.array_equal(np.array(colors.convert("RGB")), np.array(SCHEME.palette, np.uint8)[labels])


@pytest.mark.parametrize("path", SVGS, ids=lambda path: path.name)
def test_svg_has_its_fonts_and_loads_nothing(path: Path) -> None:
    svg = path.read_text(encoding="utf-8")
    assert all(target.startswith(("data:", "#")) for target in re.findall(r'(?:href="|url\()"?([^")]+)', svg))
    assert "@import" not in svg
    families = set(re.findall(r"font-family: ([^;,}]+)|font: \S+ ([^;,}]+)", svg))
    assert {first or second for first, second in families} == {f'"{pictures.FAMILY}"'}
    fonts = re.findall(r"url\((data:font/[^)]+)\)", svg)
    assert len(fonts) == len(pictures.WEIGHTS)
    assert sum(map(len, fonts)) < MAX_FONTS
    shown = set(html.unescape("".join(re.findall(r">([^<>]*)</t(?:ext|span)>", svg))))
    for name in pictures.WEIGHTS.values():
        known = set(map(chr, TTFont(pictures.FONTS / name).getBestCmap()))
        assert {character for character in shown - known if character.isprintable()} == set()


def test_svgs_of_the_readme_follow_the_theme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for light in re.findall(r"!\[[^\]]*\]\(([^)]+)\)|<img [^>]*src=\"([^\"]+)\"", text):
        name = next(filter(None, light))
        if name.endswith(".svg"):
            assert "prefers-color-scheme: dark" in (ROOT / name).read_text(encoding="utf-8"), name
        else:
            dark = name.replace("-light", "-dark")
            assert dark != name
            assert f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">' in text, name
            sizes = [Image.open(ROOT / each).size for each in (name, dark)]
            assert sizes[0] == sizes[1], name
