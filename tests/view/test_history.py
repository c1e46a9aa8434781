"""History (bounded memory) against plain loops over every step."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segapp.view.history import SMOOTHINGS, LossHistory

losses = st.lists(st.one_of(st.floats(-10, 10), st.just(math.nan)), min_size=1, max_size=400)


def plain_average(values: list[float], factor: float) -> list[float]:
    out, average, count = [], 0.0, 0
    for value in values:
        if math.isnan(value):
            out.append(math.nan)
            continue
        average, count = factor * average + (1 - factor) * value, count + 1
        out.append(average / (1 - factor**count))
    return out


def filled(values: list[float], pieces: int = 1, capacity: int = 2**17) -> LossHistory:
    history = LossHistory(capacity)
    steps = list(range(1, len(values) + 1))
    size = -(-len(values) // pieces)
    for start in range(0, len(values), size):
        part = slice(start, start + size)
        history.extend(steps[part], [float(s) for s in steps[part]], values[part])
    return history


@given(losses, st.integers(1, 7))
def test_averages_added_in_parts_equal_the_definition(values: list[float], pieces: int) -> None:
    history = filled(values, pieces)
    for factor in SMOOTHINGS:
        np.testing.assert_allclose(history.average(factor), plain_average(values, factor), rtol=1e-9, atol=1e-9)
    assert history.is_bad.tolist() == [math.isnan(value) for value in values]


@given(losses, st.integers(1, 5))
def test_merging_keeps_extremes_bad_steps_and_the_last_average(values: list[float], pieces: int) -> None:
    history = filled(values, pieces, capacity=8)
    assert history.size <= 8
    assert history.num_steps == len(values)
    known = [value for value in values if not math.isnan(value)]
    if known:
        assert np.nanmin(history.low) == min(known)
        assert np.nanmax(history.high) == max(known)
        wanted = [value for value in plain_average(values, 0.9) if not math.isnan(value)][-1]
        assert history.last_average(0.9) == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert history.step[-1] == len(values)
    assert (np.diff(history.step) > 0).all()
    ends = [0, *history.step.astype(int).tolist()]
    is_bad = [any(map(math.isnan, values[first:last])) for first, last in pairwise(ends)]
    assert history.is_bad.tolist() == is_bad, "a merged point is bad if any of its steps is"


@given(losses, st.integers(0, 400))
def test_dropped_steps_leave_no_effect_on_averages(values: list[float], step: int) -> None:
    history = filled(values)
    history.drop_after(step)
    history.extend([step + 1], [0.0], [0.5])
    expected = filled([*values[:step], 0.5])
    np.testing.assert_allclose(history.average(0.98), expected.average(0.98), rtol=1e-9)
    assert history.size == expected.size
