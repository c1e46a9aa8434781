"""Write a trained network as ONNX, pt2 or safetensors, and check that the file gives the network's output.

The exported module takes images as stored in files, and returns logits or class ids at full resolution.

Shapes: N images, B bands, C classes, H x W pixels of an image.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import itertools
import json
import logging
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from segapp.compat.torch import rename_dynamic_axes, size_oblivious_export
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import ConfigError, RunError, cannot_be_written, install_command
from segapp.models import SegmentationModel
from segapp.models.surgery import replace_adaptive_pooling
from segapp.run.files import open_new, remove_dead_temporaries, remove_quietly, unfinished_path
from segapp.run.words import first_line

Format = Literal["onnx", "pt2"]
Compute = Callable[[NDArray[Any]], NDArray[Any]]
"""Function from images (N, H, W, B) as stored in files to logits (N, C, H, W) or labels (N, H, W)."""
INFO_FILE = "segapp.json"
"""Name of the metadata inside a pt2 file."""
_PROGRAM_FIELDS = ("input", "output", "opset", "fixed_size_px", "batch_size")
"""Metadata for executable formats only."""
OPSET = 20
"""ONNX opset, if no other is asked for; onnxruntime supports it since 1.17."""
MIN_AGREEMENT = 0.999
"""Minimum share of pixels at which file and network must predict the same class."""


class ExportInfo(BaseModel):
    """Metadata of an exported file, as JSON: one property per field in ONNX, the extra file `segapp.json` in pt2."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    segapp_version: str
    """Version of segapp that wrote the file."""
    run: str
    """Name of the run's folder; SWEEP/RUN for a run of a sweep, the name in the config for a file outside a run."""
    run_id: str | None = None
    """Unique id of the run, as in its `run.json`; None for a file outside a run."""
    checkpoint: str
    """File name of the checkpoint."""
    epoch: int
    """The epoch of the checkpoint's last step."""
    step: int
    """Number of optimizer steps the checkpoint was trained for."""
    network: str
    """Library, name and backbone of the network."""
    classes: tuple[str, ...]
    """Class names in the order of their ids."""
    palette: tuple[tuple[int, int, int], ...]
    """One RGB color per class."""
    file_ids: tuple[int, ...]
    """For each class, its id in the files of the data set."""
    ignore_index: int
    """Id of pixels that training ignored."""
    mean: tuple[float, ...]
    """Mean of the normalization that the file applies, for each band in 0..1."""
    std: tuple[float, ...]
    """Standard deviation of the normalization that the file applies, for each band in 0..1."""
    bands: tuple[int, ...] | None = None
    """Bands of an image file that make the input, counted from 1; None: RGB."""
    dtype: str = "uint8"
    """Dtype of the input."""
    value_range: tuple[tuple[float, float], ...] | None = None
    """Lowest and highest value of each band in the normalization; None: 0 and 255."""
    resize_px: tuple[int, int] | None = None
    """Height and width to which the file resizes every image before the network; None: not resized. The output has the
    size of the image."""
    align_corners: bool
    """`align_corners` of the upsampling in the file."""
    input: str = "images: uint8 (batch, height, width, 3), RGB"
    """Name, type and shape of the input."""
    output: Literal["logits", "labels"]
    """Name of the output: logits, float32 (batch, classes, height, width), or labels, (batch, height, width)."""
    multilabel: bool = False
    """The logits are for sigmoids: a pixel may have several classes, or none."""
    threshold: float | None = None
    """A class is predicted if its probability is above this (multilabel)."""
    fixed_size_px: tuple[int, int] | None = None
    """Height and width of the images if the file accepts only one size; None: any size."""
    batch_size: int | None = None
    """Number of images of a call if the file accepts only one; None: any number."""
    size_multiple: int = 1
    """Images whose height or width is no multiple of this are padded with the mean color at the bottom and right."""
    opset: int | None = None
    """ONNX opset; None in other formats."""

    @property
    def pixels(self) -> PixelFormat:
        return PixelFormat(self.bands, self.dtype, self.value_range, self.mean, self.std, self.resize_px)

    def as_properties(self) -> dict[str, str]:
        return {name: json.dumps(value) for name, value in self.model_dump(mode="json").items()}


class ExportNetwork(nn.Module):
    """Normalization, network, upsampling and optional argmax in one module.

    Images whose size is not suitable for the network are padded at the bottom and right with the mean color, as in
    evaluation, and the logits are cropped. The model is copied.
    """

    def __init__(
        self,
        model: SegmentationModel,
        preprocessing: Preprocessing,
        *,
        align_corners: bool = True,
        argmax: bool = False,
    ) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float().eval()
        self.model.requires_grad_(False)
        replace_adaptive_pooling(self.model)
        self.preprocessing = preprocessing
        self.align_corners = align_corners
        self.argmax = argmax

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 logits (N, C, H, W), or class ids (N, H, W), of images (N, H, W, B) as stored in files.

        Class ids are uint8, or int32 for more than 256 classes.
        """
        seen = self.preprocessing(images.permute(0, 3, 1, 2).contiguous())
        pixels, is_resized = seen, self.preprocessing.resize_px is not None
        if self._needs_padding:
            height, width = self.model.suitable_size(*seen.shape[-2:])
            pixels = F.pad(seen, (0, width - seen.shape[-1], 0, height - seen.shape[-2]))
        logits = self.model.compute_logits(pixels)[0].float()
        # A size that is fixed is a number in the trace, so it is known here if it needs padding.
        is_fixed = all(isinstance(side, int) for side in seen.shape[-2:])
        is_padded = pixels.shape[-2:] != seen.shape[-2:] if is_fixed else self._needs_padding
        if is_padded or not is_resized:
            logits = self._upsampled(logits, pixels.shape[-2:])
        if is_padded:
            # A slice would be a view, and tracing would turn its strides into constraints on the image size.
            rows, columns = (torch.arange(side, device=logits.device) for side in seen.shape[-2:])
            logits = logits.index_select(2, rows).index_select(3, columns)
        if is_resized:
            logits = self._upsampled(logits, images.shape[1:3])
        if not self.argmax:
            return logits
        return logits.argmax(1).to(torch.uint8 if logits.shape[1] <= 256 else torch.int32)

    def _upsampled(self, logits: Tensor, size: Sequence[int]) -> Tensor:
        return F.interpolate(logits, size, mode="bilinear", align_corners=self.align_corners)

    @property
    def _needs_padding(self) -> bool:
        model = self.model
        return model.fixed_size_px is None and (model.size_multiple > 1 or model.min_size_px > 1)


@dataclass(frozen=True)
class CheckResult:
    """Comparison of an exported file with the network computed by torch in float32."""

    sizes: tuple[tuple[int, int, int], ...]  # (N, H, W) of the images used
    max_difference: float | None  # largest difference of a logit; None if the file gives labels
    max_logit: float  # the largest absolute logit, for comparison with the difference
    agreement: float  # share of pixels with the same class

    def __str__(self) -> str:
        same = f"same class at {self.agreement:.4%} of the pixels"
        if self.max_difference is None:
            return same
        return f"largest difference {self.max_difference:.2g} of logits up to {self.max_logit:.3g}, {same}"

    @property
    def shapes(self) -> str:
        """The images in words: "1x128x160 2x131x165"."""
        return " ".join("x".join(map(str, size)) for size in self.sizes)


def write_export(
    model: SegmentationModel, info: ExportInfo, path: Path, format: Format, pictures: Sequence[NDArray[Any]] = ()
) -> CheckResult:
    """Write an exported file under a temporary name, check it, and rename it if it passes.

    The network is copied. `pictures` are images (H, W, B) as stored in files, of any size, which are cropped for the
    check; if there are none, synthetic ones are used.

    Raises:
        ConfigError: a package is missing.
        RunError: the network cannot be exported, or the file predicts other classes; nothing is written then.
        StorageError: the file cannot be written.
    """
    if format == "onnx":
        _check_packages()
        info = info.model_copy(update={"opset": info.opset or OPSET})
    network = build_network(model, info)

    def checked(compute: Compute, step: str, cure: str) -> CheckResult:
        found = check_export(compute, info, model, check_sizes(model, info), pictures)
        if found.agreement < MIN_AGREEMENT:
            limit = f"at least {MIN_AGREEMENT:.1%} are needed"
            raise RunError(f"{path.name}: after {step}, {found} of {found.shapes}; {limit}: {cure}", path=path)
        return found

    with _written(path, format) as temporary:
        with _as_export_errors(network, "torch.export", "use --format safetensors"):
            program = _trace(network, info)
            compute = _compute_of(program)
        # Compared before the conversion to ONNX, which takes minutes for a large network.
        checked(compute, "tracing by torch.export", "use --format safetensors")
        write, step, other = (
            (_write_onnx, "conversion to ONNX", "pt2") if format == "onnx" else (_write_pt2, "saving as pt2", "onnx")
        )
        with _as_export_errors(network, format, f"use --format {other}"):
            compute = write(program, network, info, temporary)
        return checked(compute, step, f"use --format {other}")


@contextlib.contextmanager
def _written(path: Path, suffix: str) -> Iterator[Path]:
    """Yield a temporary name for a file, which is renamed when the block ends without an error."""
    from safetensors import SafetensorError

    temporary = unfinished_path(path, f".{suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_dead_temporaries(path.parent)
        os.close(open_new(temporary))
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors replaces the file by a new one with mode 0600
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # SafetensorError: a full disk
        raise cannot_be_written(path, error) from None
    finally:
        remove_quietly(temporary)


def write_weights(model: SegmentationModel, info: ExportInfo, path: Path, more: Mapping[str, str] | None = None) -> int:
    """Write the state dict of a network under a temporary name, read it back, and rename it if it is unchanged.

    `more` has additional metadata as text.

    Returns:
        The number of written tensors.

    Raises:
        RunError: the tensors read back differ.
        StorageError: the file cannot be written.
    """
    from safetensors.torch import load_file, save_file

    tensors = {
        # Copied because safetensors refuses tensors that share memory.
        name: value.detach().to("cpu", torch.float32 if value.is_floating_point() else None, copy=True).contiguous()
        for name, value in model.state_dict().items()
    }
    properties = {name: text for name, text in info.as_properties().items() if name not in _PROGRAM_FIELDS}
    with _written(path, "safetensors") as temporary:
        save_file(tensors, temporary, {"format": "pt", **properties, **(more or {})})
        back = load_file(temporary, device="cpu")
        if back.keys() != tensors.keys() or not all(torch.equal(back[name], tensors[name]) for name in tensors):
            raise RunError(
                f"{path.name}: the weights read back differ from the weights written: choose another --out", path=path
            )
    return len(tensors)


def build_network(model: SegmentationModel, info: ExportInfo) -> ExportNetwork:
    is_argmax = info.output == "labels"
    return ExportNetwork(model, Preprocessing(info.pixels), align_corners=info.align_corners, argmax=is_argmax).eval()


def check_sizes(model: SegmentationModel, info: ExportInfo) -> tuple[tuple[int, int, int], ...]:
    """Return (N, H, W) of the images for the check; H and W are odd if the file accepts any size."""
    height, width = info.fixed_size_px or model.suitable_size(128, 160)
    if info.fixed_size_px is not None:
        return ((1, height, width), (info.batch_size or 2, height, width))
    return (1, height, width), (2, height + 3, width + 5), (1, 2 * height - 17, width + 31)


@torch.no_grad()
def check_export(
    compute: Compute,
    info: ExportInfo,
    model: SegmentationModel,
    sizes: Sequence[tuple[int, int, int]],
    pictures: Sequence[NDArray[Any]] = (),
) -> CheckResult:
    """Compare an exported network, which `compute` runs, with the original computed by torch in float32.

    The images have the given sizes (N, H, W); see `write_export` for the pictures.
    """
    reference = build_network(model, info.model_copy(update={"output": "logits"}))
    source = itertools.cycle(pictures or [_synthetic_picture(info.pixels)])
    num_px = num_equal = 0
    difference, largest = 0.0, 0.0
    for size in sizes:
        images = np.stack([_center_crop(next(source), size[1], size[2]) for _ in range(size[0])])
        expected = reference(torch.from_numpy(images)).numpy()
        found = compute(images)
        if info.output == "logits":
            # NaN becomes infinity: the check must fail if logits are not finite.
            difference = max(difference, float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max()))
        is_equal = _decisions(found, info) == _decisions(expected, info)
        largest = max(largest, float(np.abs(expected).max()))
        num_equal += int(is_equal.sum())
        num_px += is_equal.size
    agreement = num_equal / num_px if np.isfinite(difference) else 0.0
    return CheckResult(tuple(sizes), difference if info.output == "logits" else None, largest, agreement)


def _decisions(outputs: NDArray[Any], info: ExportInfo) -> NDArray[Any]:
    """Return the class of each pixel, or for multilabel whether it has each class; labels are returned unchanged."""
    if info.multilabel:
        return np.asarray(outputs > 0)
    return np.asarray(outputs.argmax(1)) if outputs.ndim == 4 else outputs


def _center_crop(picture: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Return the middle of a picture (H, W, B), enlarged first if it is smaller than wanted."""
    scale = max(1.0, height / picture.shape[0], width / picture.shape[1])
    if scale > 1:
        size = max(width, round(picture.shape[1] * scale)), max(height, round(picture.shape[0] * scale))
        resized = cv2.resize(picture, size, interpolation=cv2.INTER_LINEAR)
        picture = np.asarray(resized).reshape(size[1], size[0], -1)
    top, left = (picture.shape[0] - height) // 2, (picture.shape[1] - width) // 2
    return picture[top : top + height, left : left + width]


def _synthetic_picture(pixels: PixelFormat) -> NDArray[Any]:
    """Return smooth patches of color with noise, for runs whose data set is not available."""
    rng = np.random.default_rng(0)
    coarse = cv2.resize(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8), (660, 540), interpolation=cv2.INTER_CUBIC)
    noisy = coarse.astype(np.float32) + rng.normal(0, 8, coarse.shape)
    picture: NDArray[np.uint8] = noisy.clip(0, 255).astype(np.uint8)
    if pixels.is_rgb8:
        return picture
    low, high = np.array(pixels.ranges).T
    values = low + picture[..., np.arange(pixels.num_bands) % 3] / 255 * (high - low)
    return np.asarray(values, pixels.numpy_dtype)


def _dynamic_axes(info: ExportInfo) -> dict[int, str]:
    if info.batch_size is not None:
        return {}
    return {0: "batch"} if info.fixed_size_px is not None else {0: "batch", 1: "height", 2: "width"}


def _trace(network: ExportNetwork, info: ExportInfo) -> torch.export.ExportedProgram:
    _, size, *_ = check_sizes(network.model, info)
    images = torch.zeros(*size, info.pixels.num_bands, dtype=info.pixels.torch_dtype)
    shapes = dict.fromkeys(_dynamic_axes(info), torch.export.Dim.DYNAMIC)
    # Otherwise the example's size becomes a constraint of the file, such as "batch >= 2" or "height >= 33".
    with size_oblivious_export(), torch.no_grad():
        program = torch.export.export(network, (images,), dynamic_shapes=(shapes,), strict=False)
    _divide_in_integers(program.graph)
    if info.batch_size is not None:
        _avoid_faults_of_opencv(program)
    return program


def _avoid_faults_of_opencv(program: torch.export.ExportedProgram) -> None:
    """Write operators on fixed sizes so that OpenCV's DNN module, version 5.0, computes them as torch does.

    It interpolates beyond the end of a map with one row or column, such as an average over the image, and returns other
    numbers in each run: the row is copied first. It takes a product with a hard sigmoid for a hard swish, although the
    factors differ. An interpolation that keeps the size is left out.
    """
    aten, graph = torch.ops.aten, program.graph

    def replace(node: torch.fx.Node, other: Any) -> None:
        node.replace_all_uses_with(other)
        program.graph_signature.replace_all_uses(node.name, other.name)  # if it is the output

    for node in graph.find_nodes(op="call_function", target=aten.upsample_bilinear2d.vec):
        source, _, align_corners, *_ = node.args
        sides, wanted = (list(each.meta["val"].shape[-2:]) for each in (source, node))
        copied = [size if side == 1 else side for side, size in zip(sides, wanted, strict=True)]
        with graph.inserting_before(node):
            if copied != sides:
                source = _inserted(graph, aten.expand.default, source, [-1, -1, *copied])
            if copied != wanted:
                source = _inserted(graph, aten.upsample_bilinear2d.vec, source, wanted, align_corners, None)
        replace(node, source)
    for node in graph.find_nodes(op="call_function", target=aten.hardsigmoid.default):
        with graph.inserting_before(node):
            line = _inserted(graph, aten.add.Tensor, _inserted(graph, aten.mul.Tensor, node.args[0], 1 / 6), 0.5)
            replace(node, _inserted(graph, aten.clamp.default, line, 0, 1))
    graph.eliminate_dead_code()


def _inserted(graph: torch.fx.Graph, function: Callable[..., Any], *args: Any) -> torch.fx.Node:
    node = graph.call_function(function, args)
    node.meta["val"] = function(*(arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args))
    return node


def _divide_in_integers(graph: torch.fx.Graph) -> None:
    """Write divisions of sizes so that every format computes them exactly.

    `math.ceil(a / b)`, as in timm's "same" padding, becomes `(a + b - 1) // b`, because `torch.export.save` has no
    format for `math.ceil` ("Failed serializing node ceil"). `a // b` becomes `(a - a % b) // b`: onnxscript turns `//`
    into ONNX's Div, which rounds toward zero, and without a remainder both agree for negative `a` too.
    """

    def divided(dividend: Any, divisor: Any) -> torch.fx.Node:
        remainder = _inserted(graph, operator.mod, dividend, divisor)
        return _inserted(graph, operator.floordiv, _inserted(graph, operator.sub, dividend, remainder), divisor)

    for node in list(graph.nodes):
        quotient = node.args[0] if node.target is math.ceil else None
        with graph.inserting_before(node):
            if node.target is operator.floordiv:
                node.replace_all_uses_with(divided(*node.args))
            elif isinstance(quotient, torch.fx.Node) and quotient.target is operator.truediv:
                dividend, divisor = quotient.args
                raised = _inserted(graph, operator.sub, _inserted(graph, operator.add, dividend, divisor), 1)
                node.replace_all_uses_with(divided(raised, divisor))
    graph.eliminate_dead_code()


def _compute_of(program: torch.export.ExportedProgram) -> Compute:
    # Guards hold sizes of the traced example, such as "more than one image"; the check tests other sizes.
    module = program.module(check_guards=False)

    @torch.no_grad()
    def compute(images: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = module(torch.from_numpy(images)).numpy()
        return found

    return compute


def _write_pt2(program: torch.export.ExportedProgram, network: ExportNetwork, info: ExportInfo, path: Path) -> Compute:
    # Into memory first: on a full disk, torch's own writer would end the process.
    torch.export.save(program, file := io.BytesIO(), extra_files={INFO_FILE: json.dumps(info.as_properties())})
    path.write_bytes(file.getbuffer())
    return _compute_of(torch.export.load(path))


def _check_packages() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"ONNX files need the package {', '.join(missing)}: {install_command('export')}")


def _write_onnx(program: torch.export.ExportedProgram, network: ExportNetwork, info: ExportInfo, path: Path) -> Compute:
    """Write an ONNX file and return it opened in onnxruntime."""
    from onnxscript import optimizer

    written = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        opset_version=info.opset,
        input_names=["images"],
        output_names=[info.output],
    )
    assert written is not None
    if (opset := written.model.opset_imports.get("")) != info.opset:
        raise RunError(f"torch's exporter writes opset {opset} for this model: use --opset {opset}")
    if info.batch_size is not None:
        # Without these limits, an embedding of positions that is resized to the size of the images is folded too.
        optimizer.fold_constants(written.model, input_size_limit=sys.maxsize, output_size_limit=sys.maxsize)
        optimizer.remove_unused_nodes(written.model)
    rename_dynamic_axes(written, _dynamic_axes(info))
    written.model.metadata_props.update(info.as_properties())
    written.model.producer_name, written.model.producer_version = "segapp", info.segapp_version
    written.save(path, external_data=False)
    return open_onnx(path)


def open_onnx(path: Path) -> Compute:
    """Return the network of an ONNX file, computed by onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def compute(images: NDArray[Any]) -> NDArray[Any]:
        outputs: NDArray[Any] = session.run(None, {"images": np.ascontiguousarray(images)})[0]
        return outputs

    return compute


@contextlib.contextmanager
def _as_export_errors(network: ExportNetwork, what: str, cure: str) -> Iterator[None]:
    """Turn any exception of a tracer into one RunError, and suppress its warnings and progress output."""
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
        raise RunError(
            f"{model.library} {model.name} with backbone {model.encoder_name} cannot be written as {what} "
            f"({first_line(error)[:300]}): {cure}"
        ) from error
    finally:
        logger.setLevel(level)
