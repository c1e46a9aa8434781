"""Steps and evaluations of black images: tried on this machine's devices, or simulated for a memory plan."""

import gc
from collections.abc import Iterator

import torch

from segapp.accelerator import accelerator_of
from segapp.assembly.data import image_sizes_of
from segapp.assembly.devices import DevicePlan, with_precision
from segapp.assembly.network import build_inference, largest_phase
from segapp.assembly.pairs import build_pixels, build_scheme, split_names
from segapp.assembly.trained import read_trained
from segapp.chunks import SplitRequest
from segapp.config import RunConfig
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.layouts.formats import DATASETS
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.pool import Batch
from segapp.errors import DataError
from segapp.inference.evaluate import EvaluationSettings, evaluate
from segapp.inference.workspace import HostLimit
from segapp.memory.plan import SavedMemoryPlan
from segapp.training.step.assembler import RealDevices, StepAssembler, StepLayout
from segapp.training.step.engine import StepEngine

MAX_HEADERS = 500


class _EnoughSeen(Exception):  # noqa: N818 - control flow, not an error
    """Ends an evaluation after its first batches, because the scores would need values."""


def blank_batch(
    scheme: ClassScheme,
    num_samples: int,
    size: tuple[int, int],
    pixels: PixelFormat = RGB8,
    *,
    device: str = "cpu",
) -> Batch:
    """Return a batch of black images (N, B, H, W) with targets (N, H, W) of class 0."""
    images = torch.zeros(num_samples, pixels.num_bands, *size, dtype=pixels.torch_dtype, device=device)
    target = torch.zeros(num_samples, *size, dtype=getattr(torch, scheme.dtype.name), device=device)
    return Batch(images, target, tuple(range(num_samples)))


def evaluate_blank(engine: StepEngine, config: RunConfig, scheme: ClassScheme, size: tuple[int, int]) -> None:
    """Evaluate two batches of black images as in training, without scores."""
    others, pixels = engine.network.further_devices, build_pixels(config.data)
    inference = build_inference(config.data, config.eval, engine.model, engine.precision, config.loss.is_aligned)

    def batches() -> Iterator[Batch]:
        for _ in range(2 * (1 + len(others))):
            yield blank_batch(scheme, config.eval.batch_size, size, pixels)
        raise _EnoughSeen

    try:
        settings = EvaluationSettings(
            inference,
            scheme.num_classes,
            scheme.ignore_index,
            engine.device,
            engine.criterion.task,
            host=HostLimit(1 + len(others)),
            other_devices=others,
        )
        evaluate(engine.update.evaluated, batches(), settings)
    except _EnoughSeen:
        return


def evaluation_size(config: RunConfig) -> tuple[tuple[int, int], str]:
    """Return height and width of the largest image in the evaluation, and the source of this size.

    The headers of the validation images are read if they are on this machine; otherwise the format's usual size is
    used.
    """
    data = config.data
    try:
        sizes = image_sizes_of(data, split_names(data)[1], MAX_HEADERS)
    except (DataError, OSError):
        sizes = []
    if sizes:
        return max(sizes, key=lambda size: size[0] * size[1]), f"the largest of {len(sizes)} validation images"
    usual_px = DATASETS[data.format].usual_px if data.format in DATASETS else None
    if usual_px is not None:
        return usual_px, f"usual for {data.format}: its images are not here"
    return data.crop_px, "data.crop_px: the images are not here"


def build_trial_engine(config: RunConfig, layout: StepLayout) -> StepEngine:
    """Build the training's engine on this machine's devices, without its weights and its data; mode single or dp."""
    config = with_precision(largest_phase(config), layout.devices)
    teacher = None if config.distill is None else read_trained(config.distill.teacher)
    assembler = StepAssembler(config, build_scheme(config.data), teacher)
    num_classes = assembler.scheme.num_classes
    parts = assembler.build_parts(layout, lambda _: [1.0] * num_classes, with_weights=False)
    return assembler.assemble(parts, layout, RealDevices())


def trial_step(config: RunConfig, devices: DevicePlan, saved_plan: SavedMemoryPlan) -> None:
    """Run two steps with a full batch, and an evaluation of the largest image.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    scheme = build_scheme(config.data)
    split = SplitRequest(shares=saved_plan.best_split if devices.mode == "dp" else None)
    engine = build_trial_engine(config, StepLayout(devices.mode, devices.devices, split, saved_plan.recompute))
    try:
        engine.network.module.train()
        batch = blank_batch(
            scheme,
            config.train.batch_size,
            config.data.crop_px,
            build_pixels(config.data),
        )
        for _ in range(2):  # the second step runs with the memory that the first one keeps
            engine.step([batch] * min(2, config.train.accumulate))
        evaluate_blank(engine, config, scheme, evaluation_size(config)[0])
        for device in set(devices.devices):
            accelerator_of(device).synchronize(device)
    finally:
        del engine
        gc.collect()
