"""Levels of masks that were saved with loss, and the level nearest to each pixel, worked by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from segapp.onboarding.content import MaskContent, dominant_levels, nearest_level

RED, BLUE = (200, 0, 0), (0, 0, 200)


@pytest.mark.parametrize(
    ("counts", "levels"),
    [
        ({0: 500, 250: 400, 120: 60, 30: 38, 200: 2}, [0, 255]),  # a blend, one too near, one too rare
        ({0: 500, 250: 400, 120: 79, 200: 21}, [0, 255]),
        ({0: 500, 250: 400, 120: 80, 200: 20}, [0, 120, 255]),  # a fifth of the rarer one: no border is as wide
        ({0: 500, 40: 500}, [0]),
        ({0: 500, 41: 500}, [0, 41]),
        ({8: 500, 247: 500}, [0, 255]),
        ({9: 500, 246: 500}, [9, 246]),
        ({0: 995, 255: 5}, [0, 255]),
        ({0: 996, 255: 4}, [0]),
    ],
)
def test_dominant_values_are_frequent_and_apart(counts: dict[int, int], levels: list[int]) -> None:
    assert dominant_levels(MaskContent(1, 1, values=Counter(counts))) == levels


def test_dominant_colours_are_not_on_the_line_between_others() -> None:
    def found(color: tuple[int, int, int], most: int = 64) -> list[Any]:
        return dominant_levels(MaskContent(1, 1, colors=Counter({RED: 500, BLUE: 400, color: 50})), most)

    assert found((100, 0, 100)) == [BLUE, RED]
    assert found((100, 31, 100)) == [BLUE, RED]
    assert found((100, 33, 100)) == [BLUE, (100, 33, 100), RED]
    assert found((100, 90, 100), 2) == [BLUE, RED]
    assert found((100, 90, 100), 1) == [RED]
    assert found((241, 0, 0)) == [BLUE, RED, (241, 0, 0)]  # behind the end of the line, by more than 32


def test_pixels_get_the_nearest_level() -> None:
    grey = np.array([[0, 63, 64, 65], [191, 192, 255, 100]], np.uint8)
    np.testing.assert_array_equal(nearest_level(grey, [0, 128, 255]), [[0, 0, 0, 1], [1, 2, 2, 1]])
    color = np.array([[(190, 10, 10), (10, 10, 190), (120, 0, 110)]], np.uint8)
    np.testing.assert_array_equal(nearest_level(color, [BLUE, RED]), [[1, 0, 1]])
