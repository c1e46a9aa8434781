"""The words that a key of the config accepts, and the key or word that a user probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from segapp.config.options import BUILT_INS
from segapp.config.sections import LossTerm, ParamGroupConfig, RunConfig
from segapp.config.values import section_of
from segapp.custom import PART_PATTERN
from segapp.errors import closest_words, did_you_mean

LISTS_OF_SECTIONS: Mapping[str, type[BaseModel]] = {"plus": LossTerm, "groups": ParamGroupConfig}
"""Fields that hold a list of sections, and the class of an entry."""

KEYS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("device", "gpu", "gpus", "gpu_ids", "cuda", "num_gpus", "n_gpus"), "parallel.devices"),
    **dict.fromkeys(("strategy", "distributed", "ddp", "dp"), "parallel.mode"),
    **dict.fromkeys(("sync_batchnorm", "syncbn", "sync_batch_norm"), "parallel.sync_bn"),
    **dict.fromkeys(("batch", "bs", "bsz", "batchsize", "samples_per_gpu", "train_batch_size"), "train.batch_size"),
    **dict.fromkeys(("epoch", "num_epochs", "max_epochs", "n_epochs", "num_train_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "iters", "max_iters", "iterations", "num_steps", "num_iterations"), "train.steps"),
    **dict.fromkeys(("amp", "fp16", "bf16", "half", "mixed_precision"), "train.precision"),
    **dict.fromkeys(
        ("grad_accum", "accumulate_grad_batches", "gradient_accumulation_steps", "accumulative_counts"),
        "train.accumulate",
    ),
    **dict.fromkeys(("early_stopping", "early_stopping_patience"), "train.early_stop"),
    **dict.fromkeys(("learning_rate", "base_lr", "lr0", "init_lr"), "optim.lr"),
    **dict.fromkeys(("optimizer", "optimiser"), "optim.name"),
    **dict.fromkeys(("wd", "weight_decay_rate"), "optim.weight_decay"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_grad_norm", "gradient_clip_val"), "optim.clip_grad_norm"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedule", "lr_scheduler_type"), "schedule.name"),
    **dict.fromkeys(("warmup", "warmup_iters", "num_warmup_steps"), "schedule.warmup_steps"),
    **dict.fromkeys(("dataset", "data_root", "data_dir", "datadir", "data_path", "root_dir"), "data.root"),
    **dict.fromkeys(("num_workers", "n_workers", "workers_per_gpu"), "data.workers"),
    **dict.fromkeys(("num_classes", "nclasses", "n_classes", "class_names", "names", "labels"), "data.classes"),
    **dict.fromkeys(("ignore_label", "ignore_id", "ignore", "void_label"), "data.ignore_index"),
    **dict.fromkeys(("image_size", "img_size", "imgsz", "input_size", "crop_size", "crop", "size"), "data.crop_px"),
    **dict.fromkeys(("img_dir", "images", "images_dir"), "data.image_dir"),
    **dict.fromkeys(("ann_dir", "masks", "masks_dir", "label_dir"), "data.mask_dir"),
    **dict.fromkeys(("transforms", "transform", "augmentation", "augmentations"), "data.augment"),
    **dict.fromkeys(("flip", "horizontal_flip", "fliplr"), "data.hflip"),
    **dict.fromkeys(("arch", "architecture", "network", "net", "model_name"), "model.name"),
    **dict.fromkeys(("backbone", "encoder_name"), "model.encoder"),
    **dict.fromkeys(("encoder_weights", "backbone_weights"), "model.weights_backbone"),
    **dict.fromkeys(("pretrained", "load_from", "pretrained_weights"), "model.weights"),
    **dict.fromkeys(("criterion", "loss_name", "loss_fn"), "loss.name"),
    **dict.fromkeys(("val_interval", "eval_interval", "validate_every"), "eval.every_epochs"),
    **dict.fromkeys(("save_interval", "save_every", "save_epochs"), "checkpoint.every_epochs"),
    **dict.fromkeys(("save_total_limit", "save_top_k", "max_keep_ckpts"), "checkpoint.keep"),
    **dict.fromkeys(("metric_for_best_model", "save_best"), "checkpoint.monitor"),
    **dict.fromkeys(("log_interval", "log_every_n_steps", "logging_steps"), "log.every_steps"),
    **dict.fromkeys(("random_seed", "manual_seed", "random_state"), "seed"),
    **dict.fromkeys(("run_name", "exp_name", "experiment", "experiment_name", "project"), "name"),
}
"""Names of keys in other trainers, in lower case -> the key here."""

VALUES_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "loss.name": {"cross_entropy": "ce", "crossentropy": "ce", "crossentropyloss": "ce", "softmax": "ce"},
    "train.precision": {
        **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "amp"), "amp-bf16"),
        **dict.fromkeys(("16", "half", "float16", "16-mixed", "mixed"), "amp-fp16"),
        **dict.fromkeys(("32", "float32", "full"), "fp32"),
    },
    "schedule.name": {
        "linear": "poly",
        "multistep": "step",
        "cosineannealing": "cosine",
        "reducelronplateau": "plateau",
    },
    "model.library": {"segmentation_models_pytorch": "smp", "torch": "torchvision", "timm": "smp", "own": "python"},
    "parallel.mode": {"dataparallel": "dp", "distributed": "ddp", "fsdp": "model"},
}
"""Key -> words of other programs, in lower case -> the word here."""


def known_keys(model: type[BaseModel] = RunConfig, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key path of the config, including those of sections and the options of built-in losses and such."""
    for name in model.model_fields:
        yield (*prefix, name)
        if name == "options" and prefix[-1] in BUILT_INS:
            built_ins = BUILT_INS[prefix[-1]].values()
            yield from dict.fromkeys((*prefix, name, key) for each in built_ins for key in each.options.model_fields)
        section = section_of(model, name)
        if section is not None:
            yield from known_keys(section, (*prefix, name))


def meant_key(path: Sequence[str]) -> str:
    """Return the key that an unknown one was probably meant to be, as "did you mean optim.lr?", or the keys there are.

    Considered are keys of the same section with a similar spelling, keys of that name in other sections, and the key
    that other programs call so; without any, similar names anywhere.

    Args:
        path: the unknown key path.
    """
    keys = list(known_keys())
    *section, word = path
    siblings = [key[-1] for key in keys if list(key[:-1]) == section] or _keys_of_entry(section)
    found = [".".join((*section, name)) for name in closest_words(word, siblings)]
    if not found:
        same = [key for key in keys if key[-1] == word]
        found = [".".join(key) for key in same if len(key) == min(map(len, same))]
    if word.lower() in KEYS_ELSEWHERE:
        found.append(KEYS_ELSEWHERE[word.lower()])
    if not found:
        names = {**KEYS_ELSEWHERE, **{key[-1]: ".".join(key) for key in reversed(keys) if len(key) > 1}}
        found = [names[name] for name in closest_words(word, names)]
    if found:
        return f"did you mean {' or '.join(dict.fromkeys(found))}?"
    if section and siblings:
        return f"{'.'.join(section)} has {', '.join(sorted(siblings))}"
    return f"the sections are {', '.join(RunConfig.model_fields)}"


def _keys_of_entry(section: Sequence[str]) -> list[str]:
    """Return the keys of an entry of a list such as `loss.plus`; [] for another path."""
    kinds = [LISTS_OF_SECTIONS[part] for part in section if part in LISTS_OF_SECTIONS]
    return list(kinds[0].model_fields) if kinds else []


def meant_word(key: str, word: str, known: Sequence[str]) -> str:
    """Return "did you mean ce?" for a value that is none of the known words of a key; "" if none is similar."""
    elsewhere = VALUES_ELSEWHERE.get(key, {}).get(word.lower())
    return f"did you mean {elsewhere}?" if elsewhere is not None else did_you_mean(word, known)


@cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = _schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return node


def _field_schema(loc: Sequence[str]) -> dict[str, Any] | None:
    node = _schema()
    for part in loc:
        for member in map(_resolved, node.get("anyOf", [node])):  # an optional section has two members
            if part in member.get("properties", {}):
                node = member["properties"][part]
                break
            if member.get("type") == "array" and "items" in member:
                node = member["items"]
                break
        else:
            return None
    return _resolved(node)


def words_of(loc: Sequence[str]) -> list[str]:
    """Return the words that a field accepts; [] for a field without any, such as a number or text."""
    node = _field_schema(loc)
    words: list[str] = []
    for member in (node or {}).get("anyOf", [node or {}]):
        member = _resolved(member)
        words += [str(value) for value in member.get("enum", [])]
        words += [str(member["const"])] if "const" in member else []
        words += {"null": ["null"], "boolean": ["true", "false"]}.get(member.get("type", ""), [])
    return words


_LEAST = {"minimum": ">=", "exclusiveMinimum": ">"}


def options_of(loc: Sequence[str]) -> str:
    """Return what a field accepts, e.g. "auto | null | a whole number >= 0"; empty for a field with one type."""
    node = _field_schema(loc)
    if node is None:
        return ""
    words: list[str] = []
    for member in node.get("anyOf", [node]):
        if "enum" in member:
            words += [str(value) for value in member["enum"]]
        elif "const" in member:
            words.append(str(member["const"]))
        elif member.get("pattern") == PART_PATTERN:
            words.append("package.module:factory")
        elif member.get("type") == "null":
            words.append("null")
        elif member.get("type") == "integer":
            words.append("a whole number" + (f" >= {member['minimum']}" if "minimum" in member else ""))
        elif member.get("type") == "number":
            least = next((f" {sign} {member[key]}" for key, sign in _LEAST.items() if key in member), "")
            words.append(f"a number{least}")
        elif member.get("type") in {"array", "object", "string", "boolean"}:
            words.append(
                {"array": "a list", "object": "a mapping", "string": "text", "boolean": "true | false"}[member["type"]]
            )
    return " | ".join(words) if len(words) > 1 or "enum" in node else ""


def description_of(loc: Sequence[str]) -> str:
    """Return ": " and the documentation of a field with what it accepts."""
    node = _field_schema(loc)
    options = options_of(loc)
    text = (node or {}).get("description", "")
    return ": " + (f"{text} Accepted: {options}" if options else text or "add it").strip()
