"""Checks of splits against tables computed by hand, and their facts in JSON and back."""

from __future__ import annotations

import doctest
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import segapp.memory.split_check as module
from segapp.chunks import SplitRequest, plan_chunks
from segapp.memory.peaks import PeakModel
from segapp.memory.split_check import (
    EXPANDABLE_SEGMENTS,
    FULL_FRAC,
    PLAIN_FRAC,
    SplitChecker,
    tensor_frac,
    usable_mib,
)


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("asked", "level", "split"),
    [
        (4, "no change", (4, 10, 9, 9)),
        (6, "ok", (6, 9, 9, 8)),
        (None, "ok", (8, 8, 8, 8)),
        (0, "ok", (0, 11, 11, 10)),
        (32, "ok", (32, 0, 0, 0)),
        (33, "refused", None),
        (-1, "refused", None),
        (True, "refused", None),
        (SplitRequest(shares=[5, 9, 9, 9]), "ok", (5, 9, 9, 9)),
        (SplitRequest(shares=[5, 9, 9]), "refused", None),
    ],
)
def test_checks_for_four_devices_and_batch_32(asked, level, split):
    checked = SplitChecker(32, 4, current=(4, 10, 9, 9)).check(asked)
    assert (checked.level, checked.split) == (level, split)
    assert checked.is_allowed == (level == "ok")
    assert checked.reason


def test_check_names_one_device_and_idle_devices():
    assert SplitChecker(8, 1).check(0).level == "refused"
    assert "no effect on one device" in SplitChecker(8, 1).check(3).reason
    assert "device 0 computes nothing" in SplitChecker(8, 2).check(0).reason
    assert "BatchNorm needs 2" in SplitChecker(8, 2, smallest_chunk=2).check(1).reason


@pytest.mark.parametrize(("mode", "reason"), [("model", "whole batch"), ("single", "one device")])
def test_modes_without_a_split_refuse_every_request(mode, reason):
    for gpu0_bsz in (0, 4, None, "auto"):
        checked = SplitChecker(8, 2, mode=mode).check(gpu0_bsz)
        assert checked.level == "refused"
        assert reason in checked.reason


def test_rank_without_samples_is_refused_if_network_needs_any():
    checker = SplitChecker(8, 2, mode="ddp", needs_samples="the network cannot run without samples")
    for gpu0_bsz, level in ((0, "refused"), (1, "ok"), (8, "refused")):
        assert checker.check(gpu0_bsz).level == level
    assert "give every rank at least one sample" in checker.check(0).reason


def test_auto_is_refused_where_device_memory_is_unknown():
    checker = SplitChecker(8, 2, current=(4, 4), usable_mib=[1000, 1000])
    assert (checker.check("auto").level, checker.check("auto").split) == ("ok", (4, 4))
    for usable in ((), (1000, None)):
        assert SplitChecker(8, 2, current=(4, 4), usable_mib=usable).check("auto").level == "refused"


@pytest.mark.parametrize(
    ("peak", "level", "allowed"),
    [(900, "ok", True), (901, "tight", True), (950, "tight", True), (951, "won't fit", False)],
)
def test_thresholds_are_90_and_95_percent_of_the_fullest_device(peak, level, allowed):
    peaks = PeakModel({(2, 3, 3): (3000, peak, None)})
    checked = SplitChecker(8, 3, usable_mib=[4000, 1000, 1000], peaks=peaks).check(2)
    assert (checked.level, checked.is_allowed) == (level, allowed)
    assert "device 1" in checked.reason
    assert f"{peak} of 1000 MiB" in checked.reason


def test_gpu0_bsz_that_ran_out_of_memory_is_an_upper_bound():
    checker = SplitChecker(8, 2, ceiling=6)
    assert checker.check(5).level == "ok"
    for gpu0_bsz in (6, 7):
        checked = checker.check(gpu0_bsz)
        assert checked.level == "won't fit"
        assert checked.is_possible
        assert "add --force" in (checked.rejection(force=False) or "")
        assert checked.rejection(force=True) is None
    old, ceilings = (4, 4), []
    for split in ((6, 2), (3, 5), (5, 3), (7, 1)):  # the last one is forced
        checker = SplitChecker(8, 2, current=old, ceiling=checker.ceiling, failed=checker.failed).with_failure(split)
        ceilings.append(checker.ceiling)
    assert (ceilings, checker.failed) == ([6, 6, 5, 5], {(6, 2), (3, 5), (5, 3), (7, 1)})


def test_unproven_estimate_warns_and_never_refuses():
    checker = SplitChecker(8, 2, usable_mib=[1000, 1000], peaks=PeakModel({(4, 4): (800.0, 700.0)}))
    checked = checker.check(5)
    assert (checked.level, checked.predicted_mib) == ("tight", (1000.0, 700.0))
    assert "no other split was measured" in checked.reason


@given(st.integers(1, 24), st.integers(1, 6), st.none() | st.integers(-2, 30))
def test_checked_split_equals_the_trainers(num_samples, num_devices, gpu0_bsz):
    checked = SplitChecker(num_samples, num_devices).check(gpu0_bsz)
    try:
        expected = plan_chunks(num_samples, num_devices, gpu0_bsz, full_batch=num_samples)
    except ValueError:
        assert checked.level == "refused"
    else:
        assert checked.split == expected


def test_usable_memory_excludes_other_processes():
    assert usable_mib(24_000, 5_000, 3_000) == 22_000
    assert usable_mib(24_000, None, 3_000) == 24_000
    assert usable_mib(None, 1, 1) is None
    assert usable_mib(100.0, 300.0, 50.0) == 0.0  # the driver's figures may be older than the allocator's
    assert usable_mib(100.0, 40.0, 50.0) == 100.0


@pytest.mark.parametrize(("total_mib", "amount"), [(4095.0, "2048 of 4095 MiB"), (4096.0, "2.0 of 4.0 GiB")])
def test_amounts_are_in_gib_from_four_on(total_mib, amount):
    peaks = PeakModel({(4, 4): (2048.0, 1.0)})
    checked = SplitChecker(8, 2, usable_mib=[total_mib] * 2, peaks=peaks).check(4)
    assert checked.reason == f"device 0 would need about {amount} (50 %)"


checkers = st.builds(
    SplitChecker,
    st.integers(1, 12),
    st.just(3),
    mode=st.sampled_from(("single", "dp", "ddp", "model")),
    smallest_chunk=st.integers(1, 2),
    needs_samples=st.none() | st.just("it needs samples"),
    current=st.none() | st.tuples(*[st.integers(0, 9)] * 3),
    usable_mib=st.just(()) | st.tuples(*[st.none() | st.floats(0, 1e5)] * 3),
    peaks=st.builds(
        PeakModel,
        st.dictionaries(st.tuples(*[st.integers(0, 9)] * 3), st.tuples(*[st.none() | st.floats(0, 1e5)] * 3)),
        st.none() | st.floats(0, 1e3),
    ),
    tensor_frac=st.sampled_from((FULL_FRAC, PLAIN_FRAC)),
    ceiling=st.none() | st.integers(1, 9),
    failed=st.frozensets(st.tuples(*[st.integers(0, 9)] * 3), max_size=3),
)


@given(checkers)
def test_checker_read_from_json_is_the_same(checker):
    values = json.loads(json.dumps(checker.to_json()))
    assert SplitChecker.from_json(values) == checker
    assert values["tensor_frac"] == checker.tensor_frac


@pytest.mark.parametrize("values", [{}, {"batch_size": 8}, {**SplitChecker(8, 2).to_json(), "peaks": 3}])
def test_json_without_facts_is_a_value_error(values):
    with pytest.raises(ValueError, match="not the facts of a split"):
        SplitChecker.from_json(values)


@pytest.mark.parametrize(
    ("environ", "frac"),
    [
        ({}, PLAIN_FRAC),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : True"}, FULL_FRAC),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, FULL_FRAC),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, PLAIN_FRAC),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE_SEGMENTS}, PLAIN_FRAC),
        ({"PYTORCH_ALLOC_CONF": EXPANDABLE_SEGMENTS, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, FULL_FRAC),
    ],
)
def test_share_is_by_the_first_setting_of_the_allocator(environ, frac):
    assert tensor_frac(environ) == frac


@pytest.mark.parametrize("total_mib", [0.0, -300.0])
def test_device_whose_memory_is_in_use_fits_nothing(total_mib):
    """The rest of a GPU after other processes and the driver; the peaks are unknown."""
    checked = SplitChecker(8, 3, usable_mib=[9000.0, None, total_mib]).check(3)
    assert (checked.level, checked.reason.split(" has ")[0]) == ("won't fit", "device 2")


@pytest.mark.parametrize(("share", "tight_from", "full_from"), [(FULL_FRAC, 0.90, 0.95), (PLAIN_FRAC, 0.81, 0.86)])
def test_tight_and_full_follow_the_share(share, tight_from, full_from):
    for frac, level in ((tight_from - 0.005, "ok"), (tight_from + 0.005, "tight"), (full_from + 0.005, "won't fit")):
        peaks = PeakModel({(4, 4): (100.0, 1000 * frac)})
        assert SplitChecker(8, 2, usable_mib=[1000, 1000], peaks=peaks, tensor_frac=share).fit_of((4, 4))[0] == level
