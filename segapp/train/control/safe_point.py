"""How the training loop listens: one look between micro-batches, on every rank at the same place, and what follows."""

from __future__ import annotations

import time
from collections.abc import Callable

from segapp.parallel.ranks import Ranks
from segapp.train.control.commands import Standing, Steering
from segapp.train.control.signals import PauseRequest, StopRequest, StopSignals
from segapp.train.saving.position import Clock, Position
from segapp.train.saving.saver import Saving
from segapp.train.telemetry.device_memory import MemoryWatch
from segapp.train.telemetry.event_log import Journal

PAUSE_POLL_S = 0.1


class Attention:
    """Hears signals and commands, and grants what can be granted at once: a checkpoint, a pause, a stop.

    Args:
        signals: of this process.
        steering: the commands.
        ranks: which share every look, in one exchange as long as nothing is asked for.
        clock: does not count pauses.
        watch: is told of pauses.
        journal: takes heartbeats.
        standing: says where the training stands.
        saving: saves checkpoints.
        position: gives the state's.
    """

    def __init__(
        self,
        signals: StopSignals,
        steering: Steering,
        ranks: Ranks,
        clock: Clock,
        watch: MemoryWatch,
        journal: Journal,
        *,
        standing: Callable[[], Standing],
        saving: Saving,
        position: Callable[[], Position],
    ) -> None:
        self.signals, self.steering, self.ranks = signals, steering, ranks
        self._clock, self._watch, self._journal = clock, watch, journal
        self._standing, self._position, self._saving = standing, position, saving
        self._has_overdue_save = False
        self._asked_at_step: int | None = None

    def check(self) -> None:
        """Hears and grants; only for places where the state is whole.

        Raises:
            StopRequest: on every rank, once any of them was asked to stop.
        """
        self._hear()
        self.grant()

    def check_in_step(self) -> None:
        """Hears, between the micro-batches of a step; a checkpoint waits for the step's end.

        Raises:
            StopRequest: as above.
            PauseRequest: the step is to be left, and made again after `grant`.
        """
        self._hear()
        if self.steering.wishes.is_paused:
            raise PauseRequest

    def grant(self) -> None:
        """Begins a save if one was asked for or is due, and waits for as long as the training is paused."""
        self._begin_save()
        if self.steering.wishes.is_paused:
            self._pause()

    def _begin_save(self) -> None:
        """The answer to whoever asked for it follows when it is written (`_tell_saved`)."""
        if self.steering.wishes.wants_checkpoint:
            self.steering.wishes.wants_checkpoint = False
            self._saving.begin_asked(self._position())
            self._asked_at_step = self._position().step
        elif self._has_overdue_save:
            self._saving.begin()
        self._has_overdue_save = False

    def _tell_saved(self) -> None:
        if self._asked_at_step is not None:
            is_done, problem = self._saving.outcome()
            if is_done:
                self.steering.checkpoint_done(self._asked_at_step, problem)
                self._asked_at_step = None

    def _hear(self) -> None:
        self._watch.touch()
        self._tell_saved()
        is_stop, is_save, is_news, is_overdue = self.ranks.any_of(
            self.signals.is_set,
            self.signals.take_checkpoint_wish(),
            self.steering.inbox.has_news(),
            self._saving.is_overdue(),
        )
        self._has_overdue_save |= is_overdue
        self.steering.wishes.wants_checkpoint |= is_save
        if is_news:
            self.steering.hear(self._standing())
            self.steering.wishes = self.ranks.from_main(self.steering.wishes)
        if is_stop:
            raise StopRequest(self.signals.signal_name or "a signal to another rank")
        if self.steering.wishes.stop == "now":
            raise StopRequest("asked to stop")

    def _pause(self) -> None:
        began, phase, step = time.perf_counter(), self._watch.phase, self._standing().step
        self._watch.mark("paused")
        self.steering.settle("pause", "applied", None, step)
        self._journal.emit("heartbeat", phase="paused", step=step)
        try:
            while self.steering.wishes.is_paused:
                time.sleep(PAUSE_POLL_S)
                self._hear()
                self._begin_save()
        finally:
            self._clock.leave_out(time.perf_counter() - began)
            self._watch.mark(phase)
        self._journal.emit("heartbeat", phase="eval" if phase == "eval" else "train", step=step)
