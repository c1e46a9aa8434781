"""`segapp init`: a config for a folder of images, each choice with its reason as a comment."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from segapp.config import load_config
from segapp.datasets.files import shown
from segapp.datasets.layouts.formats import DATASETS
from segapp.datasets.layouts.survey import (
    MAX_COLORS,
    Found,
    MaskContent,
    find_layout,
    flat_folders,
    look_into,
    write_split_lists,
)
from segapp.errors import ConfigError, DataError, storage_errors
from segapp.run.files import write_atomic

IGNORED = 255
RARE = 0.01
"""A class with a smaller share of the pixels is rare."""


@dataclass(frozen=True)
class Line:
    """One line of a config, with why it is so."""

    text: str
    why: str = ""


def propose_config(root: Path, out: Path | None, *, val_share: float | None, force: bool) -> Path:
    """Looks at a data folder and writes a config for it.

    Args:
        root: the folder.
        out: the file; NAME.yaml here, after the folder, when None.
        val_share: share of validation images to split off where the folder has no splits; writes two lists there.
        force: overwrite the file.

    Returns:
        The file, which `segapp train` accepts.

    Raises:
        ConfigError: the folder or the share is wrong, or the file is there.
        DataError: the folder is in no known layout, or its masks cannot be understood.
        StorageError: the file cannot be written.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", root.resolve().name).strip("-._") or "mine"
    out = out or Path(f"{name}.yaml")
    if out.exists() and not force:
        raise ConfigError(f"{shown(out)} is there already: choose another --out, or add --force")
    found = _find(root, val_share)
    content = look_into(found.pairs)
    text = _text(name, root, found, content)
    with storage_errors(shown(out)):
        write_atomic(out, text)
    load_config(out)
    return out


def _find(root: Path, val_share: float | None) -> Found:
    if val_share is not None:
        if not 0 < val_share < 1:
            raise ConfigError(f"--val-share {val_share:g}: a share is above 0 and below 1, such as 0.15")
        folders = flat_folders(root) if root.is_dir() else None
        if folders is None:
            raise ConfigError(f"{shown(root)} holds no images/ and masks/ without splits: leave --val-share out")
        write_split_lists(root, folders, val_share)
    found = find_layout(root)
    if "val" not in found.splits:
        raise DataError(
            f"{shown(root)} has a training split and none for validation (val, validation, valid, test): make one"
        )
    return found


def _text(name: str, root: Path, found: Found, content: MaskContent) -> str:
    height, width = content.median_px
    num_train, num_val = len(found.pairs), found.num_val
    header = [
        f"# Made by segapp init from {shown(root)}",
        f"# Format {found.format}, {num_train} training and {num_val} validation images of about {height} x {width}",
        f"# {content.num_masks} masks were looked at. What to look at first:",
        "# class names, crop_px, and epochs. Check the data: segapp check --config FILE",
    ]
    body = "\n".join(_rendered(line) for line in _lines(name, root, found, content))
    return "\n".join(header) + "\n" + body + "\n"


def _rendered(line: Line) -> str:
    return f"{line.text}  # {line.why}" if line.why else line.text


def _lines(name: str, root: Path, found: Found, content: MaskContent) -> Iterator[Line]:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    crop, crop_why = _crop(content)
    batch, batch_why = _batch(num_gpus, len(found.pairs))
    steps = max(1, len(found.pairs) // batch)
    wanted = 20_000 if num_gpus else 2_000
    epochs = min(300, max(10, round(wanted / steps)))
    yield Line(f"name: {name}")
    yield Line("data:")
    yield Line(f"  format: {found.format}")
    yield Line(f"  root: {json.dumps(str(root), ensure_ascii=False)}")
    if found.leads_outside:
        yield Line("  allow_outside_root: true", "links in it lead elsewhere: take this out if you do not trust them")
    for key, value in found.folders.items():
        yield Line(f"  {key}: {json.dumps(value, ensure_ascii=False)}")
    for usual, own in found.splits.items():
        if own not in (usual, DATASETS[found.format].splits.get(usual)):
            yield Line(f"  {usual}_split: {own}")
    yield from _class_lines(found, content)
    yield Line(f"  crop_px: [{crop[0]}, {crop[1]}]", crop_why)
    workers = min(8, max(1, (os.cpu_count() or 2) // max(1, num_gpus))) if num_gpus else 1
    yield Line(f"  workers: {workers}", f"{os.cpu_count() or 1} processors")
    if sum(h * w * 4 for h, w in content.sizes_px) / len(content.sizes_px) * len(found.pairs) < 2 << 30:
        yield Line("  cache: ram", "decoded, the data set needs less than 2 GiB")
    yield Line("model:")
    yield Line("  library: torchvision")
    if num_gpus:
        yield Line("  name: deeplabv3_resnet50", "a strong default; deeplabv3_mobilenet_v3_large is five times faster")
        yield Line("  weights_backbone: IMAGENET1K_V1", "downloaded once; null trains from scratch")
    else:
        yield Line("  name: lraspp_mobilenet_v3_large", "no GPU here: the fastest model; from scratch")
    yield Line("loss:")
    yield Line("  name: ce")
    yield from _weight_lines(found, content)
    lr = 5e-4 * math.sqrt(batch / 8)
    yield Line("optim:")
    yield Line("  name: adamw")
    yield Line(f"  lr: {lr:.1e}", "5e-4 at a batch of 8, with the square root of the batch")
    yield Line("  weight_decay: 0.01")
    yield Line("schedule:")
    yield Line("  name: poly")
    yield Line("  power: 0.9")
    yield Line(f"  warmup_steps: {min(500, max(20, epochs * steps // 20))}", "a twentieth of the run, 500 at most")
    yield Line("train:")
    yield Line(f"  epochs: {epochs}", f"about {epochs * steps} steps of {steps} an epoch")
    yield Line(f"  batch_size: {batch}", batch_why)
    if num_gpus:
        yield Line("  precision: amp-bf16", "half the activations; fp32 where a card is older than Ampere")
    yield Line("eval:")
    every = max(1, epochs // 20)
    yield Line(f"  every_epochs: {every}", "about twenty evaluations")


def _crop(content: MaskContent) -> tuple[tuple[int, int], str]:
    """Height and width of the crop: a multiple of 32 that nearly all images fill, and no larger than it needs to be."""
    cap = 768 if min(content.median_px) >= 900 else 512
    sides = []
    for axis in (0, 1):
        lengths = sorted(size[axis] for size in content.sizes_px)
        small = lengths[len(lengths) // 10]
        sides.append(max(32, min(cap, small // 32 * 32)))
    return (sides[0], sides[1]), f"a multiple of 32 that nine of ten images fill, {cap} at most"


def _batch(num_gpus: int, num_train: int) -> tuple[int, str]:
    per_device = 8 if num_gpus else 4
    batch = min(per_device * max(1, num_gpus), max(1, num_train))
    if num_gpus:
        return batch, f"{per_device} for each of {num_gpus} GPUs; what fits: segapp plan --config FILE"
    return batch, "small, as there is no GPU"


def _class_lines(found: Found, content: MaskContent) -> Iterator[Line]:
    if DATASETS[found.format].names:
        yield Line(f"  # classes: the {len(DATASETS[found.format].names)} of {found.format}")
        return
    if not content.values and not content.colors:
        raise DataError(
            f"the masks of {found.format} hold neither ids nor fewer than {MAX_COLORS} colours, for one "
            f"{shown(found.pairs[0].mask or '')}: save them as PNG files of class ids"
        )
    if content.colors and content.values:
        raise DataError(
            "some masks are pictures in colour and some hold ids: save them all in one way, as PNG files of class ids"
        )
    if content.colors:
        colors = sorted(content.colors, key=lambda color: -content.colors[color])
        yield Line(f"  classes: [{', '.join(f'class_{i}' for i in range(len(colors)))}]", "put their names here")
        yield Line("  rgb_masks: true", f"the masks are pictures of {len(colors)} colours")
        yield Line(f"  palette: {[list(color) for color in colors]}", "the most frequent first")
        return
    values = sorted(content.values)
    if values == [0, 255]:
        yield Line("  classes: [background, object]", "put their names here")
        yield Line("  label_map: {255: 1}", "the masks hold 0 and 255 alone: black and white")
        yield Line("  ignore_index: -1")
        return
    ids = [value for value in values if value != IGNORED]
    if not ids:
        raise DataError("every pixel of the masks is 255, which is ignored: there is nothing to learn")
    dense = ids[-1] + 1 <= max(2 * len(ids), len(ids) + 3)
    names = ids if not dense else range(ids[-1] + 1)
    yield Line(f"  classes: [{', '.join(f'class_{value}' for value in names)}]", "put their names here, in this order")
    if not dense:
        mapping = ", ".join(f"{value}: {i}" for i, value in enumerate(ids))
        yield Line(f"  label_map: {{{mapping}}}", "the ids in the masks have gaps")
    if IGNORED in values:
        yield Line(f"  # value {IGNORED} is ignored: {_share(content, IGNORED):.1%} of the pixels")


def _share(content: MaskContent, value: int) -> float:
    return content.values[value] / max(1, sum(content.values.values()))


def _weight_lines(found: Found, content: MaskContent) -> Iterator[Line]:
    known = DATASETS[found.format].label_map
    counts = [
        n for value, n in content.values.items() if value != IGNORED and (known is None or known.get(value) is not None)
    ]
    counts += list(content.colors.values())
    rarest = min(counts, default=0) / max(1, sum(counts))
    if len(counts) > 1 and rarest < RARE:
        yield Line("  class_weights: enet", f"the rarest class has {rarest:.2%} of the pixels")
