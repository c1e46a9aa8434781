"""The words that a config key accepts, and suggestions for an unknown key or word."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from segapp.config.options import BUILT_INS
from segapp.config.sections import LossTerm, ParamGroupConfig, RunConfig
from segapp.config.values import SHARE_PATTERN, section_of
from segapp.custom.names import COMPONENT_PATTERN
from segapp.errors import closest_words, did_you_mean
from segapp.scores import CLASS_SCORE_PATTERN, CLASS_SCORES

LISTS_OF_SECTIONS: Mapping[str, type[BaseModel]] = {"plus": LossTerm, "groups": ParamGroupConfig}
"""Fields that hold a list of sections -> the class of an entry."""

_WORDS_ELSEWHERE = {
    "parallel.devices": "device gpu gpus gpu_ids cuda num_gpus n_gpus",
    "parallel.mode": "strategy distributed ddp dp",
    "parallel.sync_bn": "sync_batchnorm syncbn sync_batch_norm",
    "train.batch_size": "batch bs bsz batchsize samples_per_gpu train_batch_size",
    "train.epochs": "epoch num_epochs max_epochs n_epochs num_train_epochs",
    "train.steps": "max_steps iters max_iters iterations num_steps num_iterations",
    "train.precision": "amp fp16 bf16 half mixed_precision",
    "train.accumulate": "grad_accum accumulate_grad_batches gradient_accumulation_steps accumulative_counts",
    "train.early_stop": "early_stopping early_stopping_patience",
    "optim.lr": "learning_rate base_lr lr0 init_lr",
    "optim.name": "optimizer optimiser",
    "optim.weight_decay": "wd weight_decay_rate",
    "optim.clip_grad_norm": "grad_clip clip_grad max_grad_norm gradient_clip_val",
    "schedule.name": "scheduler lr_scheduler lr_schedule lr_scheduler_type",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "data.root": "dataset data_root data_dir datadir data_path root_dir",
    "data.workers": "num_workers n_workers workers_per_gpu",
    "data.classes": "num_classes nclasses n_classes class_names names labels",
    "data.ignore_index": "ignore_label ignore_id ignore void_label",
    "data.crop_px": "image_size img_size imgsz input_size crop_size crop size",
    "data.image_dir": "img_dir images images_dir",
    "data.mask_dir": "mask_root ann_dir masks masks_dir label_dir",
    "data.augment": "transforms transform augmentation augmentations",
    "data.hflip": "flip horizontal_flip fliplr",
    "model.name": "arch architecture network net model_name",
    "model.encoder": "backbone encoder_name",
    "model.weights_backbone": "encoder_weights backbone_weights",
    "model.weights": "pretrained load_from pretrained_weights",
    "loss.name": "criterion loss_name loss_fn",
    "eval.every_epochs": "val_interval eval_interval validate_every",
    "checkpoint.every_epochs": "save_interval save_every save_epochs",
    "checkpoint.keep": "save_total_limit save_top_k max_keep_ckpts",
    "checkpoint.monitor": "metric_for_best_model save_best",
    "log.every_steps": "log_interval log_every_n_steps logging_steps",
    "seed": "random_seed manual_seed random_state",
    "name": "run_name exp_name experiment experiment_name project",
}
KEYS_ELSEWHERE: Mapping[str, str] = {word: key for key, words in _WORDS_ELSEWHERE.items() for word in words.split()}
"""Names of keys in other trainers, in lower case -> the key in segapp."""

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
        "warmup_stable_decay": "wsd",
    },
    "model.library": {"segmentation_models_pytorch": "smp", "torch": "torchvision", "timm": "smp", "own": "python"},
    "parallel.mode": {"dataparallel": "dp", "distributed": "ddp", "fsdp": "model"},
}
"""Key -> words of other programs, in lower case -> the word in segapp."""


def known_keys(model: type[BaseModel] = RunConfig, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key path of the config, including sections and the options of built-in losses and so on."""
    for name in model.model_fields:
        yield (*prefix, name)
        if name == "options" and prefix[-1] in BUILT_INS:
            built_ins = BUILT_INS[prefix[-1]].values()
            yield from dict.fromkeys((*prefix, name, key) for each in built_ins for key in each.options.model_fields)
        section = section_of(model, name)
        if section is not None:
            yield from known_keys(section, (*prefix, name))


def meant_key(path: Sequence[str]) -> str:
    """Return the suggestion for an unknown key, as "did you mean optim.lr?", or the keys that exist."""
    if found := keys_like(path):
        return f"did you mean {' or '.join(found)}?"
    *section, _ = path
    if section and (siblings := _siblings(section)):
        return f"{'.'.join(section)} has {', '.join(sorted(siblings))}"
    return f"the sections are {', '.join(RunConfig.model_fields)}"


def keys_like(path: Sequence[str]) -> list[str]:
    """Return the keys that the user of an unknown key probably meant, the most similar first.

    Candidates are keys of the same section with a similar spelling, keys with that name in other sections, and keys
    that have that name in other programs; if there are none, similar names in all sections.
    """
    keys = list(known_keys())
    if tuple(path) in keys:
        return [".".join(path)]
    *section, word = path
    siblings = _siblings(section)
    found = [".".join((*section, name)) for name in closest_words(word, siblings)]
    if not found:
        same = [key for key in keys if key[-1] == word]
        found = [".".join(key) for key in same if len(key) == min(map(len, same))]
    if word.lower() in KEYS_ELSEWHERE:
        found.append(KEYS_ELSEWHERE[word.lower()])
    if not found:
        names = {**KEYS_ELSEWHERE, **{key[-1]: ".".join(key) for key in reversed(keys) if len(key) > 1}}
        found = [names[name] for name in closest_words(word, names)]
    return list(dict.fromkeys(found))


def _siblings(section: Sequence[str]) -> list[str]:
    """Return the keys of a section, or of an entry of a list such as `loss.plus`; [] for another path."""
    entries = [list(LISTS_OF_SECTIONS[part].model_fields) for part in section if part in LISTS_OF_SECTIONS]
    return [key[-1] for key in known_keys() if list(key[:-1]) == list(section)] or next(iter(entries), [])


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


def _members(loc: Sequence[str]) -> list[dict[str, Any]]:
    node = _field_schema(loc) or {}
    members: list[dict[str, Any]] = node.get("anyOf", [node])
    return members


def words_of(loc: Sequence[str]) -> list[str]:
    """Return the words that a field accepts; [] for a field without words, such as a number or text."""
    words: list[str] = []
    for member in map(_resolved, _members(loc)):
        words += [str(value) for value in member.get("enum", [])]
        words += [str(member["const"])] if "const" in member else []
        words += {"null": ["null"], "boolean": ["true", "false"]}.get(member.get("type", ""), [])
    return words


_TYPES = {"null": "null", "array": "a list", "object": "a mapping", "string": "text", "boolean": "true | false"}


def _accepted(member: dict[str, Any]) -> str:
    """Return the words for one type of a field; "" for a section."""
    kind = member.get("type", "")
    if "enum" in member:
        return " | ".join(map(str, member["enum"]))
    if "const" in member:
        return str(member["const"])
    if member.get("pattern") == COMPONENT_PATTERN:
        return "package.module:factory"
    if member.get("pattern") == SHARE_PATTERN:
        return "a share such as 5%"
    if member.get("pattern") == CLASS_SCORE_PATTERN:
        return " | ".join(f"{kind}:CLASS" for kind in CLASS_SCORES)
    if kind in ("integer", "number"):
        least = [
            f" {sign} {member[key]}" for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">")) if key in member
        ]
        return ("a whole number" if kind == "integer" else "a number") + "".join(least[:1])
    return _TYPES.get(kind, "")


def options_of(loc: Sequence[str]) -> str:
    """Return the accepted values, e.g. "auto | null | a whole number >= 0"; empty for a field with one type."""
    options = [text for member in _members(loc) if (text := _accepted(member))]
    return " | ".join(options) if len(options) > 1 or any("enum" in member for member in _members(loc)) else ""


def description_of(loc: Sequence[str]) -> str:
    """Return ": ", the documentation of a field, and the values that it accepts."""
    options = options_of(loc)
    text = (_field_schema(loc) or {}).get("description", "")
    return ": " + (f"{text} Accepted: {options}" if options else text or "add it").strip()
