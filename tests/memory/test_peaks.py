"""The peaks of splits against numpy's least squares and values computed by hand."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import segapp.memory.peaks as module
from segapp.chunks import plan_chunks
from segapp.memory.peaks import PeakModel, fit_lines


def test_peaks_docstring_examples_hold():
    assert doctest.testmod(module).failed == 0


def bases(model: PeakModel, split: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(peak.basis for peak in model.peak(split))


def test_slope_comes_from_devices_that_differ_by_a_sample():
    peaks = {(4, 10, 9, 9): (900.0, 1290.0, 1200.0, 1200.0), (4, 10, 8, 10): (900.0, 1310.0, None, None)}
    model = PeakModel(peaks)
    assert model.is_proven
    assert model.peak_mib((6, 9, 9, 8)) == pytest.approx((1100.0, 1200.0, 1200.0, 1100.0))
    assert bases(model, (6, 9, 9, 8)) == ("fitted",) * 4
    assert bases(model, (4, 10, 9, 9)) == ("measured",) * 4


def test_nothing_measured_predicts_nothing():
    assert PeakModel().peak_mib((1, 2)) == (None, None)
    assert bases(PeakModel(slope_mib=5.0), (1, 2)) == ("unknown", "unknown")


def test_one_measured_split_gives_upper_bounds():
    model = PeakModel({(4, 4): (800.0, 700.0)})
    assert not model.is_proven
    assert model.peak_mib((5, 3)) == (1000.0, 700.0)
    assert bases(model, (5, 3)) == ("bound", "bound")
    idle = PeakModel({(0, 4): (50.0, 700.0)})
    assert idle.peak_mib((0, 4)) == (50.0, 700.0)
    assert idle.peak_mib((0, 3)) == (50.0, 700.0)
    assert idle.peak((1, 4))[0] == (None, "unknown")
    of_first = {(4, 3, 1): (800.0, None, None), (4, 1, 3): (850.0, None, None)}
    assert PeakModel(of_first).peak_mib((5, 2, 1)) == (850.0 * 5 / 4, None, None)
    assert PeakModel(of_first).largest_slope_mib == 200.0
    of_first = {(0, 3, 1): (60.0, None, None), (0, 1, 3): (50.0, None, None)}
    assert PeakModel(of_first).peak_mib((0, 2, 2)) == (60.0, None, None)


def test_slope_of_the_plan_is_used_until_one_is_measured():
    model = PeakModel({(4, 4): (800.0, 700.0)}, slope_mib=100.0)
    assert model.peak_mib((5, 3)) == (900.0, 600.0)
    assert bases(model, (5, 3)) == ("planned", "planned")
    learned = model.with_measured((2, 6), (500.0, 1000.0))
    assert learned.peak_mib((5, 3)) == pytest.approx((950.0, 550.0))
    assert bases(learned, (5, 3)) == ("fitted", "fitted")


def test_device_without_samples_so_far_will_hold_a_replica():
    """By hand: 100 MiB a sample, 300 fixed on each of the others; idle it was measured with 50."""
    model = PeakModel({(0, 4, 2): (50.0, 700.0, 500.0), (0, 3, 3): (40.0, 600.0, 600.0)})
    assert model.peak_mib((2, 2, 2)) == pytest.approx((500.0, 500.0, 500.0))
    assert model.peak_mib((0, 5, 1)) == pytest.approx((50.0, 800.0, 400.0))
    model = PeakModel({(4, 0, 2): (900.0, 50.0, 500.0), (3, 0, 3): (800.0, 40.0, 600.0)})
    assert model.peak_mib((2, 2, 2)) == pytest.approx((700.0, 500.0, 500.0)), "device 0 holds more than a replica"


def test_higher_peak_is_kept_and_unknown_ones_are_filled():
    model = (
        PeakModel({(4, 4): (800.0, None)}).with_measured((4, 4), (700.0, 650.0)).with_measured((4, 4), (None, 640.0))
    )
    assert model.measured == {(4, 4): (800.0, 650.0)}


def test_fit_with_given_slope_keeps_it_and_skips_empty_groups():
    assert fit_lines([[(2.0, 500.0)], []], 100.0) == (100.0, (300.0, None))
    assert fit_lines([[(2.0, 500.0)], []]) == (None, (500.0, None))


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 10**6)), min_size=2, max_size=6, unique_by=lambda p: p[0]),
)
def test_fit_equals_numpy_least_squares(num_devices, requests):
    splits = [plan_chunks(16, num_devices, gpu0_bsz) for gpu0_bsz, _ in requests]
    noise = [np.random.default_rng(seed).normal(0, 20, num_devices) for _, seed in requests]
    peaks = [tuple(500 + 100 * i + 80 * n + e[i] for i, n in enumerate(s)) for s, e in zip(splits, noise, strict=True)]
    model = PeakModel(dict(zip(splits, peaks, strict=True)))
    rows = [[*(float(j == i) for j in range(num_devices)), n] for s in splits for i, n in enumerate(s)]
    measured = np.array([mib for row in peaks for mib in row])
    solution = np.linalg.lstsq(np.array(rows), measured, rcond=None)[0]
    if solution[-1] > 0:
        unseen = tuple(range(100, 100 + num_devices))
        expected = [solution[i] + solution[-1] * n for i, n in enumerate(unseen)]
        assert model.peak_mib(unseen) == pytest.approx(expected, abs=1e-4)
