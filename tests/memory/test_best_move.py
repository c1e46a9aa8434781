"""The moves of `gpu0_bsz: auto` on devices whose memory is known."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from segapp.chunks import plan_chunks
from segapp.memory.peaks import PeakModel
from segapp.memory.split_check import MARGIN_FRAC, CheckedSplit, SplitChecker

Split = tuple[int, ...]


def walk(
    batch: int, fixed: list[float], slope: float, totals: list[float], start: int, noise: float = 0.0, epochs: int = 12
) -> list[Split]:
    """Return the split of each epoch on devices that need fixed_i + slope * samples, measured with noise."""
    rng, split, observed, walked = random.Random(start), plan_chunks(batch, len(fixed), start), {}, []
    for _ in range(epochs):
        walked.append(split)
        peaks = [f * (n > 0) + slope * n + rng.uniform(0, noise) for f, n in zip(fixed, split, strict=True)]
        known = observed.get(split, peaks)
        observed[split] = tuple(map(max, known, peaks))
        move = SplitChecker(batch, len(fixed), current=split, usable_mib=totals, peaks=PeakModel(observed)).best_move()
        split = split if move is None else move.split
    return walked


def fullest(split: Split, fixed: list[float], slope: float, totals: list[float]) -> float:
    return max((f * (n > 0) + slope * n) / t for f, n, t in zip(fixed, split, totals, strict=True))


devices = st.integers(2, 5).flatmap(
    lambda n: st.tuples(
        st.integers(n, 24),
        # Device 0 holds the optimizer too; the others are alike.
        st.tuples(st.floats(0, 300), st.floats(50, 200)).map(lambda f: [f[0] + f[1]] + [f[1]] * (n - 1)),
        st.floats(40, 150),
        st.integers(0, 24),
    )
)


@given(devices)
@example((9, [156.0, 106.0], 40.0, 3))
def test_best_split_is_reached_within_three_epochs_and_kept(case):
    batch, fixed, slope, start = case
    totals = [fullest((batch,) * len(fixed), fixed, slope, [1.0] * len(fixed)) * 1.2] * len(fixed)
    walked = walk(batch, fixed, slope, totals, min(start, batch))
    every = [plan_chunks(batch, len(fixed), gpu0_bsz) for gpu0_bsz in range(batch + 1)]
    busy = [split for split in every if all(split)]  # the peak of an idle device is not on the line
    best = min(fullest(split, fixed, slope, totals) for split in busy) if busy else 1.0
    assert fullest(walked[3], fixed, slope, totals) <= best + MARGIN_FRAC + 1e-9
    assert len(set(walked[3:])) == 1


@given(devices, st.floats(0, MARGIN_FRAC))
def test_noisy_measurements_do_not_change_the_split(case, noise_frac):
    batch, fixed, slope, start = case
    total = fullest((batch,) * len(fixed), fixed, slope, [1.0] * len(fixed)) * 1.3
    walked = walk(batch, fixed, slope, [total] * len(fixed), min(start, batch), noise_frac * total, epochs=40)
    changes = sum(a != b for a, b in itertools.pairwise(walked))
    assert changes <= len(set(walked)) + 1
    assert len(set(walked[-10:])) == 1


def plan(
    current: Split,
    peaks_mib: tuple[float | None, ...],
    total_mib: float | None = 1000.0,
    slope_mib: float | None = 100.0,
    **facts: Any,
) -> CheckedSplit | None:
    """The move of a batch of 8 over three devices with a planned slope of 100 MiB."""
    peaks = PeakModel({current: peaks_mib} if peaks_mib else {}, slope_mib)
    return SplitChecker(8, 3, current=current, usable_mib=[total_mib] * 3, peaks=peaks, **facts).best_move()


def test_split_moves_only_for_a_large_gain_with_reason():
    assert plan((3, 3, 2), (500.0, 480.0, 380.0), 10_000.0) is None
    for peaks, total_mib in (((), 1000.0), ((900.0, None, 250.0), 1000.0), ((900.0, 250.0, 250.0), None)):
        assert plan((6, 1, 1), peaks, total_mib) is None, "something is unknown"
    move = plan((6, 1, 1), (900.0, 250.0, 250.0))
    assert move.split == (2, 3, 3)
    assert move.predicted_mib == pytest.approx((500.0, 450.0, 450.0))  # 300, 150 and 150 without a sample
    assert "device 0 is the fullest, 90 %" in move.reason
    other = plan((6, 1, 1), (900.0, 250.0, 250.0), failed={move.split})
    assert other.split != move.split


def test_first_move_without_a_slope_assumes_the_largest():
    """By hand: the peaks allow 150 MiB a sample on device 0, where nothing is fixed then, and 100 on the others."""
    move = plan((6, 1, 1), (900.0, 250.0, 250.0), slope_mib=None)
    assert move.split == (2, 3, 3)
    assert move.predicted_mib == pytest.approx((300.0, 550.0, 550.0))


@pytest.mark.parametrize(
    ("ceiling", "split"),
    [(None, (6, 1, 1)), (7, (6, 1, 1)), (6, (4, 2, 2)), (4, (2, 3, 3)), (2, None)],
)
def test_share_of_device_0_stays_below_its_ceiling(ceiling, split):
    """Device 0 has most memory free: one of its samples more takes 100 MiB, and the others have 500 fixed."""
    move = plan((1, 4, 3), (150.0, 900.0, 800.0), ceiling=ceiling)
    assert (None if move is None else move.split) == split


def test_device_0_may_get_the_whole_batch():
    """By hand: device 1 is as good as full without a sample; each sample takes 100 MiB."""
    peaks = PeakModel({(1, 1): (200.0, 950.0)}, slope_mib=100.0)
    move = SplitChecker(2, 2, current=(1, 1), usable_mib=[1000.0, 1010.0], peaks=peaks).best_move()
    assert move.split == (2, 0)
