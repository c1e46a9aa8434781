"""Objects that the modules of a training share: its run and process, its devices, its fixed numbers, and its facts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from segapp.checkpoint.saver import SaveRules
from segapp.memory.counters import DeviceMemoryTracker
from segapp.parallel.distributed import Ranks
from segapp.run.events import Alert, EventLog, RunStart
from segapp.run.folder import RunFolder
from segapp.training.progress import Timetable
from segapp.training.signals import StopSignals


@dataclass(frozen=True)
class DeviceLocations:
    """Locations of the devices of a training.

    Attributes:
        names: host and device, for each device of all ranks.
    """

    names: tuple[str, ...] = ()
    num_machines: int = 1

    def to_state(self, split: Sequence[int] | None) -> dict[str, Any]:
        divided = None if split is None else list(split)
        return {"names": list(self.names), "num_machines": self.num_machines, "split": divided}


@dataclass(frozen=True)
class RunContext:
    """One training process and its run."""

    folder: RunFolder
    """Every rank reads it; the main rank writes it."""
    event_log: EventLog
    """It writes only on the main rank."""
    ranks: Ranks
    signals: StopSignals
    device_memory: DeviceMemoryTracker
    locations: DeviceLocations = field(default_factory=DeviceLocations)
    """Devices of all ranks."""


@dataclass(frozen=True)
class TrainerSettings:
    """Fixed numbers of a training."""

    timetable: Timetable
    batch_size: int
    """Images of a micro-batch, over all devices and ranks."""
    accumulate: int
    base_lr: float
    """The configured learning rate, for messages."""
    learning_rate: Callable[[int], float]
    """Returns the learning rate of a step (from 1), before the live factor."""
    save_rules: SaveRules
    monitor: str
    freeze_epochs: int | None
    """Epochs for which `model.freeze` applies; None: the whole run."""
    early_stop: int | None
    """Number of evaluations without a better score after which the training ends; None: never."""
    log_every_steps: int


@dataclass(frozen=True)
class TrainingFacts:
    """Facts of a training for `run_start` and the checkpoint."""

    start: RunStart
    """Without the values that a resume or a command changes."""
    config: dict[str, Any]
    parts: dict[str, str] = field(default_factory=dict)
    """Name -> SHA-256 of the source file of each custom component."""
    alerts: Sequence[Alert] = ()
    """Sentences for the user before the first step."""
    notes: Sequence[str] = ()
    """The same, but for usual things."""
    is_trial: bool = False
    """True for a training on a few images, whose scores say nothing."""
