"""Signals and commands, polled between micro-batches at the same place on every rank, and the reactions to them."""

from __future__ import annotations

import time

from segapp.checkpoint.saver import CheckpointSaver
from segapp.training.commands import CommandController
from segapp.training.context import RunContext
from segapp.training.progress import TrainingProgress
from segapp.training.reporting import ActivityLog
from segapp.training.signals import PauseRequest, StopRequest

PAUSE_POLL_S = 0.1
RANKS_POLL_S = 0.1
"""Seconds between two polls of several ranks if steps are faster: each costs every rank's host 0.2 to 0.3 ms."""

MOST_STEPS_WITHOUT_POLL = 64


class SafePoint:
    """Polls signals and commands, and does immediately what is possible: a checkpoint, a pause, a stop.

    All ranks poll together, with one collective as long as there is no request, and skip the same polls if their steps
    are fast.
    """

    def __init__(
        self,
        context: RunContext,
        controller: CommandController,
        saver: CheckpointSaver,
        progress: TrainingProgress,
        activities: ActivityLog,
    ) -> None:
        self._context, self._controller, self._saver, self._progress = context, controller, saver, progress
        self._activities = activities
        self._has_overdue_save = False
        self._asked_at_step: int | None = None
        self._calls_per_poll = 1
        self._calls, self._polled_s = 0, time.monotonic()

    def check(self, *, is_boundary: bool = False) -> None:
        """Poll, then save or pause as requested; call it only while the state is consistent.

        No poll is skipped at a boundary, where settings are applied next.

        Raises:
            StopRequest: on every rank, after any of them was asked to stop.
        """
        self._poll(is_due=is_boundary)
        self._begin_save()
        if self._controller.requests.is_paused:
            self._pause()

    def check_within_step(self) -> None:
        """Poll between the micro-batches of a step; a checkpoint waits for the end of the step.

        Raises:
            StopRequest: as above.
            PauseRequest: leave the step, and make it again after `check`.
        """
        self._poll()
        if self._controller.requests.is_paused:
            raise PauseRequest

    def _begin_save(self) -> None:
        """Begin a save that was requested or is overdue; the request is answered when it is written."""
        requests = self._controller.requests
        if requests.wants_checkpoint:
            requests.wants_checkpoint = False
            self._saver.begin_asked(self._progress.position)
            self._asked_at_step = self._progress.position.step
        elif self._has_overdue_save:
            self._saver.begin()
        self._has_overdue_save = False

    def _answer_saved(self) -> None:
        if self._asked_at_step is not None:
            is_done, problem = self._saver.outcome()
            if is_done:
                self._controller.answer_checkpoints(self._asked_at_step, problem)
                self._asked_at_step = None

    def _poll(self, *, is_due: bool = False) -> None:
        context, controller = self._context, self._controller
        context.device_memory.report_progress()
        self._answer_saved()
        self._calls += 1
        if self._calls < self._calls_per_poll and not is_due:
            return
        is_stop, is_save, has_commands, is_overdue = context.ranks.any_of(
            context.signals.is_set,
            context.signals.take_checkpoint_request(),
            controller.inbox.has_commands(is_due=is_due),
            self._saver.is_overdue(),
        )
        self._pace()
        self._has_overdue_save |= is_overdue
        if is_save:
            controller.requests.wants_checkpoint = True
        if has_commands:
            controller.handle_commands(self._progress.command_position())
            controller.requests = context.ranks.from_main(controller.requests)
        if is_stop:
            by = context.signals.by if controller.requests.stop is None else "command"
            raise StopRequest(context.signals.signal_name or "a signal to another rank", by)
        if controller.requests.stop == "now":
            raise StopRequest("asked to stop")

    def _pace(self) -> None:
        """Agree with the other ranks on the number of calls until the next poll, from the main rank's time per call."""
        if self._context.ranks.world_size > 1:
            call_s = (time.monotonic() - self._polled_s) / self._calls
            calls = max(1, min(MOST_STEPS_WITHOUT_POLL, int(RANKS_POLL_S / max(call_s, 1e-6))))
            self._calls_per_poll = self._context.ranks.from_main(calls)
            self._polled_s = time.monotonic()
        self._calls = 0

    def _pause(self) -> None:
        self._controller.answer_all("pause", "applied", None, self._progress.position.step)
        with self._activities.during("paused"):
            while self._controller.requests.is_paused:
                time.sleep(PAUSE_POLL_S)
                self._poll(is_due=True)
                self._begin_save()
