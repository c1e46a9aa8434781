"""Messages about a training before its first step: alerts from its config and its data. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from segapp.assembly.optimizer import build_schedule
from segapp.assembly.pairs import split_note
from segapp.config import DataConfig, RunConfig, TrainConfig
from segapp.custom.names import is_component
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.targets import Targets, absent_note, classes_absent, classes_present, has_shades, ignored_note
from segapp.errors import ConfigError
from segapp.models import SegmentationModel
from segapp.run.events import Alert


def run_length(train: TrainConfig, num_batches: int) -> tuple[int, int, int]:
    """Return the epochs and steps of a run with `num_batches` micro-batches per epoch, and the steps per epoch.

    >>> from segapp.config import TrainConfig
    >>> run_length(TrainConfig(epochs=3, accumulate=2), 5), run_length(TrainConfig(steps=7), 5)
    ((3, 9, 3), (2, 7, 5))
    """
    per_epoch = math.ceil(num_batches / train.accumulate)
    epochs = train.epochs if train.steps is None else math.ceil(train.steps / max(per_epoch, 1))
    return epochs, train.steps or epochs * per_epoch, per_epoch


def start_alerts(
    config: RunConfig,
    scheme: ClassScheme,
    train: Targets | None,
    val: Targets | None,
    *,
    largest_px: tuple[int, int] | None,
    num_images: int,
    num_batches: int,
    device_type: str,
) -> list[Alert]:
    """Return the alerts of a training, most important first.

    `train` and `val` are the counts of the masks; `largest_px` is the largest height and the largest width of the
    training images; None: unknown. In a trial on a few images there are no batches, because the length of the run does
    not matter.
    """
    found = [
        *(("classes", message) for message in _of_classes(config.checkpoint.monitor, scheme, train, val)),
        *(("schedule", message) for message in (schedule_notes(config, num_batches) if num_batches else ())),
        *(("batch", message) for message in (_of_batch(config.train, num_images, num_batches) if num_batches else ())),
        *(("data", message) for message in _of_data(config.data, largest_px)),
    ]
    if config.train.precision in ("fp16", "amp-fp16") and device_type == "cpu":
        slow = (
            f"train.precision = {config.train.precision} on the CPU, where half-precision convolutions take many times "
            "as long as fp32: set train.precision to fp32, or use a GPU"
        )
        found.append(("precision", slow))
    return [Alert(kind=kind, message=message) for kind, message in found]


def start_notes(scheme: ClassScheme, splits: Iterable[Targets | None]) -> list[str]:
    """Return the shares of ignored pixels with their causes; these are no alerts, because most data sets have some."""
    read = (targets for targets in splits if targets is not None and not has_shades(targets, scheme))
    return [note for targets in read if (note := ignored_note(targets, scheme)) is not None]


def _of_classes(monitor: str, scheme: ClassScheme, train: Targets | None, val: Targets | None) -> Iterator[str]:
    if train is not None and (absent := absent_note(train, scheme)) is not None:
        yield f"{absent}; the model cannot learn {'them' if ', ' in absent else 'it'}"
    if train is not None and has_shades(train, scheme):
        yield ignored_note(train, scheme) or ""
    if val is not None and scheme.multilabel is None and len(present := classes_present(val, scheme)) == 1:
        yield f"in {val.where} only {present[0]} has pixels: the scores of the other classes are meaningless"
    monitored = monitor.partition(":")[2]  # of iou:NAME and dice:NAME
    if val is not None and val.is_complete and monitored in classes_absent(val, scheme):
        yield f"checkpoint.monitor = {monitor}: no pixel of {val.where} is {monitored}: monitor another score"


def schedule_notes(config: RunConfig, num_batches: int) -> list[str]:
    """Return sentences about a learning rate that does not fit a run with `num_batches` micro-batches per epoch."""
    section = config.schedule
    if is_component(section.name):
        return []
    _, total_steps, _ = run_length(config.train, num_batches)
    share = section.num_warmup_steps(total_steps) / max(total_steps, 1)
    if share <= 0.2:
        return []
    rises = "all" if share >= 1 else f"{share:.0%}"
    return [
        f"schedule.warmup_steps = {section.warmup_steps}: the learning rate rises towards optim.lr for {rises} of "
        f"the {total_steps} steps of this run: set it to 5%, or train longer"
    ]


def _of_batch(train: TrainConfig, num_images: int, num_batches: int) -> Iterator[str]:
    """Yield a sentence if an epoch has fewer images than a step asks for."""
    if train.batch_size > num_images:
        yield (
            f"train.batch_size = {train.batch_size}: there are only {num_images} training images, so each step has all "
            f"of them: set it to {num_images} or less"
        )
    elif train.accumulate > num_batches:
        yield (
            f"train.accumulate = {train.accumulate}: an epoch has only {num_batches} batches of {train.batch_size} of "
            f"the {num_images} training images, so each step has {num_batches}: set it to {num_batches} or less"
        )


def changed_length_note(
    saved: Mapping[str, Any], config: RunConfig, num_batches: int, step: int, lr_factor: float = 1.0
) -> str | None:
    """Return how another length changes the learning rate of a resumed run; None if the next step's is the same.

    `saved`: `train` section of the config that the checkpoint was saved with.
    """
    before = config.train.model_copy(update={key: saved[key] for key in ("epochs", "steps") if key in saved})
    (_, old_total, per_epoch), (_, total, _) = (run_length(train, num_batches) for train in (before, config.train))
    old_shape, shape = (
        build_schedule(config.schedule, config.optim.lr, total_steps=length, steps_per_epoch=per_epoch)
        for length in (old_total, total)
    )
    # Compared as text: a difference that the note would not show is none.
    old_lr, lr = (f"{lr_factor * rate:.3g}" for rate in (old_shape(min(step + 1, old_total)), shape(step + 1)))
    if old_lr == lr:
        return None
    before_words, words = (
        f"train.epochs={train.epochs}" if train.steps is None else f"train.steps={train.steps}"
        for train in (before, config.train)
    )
    if before.steps is None and config.train.steps is not None:
        before_words += " train.steps=null"
    old_words = f"it would be {old_lr}" if step < old_total else f"the run ended at {old_lr}"
    move = f"put {before_words} back"
    stable = old_total - round(config.schedule.options.get("decay_ratio", 1.0) * old_total)
    if config.schedule.name != "wsd":
        move += "; a run with schedule.name=wsd can be made longer without this change"
    elif total > old_total and stable:
        move += f", or, since the decay began after step {stable}, resume from a checkpoint up to that step"
    return f"{words}: the learning rate of step {step + 1} is {lr}, under the old length {old_words}: {move}"


def _of_data(data: DataConfig, largest_px: tuple[int, int] | None) -> Iterator[str]:
    if (note := split_note(data)) is not None:
        yield note
    reached = _reached_px(data, largest_px)
    if reached is not None and (reached[0] < data.crop_px[0] or reached[1] < data.crop_px[1]):
        yield (
            f"data.crop_px = {list(data.crop_px)} is larger than every training image ({_at_most(data, largest_px)}): "
            "each crop is padded with ignored pixels, which costs memory and time: lower data.crop_px"
        )


def check_crop(data: DataConfig, largest_px: tuple[int, int] | None, model: SegmentationModel) -> None:
    """Raise ConfigError, with the size to write, if a crop of half the pixels would hold as much of every image."""
    reached = _reached_px(data, largest_px)
    if reached is None:
        return
    crop = data.crop_px
    height, width = map(min, model.suitable_size(*map(min, reached, crop)), crop)
    if 2 * height * width < math.prod(crop):
        padding = 1 - math.prod(map(min, reached, crop)) / math.prod(crop)
        raise ConfigError(
            f"data.crop_px = {list(crop)}: at least {math.floor(100 * padding)}% of every crop is padding, because the "
            f"training images are smaller ({_at_most(data, largest_px)}): use [{height}, {width}]",
            key="data.crop_px",
        )


def _reached_px(data: DataConfig, largest_px: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the largest height and width of an image before it is cropped; None if unknown."""
    size = data.resize_px or (None if is_component(data.format) else largest_px)  # not all custom images are read
    if size is None or data.augment is not None:  # a custom list may enlarge images
        return None
    return math.ceil(size[0] * data.scale[1]), math.ceil(size[1] * data.scale[1])


def _at_most(data: DataConfig, largest_px: tuple[int, int] | None) -> str:
    height, width = data.resize_px or largest_px or data.crop_px
    scale = data.scale[1]
    return f"at most {height} x {width} px" + (f", enlarged by at most {scale:g} (data.scale)" if scale != 1 else "")
