"""The fits of peak memory against numpy's least squares and values computed by hand."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import segapp.run.memory_fit as module
from segapp.parallel.chunks import plan_chunks
from segapp.run.memory_fit import MemoryFit, fit_lines, fit_memory


def test_memory_fit_docstring_examples_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_slope_comes_from_devices_that_differ_by_a_sample() -> None:
    fit = fit_memory([((4, 10, 9, 9), (900.0, 1300.0, 1200.0, 1200.0))])
    assert fit.is_proven
    assert fit.slope_mib == pytest.approx(100.0)
    assert fit.predict((6, 9, 9, 8)) == pytest.approx((1100.0, 1200.0, 1200.0, 1100.0))


def test_fit_without_observations_predicts_nothing() -> None:
    assert fit_memory([]).predict((1, 2)) == (None, None)


def test_fit_of_one_split_is_an_unproven_upper_bound() -> None:
    fit = fit_memory([((4, 4), (800.0, 700.0))])
    assert not fit.is_proven
    assert (fit.slope_mib, fit.fixed_mib) == (0.0, (800.0, 700.0))
    assert fit.predict((5, 3)) == (1000.0, 700.0)
    assert fit_memory([((0, 4), (50.0, 700.0))]).predict((0, 4)) == (50.0, 700.0)
    assert fit_memory([((0, 4), (50.0, 700.0))]).predict((1, 4)) == (None, 700.0)


def test_device_without_its_largest_observation_follows_the_line() -> None:
    assert MemoryFit((300.0, 100.0), 50.0, 0.0, is_proven=False).predict((2, 0, 1)) == (400.0, 100.0, None)


def test_fit_with_given_slope_keeps_it_and_skips_empty_groups() -> None:
    assert fit_lines([[(2.0, 500.0)], []], 100.0) == (100.0, (300.0, None))
    assert fit_lines([[(2.0, 500.0)], []]) == (None, (500.0, None))


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 10**6)), min_size=2, max_size=6, unique_by=lambda p: p[0]),
)
def test_fit_equals_numpy_least_squares(num_devices: int, requests: list[tuple[int, int]]) -> None:
    splits = [plan_chunks(16, num_devices, gpu0_bsz) for gpu0_bsz, _ in requests]
    noise = [np.random.default_rng(seed).normal(0, 20, num_devices) for _, seed in requests]
    peaks = [[500 + 100 * i + 80 * n + e[i] for i, n in enumerate(s)] for s, e in zip(splits, noise, strict=True)]
    fit = fit_memory(zip(splits, peaks, strict=True))
    rows = [[*(float(j == i) for j in range(num_devices)), n] for s in splits for i, n in enumerate(s)]
    solution = np.linalg.lstsq(np.array(rows), np.array([p for row in peaks for p in row]), rcond=None)[0]
    if solution[-1] > 0:
        assert fit.slope_mib == pytest.approx(solution[-1], abs=1e-6)
        assert fit.fixed_mib == pytest.approx(tuple(solution[:-1]), abs=1e-5)
