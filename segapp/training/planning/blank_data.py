"""Black images in the place of a data set, for steps and evaluations that are planned or tried."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from segapp.build.data import image_sizes_of
from segapp.build.network import build_inference
from segapp.build.pairs import build_pixels, split_names
from segapp.config import RunConfig
from segapp.datasets.distances import target_layout
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import Batch
from segapp.errors import DataError
from segapp.inference.evaluate import EvaluationSettings, evaluate, further_devices
from segapp.inference.workspace import HostLimit
from segapp.training.step.engine import StepEngine

MAX_HEADERS = 500
KNOWN_SIZES = {"cityscapes": (1024, 2048), "camvid": (720, 960), "voc": (500, 500), "ade20k": (768, 1024)}
"""Height and width of the largest usual image of a format, pixels."""

_NUM_EVALUATED = 2
"""Batches for each device."""


class _EnoughSeen(Exception):  # noqa: N818 - control flow, not an error
    """Ends an evaluation after its first batches: the scores would need numbers."""


def blank_batch(
    scheme: ClassScheme,
    num_samples: int,
    size: tuple[int, int],
    pixels: PixelFormat = RGB8,
    *,
    has_distances: bool = False,
    device: str = "cpu",
) -> Batch:
    """Return a batch of black images (N, B, H, W) with targets (N, H, W) of class 0.

    Args:
        scheme: its class ids decide about the target's dtype.
        num_samples: N.
        size: H and W.
        pixels: bands and type of the images.
        has_distances: the targets have distance maps behind them, (N, 1 + C, H, W).
        device: where it lies.
    """
    shape, dtype = target_layout(scheme, size, has_distances=has_distances)
    images = torch.zeros(num_samples, pixels.num_bands, *size, dtype=pixels.torch_dtype, device=device)
    target = torch.zeros(num_samples, *shape, dtype=getattr(torch, dtype.name), device=device)
    return Batch(images, target, tuple(range(num_samples)))


def evaluate_blank(engine: StepEngine, config: RunConfig, scheme: ClassScheme, size: tuple[int, int]) -> None:
    """Evaluate two batches of black images, as a training evaluates, without scores."""
    others, pixels = further_devices(engine.network), build_pixels(config.data)
    inference = build_inference(config.data, config.eval, engine.model, engine.precision, config.loss.align_corners)

    def batches() -> Iterator[Batch]:
        for _ in range(_NUM_EVALUATED * (1 + len(others))):
            has_distances = engine.criterion.task.needs_distances
            yield blank_batch(scheme, config.eval.batch_size, size, pixels, has_distances=has_distances)
        raise _EnoughSeen

    try:
        model = engine.model if engine.average is None else engine.average.module
        settings = EvaluationSettings(
            inference,
            scheme.num_classes,
            scheme.ignore_index,
            engine.device,
            engine.criterion.task,
            host=HostLimit(1 + len(others)),
            other_devices=others,
        )
        evaluate(model, batches(), settings)
    except _EnoughSeen:
        return


def evaluation_size(config: RunConfig) -> tuple[tuple[int, int], str]:
    """Return height and width of the largest image that evaluation meets, and where that is known from.

    The headers of the validation images are read where they are on this machine; else it is the format's usual size.
    """
    data = config.data
    if data.resize_px is not None:
        return data.resize_px, "data.resize_px"
    try:
        sizes = image_sizes_of(data, split_names(data)[1], MAX_HEADERS)
    except (DataError, OSError):
        sizes = []
    if sizes:
        return max(sizes, key=lambda size: size[0] * size[1]), f"the largest of {len(sizes)} validation images"
    if data.format in KNOWN_SIZES:
        return KNOWN_SIZES[data.format], f"usual for {data.format}: its images are not here"
    return data.crop_px, "data.crop_px: the images are not here"
