"""`segapp init`: write a config for a folder of images, with the reason for each choice as a comment."""

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
    read_samples,
    write_split_lists,
)
from segapp.errors import ConfigError, DataError, storage_errors
from segapp.run.files import write_atomic

IGNORED = 255
RARE_SHARE = 0.01
"""Share of the pixels below which class weights are proposed."""


@dataclass(frozen=True)
class ConfigLine:
    """A line of a config, and the reason for its value."""

    text: str
    reason: str = ""


def propose_config(root: Path, out: Path | None, *, val_share: float | None, force: bool) -> Path:
    """Examine a data folder and write a config for it.

    Args:
        root: the folder.
        out: the file; None: the name of the folder with .yaml, in the current folder.
        val_share: for a folder without splits: share of validation images; writes train.txt and val.txt into it.
        force: overwrite the file.

    Returns:
        The file, which `segapp train` accepts.

    Raises:
        ConfigError: the folder or the share is wrong, or the file exists.
        DataError: the folder has no known layout, or the content of its masks is ambiguous.
        StorageError: the file cannot be written.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", root.resolve().name).strip("-._") or "mine"
    out = out or Path(f"{name}.yaml")
    if out.exists() and not force:
        raise ConfigError(f"{shown(out)} exists: choose another --out, or add --force")
    found = _find(root, val_share)
    content = read_samples(found.pairs)
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
            raise ConfigError(f"{shown(root)} has no images/ and masks/ without splits: leave --val-share out")
        write_split_lists(root, folders, val_share)
    found = find_layout(root)
    if "val" not in found.splits:
        raise DataError(
            f"{shown(root)} has a training split but no validation split (val, validation, valid, test): add one"
        )
    return found


def _text(name: str, root: Path, found: Found, content: MaskContent) -> str:
    height, width = content.median_px
    num_train, num_val = len(found.pairs), found.num_val
    header = [
        f"# Made by segapp init from {shown(root)}",
        f"# Format {found.format}, {num_train} training and {num_val} validation images of about {height} x {width}",
        f"# {content.num_masks} masks were read. Review class names, crop_px and epochs first;",
        "# check the data: segapp check --config FILE",
    ]
    body = "\n".join(_rendered(line) for line in _lines(name, root, found, content))
    return "\n".join(header) + "\n" + body + "\n"


def _rendered(line: ConfigLine) -> str:
    return f"{line.text}  # {line.reason}" if line.reason else line.text


def _lines(name: str, root: Path, found: Found, content: MaskContent) -> Iterator[ConfigLine]:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    crop, crop_reason = _crop(content)
    batch, batch_reason = _batch(num_gpus, len(found.pairs))
    steps = max(1, len(found.pairs) // batch)
    wanted = 20_000 if num_gpus else 2_000
    epochs = min(300, max(10, round(wanted / steps)))
    yield ConfigLine(f"name: {name}")
    yield ConfigLine("data:")
    yield ConfigLine(f"  format: {found.format}")
    yield ConfigLine(f"  root: {json.dumps(str(root), ensure_ascii=False)}")
    if found.leads_outside:
        yield ConfigLine("  allow_outside_root: true", "links lead outside: remove this line if you do not trust them")
    for key, value in found.folders.items():
        yield ConfigLine(f"  {key}: {json.dumps(value, ensure_ascii=False)}")
    for usual, own in found.splits.items():
        if own not in (usual, DATASETS[found.format].splits.get(usual)):
            yield ConfigLine(f"  {usual}_split: {own}")
    yield from _class_lines(found, content)
    yield ConfigLine(f"  crop_px: [{crop[0]}, {crop[1]}]", crop_reason)
    workers = min(8, max(1, (os.cpu_count() or 2) // max(1, num_gpus))) if num_gpus else 1
    yield ConfigLine(f"  workers: {workers}", f"{os.cpu_count() or 1} processor cores")
    if sum(h * w * 4 for h, w in content.sizes_px) / len(content.sizes_px) * len(found.pairs) < 2 << 30:
        yield ConfigLine("  cache: ram", "the decoded data set needs less than 2 GiB")
    yield ConfigLine("model:")
    yield ConfigLine("  library: torchvision")
    if num_gpus:
        yield ConfigLine("  name: deeplabv3_resnet50", "accurate; deeplabv3_mobilenet_v3_large is five times faster")
        yield ConfigLine("  weights_backbone: IMAGENET1K_V1", "downloaded once; null trains from scratch")
    else:
        yield ConfigLine("  name: lraspp_mobilenet_v3_large", "no GPU here: the fastest model, from scratch")
    yield ConfigLine("loss:")
    yield ConfigLine("  name: ce")
    yield from _weight_lines(found, content)
    lr = 5e-4 * math.sqrt(batch / 8)
    yield ConfigLine("optim:")
    yield ConfigLine("  name: adamw")
    yield ConfigLine(f"  lr: {lr:.1e}", "5e-4 x sqrt(batch_size / 8)")
    yield ConfigLine("  weight_decay: 0.01")
    yield ConfigLine("schedule:")
    yield ConfigLine("  name: poly")
    yield ConfigLine("  power: 0.9")
    yield ConfigLine(f"  warmup_steps: {min(500, max(20, epochs * steps // 20))}", "5 % of the run, at most 500")
    yield ConfigLine("train:")
    yield ConfigLine(f"  epochs: {epochs}", f"about {epochs * steps} steps, {steps} per epoch")
    yield ConfigLine(f"  batch_size: {batch}", batch_reason)
    if num_gpus:
        yield ConfigLine("  precision: amp-bf16", "half the activation memory; use fp32 on GPUs older than Ampere")
    yield ConfigLine("eval:")
    every = max(1, epochs // 20)
    yield ConfigLine(f"  every_epochs: {every}", "about twenty evaluations")


def _crop(content: MaskContent) -> tuple[tuple[int, int], str]:
    """Return height and width of the crop, multiples of 32 that 90 % of the images reach, and the reason."""
    cap = 768 if min(content.median_px) >= 900 else 512
    sides = []
    for axis in (0, 1):
        lengths = sorted(size[axis] for size in content.sizes_px)
        small = lengths[len(lengths) // 10]
        sides.append(max(32, min(cap, small // 32 * 32)))
    return (sides[0], sides[1]), f"a multiple of 32 that 90 % of the images reach, at most {cap}"


def _batch(num_gpus: int, num_train: int) -> tuple[int, str]:
    per_device = 8 if num_gpus else 4
    batch = min(per_device * max(1, num_gpus), max(1, num_train))
    if num_gpus:
        return batch, f"{per_device} for each of {num_gpus} GPUs; the largest that fits: segapp plan --config FILE"
    return batch, "small, because there is no GPU"


def _class_lines(found: Found, content: MaskContent) -> Iterator[ConfigLine]:
    if DATASETS[found.format].names:
        yield ConfigLine(f"  # classes: the {len(DATASETS[found.format].names)} of {found.format}")
        return
    if not content.values and not content.colors:
        raise DataError(
            f"the masks of {found.format} contain neither ids nor fewer than {MAX_COLORS} colours, e.g. "
            f"{shown(found.pairs[0].mask or '')}: save them as PNG files of class ids"
        )
    if content.colors and content.values:
        raise DataError("some masks are colour images and some contain ids: save all of them as PNG files of class ids")
    if content.colors:
        colors = sorted(content.colors, key=lambda color: -content.colors[color])
        yield ConfigLine(
            f"  classes: [{', '.join(f'class_{i}' for i in range(len(colors)))}]", "replace with their names"
        )
        yield ConfigLine("  rgb_masks: true", f"the masks are images with {len(colors)} colours")
        yield ConfigLine(f"  palette: {[list(color) for color in colors]}", "the most frequent first")
        return
    values = sorted(content.values)
    if values == [0, 255]:
        yield ConfigLine("  classes: [background, object]", "replace with their names")
        yield ConfigLine("  label_map: {255: 1}", "the masks contain only 0 and 255")
        yield ConfigLine("  ignore_index: -1")
        return
    ids = [value for value in values if value != IGNORED]
    if not ids:
        raise DataError("every pixel of the masks is 255, which is ignored: label some pixels with class ids")
    dense = ids[-1] + 1 <= max(2 * len(ids), len(ids) + 3)
    names = ids if not dense else range(ids[-1] + 1)
    yield ConfigLine(
        f"  classes: [{', '.join(f'class_{value}' for value in names)}]", "replace with their names, in this order"
    )
    if not dense:
        mapping = ", ".join(f"{value}: {i}" for i, value in enumerate(ids))
        yield ConfigLine(f"  label_map: {{{mapping}}}", "the ids in the masks have gaps")
    if IGNORED in values:
        yield ConfigLine(f"  # value {IGNORED} is ignored: {_share(content, IGNORED):.1%} of the pixels")


def _share(content: MaskContent, value: int) -> float:
    return content.values[value] / max(1, sum(content.values.values()))


def _weight_lines(found: Found, content: MaskContent) -> Iterator[ConfigLine]:
    known = DATASETS[found.format].label_map
    counts = [
        n for value, n in content.values.items() if value != IGNORED and (known is None or known.get(value) is not None)
    ]
    counts += list(content.colors.values())
    rarest = min(counts, default=0) / max(1, sum(counts))
    if len(counts) > 1 and rarest < RARE_SHARE:
        yield ConfigLine("  class_weights: enet", f"the rarest class has {rarest:.2%} of the pixels")
