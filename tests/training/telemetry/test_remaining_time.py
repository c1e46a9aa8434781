"""The estimated remaining time against simulated trainings whose end is known."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segapp.training.progress import Timetable
from segapp.training.reporting import Clock, RemainingTime
from tests.training.telemetry.test_activities import Time

Place = tuple[int, int, int]
"""Epoch, finished steps, steps left in the epoch."""


def happenings(timetable: Timetable) -> Iterator[tuple[str, Place]]:
    """Yield what a training does, in its order, by the rules of the loop: `step`, `eval`."""
    epoch, step = 1, 0
    while step < timetable.num_steps:
        in_epoch = timetable.steps_per_epoch
        while in_epoch and step < timetable.num_steps:
            step, in_epoch = step + 1, in_epoch - 1
            yield "step", (epoch, step, in_epoch)
            if timetable.is_evaluation_due(epoch, step, is_epoch_end=not in_epoch):
                yield "eval", (epoch, step, in_epoch)
        epoch += 1


some = st.integers(1, 7)
timetables = st.builds(
    Timetable,
    epochs=some,
    steps_per_epoch=st.integers(1, 12),
    eval_every_epochs=some,
    eval_every_steps=st.none() | some,
)


def cut_off(timetable: Timetable, cut: int | None) -> Timetable:
    """Return a training that ends `cut` steps before the end of its last epoch."""
    if cut is None:
        return timetable
    fields: dict[str, Any] = {**vars(timetable), "total_steps": timetable.num_steps - cut % timetable.steps_per_epoch}
    return Timetable(**fields)


@given(timetables, st.none() | st.integers(1, 12), st.data())
@example(Timetable(3, 5, eval_every_epochs=2), None, None)
def test_steps_and_evaluations_equal_what_the_loop_still_does(timetable: Timetable, cut: int | None, data: Any) -> None:
    """A step takes 1 s and an evaluation 100 s."""
    timetable = cut_off(timetable, cut)
    course = list(happenings(timetable))
    steps = [i for i, (what, _) in enumerate(course) if what == "step"]
    at = data.draw(st.sampled_from(steps)) if data is not None else steps[4]
    place, later = course[at][1], course[at + 1 :]
    estimate = RemainingTime(timetable)
    estimate.observe(3, 3.0)

    def seconds(of: list[tuple[str, Place]]) -> float:
        return sum({"step": 1.0, "eval": 100.0}[what] for what, _ in of)

    within = [each for each in later if each[1][0] == place[0]]
    assert estimate.etas_s(*place, 100.0) == (seconds(within), seconds(later))
    assert timetable.num_evaluations() == sum(what == "eval" for what, _ in course)


pauses = st.dictionaries(st.integers(1, 80), st.floats(5, 500), max_size=3)


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), pauses, st.integers(2, 20), st.none() | st.integers(2, 6))
@example(Random(0), {}, 2, 3)
def test_remaining_time_is_within_15_percent_of_the_truth(
    random: Random, paused_s: dict[int, float], log_every: int, changed_at: int | None
) -> None:
    """Times of every part vary by 7 %; the first step takes 40 s more, a new split doubles the time of a step."""
    timetable, time = Timetable(6, 14, eval_every_epochs=2), Time()
    clock, estimate = Clock(time), RemainingTime(timetable)
    found: list[tuple[Place, float, float]] = []
    is_changed = False
    for what, place in happenings(timetable):
        taken_s = {"step": 0.5, "eval": 4.0}[what] * random.uniform(0.93, 1.07)
        epoch, step, in_epoch = place
        if what == "eval":
            with clock.during("eval"):
                time.pass_by(taken_s)
            clock.restart()
            continue
        if step % timetable.steps_per_epoch == 1:
            clock.restart()
        is_changed = changed_at is not None and epoch >= changed_at
        time.pass_by(taken_s * (2 if is_changed else 1) + (40 if step == 1 else 0))
        clock.num_steps, clock.num_images = clock.num_steps + 1, clock.num_images + 8
        if step in paused_s:
            with clock.during("paused"):
                time.pass_by(paused_s[step])
        if step % log_every == 0 or in_epoch == 0:
            estimate.observe(clock.num_steps, clock.elapsed_s(), is_changed)
            if clock.num_evaluations and (changed_at is None or is_changed):
                at_s = time.now_s - clock.spent_s("paused")
                found.append((place, at_s, estimate.etas_s(*place, clock.spent_s("eval") / clock.num_evaluations)[1]))
            clock.restart()
    end_s = time.now_s - clock.spent_s("paused")
    assert found or changed_at is not None
    for place, at_s, eta_s in found:
        assert eta_s == pytest.approx(end_s - at_s, rel=0.15), place


def test_median_ignores_slow_steps_and_forgets_other_settings() -> None:
    estimate = RemainingTime(Timetable(1, 100))
    for seconds in (400.0, 20.0, 21.0, 300.0, 22.0):
        estimate.observe(10, seconds)
    assert estimate.etas_s(1, 50, 50, 7.0) == (50 * 2.2 + 7.0,) * 2
    estimate.observe(10, 50.0, "in pieces")
    assert estimate.etas_s(1, 60, 40, 7.0) == (40 * 5.0 + 7.0,) * 2
