"""Zoom and pan of the chart against cases worked by hand, and properties of any sequence of moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segapp.tui.chart import MIN_SPAN, Viewport


def test_zoom_and_pan_by_hand() -> None:
    everything = Viewport()
    assert everything.visible(1, 1001) == (1, 1001)
    half = everything.zoomed(0.5, 1.0, 1, 1001)
    assert half == Viewport(500, None)
    assert half.visible(1, 1001) == (501, 1001)
    assert half.visible(1, 2000) == (1500, 2000), "the newest step is followed"
    left = half.panned(-0.5, 1, 1001)
    assert left == Viewport(500, 751)
    assert left.visible(1, 2000) == (251, 751), "a part that was moved to stays"
    assert left.panned(10, 1, 1001) == half
    assert left.jumped(1, 1001, to_end=False) == Viewport(500, 501)
    assert left.jumped(1, 1001, to_end=True) == half
    assert left.zoomed(100, 0.5, 1, 1001) == half.zoomed(2, 1.0, 1, 1001) == everything
    middle = everything.zoomed(0.5, 0.5, 0, 1000)
    assert middle.visible(0, 1000) == (250, 750), "the step under the pointer keeps its place"


moves = st.lists(st.tuples(st.sampled_from(["zoom", "pan", "jump"]), st.floats(0.1, 10), st.floats(0, 1)), max_size=12)


@given(moves, st.integers(2, 10**6))
def test_any_moves_stay_inside_the_run(moves: list[tuple[str, float, float]], last: int) -> None:
    part = Viewport()
    for kind, factor, at in moves:
        if kind == "zoom":
            part = part.zoomed(factor, at, 1, last)
        elif kind == "pan":
            part = part.panned(factor - 5, 1, last)
        else:
            part = part.jumped(1, last, to_end=at > 0.5)
        left, right = part.visible(1, last)
        assert 1 <= left < right
        assert right <= max(last, left + 1)
        assert right - left >= min(MIN_SPAN, last - 1) - 1e-6 or right - left == pytest.approx(1)
