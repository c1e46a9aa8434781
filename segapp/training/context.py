"""What the parts of a training share: its run and process, its fixed numbers, and its facts; here the config ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class TrainerSettings:
    """Fixed numbers of a training.

    Attributes:
        timetable: how long the training is, and when it evaluates.
        batch_size: images of a micro-batch, all devices and ranks together.
        accumulate: micro-batches of a step.
        base_lr: the configured learning rate, for messages.
        learning_rate: returns the learning rate of a step (from 1), before the live factor.
        save_rules: when checkpoints are due.
        monitor: the score that decides which checkpoint is best.
        freeze_epochs: epochs for which `model.freeze` holds; None: the whole run.
        early_stop: evaluations without a better score that end the training; None: never.
        max_bad_steps: steps in a row without a finite loss or gradient that end the training.
        log_every_steps: steps from one `step` event to the next.
    """

    timetable: Timetable
    batch_size: int
    accumulate: int
    base_lr: float
    learning_rate: Callable[[int], float]
    save_rules: SaveRules
    monitor: str
    freeze_epochs: int | None
    early_stop: int | None
    max_bad_steps: int
    log_every_steps: int


@dataclass(frozen=True)
class TrainingFacts:
    """Facts of a training for `run_start` and the checkpoint.

    Attributes:
        classes: names, in the order of their ids.
        palette: their RGB colours in pictures.
        num_params: of the model.
        devices: of all ranks.
        num_train: training images.
        num_val: validation images.
        config: the complete config as plain values.
        mode: how the devices work together.
        num_trainable: parameters that are trained from the first epoch on.
        freeze_epochs: epochs for which the others are frozen; None: the whole run, or nothing is frozen.
        param_groups: of the optimizer in the first epoch.
        mode_reason: why `parallel.mode: auto` chose it; None where the config names it.
        parts: name -> SHA-256 of the source file of each own part.
        alerts: what the user should know before the first step.
        notes: the same, for things that are usual.
    """

    classes: list[str]
    palette: list[tuple[int, int, int]]
    num_params: int
    devices: list[Any]
    num_train: int
    num_val: int
    config: dict[str, Any]
    num_trainable: int
    freeze_epochs: int | None
    param_groups: list[ParamGroup]
    mode: str | None = None
    mode_reason: str | None = None
    parts: dict[str, str] = field(default_factory=dict)
    alerts: Sequence[Alert] = ()
    notes: Sequence[str] = ()
