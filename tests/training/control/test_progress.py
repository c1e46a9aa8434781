"""The best evaluation, and how long ago it was."""

from __future__ import annotations

from segapp.training.progress import Best


def test_evaluations_since_the_best_are_counted_by_hand() -> None:
    best = Best()
    assert best.evaluations_since == 0
    course = [(0.2, True, 0), (0.2, False, 1), (None, False, 2), (0.1, False, 3), (0.3, True, 0), (0.2, False, 1)]
    for epoch, (value, is_best, since) in enumerate(course, 1):
        assert (best.note(value, epoch), best.evaluations_since) == (is_best, since)
    assert (best.value, best.epoch) == (0.3, 5)
