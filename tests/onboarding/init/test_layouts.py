"""`segapp init` on every drawn layout: what training would read is what was drawn, or the question has that answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.layouts import LAYOUTS
from tests.support.layouts.canvas import Ask
from tests.support.layouts.judge import answered, judged, problems

REPEATED = {"capitals", "side by side, jpg and png", "float TIFF of four bands", "OME-TIFF", "ids in 16 bits",
            "colors and an opaque alpha", "smoothed colors", "labelme", "value without a name", "EXIF-rotated",
            "npz per image", "arrays", "ids from one", "ids with gaps", "value 0 unlabeled",
            "images/masks split", "colors without a file"}  # fmt: skip
"""Layouts whose rules other layouts, the tests of `init` or a training on drawn layouts show too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in LAYOUTS]
)
def test_layout_is_read_as_it_was_drawn(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    truth, verdict = judged(layout, tmp_path)
    print(verdict.said)
    assert problems(layout, verdict) == []
    if isinstance(layout.expected, Ask) and verdict.question is not None:
        assert answered(layout, truth, tmp_path, verdict) is not None, "no answer gives what was drawn"
