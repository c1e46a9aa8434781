"""How often the ranks meet: once per step, before it, and between its micro-batches; less often if steps are fast."""

from __future__ import annotations

import contextlib
import time
import types
from pathlib import Path
from typing import Any

import pytest

from segapp.parallel.distributed import Ranks
from segapp.run.commands import parse_command, send_command
from segapp.training import trainer as safe_point
from segapp.training.trainer import SafePoint
from tests.training.live.test_controller import MIDDLE, ControllerHarness


class Clock:
    """Time that passes only between the calls of a test."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class CountedRanks(Ranks):
    """The main rank of two, whose other one asks for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size, self.num_polls = 2, 0

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        self.num_polls += 1
        return flags

    def from_main(self, value: Any) -> Any:
        return value


def safe_point_of(
    ranks: Ranks, requests: Any, take: Any, during: Any = None, controller: Any = None, saver: Any = None
) -> SafePoint:
    controller = controller or types.SimpleNamespace(
        requests=requests, inbox=types.SimpleNamespace(take=take), answer_all=lambda *_: None
    )
    context: Any = types.SimpleNamespace(
        ranks=ranks,
        signals=types.SimpleNamespace(is_set=False, take_checkpoint_request=lambda: False),
    )
    saver = saver or types.SimpleNamespace(is_overdue=lambda: False)
    progress: Any = types.SimpleNamespace(position=types.SimpleNamespace(step=3), command_position=lambda: MIDDLE)
    liveness: Any = types.SimpleNamespace(report_progress=lambda: None, during=during)
    return SafePoint(context, controller, saver, progress, liveness)


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [(1.0, [1] * 6), (0.1, [1] * 6), (0.025, [1, 0, 0, 0, 1, 0]), (0.0001, [1, 0, 0, 0, 0, 0])],
)
def test_ranks_with_fast_steps_skip_the_same_polls(
    monkeypatch: pytest.MonkeyPatch, step_s: float, expected: list[int]
) -> None:
    clock, ranks = Clock(), CountedRanks()
    monkeypatch.setattr(safe_point, "time", clock)
    requests = types.SimpleNamespace(is_paused=False, stop=None, wants_checkpoint=False)
    point = safe_point_of(ranks, requests, lambda is_due: [])
    polls = []
    for number in range(6):
        clock.now_s += step_s
        before = ranks.num_polls
        point.check("micro-batch" if number % 2 else "step")
        polls.append(ranks.num_polls - before)
    assert polls == expected
    before = ranks.num_polls
    point.check("epoch")
    assert ranks.num_polls == before + 1


def test_long_pause_is_one_activity_and_skips_no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_point, "PAUSE_POLL_S", 0.0)
    requests = types.SimpleNamespace(is_paused=True, stop=None, wants_checkpoint=False)
    activities: list[str] = []
    polls: list[bool] = []

    def take(is_due: bool) -> list[Any]:
        polls.append(is_due)
        requests.is_paused = len(polls) < 5
        return []

    def during(activity: str) -> contextlib.AbstractContextManager[None]:
        activities.append(activity)
        return contextlib.nullcontext()

    safe_point_of(Ranks(), requests, take, during).check()
    assert (activities, polls) == (["paused"], [False, True, True, True, True])


def test_pause_that_comes_with_a_resume_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, sent = ControllerHarness(tmp_path / "run"), list[str]()
    send = lambda text: sent.append(send_command(harness.folder.path, parse_command(text)))  # noqa: E731
    due = iter([("resume", "pause"), (), ("resume",)])
    # The clock of this module alone: other threads of the process sleep, too.
    clock = types.SimpleNamespace(sleep=lambda _: [send(text) for text in next(due)], monotonic=time.monotonic)
    monkeypatch.setattr(safe_point, "time", clock)
    send("pause")
    safe_point_of(Ranks(), None, None, lambda _: contextlib.nullcontext(), harness.controller).check()
    assert [harness.answers(each) for each in sent] == [["applied"]] * 4


def test_checkpoint_asked_during_a_save_waits_for_the_next(tmp_path: Path) -> None:
    """It came between two micro-batches, after the state of the first save was taken."""
    harness, begun, outcomes = ControllerHarness(tmp_path / "run"), list[int](), [(False, None)]
    saver = types.SimpleNamespace(
        is_overdue=lambda: False, begin_asked=lambda at: begun.append(at.step), outcome=lambda: outcomes[-1]
    )
    point = safe_point_of(Ranks(), None, None, None, harness.controller, saver)
    first = send_command(harness.folder.path, parse_command("checkpoint"))
    point.check("epoch")
    second = harness.send("checkpoint")
    outcomes.append((True, "disk full"))
    point.check("epoch")
    assert (harness.answers(first), harness.answers(second)) == (["rejected"], [])
    outcomes.append((True, None))
    point.check("epoch")
    assert (len(begun), harness.answers(second)) == (2, ["applied"])
