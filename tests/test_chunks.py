"""Splits of a batch against values computed by hand and their invariants."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segapp.chunks import SplitRequest, check_split, replan_shares
from segapp.parallel import plan_chunks


@pytest.mark.parametrize("num_devices", range(1, 6))
@pytest.mark.parametrize("num_samples", range(13))
def test_every_gpu0_bsz_is_honoured_and_the_rest_shared_evenly(num_samples, num_devices):
    for gpu0_bsz in range(0 if num_devices > 1 else 1, num_samples + 1):
        first, *others = plan_chunks(num_samples, num_devices, gpu0_bsz)
        assert first + sum(others) == num_samples
        assert len(others) == num_devices - 1
        if others:
            assert first == gpu0_bsz
            assert max(others) - min(others) <= 1
            assert all(a >= b for a, b in pairwise(others)), "left-overs go to the first of the others"


@pytest.mark.parametrize(
    ("arguments", "split"),
    [
        ((7, 3), (2, 3, 2)),
        ((9, 3), (3, 3, 3)),
        ((1, 3), (1, 0, 0)),  # no copy of the model for a single sample
        ((2, 3), (1, 1, 0)),
        ((0, 2), (0, 0)),
        ((3, 3, 5), (3, 0, 0)),
        ((4, 1, 2), (4,)),
    ],
)
def test_plan_chunks_by_hand(arguments, split):
    assert plan_chunks(*arguments) == split


@given(
    full=st.integers(1, 64),
    num_samples=st.integers(0, 64),
    shares=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(sum),
    data=st.data(),
)
def test_short_batches_never_exceed_a_share_of_the_full_batch(full, num_samples, shares, data):
    scaled = plan_chunks(num_samples, len(shares), shares=shares)
    assert sum(scaled) == num_samples
    if num_samples <= sum(shares):
        assert all(size <= share for size, share in zip(scaled, shares, strict=True))
    num_devices = data.draw(st.integers(2, 8))
    gpu0_bsz = data.draw(st.integers(0, full))
    short = plan_chunks(min(num_samples, full), num_devices, gpu0_bsz, full_batch=full)
    whole = plan_chunks(full, num_devices, gpu0_bsz, full_batch=full)
    assert sum(short) == min(num_samples, full)
    assert all(size <= share for size, share in zip(short, whole, strict=True))
    assert not (gpu0_bsz and sum(short)) or short[0] >= 1


@pytest.mark.parametrize(
    ("num_samples", "shares", "split"),
    [
        (3, [2, 2], (1, 2)),
        (4, [3, 3, 3], (1, 2, 1)),
        (5, [3, 3, 3], (1, 2, 2)),
        (1, [1, 1, 1], (0, 1, 0)),
        (5, [4, 2, 2], (3, 1, 1)),  # exact shares 2.5, 1.25, 1.25: a larger remainder still comes first
    ],
)
def test_tie_of_remainders_goes_to_device_0_last(num_samples, shares, split):
    assert plan_chunks(num_samples, len(shares), shares=shares) == split


@pytest.mark.parametrize(
    ("call", "error", "part"),
    [
        (lambda: plan_chunks(8, 1, 0), ValueError, "add a device"),
        (lambda: plan_chunks(8, 0), ValueError, "num_devices=0"),
        (lambda: plan_chunks(-1, 2), ValueError, "num_samples=-1"),
    ],
)
def test_bad_split_error_names_value_and_next_move(call, error, part):
    with pytest.raises(error, match=part):
        call()


def test_check_split_returns_the_problem_without_raising():
    assert check_split(2, 8, 3) == ((2, 3, 3), "")
    assert check_split(0, 8, 3) == ((0, 4, 4), "device 0 computes nothing")
    assert check_split(2, 4, 1) == ((4,), "gpu0_bsz=2 has no effect on one device")
    for request, batch_size, num_devices in ((9, 8, 3), (-1, 8, 3), (True, 8, 3), (None, 0, 3), (0, 8, 1)):
        split, reason = check_split(request, batch_size, num_devices)
        assert split is None
        assert reason


def test_check_split_suggests_a_split_batchnorm_accepts():
    _, reason = check_split(1, 5, 3, smallest_chunk=2)
    assert "gpu0_bsz=1 gives a device 1 of 5 samples" in reason
    assert "sync_bn: true" in reason
    assert "[2, 3, 0]" in reason
    assert check_split(SplitRequest(shares=[2, 3, 0]), 5, 3, smallest_chunk=2)[0] == (2, 3, 0)
    assert check_split(1, 5, 3, smallest_chunk=1)[0] == (1, 2, 2)


@pytest.mark.parametrize(
    ("shares", "old", "new", "num_samples", "expected"),
    [
        ([4, 2, 2], "abc", "abc", 8, (4, 2, 2)),
        ([4, 2, 2], "abc", "ca", 9, (3, 6)),
        ([4, 2, 2], "abc", "c", 8, (8,)),
        ([6, 2], "ab", "abd", 12, (6, 2, 4)),  # a new device counts as the mean of 4
        ([0, 8], "ab", "a", 8, (8,)),
        ([0, 6, 2], "abc", "abd", 8, (0, 6, 2)),
        ([3, 1, 1], "xxx", "xx", 5, (4, 1)),  # equal names in their order
        ([30, 1], "ab", "ab", 4, (3, 1)),  # rounding would leave b without a sample
    ],
)
def test_shares_follow_their_devices_to_another_number(shares, old, new, num_samples, expected):
    assert replan_shares(shares, old, new, num_samples) == expected
