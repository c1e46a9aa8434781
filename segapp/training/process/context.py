"""The objects that the parts of a training process share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from segapp.memory.counters import DeviceMemoryTracker
from segapp.parallel.ranks import Ranks
from segapp.run.folder import RunFolder
from segapp.training.process.inbox import Inbox
from segapp.training.process.signals import StopSignals
from segapp.training.telemetry.activities import ActivityLog
from segapp.training.telemetry.event_log import EventLog


@dataclass(frozen=True)
class RunContext:
    """One training process and its run.

    Attributes:
        folder: of the run; every rank reads it, the main rank writes it.
        event_log: takes events; it writes on the main rank only.
        ranks: the processes that train together.
        signals: stop and checkpoint requests sent to this process.
        device_memory: the run's devices, and the phase that the training thread is in.
        inbox: commands from outside; empty on all ranks but the main one.
    """

    folder: RunFolder
    event_log: EventLog
    ranks: Ranks
    signals: StopSignals
    device_memory: DeviceMemoryTracker
    inbox: Inbox

    @cached_property
    def activities(self) -> ActivityLog:
        """Tells what the training thread does."""
        return ActivityLog(self.event_log, self.device_memory)
