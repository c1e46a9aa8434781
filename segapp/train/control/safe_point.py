"""How the training loop listens: one look between micro-batches, on every rank at the same place, and what follows."""

from __future__ import annotations

import time
from collections.abc import Callable

from segapp.parallel.ranks import Ranks
from segapp.run.events import Heartbeat
from segapp.train.control.commands import CommandController, TrainingPosition
from segapp.train.control.signals import PauseRequest, StopRequest, StopSignals
from segapp.train.saving.position import Clock, Position
from segapp.train.saving.saver import CheckpointSaver
from segapp.train.telemetry.device_memory import DeviceMemoryTracker
from segapp.train.telemetry.event_log import EventLog

PAUSE_POLL_S = 0.1


class SafePoint:
    """Hears signals and commands, and grants what can be granted at once: a checkpoint, a pause, a stop.

    Args:
        signals: of this process.
        controller: the commands.
        ranks: which share every look, in one exchange as long as nothing is asked for.
        clock: does not count pauses.
        watch: is told of pauses.
        event_log: takes heartbeats.
        standing: says where the training stands.
        saving: saves checkpoints.
        position: gives the state's.
    """

    def __init__(
        self,
        signals: StopSignals,
        controller: CommandController,
        ranks: Ranks,
        clock: Clock,
        watch: DeviceMemoryTracker,
        event_log: EventLog,
        *,
        standing: Callable[[], TrainingPosition],
        saving: CheckpointSaver,
        position: Callable[[], Position],
    ) -> None:
        self.signals, self.controller, self.ranks = signals, controller, ranks
        self._clock, self._watch, self._event_log = clock, watch, event_log
        self._standing, self._position, self._saving = standing, position, saving
        self._has_overdue_save = False
        self._asked_at_step: int | None = None

    def check(self) -> None:
        """Hears and grants; only for places where the state is whole.

        Raises:
            StopRequest: on every rank, once any of them was asked to stop.
        """
        self._poll()
        self.run_pending()

    def check_within_step(self) -> None:
        """Hears, between the micro-batches of a step; a checkpoint waits for the step's end.

        Raises:
            StopRequest: as above.
            PauseRequest: the step is to be left, and made again after `run_pending`.
        """
        self._poll()
        if self.controller.requests.is_paused:
            raise PauseRequest

    def run_pending(self) -> None:
        """Begins a save if one was asked for or is due, and waits for as long as the training is paused."""
        self._begin_save()
        if self.controller.requests.is_paused:
            self._pause()

    def _begin_save(self) -> None:
        """The answer to whoever asked for it follows when it is written (`_answer_saved`)."""
        if self.controller.requests.wants_checkpoint:
            self.controller.requests.wants_checkpoint = False
            self._saving.begin_asked(self._position())
            self._asked_at_step = self._position().step
        elif self._has_overdue_save:
            self._saving.begin()
        self._has_overdue_save = False

    def _answer_saved(self) -> None:
        if self._asked_at_step is not None:
            is_done, problem = self._saving.outcome()
            if is_done:
                self.controller.answer_checkpoints(self._asked_at_step, problem)
                self._asked_at_step = None

    def _poll(self) -> None:
        self._watch.report_progress()
        self._answer_saved()
        is_stop, is_save, is_news, is_overdue = self.ranks.any_of(
            self.signals.is_set,
            self.signals.take_checkpoint_request(),
            self.controller.inbox.has_commands(),
            self._saving.is_overdue(),
        )
        self._has_overdue_save |= is_overdue
        self.controller.requests.wants_checkpoint |= is_save
        if is_news:
            self.controller.handle_commands(self._standing())
            self.controller.adopt_requests(self.ranks.from_main(self.controller.requests))
        if is_stop:
            raise StopRequest(self.signals.signal_name or "a signal to another rank")
        if self.controller.requests.stop == "now":
            raise StopRequest("asked to stop")

    def _pause(self) -> None:
        began, phase, step = time.perf_counter(), self._watch.phase, self._standing().step
        self._watch.mark("paused")
        self.controller.answer_all("pause", "applied", None, step)
        self._event_log.emit(Heartbeat(phase="paused", step=step))
        try:
            while self.controller.requests.is_paused:
                time.sleep(PAUSE_POLL_S)
                self._poll()
                self._begin_save()
        finally:
            self._clock.leave_out(time.perf_counter() - began)
            self._watch.mark(phase)
        self._event_log.emit(Heartbeat(phase="eval" if phase == "eval" else "train", step=step))
