"""`segapp export`: from a run to a file, with pictures of its own data for the check where they are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from numpy.typing import NDArray

from segapp import __version__
from segapp.datasets.formats import find_pairs
from segapp.datasets.masks import read_image
from segapp.errors import ConfigError, SegappError
from segapp.export import EXPORT_SUFFIXES, CheckResult, ExportInfo, Format, write_export
from segapp.run.text import printable
from segapp.train.apply import TrainedModel, load_trained
from segapp.train.build import split_names

NUM_PICTURES = 3
"""Validation images that the check looks at."""


def export_target(target: str, out: Path, *, format: str | None, half: bool, argmax: bool) -> None:
    """`segapp export`: writes the file, and prints how well it agrees.

    Raises:
        ConfigError: an unknown format, or a package is missing.
        RunError: the network cannot be exported, or the file's answers differ.
    """
    chosen = _format(out, format)
    trained = load_trained(target)
    info = _info(trained, half=half, argmax=argmax)
    pictures = _pictures(trained)
    found = write_export(trained.model, info, out, chosen, pictures)
    for line in _report(found, out, chosen, info, num_pictures=len(pictures)):
        print(line)


def _format(out: Path, format: str | None) -> Format:
    """What `--format` says, else the ending of the file."""
    known = get_args(Format)
    ending = out.suffix.lower().removeprefix(".")
    wanted = ending if format is None else format
    for name in known:
        if wanted == name:
            chosen: Format = name
            return chosen
    if format is None:
        raise ConfigError(f"--out {out} ends in none of {' '.join(EXPORT_SUFFIXES)}: change it, or add --format")
    raise ConfigError(f"--format {format} is not known: use one of {', '.join(known)}")


def _info(trained: TrainedModel, *, half: bool, argmax: bool) -> ExportInfo:
    model, config, scheme, checkpoint = trained.model, trained.config, trained.scheme, trained.checkpoint
    return ExportInfo(
        segapp_version=__version__,
        run=config.name,
        checkpoint=checkpoint.path.name,
        epoch=checkpoint.epoch,
        step=checkpoint.step,
        network=f"{model.library} {model.name} {model.encoder_name}",
        classes=scheme.names,
        palette=scheme.palette[: scheme.num_classes],
        file_ids=scheme.file_ids,
        ignore_index=scheme.ignore_index,
        mean=config.data.mean,
        std=config.data.std,
        align_corners=config.loss.align_corners,
        output="labels" if argmax else "logits",
        precision="fp16" if half else "fp32",
        fixed_size_px=model.fixed_size_px,
    )


def _pictures(trained: TrainedModel) -> list[NDArray[Any]]:
    """A few validation images; none where the data are not here."""
    data = trained.config.data
    try:
        pairs = find_pairs(
            data.format,
            data.root,
            split_names(data)[1],
            image_dir=data.image_dir,
            mask_dir=data.mask_dir,
            image_suffix=data.image_suffix,
            mask_suffix=data.mask_suffix,
            allow_outside_root=data.allow_outside_root,
        )
        chosen = pairs[:: max(1, len(pairs) // NUM_PICTURES)][:NUM_PICTURES]
        return [read_image(pair.image) for pair in chosen]
    except (SegappError, OSError):
        return []


def _report(found: CheckResult, out: Path, format: Format, info: ExportInfo, num_pictures: int) -> list[str]:
    kind = "ONNX" if format == "onnx" else "torch.export"
    runtime = "onnxruntime" if format == "onnx" else "torch"
    sizes = " ".join(f"{batch}x{height}x{width}" for batch, height, width in found.sizes)
    source = f"{num_pictures} validation images" if num_pictures else "drawn pictures: the data are not here"
    difference = (
        f"largest difference {found.max_difference:.2g} of logits up to {found.max_logit:.3g}, "
        if found.max_difference is not None
        else ""
    )
    shape = f"{info.fixed_size_px[0]}x{info.fixed_size_px[1]} px only" if info.fixed_size_px else "any size"
    return [
        f"{printable(str(out))}: {kind}, {info.precision}, {out.stat().st_size / 2**20:.1f} MiB, {info.network}, "
        f"images of {shape} -> {info.output}",
        f"checked with {runtime} on {sizes} ({source}): {difference}same class at {found.agreement:.4%} of the pixels",
    ]
