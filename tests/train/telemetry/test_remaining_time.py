"""The estimated remaining time against trainings whose end is known: simulated ones, and recorded real ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from segapp.train.telemetry.remaining_time import Left, Place, Schedule


def happenings(schedule: Schedule) -> Iterator[tuple[str, Place]]:
    """Yield what a training does, in its order, by the rules of the loop: `load`, `step`, `eval`, `save`, `end`."""
    total, epoch, step = schedule.total_steps, 1, 0
    last = total or schedule.epochs * schedule.steps_per_epoch
    while step < last:
        in_epoch = schedule.steps_per_epoch
        is_new = True
        while in_epoch and step < last:
            place = Place(epoch, step, in_epoch)
            if is_new:
                yield "load", place
                is_new = False
            step, in_epoch = step + 1, in_epoch - 1
            place = Place(epoch, step, in_epoch)
            yield "step", place
            by_steps, by_epochs = schedule.eval_every_steps, schedule.eval_every_epochs
            is_regular = step % by_steps == 0 if by_steps else not in_epoch and epoch % by_epochs == 0
            if is_regular or step == last:
                is_new = True
                yield "eval", place
            epochs, steps = schedule.save_every_epochs, schedule.save_every_steps
            if (epochs and not in_epoch and epoch % epochs == 0) or (steps and step % steps == 0) or step == last:
                yield "save", place
        epoch += 1
    yield "end", Place(epoch, step, 0)


some = st.integers(1, 7)
schedules = st.builds(
    Schedule,
    epochs=some,
    steps_per_epoch=st.integers(1, 12),
    eval_every_epochs=some,
    eval_every_steps=st.none() | some,
    save_every_epochs=st.none() | some,
    save_every_steps=st.none() | some,
)


@given(schedules, st.none() | st.integers(1, 12), st.data())
@example(Schedule(3, 5, eval_every_epochs=2), None, None)
def test_what_is_left_equals_what_the_loop_still_does(schedule: Schedule, cut: int | None, data: Any) -> None:
    if cut is not None:
        total = max(1, schedule.epochs * schedule.steps_per_epoch - cut % schedule.steps_per_epoch)
        schedule = Schedule(**{**asdict(schedule), "total_steps": total})
    course = list(happenings(schedule))
    steps = [i for i, (what, _) in enumerate(course) if what == "step"]
    at = data.draw(st.sampled_from(steps)) if data is not None else steps[4]
    place = course[at][1]
    later = course[at + 1 :]

    def counted(until: int) -> Left:
        kinds = [what for what, _ in later[:until]]
        return Left(*(kinds.count(what) for what in ("step", "eval", "save", "load")))

    assert schedule.left_of_run(place) == counted(len(later))
    begins = [i for i, (what, p) in enumerate(later) if what == "load" and p.epoch > place.epoch]
    assert schedule.left_of_epoch(place) == counted(min([*begins, len(later)]))
