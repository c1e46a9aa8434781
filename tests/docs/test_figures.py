"""The figures of the pages are what the code draws, in a light and a dark theme, and load nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from segapp.datasets.images.reading import read_image
from segapp.datasets.masks import read_mask
from segapp.docs.pages import FOLDER
from tests.support import ROOT, mask_figure, mono_font, prediction_figure
from tests.support.reference import PLAN_PICTURE

PICTURES = FOLDER / "pictures"
SVGS = sorted(PICTURES.glob("*.svg"))
MAX_FONTS = 40 * 1024


def test_figure_of_masks_shows_the_demo_data() -> None:
    assert np.array_equal(np.array(Image.open(mask_figure.FIGURE)), mask_figure.figure())


def test_figure_of_a_prediction_shows_the_demo_data() -> None:
    svg = prediction_figure.FIGURE.read_text(encoding="utf-8")
    scheme, pair = prediction_figure.demo_pair()
    image, colors = (
        Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r'"data:image/png;base64,([^"]+)"', svg)
    )
    labels, target = np.array(colors), read_mask(pair.mask, scheme)
    assert np.array_equal(np.array(image), read_image(pair.image))
    assert svg == prediction_figure.figure(np.array(image), labels, scheme)
    assert np.mean((labels == target)[target != scheme.ignore_index]) > 0.8  # a random model: 0.1


@pytest.mark.parametrize("path", SVGS, ids=lambda path: path.name)
def test_svg_has_its_fonts_and_loads_nothing(path: Path) -> None:
    svg = path.read_text(encoding="utf-8")
    assert all(target.startswith(("data:", "#")) for target in re.findall(r'(?:href="|url\()"?([^")]+)', svg))
    assert "@import" not in svg
    families = set(re.findall(r"font-family: ([^;,}]+)|font: \S+ ([^;,}]+)", svg))
    assert {first or second for first, second in families} == {f'"{mono_font.FAMILY}"'}
    fonts = re.findall(r"url\((data:font/[^)]+)\)", svg)
    assert len(fonts) == len(mono_font.WEIGHTS)
    assert sum(map(len, fonts)) < MAX_FONTS
    missing = {
        c for weight in mono_font.WEIGHTS for c in mono_font.text_of(svg) if c not in mono_font.characters(weight)
    }
    assert missing == set(), "run: python -m tests.support.mono_font --write, then tests.support.reference --write"


def test_plan_picture_is_the_whole_output_of_the_page() -> None:
    svg, page = PLAN_PICTURE.read_text(encoding="utf-8"), (FOLDER / "tasks" / "plan.md").read_text(encoding="utf-8")
    command, block = page.split("```sh\n")[1], page.split("```text\n")[1].partition("\n\n...")[0]
    lines = map(html.unescape, re.findall(r"<text[^>]*>([^<]*)</text>", svg))
    assert " ".join(lines).split() == ["$", *command.partition("\n")[0].split(), *block.split()]
    assert {"won't fit", " ok "} <= set(re.findall("won't fit| ok ", block))
    assert "…" not in block


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
