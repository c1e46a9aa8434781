"""The cheapest blocks to compute again: by hand, and against every set."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segapp.memory.recompute import BlockCall, DeviceCourse


def course(kept, seconds, peaks, names=None):
    names = names or [f"b{i}" for i in range(len(kept))]
    return DeviceCourse(tuple(map(BlockCall, names, kept, seconds)), tuple(peaks))


def test_cheapest_set_by_hand():
    # Three blocks of 100, 60 and 50 MiB; at the loss all of them are alive, 300 MiB together with 90 MiB of weights.
    three = course([100, 60, 50], [5.0, 2.0, 2.0], [150, 220, 280, 300])
    assert three.cheapest(300) == ()
    assert three.cheapest(250) == ("b2",) or three.cheapest(250) == ("b1",)
    # 240: 60 MiB at the loss, of which 40 must be free before b2 has run, so b1 and not b2 and not the dearer b0.
    assert three.cheapest(240) == ("b1",)
    assert three.cheapest(200) == ("b0",)  # 100 at the loss for 5 s; b1 and b2 would do with 110 for 4 s, but 80 before
    assert three.cheapest(140) is None  # no block is kept at that peak
    assert three.peak_mib(("b0",)) == 200
    assert three.peak_mib(("b0", "b1", "b2")) == 150


def test_block_of_several_calls_is_chosen_as_one():
    head = course([30, 100, 30], [1.0, 5.0, 1.0], [50, 80, 180, 210], ["head", "body", "head"])
    assert head.cheapest(150) == ("head",)  # 60 of 210 MiB for 2 s
    assert head.cheapest(140) == ("body",)  # 110 MiB would be left of 210; the head alone leaves 150
    assert head.step_s(("head",), 3) == 6.0


@settings(deadline=None, max_examples=60)
@given(data=st.data(), count=st.integers(1, 12))
def test_choice_equals_the_best_of_all_sets(data, count):
    number = st.integers(1, 40)
    kept, seconds = (data.draw(st.lists(number, min_size=count, max_size=count)) for _ in range(2))
    names = data.draw(st.lists(st.sampled_from("abcdefghijkl"), min_size=count, max_size=count))
    peaks = data.draw(st.lists(st.integers(0, 300), min_size=count + 1, max_size=count + 1))
    case, budget = course(kept, seconds, peaks, names), data.draw(st.integers(0, 300))
    blocks = sorted(set(names))
    sets = [each for size in range(len(blocks) + 1) for each in combinations(blocks, size)]
    fitting = [each for each in sets if case.peak_mib(each) <= budget]
    chosen = case.cheapest(budget)
    if not fitting:
        assert chosen is None
    else:
        assert chosen is not None
        assert case.peak_mib(chosen) <= budget + 1e-6
        assert case.step_s(chosen, 1) == pytest.approx(min(case.step_s(each, 1) for each in fitting))
