"""`segapp export`: export a run, and check the file on validation images if they are available."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final, Literal, get_args

from numpy.typing import NDArray

from segapp import __version__
from segapp.assembly.pairs import build_pairs, build_pixels, own_data, split_names
from segapp.assembly.trained import TrainedModel, load_trained
from segapp.custom.names import is_component
from segapp.custom.trust import using_copies
from segapp.datasets.images.reading import read_image
from segapp.errors import ConfigError, SegappError, accepted_words, without_secrets
from segapp.export.write import CheckResult, ExportInfo, Format, write_export, write_weights
from segapp.models.weights import CONFIG_KEY
from segapp.run.folder import run_of_file
from segapp.run.words import printable

NUM_PICTURES = 3
"""Number of validation images used for the check."""


WEIGHTS: Final = "safetensors"
"""The format that holds weights only."""


def export_target(target: str, out: Path, *, format: str | None, argmax: bool, config: str | None = None) -> None:
    """Write the file, check it, and print the result.

    Raises:
        ConfigError: the format is unknown or does not support an option, or a package is missing.
        RunError: the network cannot be exported, or the output of the file differs from the network's.
    """
    chosen = _format(out, format)
    if chosen == WEIGHTS and argmax:
        raise ConfigError("--argmax: a safetensors file holds weights only: leave it out")
    trained = load_trained(target, config, uses=("model.", *(["data.format"] if chosen != WEIGHTS else [])))
    if argmax and trained.scheme.multilabel is not None:
        raise ConfigError(f"--argmax: {printable(target)} has several classes per pixel: leave it out")
    info = _info(trained, argmax=argmax)
    if chosen == WEIGHTS:
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
    for line in _report(found, out, chosen, info, num_pictures=len(pictures)):
        print(line)


def _format(out: Path, format: str | None) -> Format | Literal["safetensors"]:
    """Return the format from `--format`, or else from the suffix of the file."""
    known: tuple[Format | Literal["safetensors"], ...] = (*get_args(Format), WEIGHTS)
    wanted = out.suffix.lower().removeprefix(".") if format is None else format
    chosen = next((name for name in known if name == wanted), None)
    if chosen is not None:
        return chosen
    if format is None:
        words = accepted_words(out.suffix, [f".{name}" for name in known])
        raise ConfigError(f"--out {out} has another suffix than the formats: {words}; or add --format")
    raise ConfigError(f"--format {format} is not known: {accepted_words(format, known)}")


def _info(trained: TrainedModel, *, argmax: bool) -> ExportInfo:
    model, config, scheme = trained.model, trained.config, trained.scheme
    folder = run_of_file(trained.path)
    info = None if folder is None else folder.read_info()
    pixels = trained.inference.preprocessing.pixels
    mean, std = pixels.statistics
    is_rgb = pixels.bands is None
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
        input=f"images: {pixels.dtype} (batch, height, width, {pixels.num_bands})" + (", RGB" if is_rgb else ""),
        align_corners=config.loss.is_aligned,
        output="labels" if argmax else "logits",
        multilabel=scheme.multilabel is not None,
        threshold=trained.inference.threshold,
        fixed_size_px=model.fixed_size_px,
        size_multiple=model.size_multiple,
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


def _report(found: CheckResult, out: Path, format: Format, info: ExportInfo, num_pictures: int) -> list[str]:
    kind = "ONNX" if format == "onnx" else "torch.export"
    runtime = "onnxruntime" if format == "onnx" else "torch"
    source = f"{num_pictures} validation images" if num_pictures else "synthetic pictures, no data set found"
    shape = f"{info.fixed_size_px[0]}x{info.fixed_size_px[1]} px only" if info.fixed_size_px else "any size"
    return [
        f"{printable(str(out))}: {kind}, {out.stat().st_size / 2**20:.1f} MiB, {info.network}, "
        f"images of {shape} -> {info.output}",
        f"checked with {runtime} on {found.shapes} ({source}): {found}",
    ]
