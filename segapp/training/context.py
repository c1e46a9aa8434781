"""Objects that the modules of a training share: its run and process, its fixed numbers, and its facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from segapp.checkpoint.saver import SaveRules
from segapp.memory.counters import DeviceMemoryTracker
from segapp.parallel.distributed import Ranks
from segapp.run.events import Alert, EventLog, ParamGroup
from segapp.run.folder import RunFolder
from segapp.training.signals import StopSignals
from segapp.training.telemetry.remaining_time import Timetable


@dataclass(frozen=True)
class Places:
    """Locations of the devices of a training.

    Attributes:
        names: host and device, for each device of all ranks.
        num_machines: number of machines.
    """

    names: tuple[str, ...] = ()
    num_machines: int = 1

    def to_state(self, split: Sequence[int] | None) -> dict[str, Any]:
        """Return the `topology` of a checkpoint, with the split of a full batch."""
        divided = None if split is None else list(split)
        return {"places": list(self.names), "num_machines": self.num_machines, "split": divided}

    def have_other_number(self, saved: Mapping[str, Any] | None) -> bool:
        """Return True if a checkpoint's `topology` has another number of devices; earlier versions wrote none."""
        return saved is not None and len(saved["places"]) != len(self.names)


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
    places: Places = field(default_factory=Places)
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

    classes: list[str]
    palette: list[tuple[int, int, int]]
    num_params: int
    devices: list[Any]
    """Devices of all ranks."""
    num_train: int
    num_val: int
    config: dict[str, Any]
    num_trainable: int
    """Number of parameters that are trained from the first epoch on."""
    freeze_epochs: int | None
    """Epochs for which the others are frozen; None: the whole run, or nothing is frozen."""
    param_groups: list[ParamGroup]
    mode: str | None = None
    mode_reason: str | None = None
    """Why `parallel.mode: auto` chose it; None if the config sets it."""
    parts: dict[str, str] = field(default_factory=dict)
    """Name -> SHA-256 of the source file of each custom component."""
    alerts: Sequence[Alert] = ()
    """Sentences for the user before the first step."""
    notes: Sequence[str] = ()
    """The same, but for usual things."""
