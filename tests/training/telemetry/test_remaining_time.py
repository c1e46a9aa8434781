"""The estimated remaining time against trainings whose end is known: simulated ones, and recorded real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segapp.training.telemetry.clock import Clock, Spent
from segapp.training.telemetry.remaining_time import EpochPosition, Left, Observed, RemainingTime, Timetable
from tests.training.telemetry.test_activities import Time

RECORDED = Path(__file__).parent / "recorded_times"


def happenings(timetable: Timetable) -> Iterator[tuple[str, EpochPosition]]:
    """Yield what a training does, in its order, by the rules of the loop: `load`, `step`, `eval`, `save`, `end`."""
    total, epoch, step = timetable.total_steps, 1, 0
    last = total or timetable.epochs * timetable.steps_per_epoch
    while step < last:
        in_epoch = timetable.steps_per_epoch
        is_new = True
        while in_epoch and step < last:
            place = EpochPosition(epoch, step, in_epoch)
            if is_new:
                yield "load", place
                is_new = False
            step, in_epoch = step + 1, in_epoch - 1
            place = EpochPosition(epoch, step, in_epoch)
            yield "step", place
            by_steps, by_epochs = timetable.eval_every_steps, timetable.eval_every_epochs
            is_regular = step % by_steps == 0 if by_steps else not in_epoch and epoch % by_epochs == 0
            if is_regular or step == last:
                is_new = True
                yield "eval", place
            epochs, steps = timetable.save_every_epochs, timetable.save_every_steps
            if (epochs and not in_epoch and epoch % epochs == 0) or (steps and step % steps == 0) or step == last:
                yield "save", place
        epoch += 1
    yield "end", EpochPosition(epoch, step, 0)


some = st.integers(1, 7)
timetables = st.builds(
    Timetable,
    epochs=some,
    steps_per_epoch=st.integers(1, 12),
    eval_every_epochs=some,
    eval_every_steps=st.none() | some,
    save_every_epochs=st.none() | some,
    save_every_steps=st.none() | some,
)


@given(timetables, st.none() | st.integers(1, 12), st.data())
@example(Timetable(3, 5, eval_every_epochs=2), None, None)
def test_what_is_left_equals_what_the_loop_still_does(timetable: Timetable, cut: int | None, data: Any) -> None:
    if cut is not None:
        total = max(1, timetable.epochs * timetable.steps_per_epoch - cut % timetable.steps_per_epoch)
        timetable = Timetable(**{**asdict(timetable), "total_steps": total})
    course = list(happenings(timetable))
    steps = [i for i, (what, _) in enumerate(course) if what == "step"]
    at = data.draw(st.sampled_from(steps)) if data is not None else steps[4]
    place = course[at][1]
    later = course[at + 1 :]

    def counted(until: int) -> Left:
        kinds = [what for what, _ in later[:until]]
        return Left(*(kinds.count(what) for what in ("step", "eval", "save", "load")))

    assert timetable.left_of_run(place) == counted(len(later))
    begins = [i for i, (what, p) in enumerate(later) if what == "load" and p.epoch > place.epoch]
    assert timetable.left_of_epoch(place) == counted(min([*begins, len(later)]))


pauses = st.dictionaries(st.integers(1, 80), st.floats(5, 500), max_size=3)


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), pauses, st.integers(2, 20), st.none() | st.integers(2, 6))
@example(Random(0), {}, 2, 3)
def test_remaining_time_is_within_15_percent_of_the_truth(
    random: Random, paused_s: dict[int, float], log_every: int, changed_at: int | None
) -> None:
    """Times of every part vary by 7 %; the first step takes 40 s more, a new split doubles the time of a step.

    The steps before a change count as three (`_KEPT`), so that it takes ten after it to be right again.
    """
    timetable = Timetable(6, 14, eval_every_epochs=2, save_every_steps=5)
    seconds = {"load": 1.5, "step": 0.5, "eval": 4.0, "save": 0.1}
    time = Time()
    clock, estimate = Clock(time), RemainingTime(timetable)
    found: list[tuple[EpochPosition, float, float | None]] = []
    num_evaluations, last_change = 0, None
    for what, place in happenings(timetable):
        way = changed_at is not None and place.epoch >= changed_at
        if way and last_change is None:
            clock.warm_up()
            last_change = place.step
        if what == "end":
            break
        taken_s = seconds[what] * random.uniform(0.93, 1.07)
        if what == "step":
            time.pass_by(taken_s * (2 if way else 1) + (40 if place.step == 1 else 0))
            clock.count_step(8)
            if place.step in paused_s:
                with clock.during("paused"):
                    time.pass_by(paused_s[place.step])
            if place.step % log_every == 0 or place.steps_in_epoch == 0:
                estimate.observe(Observed.of(clock), way)
                is_settled = changed_at is None or (last_change or 999) + max(log_every, 10) <= place.step
                if place.epoch > 1 and num_evaluations and is_settled:
                    at_s = time.now_s - clock.spent("paused").seconds
                    found.append((place, at_s, estimate.etas_s(place)[1]))
        else:
            with clock.during("load" if what == "load" else "eval" if what == "eval" else "save"):
                time.pass_by(taken_s)
            num_evaluations += what == "eval"
    end_s = time.now_s - clock.spent("paused").seconds
    for place, at_s, eta_s in found:
        assert eta_s == pytest.approx(end_s - at_s, rel=0.15), place


def observed(raw: list[list[float]]) -> Observed:
    return Observed(*(Spent(int(times), seconds) for times, seconds in raw))


@pytest.mark.parametrize("shape", sorted(file.stem for file in RECORDED.glob("*.json")))
def test_recorded_trainings_end_when_it_was_estimated(shape: str) -> None:
    """From the second epoch on within 15 % of the truth, or within a second."""
    found = json.loads((RECORDED / f"{shape}.json").read_text())
    estimate = RemainingTime(Timetable(**found["schedule"]))
    end_s, paused_s = found["end"]
    wrong = []
    for t, paused, way, times, place in found["rows"]:
        estimate.observe(observed(times), way)
        _, eta_s = estimate.etas_s(EpochPosition(*place))
        left_s = end_s - t - (paused_s - paused)
        is_later = place[1] > found["schedule"]["steps_per_epoch"]
        if is_later and (eta_s is None or abs(eta_s - left_s) > max(0.15 * left_s, 1.0)):
            wrong.append((place, left_s, eta_s))
    assert not wrong


def test_saves_take_a_twentieth_of_the_time_with_their_writes() -> None:
    """A copy of 0.5 s and a write of 1.5 s: within 400 s there is time for ten, and the first and the last are made."""
    timetable = Timetable(50, 3)
    left = timetable.whole_run()
    assert left.saves == 50
    assert timetable.saves_within(left, 400.0, 0.5 + 1.5) == 12
    assert timetable.saves_within(left, 4000.0, 0.5 + 1.5) == 50
    assert timetable.saves_within(left, 400.0, 0.0) == 50
