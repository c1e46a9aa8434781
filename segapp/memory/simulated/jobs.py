"""Jobs and results of memory simulations: plain values that pass between processes. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Mode = Literal["single", "dp", "ddp", "model"]

LossStyle = Literal["small", "full", "upsampled", "gathered"]
"""small: segapp's loss from low-resolution logits, band by band. full: the same logits, upsampled at once. upsampled:
the model upsamples, as torchvision's models do. gathered: as upsampled, and device 0 gathers all logits, as
torch.nn.DataParallel does."""

EVAL = "eval"
PHASES = ("forward", "loss", "backward", "step", EVAL)
"""The phases of a training, with the names of `memory` events."""

KINDS = (
    "weights", "buffers", "masters", "optimizer", "average", "replicas", "gradients", "buckets", "input",
    "activations", "loss", "temporaries", "evaluation",
)  # fmt: skip
"""Kinds of memory, in the order of the bars in reports."""


@dataclass(frozen=True)
class SimulationJob:
    """One simulation.

    Attributes:
        mode: parallel mode.
        split: samples per simulated device; a rank of ddp is one device.
        num_ranks: ranks in ddp.
        accumulate: micro-batches per step.
        loss: how the loss is computed from the logits.
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
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SimulationJob:
        """Return the object for the values of `to_json`."""
        size = values["eval_px"]
        return cls(**{**values, "split": tuple(values["split"]), "eval_px": None if size is None else tuple(size)})


@dataclass(frozen=True)
class PhasePeak:
    """Peak of a device in a phase.

    Attributes:
        mib: memory of live tensors at the peak.
        by_kind: the same by kind, MiB.
        largest: the largest tensors at the peak: (MiB, description, module that created it).
    """

    mib: float
    by_kind: dict[str, float] = field(default_factory=dict)
    largest: tuple[tuple[float, str, str], ...] = ()


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulation."""

    split: tuple[int, ...]
    devices: tuple[dict[str, PhasePeak], ...]

    def peak_mib(self) -> tuple[float, ...]:
        """Return each device's highest peak over all phases, MiB."""
        return tuple(max((peak.mib for peak in phases.values()), default=0.0) for phases in self.devices)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SimulationResult:
        """Return the object for the values of `to_json`."""

        def phase(raw: dict[str, Any]) -> PhasePeak:
            return PhasePeak(raw["mib"], raw["by_kind"], tuple((m, w, p) for m, w, p in raw["largest"]))

        devices = tuple({name: phase(raw) for name, raw in phases.items()} for phases in values["devices"])
        return cls(tuple(values["split"]), devices)
