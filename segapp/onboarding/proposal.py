"""The config for a data set, with the reason for each choice as a comment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import yaml

from segapp.datasets.files import shown
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.images.windows import PERCENTILES, config_values
from segapp.datasets.layouts.formats import DATASETS
from segapp.onboarding.content import MaskContent
from segapp.onboarding.division import Division
from segapp.onboarding.encoding import Classes
from segapp.onboarding.fingerprint import Fingerprint
from segapp.onboarding.machine import Machine
from segapp.run.words import aligned, plural, printable

LARGE_PX = 8_000_000  # larger images are evaluated in windows: whole, they need gigabytes on the device
MIN_KEPT = 0.98
"""Least Dice that every class must keep at stride 4 for DeepLabV3+: less costs more than models differ by."""
MIN_MEAN_KEPT, MIN_KEPT_OF_EACH = 0.87, 1 / 3
"""Least mean Dice that the classes must keep at stride 8 for LR-ASPP. From random weights, it is about 0.1 ahead of a
Unet for the first hundreds of steps (page `results`), so it may lose as much on its grid: CamVid keeps 0.898, where it
is ahead, and drawn cells keep 0.826, where it is behind. A class that keeps less than a third is lost, which a mean
over many classes does not show."""
RARE_SHARE = 0.01
WITHOUT_WEIGHTS = "no ImageNet weights, which would give more (segapp docs results)"


@dataclass(frozen=True)
class Encoder:
    """An encoder of smp, the widths of a Unet's decoder, and a learning rate of AdamW that was tried with a batch."""

    name: str
    decoder_channels: tuple[int, ...]
    lr: float
    batch: int


GPU_ENCODER = Encoder("resnet50", (256, 128, 64, 32, 16), 5e-4, 8)
CPU_ENCODER = Encoder("tu-tf_efficientnet_lite0", (96, 64, 48, 32, 16), 1e-3, 4)
RANDOM_CPU_ENCODER = Encoder("resnet18", (96, 64, 48, 32, 16), 2e-3, 4)
"""Learns faster from random weights than networks of depthwise convolutions (page `results`)."""


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
    machine: Machine
    pixels: PixelFormat | None = None
    leads_outside: bool = False
    fold: int | None = None
    fingerprint: Fingerprint | None = None
    weights_problem: str | None = "they were not looked for"
    """Why ImageNet weights cannot be had; None if they can."""

    @property
    def encoder(self) -> Encoder:
        if self.machine.num_gpus:
            return GPU_ENCODER
        return RANDOM_CPU_ENCODER if self.weights_problem else CPU_ENCODER


def config_text(facts: Facts) -> str:
    content, division, found = facts.content, facts.division, facts.fingerprint
    assert found is not None  # measured by the time that a config is written
    height, width = content.median_px
    header = [
        f"For {facts.machine.device}",
        f"Made by segapp init from {shown(facts.root)}",
        f"Format {facts.format}, images of about {height} x {width}",
        f"{content.num_masks} of {content.num_all} masks were read. Review class names, crop_px and epochs first;",
        "check the data: segapp check --config FILE",
        *division.lines,
        *(f"note: {note}" for note in facts.classes.notes),
        *fingerprint_lines(found, facts.classes.names),
    ]
    comments = "".join(f"# {printable(line)}\n" for line in header)
    return comments + data_text(facts) + "".join(f"{line}\n" for line in _lines(facts, found))


def data_text(facts: Facts) -> str:
    lines = (f"name: {json.dumps(facts.name, ensure_ascii=False)}", *_data_lines(facts))
    return "".join(f"{line}\n" for line in lines)


def fingerprint_lines(found: Fingerprint, names: Sequence[str]) -> list[str]:
    rows = [["class", "pixels", *(f"{grid_px} px" for grid_px in found.kept)]]
    for number, name in enumerate(names):
        kept = (dice[number] for dice in found.kept.values())
        rows.append([name, f"{found.shares[number]:.2%}", *("-" if d is None else f"{d:.3f}" for d in kept)])
    up = "a class knows up from down, or is in fewer than 50 masks" if found.has_up else "no class knows up from down"
    return [
        f"{found.num_masks} masks of {'gray' if found.is_gray else 'color'} images: {up};",
        "pixels of each class, and the Dice that it keeps on a grid:",
        *aligned(rows),
    ]


def _line(text: str, reason: str = "") -> str:
    return f"{text}  # {printable(reason)}" if reason else text


def _lines(facts: Facts, found: Fingerprint) -> Iterator[str]:
    """Yield the other lines, which follow from the fingerprint and the machine."""
    content, encoder, num_gpus = facts.content, facts.encoder, facts.machine.num_gpus
    num_train = len(facts.division.train)
    cap = (768 if min(content.median_px) >= 900 else 512) if num_gpus else 256
    height, width = _crop(content, cap)
    yield f"  crop_px: [{height}, {width}]  # multiples of 32 that 90 % of the images reach, at most {cap}"
    yield from _augmentation_lines(found, is_square=height == width)
    yield from _model_lines(facts, found)
    yield from _loss_lines(found)
    batch = min(encoder.batch * max(1, num_gpus), max(1, num_train))
    wanted = f"{encoder.batch} for each of {plural(num_gpus, 'GPU')}" if num_gpus else f"{encoder.batch} on a CPU"
    reason = wanted if batch == encoder.batch * max(1, num_gpus) else f"all images: {wanted} would be more"
    if num_gpus:
        reason += f"; the largest that fits: segapp plan --config FILE{facts.machine.plan_option}"
    steps = max(1, num_train // batch)
    epochs = max(10, round((20_000 if num_gpus else 2_000) / steps))
    length = f"{epochs * steps:,} steps, {steps} per epoch; segapp train --smoke --config FILE measures their time"
    yield f"""\
optim:
  name: adamw
  lr: {encoder.lr * math.sqrt(batch / encoder.batch):.1e}  # {encoder.lr:g} x sqrt(batch_size / {encoder.batch})
  weight_decay: 0.01
schedule:
  name: poly
  power: 0.9
  warmup_steps: 5%
train:
  epochs: {epochs}  # {length}
  batch_size: {batch}  # {reason}
eval:
  every_epochs: {max(1, epochs // 20)}  # about twenty evaluations"""
    largest_px = max(h * w for h, w in content.sizes_px)
    if largest_px > LARGE_PX:
        yield f"  slide: true  # windows of crop_px: the largest image has {largest_px / 1e6:.0f} Mpx"


def _crop(content: MaskContent, cap: int) -> list[int]:
    lengths = (sorted(size[axis] for size in content.sizes_px) for axis in (0, 1))
    return [max(32, min(cap, own[len(own) // 10] // 32 * 32)) for own in lengths]


def _augmentation_lines(found: Fingerprint, *, is_square: bool) -> Iterator[str]:
    """Yield vertical flips and quarter turns if the classes lie in the images as in their mirror images.

    Such images are seen from above, through a microscope or on a scanner, so an object has one size. In perspective,
    which has an up, it has many, and the zoom stays at 0.5 to 2.
    """
    if found.has_up:
        return
    has_turns = is_square and not found.has_sides  # a quarter turn exchanges the sides of a crop
    flips = "{D4: {}}" if has_turns else "{HorizontalFlip: {}}, {VerticalFlip: {}}"
    yield _line(
        f"  augment: [{{ScaledCrop: {{scale: [0.75, 1.33]}}}}, {flips}, {{PhotometricChange: {{}}}}]",
        f"{'flips and quarter turns' if has_turns else 'vertical flips'}, and little zoom: no class knows up from down",
    )


def _model_lines(facts: Facts, found: Fingerprint) -> Iterator[str]:
    """Yield the model with the coarsest logits on which every class keeps its Dice, and the loss."""
    encoder, problem = facts.encoder, facts.weights_problem
    mean_kept, least_kept = fmean(found.kept_of_classes(8)), min(found.kept_of_classes(4))
    is_random = encoder is RANDOM_CPU_ENCODER
    yield "model:"
    if is_random and mean_kept >= MIN_MEAN_KEPT and min(found.kept_of_classes(8)) >= MIN_KEPT_OF_EACH:
        yield "  library: torchvision"
        yield f"  name: lraspp_mobilenet_v3_large  # light, and stride 8 keeps a mean Dice of {mean_kept:.3f}"
    else:
        keeps_details = least_kept >= MIN_KEPT and not is_random
        name, word = ("DeepLabV3Plus", "keeps") if keeps_details else ("Unet", "would keep only")
        kept = f"8 {word} a mean Dice of {mean_kept:.3f}" if is_random else f"4 {word} a Dice of {least_kept:.3f}"
        lowest = f", and of a class {min(found.kept_of_classes(8)):.3f}" if is_random else ""
        yield f"  library: smp\n  name: {name}  # stride {kept}{lowest}"
        yield f"  encoder: {encoder.name}"
        if name == "Unet":
            yield f"  options: {{decoder_channels: {list(encoder.decoder_channels)}}}"
    named = "imagenet  # here, or downloaded once" if problem is None else f"null  # {WITHOUT_WEIGHTS}: {problem}"
    yield printable(f"  weights_backbone: {named}")


def _loss_lines(found: Fingerprint) -> Iterator[str]:
    """Yield a loss in which rare classes count: by weights if classes are many, which Dice learns slowly."""
    shares = [share for share in found.shares if share]
    yield "loss:\n  name: ce"
    if len(shares) > 2 and min(shares) < RARE_SHARE:
        yield f"  class_weights: enet  # the rarest of {len(shares)} classes has {min(shares):.2%} of the pixels"
    else:
        yield "  plus: [{name: dice}]  # every class counts alike, however few its pixels"


def _data_lines(facts: Facts) -> Iterator[str]:
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
        yield _line(
            f"  value_range: {values['value_range']}", f"{low:g} % and {high:g} % of the values of each class, measured"
        )
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
