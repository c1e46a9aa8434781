"""`segapp export`: export a run, and check the file on validation images if they are available."""

import json
import sys
from pathlib import Path
from typing import Any, Final, Literal, get_args

from numpy.typing import NDArray

from segapp import __version__
from segapp.assembly.pairs import build_pairs, build_pixels, own_data, split_names
from segapp.assembly.trained import TrainedModel, load_trained
from segapp.commands.models import parse_size
from segapp.compat.torch import onnx_opsets
from segapp.custom.names import is_component
from segapp.custom.trust import using_copies
from segapp.datasets.images.reading import read_image
from segapp.errors import ConfigError, SegappError, accepted_words, without_secrets
from segapp.export.write import CheckResult, ExportInfo, Format, write_export, write_weights
from segapp.models import SegmentationModel
from segapp.models.weights import CONFIG_KEY
from segapp.run.folder import run_of_file
from segapp.run.words import printable

NUM_PICTURES = 3


WEIGHTS: Final = "safetensors"
"""The format that holds weights only."""


def export_target(
    target: str,
    out: Path,
    *,
    format: str | None,
    argmax: bool,
    size: str | None = None,
    opset: int | None = None,
    config: str | None = None,
) -> None:
    """Write the file, check it, and print the result.

    Raises:
        ConfigError: the format is unknown or does not support an option, or a package is missing.
        RunError: the network cannot be exported, or the output of the file differs from the network's.
    """
    # Wrong options are refused before the network is loaded, which takes a while.
    chosen = _format(out, format)
    if chosen == WEIGHTS and (argmax or size):
        option = "--argmax" if argmax else "--size"
        raise ConfigError(f"{option}: a safetensors file holds weights only: leave it out")
    known = onnx_opsets()
    if opset is not None and (chosen != "onnx" or opset not in known):
        cure = f"use {known[0]} to {known[-1]}" if chosen == "onnx" else "only ONNX files have one: leave it out"
        raise ConfigError(f"--opset {opset}: {cure}")
    size_px = None if size is None else parse_size(size)
    trained = load_trained(target, config, uses=("model.", *(["data.format"] if chosen != WEIGHTS else [])))
    if size_px is not None and (only_px := trained.model.fixed_size_px) not in (None, size_px):
        raise ConfigError(f"--size {size}: this model takes {_words(only_px)} only: use --size {_words(only_px)}")
    if argmax and trained.scheme.multilabel is not None:
        raise ConfigError(f"--argmax: {printable(target)} has several classes per pixel: leave it out")
    info = _info(trained, argmax=argmax, size_px=size_px, opset=opset)
    if chosen == WEIGHTS:
        # The file may be given to others, and the address of a tracker may hold a password.
        text = without_secrets(json.dumps(trained.config.model_dump(mode="json")))
        num_tensors = write_weights(trained.model, info, out, {CONFIG_KEY: text})
        print(
            f"{printable(str(out))}: safetensors, {out.stat().st_size / 2**20:.1f} MiB, "
            f"{num_tensors} tensors of {info.network}, read back and compared"
        )
        return
    pictures = _pictures(trained)
    print(f"exporting {info.network}: this takes minutes if the model is large", file=sys.stderr)
    found = write_export(trained.model, info, out, chosen, pictures)
    for line in _report(found, out, chosen, info, trained.model, num_pictures=len(pictures)):
        print(line)


def _format(out: Path, format: str | None) -> Format | Literal["safetensors"]:
    known: tuple[Format | Literal["safetensors"], ...] = (*get_args(Format), WEIGHTS)
    wanted = out.suffix.lower().removeprefix(".") if format is None else format
    chosen = next((name for name in known if name == wanted), None)
    if chosen is not None:
        return chosen
    if format is None:
        words = accepted_words(out.suffix, [f".{name}" for name in known])
        raise ConfigError(f"--out {out} has another suffix than the formats: {words}; or add --format")
    raise ConfigError(f"--format {format} is not known: {accepted_words(format, known)}")


def _info(trained: TrainedModel, *, argmax: bool, size_px: tuple[int, int] | None, opset: int | None) -> ExportInfo:
    model, config, scheme = trained.model, trained.config, trained.scheme
    folder = run_of_file(trained.path)
    info = None if folder is None else folder.read_info()
    pixels = trained.inference.preprocessing.pixels
    mean, std = pixels.statistics
    shape = "batch, height, width" if size_px is None else f"1, {size_px[0]}, {size_px[1]}"
    kind = f"{pixels.dtype} ({shape}, {pixels.num_bands})"
    return ExportInfo(
        segapp_version=__version__,
        run=config.name if folder is None else folder.name,
        run_id=None if info is None else info.id,
        checkpoint=trained.path.name,
        epoch=trained.epoch,
        step=trained.step,
        network=f"{model.library} {model.name} {model.encoder_name}",
        classes=scheme.names,
        palette=scheme.palette[: scheme.num_classes],
        file_ids=scheme.file_ids,
        ignore_index=scheme.ignore_index,
        mean=mean,
        std=std,
        bands=pixels.bands,
        dtype=pixels.dtype,
        value_range=pixels.value_range,
        # A model of one size needs windows over a resized image, which are no part of the file.
        resize_px=None if model.fixed_size_px is not None else pixels.resize_px,
        input=f"images: {kind}" + (", RGB" if pixels.bands is None else ""),
        align_corners=config.loss.is_aligned,
        output="labels" if argmax else "logits",
        multilabel=scheme.multilabel is not None,
        threshold=trained.inference.threshold,
        fixed_size_px=size_px or model.fixed_size_px,
        batch_size=None if size_px is None else 1,
        size_multiple=model.size_multiple,
        opset=opset,
    )


def _pictures(trained: TrainedModel) -> list[NDArray[Any]]:
    """Return some validation images; none if the data set is not available."""
    data = trained.config.data
    split = split_names(data)[1]
    try:
        if is_component(data.format):
            with using_copies(trained.copies):
                own = own_data(data, split)
            return [
                own.read(index, trained.scheme, build_pixels(data))[0] for index in range(min(len(own), NUM_PICTURES))
            ]
        pairs = build_pairs(data, split)
        chosen = pairs[:: max(1, len(pairs) // NUM_PICTURES)][:NUM_PICTURES]
        return [read_image(pair.image, build_pixels(data)) for pair in chosen]
    except (SegappError, OSError):
        return []


def _words(size_px: tuple[int, int]) -> str:
    return f"{size_px[0]}x{size_px[1]}"


def _report(
    found: CheckResult, out: Path, format: Format, info: ExportInfo, model: SegmentationModel, num_pictures: int
) -> list[str]:
    kind = "ONNX" if format == "onnx" else "torch.export"
    runtime = "onnxruntime" if format == "onnx" else "torch"
    source = f"{num_pictures} validation images" if num_pictures else "synthetic pictures, no data set found"
    shape = "any size"
    if (only_px := info.fixed_size_px) is not None:
        inside_px = model.suitable_size(*only_px) if info.resize_px is None else only_px
        padding = f" (padded to {_words(inside_px)}: --size {_words(inside_px)} needs none)"
        shape = f"{_words(only_px)} px only" + (padding if inside_px != only_px else "")
    return [
        f"{printable(str(out))}: {kind}, {out.stat().st_size / 2**20:.1f} MiB, {info.network}, "
        f"images of {shape} -> {info.output}",
        f"checked with {runtime} on {found.shapes} ({source}): {found}",
    ]
