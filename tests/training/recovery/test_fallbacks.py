"""Ways of working that need less memory: what remains when two are joined, and which one comes next."""

from __future__ import annotations

import types
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from segapp.checkpoint.saver import Position
from segapp.inference.sliding import Inference
from segapp.models.normalizer import Normalizer
from segapp.parallel.distributed import Ranks
from segapp.training.recovery import MemoryFallbacks, OomPolicy, next_eval_fallback

WHOLE = Inference(Normalizer((0.5,) * 3, (0.25,) * 3))
"""Whole images."""

PAIRS = [
    (MemoryFallbacks(num_pieces=4), MemoryFallbacks(num_pieces=2), MemoryFallbacks(num_pieces=4)),
    (MemoryFallbacks(is_eval_single=True), MemoryFallbacks(), MemoryFallbacks(is_eval_single=True)),
    (MemoryFallbacks(window_px=(64, 96)), MemoryFallbacks(window_px=(128, 96)), MemoryFallbacks(window_px=(64, 96))),
    (MemoryFallbacks(window_px=(64, 256)), MemoryFallbacks(window_px=(96, 96)), MemoryFallbacks(window_px=(96, 96))),
    (MemoryFallbacks(window_px=(64, 96)), MemoryFallbacks(), MemoryFallbacks(window_px=(64, 96))),
    (MemoryFallbacks(is_recomputed=True), MemoryFallbacks(), MemoryFallbacks(is_recomputed=True)),
    (
        MemoryFallbacks(failed_splits=((3, 5),)),
        MemoryFallbacks(failed_splits=((2, 6), (3, 5))),
        MemoryFallbacks(failed_splits=((2, 6), (3, 5))),
    ),
]


@pytest.mark.parametrize(("one", "two", "both"), PAIRS)
def test_joined_fallbacks_need_as_little_as_either(
    one: MemoryFallbacks, two: MemoryFallbacks, both: MemoryFallbacks
) -> None:
    for first, second in permutations((one, two)):
        assert first.joined(second) == both
        assert MemoryFallbacks.from_json(first.joined(second).to_json()) == both


def test_window_is_no_larger_than_the_config_s() -> None:
    fallbacks = MemoryFallbacks(window_px=(64, 96))
    assert fallbacks.adapted(WHOLE).window_px == (64, 96)
    assert fallbacks.adapted(replace(WHOLE, window_px=(48, 128))).window_px == (48, 96)
    assert MemoryFallbacks().adapted(replace(WHOLE, window_px=(48, 128))).window_px == (48, 128)


def test_evaluation_shrinks_until_nothing_is_left() -> None:
    """Single images, windows of the crop's size, then half of it along each side, down to 64 px."""
    fallbacks, found = MemoryFallbacks(), []
    while True:
        inference = fallbacks.adapted(WHOLE)
        result = next_eval_fallback(fallbacks, inference, 4, (256, 100), is_fixed=False)
        if result is None:
            break
        fallbacks = result.adopted
        found.append((fallbacks.is_eval_single, fallbacks.window_px))
    assert found == [(True, None), (True, (256, 100)), (True, (128, 64)), (True, (64, 64))]
    assert next_eval_fallback(MemoryFallbacks(), WHOLE, 1, (256, 100), is_fixed=True) is None
    small = MemoryFallbacks(window_px=(32, 32))
    assert next_eval_fallback(small, small.adapted(WHOLE), 1, (32, 32), is_fixed=False) is None


def test_later_fallbacks_are_adopted_at_their_steps() -> None:
    later = [(3, MemoryFallbacks(num_pieces=2)), (6, MemoryFallbacks(num_pieces=4)), (7, MemoryFallbacks(num_pieces=8))]
    folder = types.SimpleNamespace(reports=None)
    context: Any = types.SimpleNamespace(ranks=Ranks(), event_log=None, device_memory=None, folder=folder)
    sizes: Any = {"accumulate": 1, "eval_batch_size": 2, "crop_px": (32, 32)}
    cleared: list[int] = []

    def policy() -> OomPolicy:
        batch_split = types.SimpleNamespace(batch_size=4, clear_peaks=lambda: cleared.append(1))
        controller: Any = types.SimpleNamespace(batch_split=batch_split)
        return OomPolicy(context, None, controller, WHOLE, **sizes, to_adopt=later)  # type: ignore[arg-type]

    step_by_step = policy()
    assert [step_by_step.begin(Position(step=step)).num_pieces for step in (2, 3, 5, 6)] == [1, 2, 2, 4]
    assert len(cleared) == 2, "peaks of larger pieces say nothing about these"
    assert policy().begin(Position(step=9)) == MemoryFallbacks(num_pieces=8)
