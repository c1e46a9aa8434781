"""Signals and commands, polled between micro-batches on every rank at the same place, and what is done about them."""

from __future__ import annotations

import time

from segapp.checkpoint.saver import CheckpointSaver
from segapp.training.context import RunContext
from segapp.training.control.commands import CommandController
from segapp.training.control.progress import TrainingProgress
from segapp.training.signals import PauseRequest, StopRequest
from segapp.training.telemetry.clock import ActivityLog

PAUSE_POLL_S = 0.1


class SafePoint:
    """Polls signals and commands, and carries out what can be done at once: a checkpoint, a pause, a stop.

    All ranks poll together, in one collective as long as nothing is asked for.
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

    def check(self) -> None:
        """Poll, then save or pause as requested; only for places where the state is whole.

        Raises:
            StopRequest: on every rank, once any of them was asked to stop.
        """
        self._poll()
        self._begin_save()
        if self._controller.requests.is_paused:
            self._pause()

    def check_within_step(self) -> None:
        """Poll between the micro-batches of a step; a checkpoint waits for the end of the step.

        Raises:
            StopRequest: as above.
            PauseRequest: the step is to be left, and made again after `check`.
        """
        self._poll()
        if self._controller.requests.is_paused:
            raise PauseRequest

    def _begin_save(self) -> None:
        """Begin a save that was requested or is overdue; the request is answered when it is written."""
        if self._controller.take_checkpoint_request():
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

    def _poll(self) -> None:
        context, controller = self._context, self._controller
        context.device_memory.report_progress()
        self._answer_saved()
        is_stop, is_save, has_commands, is_overdue = context.ranks.any_of(
            context.signals.is_set,
            context.signals.take_checkpoint_request(),
            controller.inbox.has_commands(),
            self._saver.is_overdue(),
        )
        self._has_overdue_save |= is_overdue
        if is_save:
            controller.request_checkpoint()
        if has_commands:
            controller.handle_commands(self._progress.command_position())
            controller.adopt_requests(context.ranks.from_main(controller.requests))
        if is_stop:
            raise StopRequest(context.signals.signal_name or "a signal to another rank")
        if controller.requests.stop == "now":
            raise StopRequest("asked to stop")

    def _pause(self) -> None:
        self._controller.answer_all("pause", "applied", None, self._progress.position.step)
        with self._activities.during("paused"):
            while self._controller.requests.is_paused:
                time.sleep(PAUSE_POLL_S)
                self._poll()
                self._begin_save()
