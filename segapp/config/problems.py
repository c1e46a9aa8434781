"""Error messages for configs: place, key, value, accepted values, and the nearest known key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from segapp.config.modes import unsupported
from segapp.config.options import UNKNOWN_OPTION
from segapp.config.sections import MAX_LABELS, DataConfig, LossConfig, ParallelConfig, RunConfig
from segapp.config.trust import part_names
from segapp.config.values import section_of
from segapp.config.words import (
    LISTS_OF_SECTIONS,
    description_of,
    meant_key,
    meant_word,
    options_of,
    why_removed,
    words_of,
)
from segapp.custom.names import PART_PATTERN, is_part
from segapp.errors import ConfigError


@dataclass(frozen=True)
class KeyLocations:
    """The file and line of each key path, and the key paths that were given on the command line."""

    path: Path | None = None
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    overrides: frozenset[tuple[str, ...]] = frozenset()
    wrong_in_file: frozenset[tuple[str, ...]] | None = None
    """Key paths with a problem if the command line is left out; None if unknown."""

    def place(self, loc: tuple[str, ...]) -> str:
        """Return the place that caused the problem with a key.

        That is `file:line` of the key or of the nearest key above it, or the file for a key that is not in it. It is
        the command line if it gives the key, or another key that conflicts with the key in the file.
        """
        if self.overrides and self.wrong_in_file is not None and loc not in self.wrong_in_file:
            return "command line"
        for end in range(len(loc), 0, -1):
            if loc[:end] in self.overrides:
                return "command line"
            if loc[:end] in self.lines:
                return f"{self.path}:{self.lines[loc[:end]]}"
        return str(self.path) if self.path else "config"


_ACCEPTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number is expected"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number is expected"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false is expected"),
    "string_type": "text is expected",
    **dict.fromkeys(("list_type", "tuple_type"), "a list is expected"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping of keys is expected"),
}
"""Type of a pydantic error -> the end of the message."""


def _key_path(loc: Sequence[int | str]) -> tuple[str, ...]:
    """Return pydantic's location without the names of union members: the key path as it is in the file."""
    path: list[str] = []
    model: Any = RunConfig
    for part in loc:
        if isinstance(part, str) and model is None and not part.isidentifier():
            break
        path.append(str(part))
        if model is not None and isinstance(part, str):
            is_field = part in model.model_fields
            model = section_of(model, part) if is_field else None
            if is_field and model is None and part not in LISTS_OF_SECTIONS:
                rest = loc[len(path) :]
                return (*path, *(str(each) for each in rest if isinstance(each, int) or part == "options"))
    return tuple(path)


def wrong_keys(raw: Mapping[str, Any]) -> frozenset[tuple[str, ...]] | None:
    """Return the key paths of values that conflict with each other; None if single values are invalid."""
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError:
        return None
    return frozenset(tuple(key.split(".")) for key, _ in combination_problems(config))


def describe_problems(items: Sequence[Any], locations: KeyLocations) -> list[ConfigError]:
    """Return one problem per pydantic error; a value that fits none of several types gives only one."""
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for item in items:
        by_key.setdefault(_key_path(item["loc"]), []).append(item)
    found: list[ConfigError] = []
    for loc, own in by_key.items():
        options = options_of(loc)
        removed = why_removed(".".join(loc), own[0]["input"])
        if removed is not None:
            found.append(ConfigError(f"{locations.place(loc)}: {removed}", key=".".join(loc), value=own[0]["input"]))
        elif len(own) > 1 and options and all(item["input"] is own[0]["input"] for item in own):
            value = own[0]["input"]
            text = f"{'.'.join(loc)} = {_shown(value)}: {_hint(loc, value)}accepted: {options}"
            found.append(ConfigError(f"{locations.place(loc)}: {text}", key=".".join(loc), value=value))
        else:
            for item in own:
                value = None if item["type"] == "missing" else item["input"]
                found.append(ConfigError(_describe_problem(item, loc, locations), key=".".join(loc), value=value))
    return list({str(problem): problem for problem in found}.values())


def _shown(value: object) -> str:
    return repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."


def _describe_problem(item: Any, loc: tuple[str, ...], locations: KeyLocations) -> str:
    """Return one line: place, key, value and accepted values."""
    key = ".".join(loc)
    kind, value = item["type"], item["input"]
    if kind == UNKNOWN_OPTION:
        return f"{locations.place(loc)}: unknown key {key}: {item['msg']}"
    if kind == "extra_forbidden":
        return f"{locations.place(loc)}: unknown key {key}: {meant_key(loc)}"
    if kind == "missing":
        return f"{locations.place(loc)}: {key} is missing{description_of(loc)}"
    if kind == "literal_error" or (kind == "string_pattern_mismatch" and item["ctx"]["pattern"] == PART_PATTERN):
        text = f"accepted: {options_of(loc) or item['ctx']['expected']}"
    else:
        text = _ACCEPTED.get(kind, str(item["msg"])).removeprefix("Value error, ")
        options = options_of(loc)
        if options and kind in {"int_parsing", "int_type", "string_type", "list_type", "float_type"}:
            text = f"accepted: {options}"
    text = text[:1].lower() + text[1:]
    return f"{locations.place(loc)}: {key} = {_shown(value)}: {_hint(loc, value)}{text}"


def _hint(loc: Sequence[str], value: object) -> str:
    """Return "did you mean ce? " if the field accepts a word similar to the given one; else ""."""
    words = words_of(loc)
    hint = meant_word(".".join(loc), value, words) if isinstance(value, str) and words and value not in words else ""
    return f"{hint} " if hint else ""


def combination_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the message of each value that is valid on its own but not together with others."""
    data, train, parallel = config.data, config.train, config.parallel
    yield from _data_problems(data)
    yield from _multilabel_problems(config) if data.multilabel is not None else _sigmoid_problems(config.loss)
    yield from _part_problems(config)
    yield from _schedule_problems(config)
    if config.model.freeze_epochs is not None and not config.model.freeze:
        yield "model.freeze_epochs", "needs model.freeze: name what is frozen, e.g. [backbone], or leave it out"
    if config.model.library == "smp" and config.model.encoder is None:
        yield (
            "model.encoder",
            "is missing: the models of model.library = smp are built on an encoder: add e.g. model.encoder=resnet34, "
            "efficientnet-b3 or tu-convnext_tiny (segapp models lists all)",
        )
    if config.model.library == "segapp":
        yield from _mask_classification_problems(config)
    elif config.loss.name == "mask_classification":
        yield "loss.name", "mask_classification is for model.library: segapp: use ce, or model.name: eomt"
    if config.optim.name == "sgd" and config.optim.options["nesterov"] and config.optim.momentum == 0:
        yield "optim.options.nesterov", "needs optim.momentum > 0"
    if isinstance(parallel.gpu0_bsz, int) and train.batch_size and parallel.gpu0_bsz > train.batch_size:
        yield (
            "parallel.gpu0_bsz",
            f"{parallel.gpu0_bsz} is above train.batch_size = {train.batch_size}: use 0 to {train.batch_size}, or null",
        )
    if parallel.shares is not None:
        if parallel.gpu0_bsz is not None:
            yield "parallel.shares", "cannot be combined with parallel.gpu0_bsz: keep one of them"
        if sum(parallel.shares) == 0:
            yield "parallel.shares", "adds up to 0: at least one device must take images"
    if (batch := train.effective_batch_size) is not None:
        if train.batch_size and batch % train.batch_size:
            yield (
                "train.effective_batch_size",
                f"{batch} is not a multiple of train.batch_size = {train.batch_size}: "
                f"use {-(-batch // train.batch_size) * train.batch_size}",
            )
        elif train.accumulate not in (1, batch // train.batch_size if train.batch_size else 1):
            yield "train.accumulate", "is set by train.effective_batch_size: keep one of them"
    if parallel.memory_budget_mib is not None:
        yield from _budget_problems(parallel)
    if parallel.mode != "auto":
        yield from ((feature.key, feature.problem(parallel.mode)) for feature in unsupported(config, parallel.mode))
    if config.train.compile and config.distill is not None:
        yield "train.compile", "does not support distill: set it to false, or leave distill out"
    if config.train.recompute != "off":
        for key, is_on in (("train.compile", config.train.compile), ("train.cuda_graph", config.train.cuda_graph)):
            if is_on:
                yield "train.recompute", f"cannot be combined with {key}: set one of them to off or false"
    if config.train.cuda_graph:
        yield from (("train.cuda_graph", f"true {problem}") for problem in _graph_problems(config))
    if isinstance(parallel.devices, list) and not parallel.devices:
        yield "parallel.devices", "is empty: name at least one device, or auto"
    distill = config.distill
    if distill is not None and not (distill.pixel_wise or distill.pair_wise or distill.holistic):
        yield "distill", "has no term: give pixel_wise, pair_wise or holistic a factor above 0, or leave it out"
    yield from _loss_problems(config.loss, data.classes)


def _loss_problems(loss: LossConfig, classes: list[str] | None) -> Iterator[tuple[str, str]]:
    weights = loss.class_weights
    if isinstance(weights, list) and not any(weights):
        yield "loss.class_weights", f"{weights} has no weight above 0: nothing would be trained"
    if isinstance(weights, list) and classes is not None and len(weights) != len(classes):
        yield (
            "loss.class_weights",
            f"has {len(weights)} values, but data.classes has {len(classes)} names: give one per class",
        )
    if loss.label_smoothing and loss.name not in {"ce", "bce"}:
        yield "loss.label_smoothing", f"is for name: ce or bce, not {loss.name}: set it to 0"
    for i, term in enumerate(loss.plus):
        if term.name == "mask_classification":
            yield f"loss.plus.{i}.name", "mask_classification cannot be added to another loss: make it loss.name"


def _graph_problems(config: RunConfig) -> Iterator[str]:
    """Yield the end of a message for each setting that does not allow a step to be captured as a graph."""
    if config.train.compile:
        yield "cannot be combined with train.compile: set one of them to false"
    if config.distill is not None:
        yield "does not support distill: set it to false, or leave distill out"
    if config.loss.name == "mask_classification":
        yield "does not support loss.name: mask_classification, which waits for the GPU: set it to false"
    for key, name in part_names(config).items():
        if key.partition(".")[0] in ("model", "loss"):
            yield f"does not support custom components, which may wait for the GPU ({key} = {name}): set it to false"


def _mask_classification_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    loss = config.loss
    if config.model.encoder is None:
        yield "model.encoder", "is missing: eomt needs one, e.g. tu-vit_small_patch16_dinov3"
    if loss.name != "mask_classification":
        yield (
            "loss.name",
            f"{loss.name} needs logits per pixel, but eomt is trained with loss.name: mask_classification",
        )
    if loss.plus:
        yield "loss.plus", "cannot be combined with mask_classification: leave it out"
    if loss.class_weights is not None:
        yield "loss.class_weights", "are not used by mask_classification: set them to null"
    if config.distill is not None:
        yield (
            "distill",
            "needs logits per pixel, which eomt is not trained with: leave it out (eomt can be the teacher)",
        )


def _schedule_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    section = config.schedule
    if section.min_lr > config.optim.lr:
        yield "schedule.min_lr", f"{section.min_lr} is above optim.lr = {config.optim.lr}: lower it"
    if section.name == "step" and not (section.options["epochs"] or section.options["steps"]):
        yield (
            "schedule.options",
            "has neither epochs nor steps, but schedule.name is step: list the epochs, e.g. {epochs: [60, 80]}",
        )
    if section.name == "onecycle" and section.warmup_steps:
        yield "schedule.warmup_steps", "cannot be combined with onecycle, which has its own warm-up: set it to 0"


def _part_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    named = part_names(config)
    if config.data.options and "data.format" not in named:
        yield "data.options", "is for a custom data set, and data.format names none: leave it out"
    if config.model.library == "python" and "model.name" not in named:
        yield (
            "model.name",
            f"{config.model.name!r} is not a custom component: write package.module:factory or ./file.py:factory, or "
            "set model.library to torchvision or smp",
        )
    if config.model.library != "python" and is_part(config.model.name):
        yield "model.library", f"is {config.model.library}, but model.name is a custom component: set it to python"
    if "data.format" in named and not config.data.classes:
        yield (
            "data.classes",
            "is missing: a custom data format does not fix the classes: list their names in the order of their ids",
        )
    if "data.format" in named and config.data.cache != "none":
        yield (
            "data.cache",
            f"{config.data.cache} caches image files, which a custom data format may not have: set it to none",
        )


MULTILABEL_LOSSES = ("bce", "dice", "tversky", "focal")
"""The losses for classes that do not exclude each other."""


def _multilabel_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    data = config.data
    if data.format not in ("folder", "list"):
        yield "data.multilabel", f"is for the formats folder and list, not {data.format}: set it to null"
    names_class = any("{class}" in (part or "") for part in (data.mask_dir, data.mask_suffix))
    if data.multilabel == "files" and data.format == "folder" and not names_class:
        yield "data.multilabel", "files needs {class} in data.mask_dir or data.mask_suffix, e.g. masks/{class}"
    if data.classes is not None and len(data.classes) > MAX_LABELS:
        yield "data.classes", f"has {len(data.classes)} names: at most {MAX_LABELS} with data.multilabel"
    if data.label_map is not None:
        yield "data.label_map", "cannot be combined with data.multilabel: leave it out"
    if data.rgb_masks:
        yield "data.rgb_masks", "cannot be combined with data.multilabel: set it to false"
    if data.sampling != "uniform":
        yield "data.sampling", f"{data.sampling} needs one class per pixel: use uniform with data.multilabel"
    for path, term in config.loss.by_key().items():
        if term.name not in MULTILABEL_LOSSES:
            yield (
                f"{path}.name",
                f"{term.name} is for one class per pixel: with data.multilabel use {', '.join(MULTILABEL_LOSSES)}",
            )
    if isinstance(weights := config.loss.class_weights, str):
        yield "loss.class_weights", f"{weights} is for one class per pixel: give a list, or null"
    if config.distill is not None:
        yield "distill", "needs one class per pixel: leave it out with data.multilabel"


def _sigmoid_problems(loss: LossConfig) -> Iterator[tuple[str, str]]:
    names = [term.name for term in (loss, *loss.plus)]
    if "bce" in names and set(names) != {"bce"}:
        yield "loss.plus", "adds losses of sigmoids (bce) and softmax: use ce, or data.multilabel"


def _budget_problems(parallel: ParallelConfig) -> Iterator[tuple[str, str]]:
    path, budgets = "parallel.memory_budget_mib", parallel.memory_budget_mib or []
    if parallel.mode == "model":
        yield path, "does not support parallel.mode: model, where devices hold parts of the model: leave it out"
    elif isinstance(parallel.devices, list) and len(budgets) != len(parallel.devices) and parallel.mode != "single":
        yield path, f"names {len(budgets)} budgets for {len(parallel.devices)} devices: give one each"
    elif not budgets:
        yield path, "is empty: give one number per device, or null"


def _pixel_problems(data: DataConfig) -> Iterator[tuple[str, str]]:
    num_bands = len(data.bands or (1, 2, 3))
    if data.bands is None and data.dtype != "uint8":
        yield "data.bands", f"is missing: data.dtype = {data.dtype} needs the bands to read, e.g. [1, 2, 3]"
    if data.value_range is not None:
        if len(data.value_range) not in {1, num_bands}:
            yield (
                "data.value_range",
                f"has {len(data.value_range)} pairs for {num_bands} bands: give one for all, or one for each",
            )
        for pair in (list(pair) for pair in data.value_range if pair[0] >= pair[1]):
            yield "data.value_range", f"{pair} is not [lowest, highest]: the second must be larger"
    for key, values in (("mean", data.mean), ("std", data.std)):
        if len(values) not in {3, num_bands}:
            yield f"data.{key}", f"has {len(values)} values for {num_bands} bands: give {num_bands}, or RGB's three"


def _data_problems(data: DataConfig) -> Iterator[tuple[str, str]]:
    yield from _pixel_problems(data)
    for key in ("scale", "hflip", "photometric"):
        if data.augment is not None and getattr(data, key) != DataConfig.model_fields[key].default:
            yield f"data.{key}", "is for the built-in transforms, not for data.augment: write it into the list there"
    if data.sampling != "uniform" and not any("ScaledCrop" in entry for entry in data.transforms):
        yield "data.sampling", f"{data.sampling} needs ScaledCrop in data.augment, which places the crops: add it"
    if (total := data.cutmix + data.classmix) > 1:
        yield "data.cutmix", f"data.cutmix and classmix add up to {total:g}: at most one is used, so at most 1"
    if data.augment == []:
        yield "data.augment", "is empty: list at least ScaledCrop, or set it to null"
    if data.scale[0] > data.scale[1]:
        yield "data.scale", f"{list(data.scale)} is not [smallest, largest]: swap them"
    if math.prod(data.crop_px) > 1 << 26:
        yield "data.crop_px", f"{list(data.crop_px)} is more than 67 megapixels a sample: use a smaller crop"
    if data.format in {"folder", "list"} and not data.classes:
        yield (
            "data.classes",
            f"is missing: format {data.format} does not fix the classes; list their names in id order",
        )
    if data.classes is not None and len(data.classes) == 1 and data.multilabel is None:
        yield "data.classes", f"{data.classes} is one class: add the background, or set data.multilabel: channels"
    if data.rgb_masks and not data.palette:
        yield "data.palette", "is missing: rgb_masks needs one color per class"
    num_colors, num_classes = len(data.palette or ()), len(data.classes or ())
    ignored_follow = data.rgb_masks and num_colors > num_classes  # further colors are ignored pixels
    if data.palette is not None and data.classes is not None and num_colors != num_classes and not ignored_follow:
        yield (
            "data.palette",
            f"has {num_colors} colors, but data.classes has {num_classes} names: give one color per class",
        )
    yield from _label_map_problems(data)


def _label_map_problems(data: DataConfig) -> Iterator[tuple[str, str]]:
    if data.classes is None or data.multilabel is not None:
        return
    num_classes, ignored = len(data.classes), 255 if data.ignore_index is None else data.ignore_index
    strange = sorted({to for to in (data.label_map or {}).values() if not 0 <= to < num_classes and to != ignored})
    if strange:
        shown = ", ".join(map(str, strange[:3])) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        yield (
            "data.label_map",
            f"maps to {shown}, but data.classes has {num_classes} names (ids 0 to {num_classes - 1}): "
            f"{_fitting(data, max(strange) + 1)}map to these ids, or to data.ignore_index = {ignored}",
        )


def _fitting(data: DataConfig, num_wanted: int) -> str:
    """Return the advice to name as many classes as `data.label_map` has; "" if some of these classes are unused."""
    used = {to for to in (data.label_map or {}).values() if to >= 0}
    return f"name {num_wanted} classes in data.classes, or " if used >= set(range(num_wanted)) else ""
