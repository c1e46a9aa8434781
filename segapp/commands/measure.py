"""Size, cost and memory of a network, measured on the meta device and by a simulation: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from segapp.build.pairs import build_scheme
from segapp.commands.model_names import ModelName
from segapp.config import RunConfig, validate_config
from segapp.errors import ConfigError, SegappError
from segapp.memory.peaks import SimulationJob
from segapp.models import SegmentationModel, build_model
from segapp.models.by_name import weights_in_cache
from segapp.run.words import first_line

NUM_CLASSES = 19
"""Classes of the measured networks, those of Cityscapes."""


@dataclass(frozen=True)
class ModelFacts:
    """What a run of a network shows.

    Attributes:
        label: its name.
        num_params: parameters.
        gflops: 1e9 floating-point operations of a forward pass of one image, a multiplication and an addition as two.
        size_px: height and width of that image, the nearest that the network takes.
        stride: pixels per logit along each axis.
        image_mib: memory that one more image of a training step takes, fp32 with SGD; None: not simulated.
        weights_here: named weights of the backbone, or of the network, that lie in the local caches.
        problem: why it cannot be built or run; None if it can.
    """

    label: str
    num_params: int = 0
    gflops: float = 0.0
    size_px: tuple[int, int] | None = None
    stride: int = 0
    image_mib: float | None = None
    weights_here: list[str] = field(default_factory=list)
    problem: str | None = None


def measure_model(name: ModelName, size_px: tuple[int, int], *, with_memory: bool) -> ModelFacts:
    """Return the facts of a network for images of a size; an error is one of them."""
    try:
        model = _built(name)
        size_px = model.suitable_size(*size_px)
        return ModelFacts(
            name.label,
            sum(parameter.numel() for parameter in model.parameters()),
            _num_flops(model, size_px) / 1e9,
            size_px,
            model.logits_stride,
            _image_mib(name, size_px) if with_memory else None,
            weights_in_cache(model),
        )
    except (SegappError, RuntimeError, ValueError) as error:
        return ModelFacts(name.label, problem=first_line(error))


def _built(name: ModelName) -> SegmentationModel:
    for device in ("meta", "cpu"):  # some constructors read values
        try:
            with torch.device(device):
                return build_model(name.library, name.name, NUM_CLASSES, encoder=name.encoder)
        except ConfigError:
            if device == "cpu":
                raise
    raise AssertionError("unreachable")


def _num_flops(model: SegmentationModel, size_px: tuple[int, int]) -> int:
    model = model.to("meta").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, *size_px, device="meta"))
    return int(counter.get_total_flops())


def _image_mib(name: ModelName, size_px: tuple[int, int]) -> float:
    """Return the difference of the peaks of two batches, per image."""
    from segapp.build.step import StepAssembler
    from segapp.training.planning.simulate import Simulator

    simulator = Simulator(StepAssembler(_config(name, size_px), build_scheme(_config(name, size_px).data)))
    peaks = [simulator.run(SimulationJob("single", (num_images,))).peak_mib()[0] for num_images in (2, 6)]
    return (peaks[1] - peaks[0]) / 4


def _config(name: ModelName, size_px: tuple[int, int]) -> RunConfig:
    section = {"library": name.library, "name": name.name, "encoder": name.encoder}
    classes = [f"class {number}" for number in range(NUM_CLASSES)]
    data = {"format": "folder", "root": str(Path()), "classes": classes, "crop_px": list(size_px)}
    config = {"name": "models", "data": data, "model": section, "train": {"batch_size": 6}}
    if name.library == "segapp":
        config["loss"] = {"name": "mask_classification", "align_corners": False, "aux_weight": 1.0}
    return validate_config(config)
