"""The evaluations of a view against a plain list of the events."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segapp.run.events import Val, parse_event
from segapp.scores import SCORES
from segapp.view.history import NUM_WHOLE, Evaluations

SHARES = st.none() | st.floats(0, 1)
VALS = st.builds(
    Val,
    epoch=st.integers(0, 2**53 - 1),
    step=st.integers(0, 300),
    loss=st.none() | st.floats(0, 100),
    miou=SHARES,
    iou=st.lists(SHARES, max_size=3),
    pixel_accuracy=SHARES,
    num_images=st.none() | st.integers(0, 10**6),
    val_s=st.none() | st.floats(0, 1e6),
    mean_dice=SHARES,
    scores=st.none() | st.fixed_dictionaries({"frequency_weighted_iou": SHARES}),
)
FACTS = ("epoch", "step", "num_images", "val_s")


def short(val: Val) -> list[object]:
    """Return what is kept of every evaluation."""
    return [*(number(val, name) for name in (*FACTS, *SCORES)), val.iou]


def number(val: Val, name: str) -> float | None:
    """Return a score, or another number of an evaluation."""
    return val.score(name) if name in SCORES else getattr(val, name)


@given(st.lists(VALS, max_size=3 * NUM_WHOLE), st.integers(0, 300), st.lists(VALS, max_size=NUM_WHOLE))
def test_evaluations_are_those_of_a_plain_list(first: list[Val], step: int, more: list[Val]) -> None:
    found = Evaluations(first)
    found.drop_after(step)
    for val in more:
        found.append(val)
    wanted = [val for val in first if val.step <= step] + more
    assert [short(val) for val in found] == [short(val) for val in wanted]
    assert [short(found[-i - 1]) for i in range(min(3, len(wanted)))] == [short(val) for val in wanted[:-4:-1]]
    for name in (*FACTS, *SCORES):
        column = [math.nan if (value := number(val, name)) is None else value for val in wanted]
        np.testing.assert_array_equal(found.values(name), column)
    for i in range(-1, 4):
        course = [math.nan if not 0 <= i < len(val.iou) or val.iou[i] is None else val.iou[i] for val in wanted]
        np.testing.assert_array_equal(found.class_iou(i), course)


def test_the_last_evaluations_are_whole() -> None:
    vals = [Val(epoch=n, step=n, loss=None, miou=None, iou=[], recall=[0.5]) for n in range(NUM_WHOLE + 2)]
    found = Evaluations(vals)
    assert list(found)[2:] == vals[2:]
    assert found[-1] is vals[-1]
    assert [val.recall for val in found] == [None, None, *[[0.5]] * NUM_WHOLE]
    found.drop_after(10)
    assert list(found)[2:] == vals[2:11]
    with pytest.raises(IndexError):
        found[11]


@pytest.mark.parametrize("number", [-1, 2**53, 10**400])
@pytest.mark.parametrize("name", ["epoch", "step"])
def test_epochs_and_steps_that_no_float_holds_are_refused(name: str, number: int) -> None:
    raw = {"type": "val", "epoch": 1, "step": 1, "loss": 0.5, "miou": 0.5, "iou": [0.5]}
    assert Evaluations([Val.model_validate(raw)])[0].step == 1
    with pytest.raises(ValueError, match=name):
        parse_event(raw | {name: number})
