"""The objects that the parts of a training process share."""

from __future__ import annotations

from dataclasses import dataclass

from segapp.memory.counters import DeviceMemoryTracker
from segapp.parallel.distributed import Ranks
from segapp.run.events import EventLog
from segapp.run.folder import RunFolder
from segapp.training.signals import StopSignals


@dataclass(frozen=True)
class RunContext:
    """One training process and its run.

    Attributes:
        folder: of the run; every rank reads it, the main rank writes it.
        event_log: takes events; it writes on the main rank only.
        ranks: the processes that train together.
        signals: stop and checkpoint requests sent to this process.
        device_memory: the run's devices, and the phase that the training thread is in.
    """

    folder: RunFolder
    event_log: EventLog
    ranks: Ranks
    signals: StopSignals
    device_memory: DeviceMemoryTracker
