"""Jobs and results of memory simulations: plain values that pass between processes. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

Mode = Literal["single", "dp", "ddp", "model"]

LossStyle = Literal["small", "upsampled"]
"""small: segapp's loss from low-resolution logits, band by band. upsampled: the model upsamples, as torchvision's
models do, and the loss is computed at full resolution: what other programs need, for the advice."""

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
        return TypeAdapter(cls).validate_python(values)


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
        return TypeAdapter(cls).validate_python(values)
