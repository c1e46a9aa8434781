"""Objects that the modules of a training share: its run and process, its fixed numbers, its facts, and its devices.

The devices may change with a resume, and with them the split of the batch.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from segapp.checkpoint.saver import SaveRules
from segapp.chunks import replan_shares
from segapp.config import RunConfig
from segapp.memory.counters import DeviceMemoryTracker
from segapp.memory.plan import SavedMemoryPlan
from segapp.parallel.distributed import Ranks
from segapp.run.events import Alert, EventLog, RunStart, Topology
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
        return {"places": list(self.names), "num_machines": self.num_machines, "split": divided}

    def have_other_number(self, saved: Mapping[str, Any] | None) -> bool:
        """Return True if a checkpoint's `topology` has another number of devices."""
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


def first_split(
    config: RunConfig, saved_plan: SavedMemoryPlan | None, state: Mapping[str, Any] | None, locations: DeviceLocations
) -> tuple[int | None, list[int] | None]:
    """Return `gpu0_bsz` and `shares` of the first step.

    They come from the config, or from the plan if `gpu0_bsz` is auto. If a resumed training has another number of
    devices, and the config has no shares for it, the shares of its last split are planned anew per device, also in
    later resumes with that number.
    """
    shares, gpu0_bsz, num = config.parallel.shares, config.parallel.gpu0_bsz, len(locations.names)
    if gpu0_bsz == "auto":
        gpu0_bsz = None if saved_plan is None else saved_plan.gpu0_bsz
    saved = None if state is None else state.get("topology")
    is_other, has_shares = locations.have_other_number(saved), shares is not None and len(shares) == num
    if state is None or saved is None or has_shares or not (is_other or shares is not None):
        return gpu0_bsz, shares
    settings = state["settings"]
    is_planned = settings["gpu0_bsz_auto"] and gpu0_bsz is not None
    if settings["gpu0_bsz"] is settings["shares"] is None or is_planned or num < 2:
        return gpu0_bsz if is_planned and num > 1 else None, None
    split = saved["split"] or (1,) * len(saved["places"])
    planned = replan_shares(split, saved["places"], locations.names, config.train.batch_size)
    return (planned[0], None) if settings["shares"] is None else (None, list(planned))


def topology_event(
    saved: Mapping[str, Any] | None, locations: DeviceLocations, split: Sequence[int] | None, step: int
) -> Topology | None:
    """Return the event of a resume on other devices than the checkpoint's; None for the same or one device."""
    if saved is None or max(len(locations.names), len(saved["places"])) < 2:
        return None
    old, new = Counter(saved["places"]), Counter(locations.names)
    changes = [
        f"{word} {', '.join(each.elements())}" for word, each in (("without", old - new), ("with", new - old)) if each
    ]
    if not changes:
        return None
    return Topology(
        step=step,
        ranks=len(locations.names),
        machines=locations.num_machines,
        old_ranks=len(saved["places"]),
        old_machines=saved["num_machines"],
        round=int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        reason="; ".join(changes),
        split=None if split is None else list(split),
    )


def shares_note(config: RunConfig, locations: DeviceLocations, split: Sequence[int] | None) -> str | None:
    """Return a sentence if `parallel.shares` is a list for another number of devices; None if not."""
    shares, num = config.parallel.shares, len(locations.names)
    if shares is None or len(shares) == num:
        return None
    used = "nothing is divided" if split is None else f"split {list(split)} is planned from the last one"
    return f"parallel.shares = {shares} is for {len(shares)} devices, and this resume has {num}: {used}"
