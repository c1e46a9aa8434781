"""Error messages for configs: place, key, value, accepted values, and the nearest known key."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from segapp.config.modes import unsupported
from segapp.config.options import LOSSES, UNKNOWN_OPTION
from segapp.config.sections import MAX_LABELS, DataConfig, ParallelConfig, RunConfig
from segapp.config.trust import component_names
from segapp.config.values import section_of
from segapp.config.words import (
    LISTS_OF_SECTIONS,
    description_of,
    meant_key,
    meant_word,
    options_of,
    words_of,
)
from segapp.config.yaml_reader import parse_yaml
from segapp.custom.names import COMPONENT_PATTERN, is_component
from segapp.errors import ConfigError, some_names


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
        # Without the command line, the file has no problem with this key.
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
    "string_type": "text is expected: write it in quotes",
    "string_pattern_mismatch": "letters, digits, dots, hyphens and underscores are accepted, at most 100, and first a "
    "letter or a digit",
    **dict.fromkeys(("list_type", "tuple_type"), "a list is expected"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping of keys is expected"),
}
"""Type of a pydantic error -> the end of the message."""


def _key_path(loc: Sequence[int | str]) -> tuple[str, ...]:
    """Return pydantic's location without the names of union members: the key path as it is in the file."""
    path: list[str] = []
    model: Any = RunConfig
    for part in loc:
        # pydantic appends the types of a union, such as `list[int]`, which are no keys of the file.
        if isinstance(part, str) and model is None and not part.isidentifier():
            break
        path.append(str(part))
        if model is not None and isinstance(part, str):
            is_field = part in model.model_fields
            model = section_of(model, part) if is_field else None
            if is_field and model is None and part not in LISTS_OF_SECTIONS:
                # Below a value, only positions of a list are in the file; below `options`, every part is.
                rest = loc[len(path) :]
                return (*path, *(str(step) for step in rest if isinstance(step, int) or part == "options"))
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
    problems: list[ConfigError] = []
    for loc, errors in by_key.items():
        options = options_of(loc)
        if len(errors) > 1 and options and all(item["input"] is errors[0]["input"] for item in errors):
            value = errors[0]["input"]
            text = f"{'.'.join(loc)} = {_shown(value)}: {_hint(loc, value)}accepted: {options}"
            problems.append(ConfigError(f"{locations.place(loc)}: {text}", key=".".join(loc), value=value))
        else:
            for item in errors:
                value = None if item["type"] == "missing" else item["input"]
                problems.append(ConfigError(_describe_problem(item, loc, locations), key=".".join(loc), value=value))
    # The errors of a union may have the same text.
    return list({str(problem): problem for problem in problems}.values())


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
    if kind == "literal_error" or (kind == "string_pattern_mismatch" and item["ctx"]["pattern"] == COMPONENT_PATTERN):
        text = f"accepted: {options_of(loc) or item['ctx']['expected']}"
    else:
        text = _ACCEPTED.get(kind, str(item["msg"])).removeprefix("Value error, ")
        options = options_of(loc)
        if options and kind in {"int_parsing", "int_type", "string_type", "list_type", "float_type"}:
            text = f"accepted: {options}"
        text += _as_flow(loc, value, text)
    text = text[:1].lower() + text[1:]
    return f"{locations.place(loc)}: {key} = {_shown(value)}: {_hint(loc, value)}{text}"


def _as_flow(loc: Sequence[str], value: object, expected: str) -> str:
    """Return ": write [512, 512]" for a value that lacks only the brackets or spaces of what is expected; else ""."""
    is_list, text = expected == _ACCEPTED["list_type"], str(value).strip("[]{} ")
    if not isinstance(value, str | dict) or not (is_list or expected == _ACCEPTED["dict_type"]):
        return ""
    text = re.sub(r"(?<=\d)x(?=\d)", ",", text)  # 512x512
    if not is_list or loc[-1] in LISTS_OF_SECTIONS:
        text = "{" + re.sub(r"(^|[,{] *)(\w+):(?=\S)", r"\1\2: ", text) + "}"
    with contextlib.suppress(ConfigError):
        meant, _ = parse_yaml(f"[{text}]")
        if meant and None not in (meant[0].values() if isinstance(meant[0], dict) else ()):
            return f": write {yaml.safe_dump(meant if is_list else meant[0], default_flow_style=True).strip()}"
    return ""


def _hint(loc: Sequence[str], value: object) -> str:
    """Return "did you mean ce? " if the field accepts a word similar to the given one; else ""."""
    words = words_of(loc)
    hint = meant_word(".".join(loc), value, words) if isinstance(value, str) and words and value not in words else ""
    return f"{hint} " if hint else ""


def _num_bands(config: RunConfig) -> int:
    return len(config.data.bands or (1, 2, 3))


def _is_ignored_by_augment(config: RunConfig, key: str) -> bool:
    """Return True if a key of the built-in transforms is changed, although `data.augment` replaces them."""
    return config.data.augment is not None and getattr(config.data, key) != DataConfig.model_fields[key].default


def _has_fitting_colors(data: DataConfig) -> bool:
    """Return True if each class has a color; with `rgb_masks`, further colors mark ignored pixels."""
    num_colors, num_classes = len(data.palette or ()), len(data.classes or ())
    return num_colors == num_classes or (bool(data.rgb_masks) and num_colors > num_classes)


def _has_other_number_of_budgets(parallel: ParallelConfig) -> bool:
    is_named = isinstance(parallel.devices, list) and parallel.mode not in ("single", "model")
    return is_named and len(parallel.memory_budget_mib or ()) != len(parallel.devices)


_BUDGETS = "parallel.memory_budget_mib"

Rule = tuple[str, Callable[[RunConfig], object], str | Callable[[RunConfig], str]]
"""A key, the condition under which its value is refused, and the message, in which `{section.key}` is a value."""

# fmt: off
_DATA: tuple[Rule, ...] = (
    ("data.bands", lambda c: c.data.bands is None and c.data.dtype != "uint8",
     "is missing: data.dtype = {data.dtype} needs the bands to read, e.g. [1, 2, 3]"),
    ("data.value_range", lambda c: c.data.value_range and len(c.data.value_range) not in {1, _num_bands(c)},
     lambda c: f"has {len(c.data.value_range or ())} pairs for {_num_bands(c)} bands: "
     "give one for all, or one for each"),
    *((f"data.{key}", partial(_is_ignored_by_augment, key=key),
       "is for the built-in transforms, not for data.augment: write it into the list there")
      for key in ("scale", "hflip", "photometric")),
    ("data.sampling", lambda c: c.data.sampling != "uniform" and not any("ScaledCrop" in e for e in c.data.transforms),
     "{data.sampling} needs ScaledCrop in data.augment, which places the crops: add it"),
    ("data.cutmix", lambda c: c.data.cutmix + c.data.classmix > 1,
     lambda c: f"data.cutmix and classmix add up to {c.data.cutmix + c.data.classmix:g}: "
     "at most one is used, so at most 1"),
    ("data.augment", lambda c: c.data.augment == [], "is empty: list at least ScaledCrop, or set it to null"),
    ("data.scale", lambda c: c.data.scale[0] > c.data.scale[1],
     "[{data.scale[0]}, {data.scale[1]}] is not [smallest, largest]: swap them"),
    ("data.crop_px", lambda c: math.prod(c.data.crop_px) > 1 << 26,
     "[{data.crop_px[0]}, {data.crop_px[1]}] is more than 67 megapixels a sample: use a smaller crop"),
    ("data.classes", lambda c: c.data.format in {"folder", "list"} and not c.data.classes,
     "is missing: format {data.format} does not fix the classes; list their names in id order"),
    ("data.classes", lambda c: c.data.classes and len(c.data.classes) == 1 and c.data.multilabel is None,
     "{data.classes} is one class: add the background, or set data.multilabel: channels and loss.name: bce"),
    ("data.valid_area", lambda c: c.data.valid_area and c.data.format not in {"folder", "list"},
     "is for the formats folder and list, not {data.format}: set it to null"),
    ("data.palette", lambda c: c.data.rgb_masks and not c.data.palette,
     "is missing: rgb_masks needs one color per class"),
    ("data.palette", lambda c: None not in (c.data.palette, c.data.classes) and not _has_fitting_colors(c.data),
     lambda c: f"has {len(c.data.palette or ())} colors, but data.classes has {len(c.data.classes or ())} names: "
     "give one color per class"),
)

_MULTILABEL: tuple[Rule, ...] = (
    ("data.multilabel", lambda c: c.data.format not in ("folder", "list"),
     "is for the formats folder and list, not {data.format}: set it to null"),
    ("data.multilabel",
     lambda c: c.data.multilabel == "files" and c.data.format == "folder"
     and not any("{class}" in (part or "") for part in (c.data.mask_dir, c.data.mask_suffix)),
     "files needs {{class}} in data.mask_dir or data.mask_suffix, e.g. masks/{{class}}"),
    ("data.classes", lambda c: c.data.classes is not None and len(c.data.classes) > MAX_LABELS,
     lambda c: f"has {len(c.data.classes or ())} names: at most {MAX_LABELS} with data.multilabel"),
    ("data.label_map", lambda c: c.data.label_map is not None, "cannot be combined with data.multilabel: leave it out"),
    ("data.rgb_masks", lambda c: c.data.rgb_masks, "cannot be combined with data.multilabel: set it to false"),
    ("data.sampling", lambda c: c.data.sampling != "uniform",
     "{data.sampling} needs one class per pixel: use uniform with data.multilabel"),
    ("loss.class_weights", lambda c: isinstance(c.loss.class_weights, str),
     "{loss.class_weights} is for one class per pixel: give a list, or null"),
    ("distill", lambda c: c.distill is not None, "needs one class per pixel: leave it out with data.multilabel"),
)

_SOFTMAX: tuple[Rule, ...] = (
    ("loss.plus", lambda c: {"bce"} < {term.name for term in (c.loss, *c.loss.plus)},
     "adds losses of sigmoids (bce) and softmax: use ce as loss.name, or only bce with data.multilabel"),
)

_COMPONENTS: tuple[Rule, ...] = (
    ("data.options", lambda c: c.data.options and "data.format" not in component_names(c),
     "is for a custom data set, and data.format names none: leave it out"),
    ("model.name", lambda c: c.model.library == "python" and "model.name" not in component_names(c),
     "{model.name!r} is not a custom component: write package.module:factory or ./file.py:factory, or "
     "set model.library to torchvision or smp"),
    ("model.library", lambda c: c.model.library != "python" and is_component(c.model.name),
     "is {model.library}, but model.name is a custom component: set it to python"),
    ("data.classes", lambda c: "data.format" in component_names(c) and not c.data.classes,
     "is missing: a custom data format does not fix the classes: list their names in the order of their ids"),
    ("data.cache", lambda c: "data.format" in component_names(c) and c.data.cache in {"ram", "disk"},
     "{data.cache} caches image files, which a custom data format may not have: leave it out"),
)

_SCHEDULE: tuple[Rule, ...] = (
    ("schedule.min_lr", lambda c: c.schedule.min_lr > c.optim.lr,
     "{schedule.min_lr} is above optim.lr = {optim.lr}: lower it"),
    ("schedule.options",
     lambda c: c.schedule.name == "step" and not (c.schedule.options["epochs"] or c.schedule.options["steps"]),
     "has neither epochs nor steps, but schedule.name is step: list the epochs, e.g. {{epochs: [60, 80]}}"),
    ("schedule.warmup_steps",
     lambda c: c.schedule.name == "onecycle" and float(str(c.schedule.warmup_steps).removesuffix("%")),
     "cannot be combined with onecycle, which has its own warm-up: set it to 0"),
)

_MODEL: tuple[Rule, ...] = (
    ("model.freeze_epochs", lambda c: c.model.freeze_epochs is not None and not c.model.freeze,
     "needs model.freeze: name what is frozen, e.g. [backbone], or leave it out"),
    ("model.encoder", lambda c: c.model.library == "smp" and c.model.encoder is None,
     "is missing: the models of model.library = smp are built on an encoder: add e.g. model.encoder=resnet34, "
     "efficientnet-b3 or tu-convnext_tiny (segapp models lists all)"),
    ("loss.name", lambda c: not c.model.is_eomt and c.loss.name == "mask_classification",
     "mask_classification is for eomt: use ce, or model.library: segapp, model.name: eomt and model.encoder: "
     "tu-vit_small_patch16_dinov3"),
)

_EOMT: tuple[Rule, ...] = (
    ("model.encoder", lambda c: c.model.encoder is None,
     "is missing: eomt needs one, e.g. tu-vit_small_patch16_dinov3"),
    ("loss.name", lambda c: c.loss.name != "mask_classification",
     "{loss.name} needs logits per pixel, but eomt is trained with loss.name: mask_classification"),
    ("loss.plus", lambda c: c.loss.plus, "cannot be combined with mask_classification: leave it out"),
    ("loss.class_weights", lambda c: c.loss.class_weights is not None,
     "are not used by mask_classification: set them to null"),
    ("distill", lambda c: c.distill is not None,
     "needs logits per pixel, which eomt is not trained with: leave it out (eomt can be the teacher)"),
)

_TRAINING: tuple[Rule, ...] = (
    ("optim.options.nesterov",
     lambda c: c.optim.name == "sgd" and c.optim.options["nesterov"] and c.optim.momentum == 0,
     "needs optim.momentum > 0"),
    ("parallel.gpu0_bsz",
     lambda c: isinstance(c.parallel.gpu0_bsz, int) and 0 < c.train.batch_size < c.parallel.gpu0_bsz,
     "{parallel.gpu0_bsz} is above train.batch_size = {train.batch_size}: use 0 to {train.batch_size}, or null"),
    ("parallel.shares", lambda c: c.parallel.shares is not None and c.parallel.gpu0_bsz is not None,
     "cannot be combined with parallel.gpu0_bsz: keep one of them"),
    ("parallel.shares", lambda c: c.parallel.shares is not None and sum(c.parallel.shares) == 0,
     "adds up to 0: at least one device must take images"),
    (_BUDGETS, lambda c: c.parallel.memory_budget_mib is not None and c.parallel.mode == "model",
     "does not support parallel.mode: model, where devices hold parts of the model: leave it out"),
    (_BUDGETS, lambda c: c.parallel.memory_budget_mib is not None and _has_other_number_of_budgets(c.parallel),
     lambda c: f"names {len(c.parallel.memory_budget_mib or ())} budgets for {len(c.parallel.devices)} devices: "
     "give one each"),
    (_BUDGETS, lambda c: c.parallel.memory_budget_mib == [] and c.parallel.mode != "model"
     and not _has_other_number_of_budgets(c.parallel), "is empty: give one number per device, or null"),
    ("train.compile", lambda c: c.train.compile and c.distill is not None,
     "does not support distill: set it to false, or leave distill out"),
    ("train.compile", lambda c: c.train.compile == "reduce-overhead" and c.train.accumulate > 1,
     "reduce-overhead cannot be combined with train.accumulate = {train.accumulate}, because the gradients of a pass "
     "lie in the memory of its graph: set it to true, or train.accumulate to 1"),
    ("train.recompute", lambda c: c.train.recompute != "off" and c.train.compile,
     "cannot be combined with train.compile: set one of them to off or false"),
    ("parallel.devices", lambda c: c.parallel.devices == [], "is empty: name at least one device, or auto"),
    ("distill", lambda c: (d := c.distill) is not None and not (d.pixel_wise or d.pair_wise or d.holistic),
     "has no term: give pixel_wise, pair_wise or holistic a factor above 0, or leave it out"),
)

_LOSS: tuple[Rule, ...] = (
    ("loss.class_weights", lambda c: isinstance(c.loss.class_weights, list) and not any(c.loss.class_weights),
     "{loss.class_weights} has no weight above 0: nothing would be trained"),
    ("loss.class_weights",
     lambda c: isinstance(weights := c.loss.class_weights, list) and c.data.classes is not None
     and len(weights) != len(c.data.classes),
     lambda c: f"has {len(c.loss.class_weights or ())} values, but data.classes has {len(c.data.classes or ())} names: "
     "give one per class"),
    ("loss.label_smoothing", lambda c: c.loss.label_smoothing and c.loss.name not in {"ce", "bce"},
     "is for name: ce or bce, not {loss.name}: set it to 0"),
)
# fmt: on


def combination_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the message of each value that is valid on its own but not together with others."""
    is_multilabel = config.data.multilabel is not None
    rules = [*_DATA, *(_MULTILABEL if is_multilabel else _SOFTMAX), *_COMPONENTS, *_SCHEDULE, *_MODEL]
    rules += [*(_EOMT if config.model.is_eomt else ()), *_TRAINING, *_LOSS]
    sections = {name: getattr(config, name) for name in RunConfig.model_fields}
    for key, is_refused, message in rules:
        if is_refused(config):
            yield key, message.format(**sections) if isinstance(message, str) else message(config)
    yield from _problems_of_lists(config)


def _problems_of_lists(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the problems of which one key, or several similar keys, can have more than one."""
    data, loss, mode = config.data, config.loss, config.parallel.mode
    for pair in (list(pair) for pair in data.value_range or () if pair[0] >= pair[1]):
        yield "data.value_range", f"{pair} is not [lowest, highest]: the second must be larger"
    num_bands = _num_bands(config)
    for key, values in (("data.mean", data.mean), ("data.std", data.std)):
        # From three values, `per_band` derives the others.
        if values is not None and len(values) not in {3, num_bands}:
            yield key, f"has {len(values)} values for {num_bands} bands: give {num_bands}, or RGB's three"
    yield from _label_map_problems(data)
    # The mode of auto depends on the devices; `check_mode` is called when it is known.
    if mode != "auto":
        yield from ((feature.key, feature.problem(mode)) for feature in unsupported(config, mode))
    for_sets = [name for name, built_in in LOSSES.items() if built_in.takes_sets]
    for path, term in loss.by_key().items():
        if data.multilabel is not None and term.name not in for_sets:
            yield (
                f"{path}.name",
                f"{term.name} is for one class per pixel: with data.multilabel use {', '.join(for_sets)}",
            )
    for i, term in enumerate(loss.plus):
        if term.name == "mask_classification":
            yield f"loss.plus.{i}.name", "mask_classification cannot be added to another loss: make it loss.name"


def _label_map_problems(data: DataConfig) -> Iterator[tuple[str, str]]:
    if data.classes is None or data.multilabel is not None:
        return
    num_classes, ignored = len(data.classes), 255 if data.ignore_index is None else data.ignore_index
    strange = sorted({to for to in (data.label_map or {}).values() if not 0 <= to < num_classes and to != ignored})
    if strange:
        yield (
            "data.label_map",
            f"maps to {some_names([*map(str, strange)], 3)}, but data.classes has {num_classes} names "
            f"(ids 0 to {num_classes - 1}): "
            f"{_fitting(data, max(strange) + 1)}map to these ids, or to data.ignore_index = {ignored}",
        )


def _fitting(data: DataConfig, num_wanted: int) -> str:
    """Return the advice to name as many classes as `data.label_map` has; "" if some of these classes are unused."""
    used = {to for to in (data.label_map or {}).values() if to >= 0}
    return f"name {num_wanted} classes in data.classes, or " if used >= set(range(num_wanted)) else ""
