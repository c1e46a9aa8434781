"""Columns, scales and dots against brute force over every point."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from segapp.tui.widgets import ascii_text
from segapp.view.plot import (
    CurveColumns,
    Scale,
    choose_scale,
    draw_columns,
    pack_dots,
    reduce_columns,
    row_labels,
    usual_range,
    without_spikes,
)

NAN = math.nan


def reduced(y: list[float], num: int):
    x = np.arange(len(y), dtype=float)
    values = np.array(y)
    return reduce_columns(x, values, values, np.isnan(values), 0.0, float(max(len(y) - 1, 1)), num)


@given(st.lists(st.floats(-5, 5) | st.just(NAN), min_size=2, max_size=300), st.integers(2, 40))
def test_plot_columns_span_the_extremes_of_their_points(y: list[float], num: int) -> None:
    columns = reduced(y, num)
    span = len(y) - 1
    for column in range(num):
        inside = [v for i, v in enumerate(y) if min(int(i * (num / span)), num - 1) == column]
        finite = [v for v in inside if not math.isnan(v)]
        if finite:
            assert columns.low[column] == min(finite)
            assert columns.high[column] == max(finite)
        assert columns.is_bad[column] == (len(finite) < len(inside))


def test_neighboring_points_are_joined_and_gaps_kept() -> None:
    np.testing.assert_allclose(reduced([0.0, 1.0, 2.0], 9).low, np.arange(9) / 4, atol=0.26)
    broken = reduced([0.0, NAN, 2.0], 9)
    assert (np.flatnonzero(np.isfinite(broken.low)).tolist(), broken.is_bad.sum()) == ([0, 8], 1)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=60), st.integers(4, 40))
def test_drawn_curve_has_no_holes(y: list[float], num_rows: int) -> None:
    columns = reduced(y, 2 * len(y))
    dots = draw_columns(columns, Scale(0.0, 1.0), num_rows)
    drawn = [np.flatnonzero(column) for column in dots.T]
    assert all(len(rows) for rows in drawn)
    for rows, after in itertools.pairwise(drawn):
        assert (np.diff(rows) == 1).all()
        assert rows[0] - 1 <= after[-1]
        assert after[0] <= rows[-1] + 1


@pytest.mark.parametrize(
    ("scale", "count", "ticks"),
    [
        (Scale(0.0, 1.0), 5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Scale(0.0, 62.0), 5, [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]),
        (Scale(-1.0, 3.0), 4, [-1.0, 0.0, 1.0, 2.0, 3.0]),
        (Scale(7.0, 7.5), 2, [7.0, 7.2, 7.4]),
        (Scale(1.0, 1.0), 3, []),
        (Scale(0.01, 100.0, is_log=True), 6, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]),
        (Scale(0.01, 100.0, is_log=True), 5, [0.01, 0.1, 1.0, 10.0, 100.0]),
        (Scale(1e-4, 1e4, is_log=True), 4, [1e-4, 1e-2, 1.0, 1e2, 1e4]),
        (Scale(2.5, 4.5, is_log=True), 4, [2.5, 3.0, 3.5, 4.0, 4.5]),
        (Scale(1e300, 1.7e308, is_log=True), 4, [1e300, 1e302, 1e304, 1e306, 1e308]),
        (Scale(1.0, math.inf, is_log=True), 4, []),
    ],
)
def test_ticks_are_round_numbers(scale: Scale, count: int, ticks: list[float]) -> None:
    assert scale.ticks(count) == pytest.approx(ticks)


def test_braille_dots_have_their_own_patterns() -> None:
    dots = [np.arange(8).reshape(4, 2) == i for i in range(8)]
    assert len({int(pack_dots(dot)[0, 0]) for dot in dots}) == 8
    assert pack_dots(np.ones((4, 2), dtype=bool))[0, 0] == 255
    assert ascii_text("\u2800⠁⠂⠈⠐⠄⡀⠠⢀⠇") == " ''''....:"


def test_strokes_are_drawn_from_low_to_high_and_joined() -> None:
    low, high = np.array([0.0, 1.0, 0.5, 0.25, NAN]), np.array([0.0, 1.0, 0.5, 0.75, NAN])
    dots = draw_columns(CurveColumns(low, high, np.zeros(5, dtype=bool)), Scale(0.0, 1.0), 5)
    assert [np.flatnonzero(column).tolist() for column in dots.T] == [[4], [0, 1, 2, 3], [1, 2], [1, 2, 3], []]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ([1.0] * 200, [2.0] * 200, (1.0, 2.0)),
        ([1.0] * 200, [2.0] * 199 + [5.0], (1.0, 2.0)),  # more than twice the span above
        ([1.0] * 200, [2.0] * 199 + [4.0], (1.0, 4.0)),
        ([1.0] * 199 + [-0.5], [2.0] * 200, (1.0, 2.0)),  # one of 200 is left out
        ([1.0] * 198 + [-0.5], [2.0] * 199, (-0.5, 2.0)),
        ([1.0] * 20, [2.0] * 19 + [9.0], (1.0, 9.0)),  # too few to call one rare
        ([1.0] * 21, [2.0] * 20 + [9.0], (1.0, 2.0)),
        ([NAN] * 3, [NAN] * 3, None),
    ],
)
def test_rarest_values_do_not_count_for_the_usual_range(
    low: list[float], high: list[float], expected: tuple[float, float] | None
) -> None:
    assert usual_range(np.array(low), np.array(high)) == expected


@pytest.mark.parametrize("value", [0.014, 0.5, -3e-7, 1e6])
def test_rounding_is_no_span(value: float) -> None:
    curve = reduced([value, value * (1 + 1e-13), value], 6)
    scale = choose_scale(curve, np.array([value * (1 - 1e-12)]), is_log=False)
    assert scale is not None
    assert scale.fraction(np.array([value])) == pytest.approx(0.5)
    changed = choose_scale(reduced([value, value * (1 + 1e-6)], 6), np.empty(0), is_log=False)
    assert changed is not None
    assert changed.fraction(np.array([value])) != pytest.approx(0.5, abs=0.4)


@given(st.floats(-1e9, 1e9), st.floats(1e-300, 1e300), st.integers(4, 40), st.booleans())
def test_neighboring_labels_differ_and_are_their_ticks(bottom: float, span: float, height: int, is_log: bool) -> None:
    bottom = abs(bottom) + 1e-9 if is_log else bottom
    assume(bottom + span > bottom)
    scale = Scale(bottom, bottom + span, is_log)
    texts = [label.strip() for label in reversed(row_labels(scale, height, 8))]
    ticks = scale.ticks(max(2, height // 3))
    shown = [float(text) for text in texts if text]
    assert all(a < b for a, b in itertools.pairwise(shown))
    for number in shown:
        assert any(number == pytest.approx(tick, rel=0.5, abs=span / 2) for tick in ticks)


def test_scale_has_a_margin_and_covers_what_must_be_inside() -> None:
    curve, nothing = reduced([1.0, 3.0], 4), np.empty(0)
    for firm, is_log, usual, bottom, top in (
        (nothing, False, None, 0.94, 3.06),
        (np.array([5.0, NAN]), False, None, 0.88, 5.12),
        (nothing, False, (2.0, 2.0), 1.8, 2.2),
        (nothing, False, (0.0, 0.0), -0.5, 0.5),
        (nothing, True, (0.0, 9.0), 1 / 3**0.03, 3 * 3**0.03),  # a range that has no logarithm
        (nothing, True, (1.0, 100.0), 1 / 100**0.03, 100 * 100**0.03),
    ):
        scale = choose_scale(curve, firm, is_log=is_log, usual=usual)
        assert scale is not None
        assert (scale.bottom, scale.top) == pytest.approx((bottom, top))
    assert choose_scale(reduced([0.0, -1.0], 4), nothing, is_log=True) is None
    scale = choose_scale(reduced([-1.0, 0.0, 0.1, 10.0], 8), nothing, is_log=True)
    assert scale is not None
    assert (scale.is_log, 0 < scale.bottom < 0.1) == (True, True)
    fractions = Scale(0.1, 10.0, is_log=True).fraction(np.array([0.1, 1.0, 10.0, 0.0, -1.0]))
    np.testing.assert_allclose(fractions, [0.0, 0.5, 1.0, NAN, NAN], atol=1e-12)


def test_row_labels_stand_at_their_heights() -> None:
    assert row_labels(Scale(0.0, 1.0), 6, 6) == ["    1 ", "      ", "      ", "  0.5 ", "      ", "    0 "]
    assert row_labels(Scale(0.0, 12_345.0), 3, 4) == ["    ", "    ", "  0 "], "no number is cut"
    assert row_labels(Scale(9.98, 10.02), 9, 8)[2:7:2] == ["  10.01 ", "     10 ", "   9.99 "]
    labels = [label.strip() for label in row_labels(Scale(0.9999, 1.0001), 30, 8) if label.strip()]
    assert labels[:3] == ["1.0001", "1.00008", "1.00006"]


def test_single_steps_beyond_the_scale_leave_no_stroke() -> None:
    calm = reduced([1.0, 2.0] * 50, 20)
    values = [1.0, 2.0] * 50
    values[31] = values[32] = 90.0
    spiky = reduced(values, 20)
    assert spiky.high.max() == 90
    mended = without_spikes(spiky, 3.0)
    np.testing.assert_array_equal(mended.high, calm.high)
    np.testing.assert_array_equal(mended.low, calm.low)
    np.testing.assert_array_equal(without_spikes(calm, 3.0).high, calm.high)
    everywhere = reduced([50.0] * 20, 10)
    np.testing.assert_array_equal(without_spikes(everywhere, 3.0).high, everywhere.high)
