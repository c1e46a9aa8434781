"""What is asked of a simulation, and what it answers; plain values that travel between processes. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Mode = Literal["single", "dp", "ddp", "model"]

LossStyle = Literal["small", "full", "upsampled", "gathered"]
"""small: segapp's. full: the same low-resolution logits, upsampled whole. upsampled: the model upsamples, as
torchvision's do. gathered: so too, and GPU 0 gathers everybody's logits, as torch.nn.DataParallel does."""

EVAL = "eval"
PHASES = ("forward", "loss", "backward", "step", EVAL)
"""The phases of a training as the run's `memory` events name them."""

KINDS = (
    "weights", "buffers", "masters", "optimizer", "average", "replicas", "gradients", "buckets", "input",
    "activations", "loss", "temporaries", "evaluation",
)  # fmt: skip
"""What memory is for, in the order in which pictures stack it."""


@dataclass(frozen=True)
class SimulationJob:
    """One simulation.

    Attributes:
        mode: how the devices work together.
        split: samples per simulated device; a rank of ddp is one device.
        num_ranks: ranks in ddp.
        accumulate: micro-batches a step.
        loss: how the loss meets the logits.
        eval_px: height and width of the evaluated images; None: no evaluation.
        changes: dotted config keys and their values, for this job alone.
    """

    mode: Mode
    split: tuple[int, ...]
    num_ranks: int = 1
    accumulate: int = 1
    loss: LossStyle = "small"
    eval_px: tuple[int, int] | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SimulationJob:
        """The inverse of `to_json`."""
        size = values["eval_px"]
        return cls(**{**values, "split": tuple(values["split"]), "eval_px": None if size is None else tuple(size)})


@dataclass(frozen=True)
class PhasePeak:
    """The highest moment of a device in a phase.

    Attributes:
        mib: alive then.
        by_kind: the same by what it is for, MiB.
        largest: the largest tensors alive then: (MiB, what it is, which part of the model made it).
    """

    mib: float
    by_kind: dict[str, float] = field(default_factory=dict)
    largest: tuple[tuple[float, str, str], ...] = ()


@dataclass(frozen=True)
class SimulationResult:
    """What a simulation found.

    Attributes:
        split: samples per device.
        devices: for each device its phases.
    """

    split: tuple[int, ...]
    devices: tuple[dict[str, PhasePeak], ...]

    def peak_mib(self) -> tuple[float, ...]:
        """Each device's highest point in any phase, MiB."""
        return tuple(max((peak.mib for peak in phases.values()), default=0.0) for phases in self.devices)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SimulationResult:
        """The inverse of `to_json`."""

        def phase(raw: dict[str, Any]) -> PhasePeak:
            return PhasePeak(raw["mib"], raw["by_kind"], tuple((m, w, p) for m, w, p in raw["largest"]))

        devices = tuple({name: phase(raw) for name, raw in phases.items()} for phases in values["devices"])
        return cls(tuple(values["split"]), devices)
