"""Writing an exported file, and the proof that it answers as the network does."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx.experimental import _config as symbolic_config

from segapp.errors import RunError, StorageError
from segapp.export.archive import INFO_FILE
from segapp.export.info import ExportInfo
from segapp.export.network import ExportNetwork
from segapp.export.runner import ExportedModel, needed
from segapp.models import SegmentationModel
from segapp.run.files import remove_quietly, temporary_name

Format = Literal["onnx", "pt2"]
OPSET = 20
"""Of ONNX; onnxruntime knows it since 1.17."""
MIN_AGREEMENT = 0.999
"""Share of pixels whose class must be the network's own."""


@dataclass(frozen=True)
class CheckResult:
    """How an exported file compares with the network computed by torch in float32.

    Attributes:
        sizes: (batch, height, width) of the images that were shown.
        max_difference: largest difference of a logit; None where the file gives labels.
        max_logit: largest absolute logit, to compare the difference with.
        agreement: share of pixels with the same class.
    """

    sizes: tuple[tuple[int, int, int], ...]
    max_difference: float | None
    max_logit: float
    agreement: float


def write_export(
    model: SegmentationModel, info: ExportInfo, path: Path, format: Format, pictures: Sequence[NDArray[Any]] = ()
) -> CheckResult:
    """Writes a file, checks it, and only then gives it its name.

    Args:
        model: the trained network; it is copied.
        info: what to export, and the file's metadata.
        path: the file.
        format: onnx, or pt2 (`torch.export`).
        pictures: uint8 (H, W, 3) RGB of any size, from which the images of the check are cut; none: drawn ones.

    Raises:
        ConfigError: a package is missing.
        RunError: the network cannot be exported, or the file's answers differ; nothing is written then.
        StorageError: the file cannot be written.
    """
    temporary = path.parent / f"{temporary_name()}.{format}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if format == "onnx":
            info = info.model_copy(update={"opset": OPSET})
            _write_onnx(build_network(model, info), info, temporary)
        else:
            _write_pt2(build_network(model, info), info, temporary)
        found = check_export(ExportedModel(temporary), model, pictures)
        if found.agreement < MIN_AGREEMENT:
            raise RunError(
                f"{path.name}: the exported network gives another class than the trained one at "
                f"{1 - found.agreement:.2%} of the pixels, at most {1 - MIN_AGREEMENT:.1%} are allowed: "
                + ("export without --half" if info.precision == "fp16" else "use the other --format")
            )
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}: choose another --out") from None
    finally:
        remove_quietly(temporary)
    return found


def build_network(model: SegmentationModel, info: ExportInfo) -> ExportNetwork:
    """The module that a file with this metadata holds."""
    return ExportNetwork(
        model,
        info.mean,
        info.std,
        align_corners=info.align_corners,
        argmax=info.output == "labels",
        half=info.precision == "fp16",
    ).eval()


def check_sizes(model: SegmentationModel) -> tuple[tuple[int, int, int], ...]:
    """(batch, height, width) of the images of the check: odd ones where the network takes any."""
    height, width = model.suitable_size(128, 160)
    if model.fixed_size_px is not None:
        return (1, height, width), (2, height, width)
    return (1, height, width), (2, height + 3, width + 5), (1, 2 * height - 17, width + 31)


@torch.no_grad()
def check_export(
    exported: ExportedModel, model: SegmentationModel, pictures: Sequence[NDArray[Any]] = ()
) -> CheckResult:
    """Compares an exported file with the network computed by torch in float32.

    Args:
        exported: the file.
        model: what it was made from.
        pictures: uint8 (H, W, 3) RGB of any size; none: drawn ones.
    """
    reference = build_network(model, exported.info.model_copy(update={"output": "logits", "precision": "fp32"}))
    sizes = check_sizes(model)
    if exported.info.precision == "fp16" and exported.path.suffix == ".pt2":
        sizes = sizes[1:2]  # torch's half convolutions on a processor take 60 times as long
    source = itertools.cycle(pictures or [_drawn_picture()])
    num_px = num_equal = 0
    difference, largest = 0.0, 0.0
    for size in sizes:
        images = np.stack([_cut(next(source), size[1], size[2]) for _ in range(size[0])])
        wanted = reference(torch.from_numpy(images)).numpy()
        found = exported(images)
        if exported.info.output == "logits":
            # A logit that is not finite is no answer: the comparison must not pass on it.
            difference = max(difference, float(np.nan_to_num(np.abs(found - wanted), nan=np.inf).max()))
            found = found.argmax(1)
        largest = max(largest, float(np.abs(wanted).max()))
        num_equal += int((found == wanted.argmax(1)).sum())
        num_px += found.size
    is_logits = exported.info.output == "logits"
    agreement = num_equal / num_px if np.isfinite(difference) else 0.0
    return CheckResult(sizes, difference if is_logits else None, largest, agreement)


def _cut(picture: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """The middle of a picture at the size wanted, enlarged if it is smaller."""
    scale = max(1.0, height / picture.shape[0], width / picture.shape[1])
    if scale > 1:
        size = max(width, round(picture.shape[1] * scale)), max(height, round(picture.shape[0] * scale))
        picture = cv2.resize(picture, size, interpolation=cv2.INTER_LINEAR)
    top, left = (picture.shape[0] - height) // 2, (picture.shape[1] - width) // 2
    return picture[top : top + height, left : left + width]


def _drawn_picture() -> NDArray[Any]:
    """Patches of colour with texture, for runs whose data are not here."""
    rng = np.random.default_rng(0)
    coarse = cv2.resize(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8), (660, 540), interpolation=cv2.INTER_CUBIC)
    noisy = coarse.astype(np.float32) + rng.normal(0, 8, coarse.shape)
    picture: NDArray[np.uint8] = noisy.clip(0, 255).astype(np.uint8)
    return picture


def _example(network: ExportNetwork) -> tuple[torch.Tensor, dict[int, str]]:
    """Images to trace with, and which of their sides are free."""
    _, size, *_ = check_sizes(network.model)
    free = {0: "batch"} if network.model.fixed_size_px is not None else {0: "batch", 1: "height", 2: "width"}
    return torch.zeros(*size, 3, dtype=torch.uint8), free


def _trace(network: ExportNetwork) -> torch.export.ExportedProgram:
    images, free = _example(network)
    shapes = dict.fromkeys(free, torch.export.Dim.DYNAMIC)
    # Without this a size of the example becomes a rule: "the batch is at least 2", "at least 33 pixels high".
    patch = symbolic_config.patch  # type: ignore[attr-defined]
    with patch(backed_size_oblivious=True), torch.no_grad():
        return torch.export.export(network, (images,), dynamic_shapes=(shapes,), strict=False)


def _write_pt2(network: ExportNetwork, info: ExportInfo, path: Path) -> None:
    with _as_export_errors(network, "torch.export"):
        program = _trace(network)
        torch.export.save(program, path, extra_files={INFO_FILE: json.dumps(info.as_properties())})


def _write_onnx(network: ExportNetwork, info: ExportInfo, path: Path) -> None:
    needed("onnx", "onnxscript", "onnxruntime")
    with _as_export_errors(network, "ONNX"):
        written = torch.onnx.export(
            _trace(network),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=["images"],
            output_names=[info.output],
        )
        assert written is not None
        written._rename_dynamic_axes((_example(network)[1],))
        written.model.metadata_props.update(info.as_properties())
        written.model.producer_name, written.model.producer_version = "segapp", info.segapp_version
        written.save(path, external_data=False)


@contextlib.contextmanager
def _as_export_errors(network: ExportNetwork, what: str) -> Iterator[None]:
    """Whatever a tracer raises, as one error; its warnings and progress are no news for a user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            yield
    except (OSError, RunError):
        raise
    except Exception as error:
        model = network.model
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise RunError(
            f"{model.library} {model.name} with backbone {model.encoder_name} cannot be written as {what} ({reason}): "
            "try the other --format"
        ) from error
    finally:
        logger.setLevel(level)
