"""The config for a data set, with the reason for each choice as a comment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from segapp.datasets.files import shown
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.images.windows import PERCENTILES, config_values
from segapp.datasets.layouts.formats import DATASETS
from segapp.memory.gpus import visible_gpus
from segapp.onboarding.content import MaskContent
from segapp.onboarding.division import Division
from segapp.onboarding.encoding import Classes
from segapp.run.words import printable

LARGE_PX = 8_000_000  # larger images are evaluated in windows: whole, they need gigabytes on the device
RARE_SHARE = 0.01  # share of the pixels below which class weights are proposed


@dataclass(frozen=True)
class Facts:
    """The facts about a data set; `root` is the folder of its images, `keys` are further keys of the `data` section.

    The pixels of 8-bit RGB images are None.
    """

    name: str
    root: Path
    format: str
    keys: Mapping[str, str]
    division: Division
    classes: Classes
    content: MaskContent
    pixels: PixelFormat | None = None
    leads_outside: bool = False
    fold: int | None = None


def config_text(facts: Facts) -> str:
    """Return a config as YAML with comments."""
    content, division = facts.content, facts.division
    height, width = content.median_px
    header = [
        f"Made by segapp init from {shown(facts.root)}",
        f"Format {facts.format}, images of about {height} x {width}",
        f"{content.num_masks} of {content.num_all} masks were read. Review class names, crop_px and epochs first;",
        "check the data: segapp check --config FILE",
        *division.lines,
        *(f"note: {note}" for note in facts.classes.notes),
    ]
    return "".join(f"{line}\n" for line in (*(f"# {printable(line)}" for line in header), *_lines(facts)))


def _line(text: str, reason: str = "") -> str:
    """Return a line of a config, with the reason for its value as a comment."""
    return f"{text}  # {printable(reason)}" if reason else text


_GPU_MODEL = """\
  name: deeplabv3_resnet50  # accurate; deeplabv3_mobilenet_v3_large is five times faster
  weights_backbone: IMAGENET1K_V1  # downloaded once; null trains from scratch"""
_CPU_MODEL = "  name: lraspp_mobilenet_v3_large  # no GPU here: the fastest model, from scratch"


def _lines(facts: Facts) -> Iterator[str]:
    """Yield the sections of a config, each without its last line break."""
    content, num_train = facts.content, len(facts.division.train)
    seen = visible_gpus()
    num_gpus = len(seen.gpus)
    (height, width), crop_reason = _crop(content)
    batch, batch_reason = _batch(num_gpus, num_train, f" ({seen.message})" if seen.cure else "")
    steps = max(1, num_train // batch)
    wanted = 20_000 if num_gpus else 2_000
    epochs = min(300, max(10, round(wanted / steps)))
    yield f"name: {json.dumps(facts.name, ensure_ascii=False)}"
    yield from _data_lines(facts)
    yield f"  crop_px: [{height}, {width}]  # {crop_reason}"
    if sum(h * w * 4 for h, w in content.sizes_px) / len(content.sizes_px) * num_train < 2 << 30:
        yield "  cache: ram  # the decoded data set needs less than 2 GiB"
    yield "model:\n  library: torchvision"
    yield _GPU_MODEL if num_gpus else _CPU_MODEL
    yield "loss:"
    yield "  name: ce"
    counts = [count for value, count in content.pixels.items() if facts.classes.class_of(value) is not None]
    rarest = min(counts, default=0) / max(1, sum(counts))
    if len(counts) > 1 and rarest < RARE_SHARE:
        yield f"  class_weights: enet  # the rarest class has {rarest:.2%} of the pixels"
    yield f"""\
optim:
  name: adamw
  lr: {5e-4 * math.sqrt(batch / 8):.1e}  # 5e-4 x sqrt(batch_size / 8)
  weight_decay: 0.01
schedule:
  name: poly
  power: 0.9
  warmup_steps: 5%
train:
  epochs: {epochs}  # about {epochs * steps} steps, {steps} per epoch
  batch_size: {batch}  # {batch_reason}"""
    yield f"eval:\n  every_epochs: {max(1, epochs // 20)}  # about twenty evaluations"
    largest_px = max(h * w for h, w in content.sizes_px)
    if largest_px > LARGE_PX:
        yield f"  slide: true  # windows of crop_px: the largest image has {largest_px / 1e6:.0f} Mpx"


def _crop(content: MaskContent) -> tuple[tuple[int, int], str]:
    """Return height and width of the crop, multiples of 32 that 90 % of the images reach, and the reason."""
    cap = 768 if min(content.median_px) >= 900 else 512
    sides = []
    for axis in (0, 1):
        lengths = sorted(size[axis] for size in content.sizes_px)
        small = lengths[len(lengths) // 10]
        sides.append(max(32, min(cap, small // 32 * 32)))
    return (sides[0], sides[1]), f"a multiple of 32 that 90 % of the images reach, at most {cap}"


def _batch(num_gpus: int, num_train: int, note: str) -> tuple[int, str]:
    per_device = 8 if num_gpus else 4
    batch = min(per_device * max(1, num_gpus), max(1, num_train))
    if num_gpus:
        return (
            batch,
            f"{per_device} for each of {num_gpus} GPUs{note}; the largest that fits: segapp plan --config FILE",
        )
    return batch, f"small, because there is no GPU{note}"


def _data_lines(facts: Facts) -> Iterator[str]:
    """Yield the lines on the locations of the files and the contents of the masks."""
    yield "data:"
    yield f"  format: {facts.format}"
    yield f"  root: {json.dumps(str(facts.root), ensure_ascii=False)}"
    if facts.leads_outside:
        yield _line("  allow_outside_root: true", "links lead outside: remove this line if you do not trust them")
    for key, value in facts.keys.items():
        yield f"  {key}: {json.dumps(value, ensure_ascii=False)}"
    if facts.pixels is not None:
        values = config_values(facts.pixels)
        yield _line(f"  bands: {values['bands']}", "pictures show the first three as RGB: reorder them to choose")
        yield _line(f"  dtype: {values['dtype']}", "as in the image files")
        low, high = PERCENTILES
        yield _line(f"  value_range: {values['value_range']}", f"{low:g} % and {high:g} % of the values, measured")
    for split in ("train", "val") if facts.fold is not None else ():
        yield f"  {split}_split: fold{facts.fold}-{split}"
    yield from _class_lines(facts)


def _class_lines(facts: Facts) -> Iterator[str]:
    classes = facts.classes
    if DATASETS[facts.format].names:
        yield f"  # classes: {classes.names_reason}"
        return
    names = yaml.safe_dump(list(classes.names), default_flow_style=True, width=10**9, allow_unicode=True).strip()
    yield _line(f"  classes: {names}", classes.names_reason)
    if facts.content.disagreement:
        yield "  rgb_masks: false  # the palettes disagree, and are not used"
    if classes.palette:
        yield "  rgb_masks: true"
        yield _line(f"  palette: {[list(color) for color in classes.palette]}", classes.stored_reason)
    if classes.label_map:
        mapping = ", ".join(f"{value}: {to}" for value, to in classes.label_map.items())
        yield _line(f"  label_map: {{{mapping}}}", classes.stored_reason)
    if classes.ignore_index is not None:
        yield f"  ignore_index: {classes.ignore_index}"
