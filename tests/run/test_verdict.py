"""The verdict on a split against tables worked out by hand, and the memory fit against numpy's least squares."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import segapp.run.verdict as module
from segapp.parallel.chunks import plan_chunks
from segapp.run.verdict import fit_memory, split_verdict, usable_mib


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("wish", "word", "split"),
    [
        ({"gpu0_bsz": 4}, "no change", (4, 10, 9, 9)),
        ({"gpu0_bsz": 6}, "ok", (6, 9, 9, 8)),
        ({"gpu0_bsz": None}, "ok", (8, 8, 8, 8)),
        ({"gpu0_bsz": 0}, "ok", (0, 11, 11, 10)),
        ({"gpu0_bsz": 32}, "ok", (32, 0, 0, 0)),
        ({"gpu0_bsz": 33}, "refused", None),
        ({"gpu0_bsz": -1}, "refused", None),
        ({"gpu0_bsz": True}, "refused", None),
        ({"gpu0_bsz": None, "shares": [5, 9, 9, 9]}, "ok", (5, 9, 9, 9)),
        ({"gpu0_bsz": None, "shares": [5, 9, 9]}, "refused", None),
    ],
)
def test_verdicts_for_four_devices_and_batch_32(wish: dict, word: str, split: tuple | None) -> None:
    verdict = split_verdict(32, 4, **wish, current=(4, 10, 9, 9))
    assert (verdict.level, verdict.split) == (word, split)
    assert verdict.is_allowed == (word == "ok")
    assert verdict.reason


def test_verdict_names_one_device_and_idle_devices() -> None:
    assert split_verdict(8, 1, 0).level == "refused"
    assert "no effect on one device" in split_verdict(8, 1, 3).reason
    assert "device 0 computes nothing" in split_verdict(8, 2, 0).reason


def test_batchnorm_without_sync_refuses_single_samples() -> None:
    assert split_verdict(8, 2, 1, sync_bn=False, smallest_chunk=2).level == "refused"
    assert split_verdict(8, 2, 1, sync_bn=True, smallest_chunk=2).level == "ok"


@pytest.mark.parametrize(
    ("peak", "word", "allowed"),
    [(900, "ok", True), (901, "tight", True), (950, "tight", True), (951, "won't fit", False)],
)
def test_thresholds_are_90_and_95_percent_of_the_fullest_device(peak: float, word: str, allowed: bool) -> None:
    verdict = split_verdict(8, 3, 2, predicted_mib=[100, peak, None], total_mib=[1000, 1000, 1000])
    assert (verdict.level, verdict.is_allowed) == (word, allowed)
    assert "device 1" in verdict.reason
    assert f"{peak} of 1000 MiB" in verdict.reason


def test_gpu0_bsz_that_ran_out_of_memory_is_an_upper_bound() -> None:
    assert split_verdict(8, 2, 5, ceiling=6).level == "ok"
    for gpu0_bsz in (6, 7):
        verdict = split_verdict(8, 2, gpu0_bsz, ceiling=6)
        assert verdict.level == "won't fit"
        assert verdict.is_possible


def test_unproven_estimate_warns_and_never_refuses() -> None:
    fit = fit_memory([((4, 4), (800.0, 700.0))])
    assert not fit.is_proven
    assert fit.predict((5, 3)) == (1000.0, 700.0)
    verdict = split_verdict(8, 2, 5, fit=fit, total_mib=[1000, 1000])
    assert verdict.level == "tight"
    assert "no other split was tried" in verdict.reason


def test_slope_comes_from_devices_that_differ_by_a_sample() -> None:
    fit = fit_memory([((4, 10, 9, 9), (900.0, 1300.0, 1200.0, 1200.0))])
    assert fit.is_proven
    assert fit.slope_mib == pytest.approx(100.0)
    assert fit.predict((6, 9, 9, 8)) == pytest.approx((1100.0, 1200.0, 1200.0, 1100.0))


def test_no_observation_gives_no_prediction() -> None:
    fit = fit_memory([])
    assert fit.predict((1, 2)) == (None, None)
    assert split_verdict(4, 2, 1, fit=fit, total_mib=[100, 100]).level == "ok"


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 10**6)), min_size=2, max_size=6, unique_by=lambda p: p[0]),
)
def test_fit_equals_numpy_least_squares(num_devices: int, requests: list[tuple[int, int]]) -> None:
    splits = [plan_chunks(16, num_devices, wish) for wish, _ in requests]
    noise = [np.random.default_rng(seed).normal(0, 20, num_devices) for _, seed in requests]
    peaks = [[500 + 100 * i + 80 * n + e[i] for i, n in enumerate(s)] for s, e in zip(splits, noise, strict=True)]
    fit = fit_memory(zip(splits, peaks, strict=True))
    rows = [[*(float(j == i) for j in range(num_devices)), n] for s in splits for i, n in enumerate(s)]
    solution = np.linalg.lstsq(np.array(rows), np.array([p for row in peaks for p in row]), rcond=None)[0]
    if solution[-1] > 0:
        assert fit.slope_mib == pytest.approx(solution[-1], abs=1e-6)
        assert fit.fixed_mib == pytest.approx(tuple(solution[:-1]), abs=1e-5)


@given(st.integers(1, 24), st.integers(1, 6), st.none() | st.integers(-2, 30))
def test_verdict_split_equals_the_trainers(num_samples: int, num_devices: int, gpu0_bsz: int | None) -> None:
    verdict = split_verdict(num_samples, num_devices, gpu0_bsz)
    try:
        expected = plan_chunks(num_samples, num_devices, gpu0_bsz, full_batch=num_samples)
    except ValueError:
        assert verdict.level == "refused"
    else:
        assert verdict.split == expected


def test_usable_memory_excludes_other_processes() -> None:
    assert usable_mib(24_000, 5_000, 3_000) == 22_000
    assert usable_mib(24_000, None, 3_000) == 24_000
    assert usable_mib(None, 1, 1) is None
