"""Build the criterion, the optimizer, its parameter groups and the learning-rate schedule from the config."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from segapp.assembly.own_parts import own_criterion, own_optimizer, own_schedule
from segapp.config import LossConfig, LossTerm, OptimConfig, RunConfig, ScheduleConfig
from segapp.config.options import LOSSES, OPTIMIZERS, SCHEDULES
from segapp.custom.loading import build_part
from segapp.custom.names import is_component
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError
from segapp.losses import AdditiveCriterion, CriterionSum
from segapp.models import SegmentationModel
from segapp.models.eomt import NUM_QUERIES
from segapp.optim import GroupSettings, Plateau, Shape, norm_and_bias, parameter_groups, warmed_up
from segapp.precision import Precision


def criterion_of(config: RunConfig, scheme: ClassScheme, weights_of: Callable[[str], list[float]]) -> AdditiveCriterion:
    queries = int(config.model.options.get("num_queries", NUM_QUERIES))
    is_multilabel = scheme.multilabel is not None
    sizes = scheme.num_classes, scheme.ignore_index
    return build_criterion(config.loss, *sizes, weights_of, queries, multilabel=is_multilabel)


def build_criterion(
    section: LossConfig,
    num_classes: int,
    ignore_index: int,
    weights_of: Callable[[str], list[float]],
    num_queries: int = 1,
    *,
    multilabel: bool = False,
) -> AdditiveCriterion:
    """Return the criterion of a `loss` section.

    `weights_of` returns the class weights of a named rule. `num_queries` is used by mask classification. With
    `multilabel`, targets are sets of classes.

    Raises:
        ConfigError: the number of class weights is not the number of classes.
    """
    given = {
        "num_classes": num_classes,
        "num_queries": num_queries,
        "ignore_index": ignore_index,
        "multilabel": multilabel,
        "align_corners": section.is_aligned,
        "aux_weight": section.aux_weight,
    }
    weights = section.class_weights
    if isinstance(weights, str):
        weights = weights_of(weights)
    if weights is not None and len(weights) != num_classes:
        raise ConfigError(
            f"loss.class_weights has {len(weights)} values for {num_classes} classes: give one per class",
            key="loss.class_weights",
        )
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float32)
    first = {**given, "weight": weight, "label_smoothing": section.label_smoothing}
    criteria = [(section.weight, _build_term(section, first))]
    criteria += [(term.weight, _build_term(term, given)) for term in section.plus]
    total = criteria[0][1] if len(criteria) == 1 and criteria[0][0] == 1.0 else CriterionSum(criteria)
    for part in total.modules():
        if isinstance(part, AdditiveCriterion):
            part.takes_any_aspect = True  # an evaluation squashes images by data.resize_px, but not their masks
    return total


def _build_term(term: LossTerm, given: Mapping[str, Any]) -> AdditiveCriterion:
    if is_component(term.name):
        return own_criterion(
            term,
            given["num_classes"],
            given["ignore_index"],
            given.get("weight"),
            align_corners=given["align_corners"],
            aux_weight=given["aux_weight"],
        )
    criterion: AdditiveCriterion = build_part(
        LOSSES[term.name].factory, "loss.name", term.options, offered=given, is_built_in=True
    )
    return criterion


def build_parameter_groups(
    section: OptimConfig, model: SegmentationModel, precision: Precision, only: Collection[str] | None = None
) -> list[Mapping[str, Any]]:
    """Return the optimizer's groups of the trainable parameters, as master weights; `set_lr` uses `lr_factor`.

    `only`: names of the parameters to use; None: all.

    Raises:
        ConfigError: `layer_decay` or an entry of `groups` does not suit the network.
    """
    named = [(name, p) for name, p in model.named_parameters() if only is None or name in only]
    return [
        {"params": precision.master_weights(group.values()), "lr_factor": of.lr_factor, "weight_decay": of.weight_decay}
        for of, group in parameter_groups(named, group_settings(section, model)).items()
    ]


def group_settings(section: OptimConfig, model: SegmentationModel) -> dict[str, GroupSettings]:
    """Return learning-rate factor and weight decay of each parameter, by name.

    Raises:
        ConfigError: `layer_decay` or an entry of `groups` does not suit the network.
    """
    no_decay = set() if section.decay_norm_and_bias else norm_and_bias(model)
    depths, decays = _layer_factors(section.layer_decay, model)
    entry_of: dict[str, int] = {}
    for number, entry in enumerate(section.groups, start=1):
        for name in model.names_matching(entry.pattern, f"optim.groups[{number - 1}].pattern"):
            entry_of.setdefault(name, number)  # the first matching entry applies
    prefix, settings = model.backbone_prefix, {}
    for name, parameter in model.named_parameters():
        is_head, is_exempt = not name.startswith(prefix), id(parameter) in no_decay
        factor = section.head_lr_factor if is_head else decays.get(name, 1.0)
        decay = 0.0 if is_exempt else section.weight_decay
        number = entry_of.get(name, 0)
        if number:
            chosen = section.groups[number - 1]
            factor = factor if chosen.lr_factor is None else chosen.lr_factor
            decay = decay if chosen.weight_decay is None else chosen.weight_decay
        settings[name] = GroupSettings(is_head, depths.get(name, 0), number, is_exempt, factor, decay)
    return settings


def _layer_factors(layer_decay: float | None, model: SegmentationModel) -> tuple[dict[str, int], dict[str, float]]:
    """Return depth and learning-rate factor of the backbone's parameters; empty without layer-wise decay."""
    if layer_decay is None:
        return {}, {}
    prefix = model.backbone_prefix
    found = layer_depths(name for name, _ in model.named_parameters() if name.startswith(prefix))
    if isinstance(found, str):
        raise ConfigError(
            f"optim.layer_decay = {layer_decay}: the depth of {found} in backbone {model.encoder_name} is not known "
            "(ViT, DINO, Swin, ConvNeXt, PVT and SegFormer encoders have numbered blocks): use "
            "optim.groups",
            key="optim.layer_decay",
            value=layer_decay,
        )
    depths, end = found
    return depths, {name: layer_decay ** (end - depth) for name, depth in depths.items()}


def build_optimizer(section: OptimConfig, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    if is_component(section.name):
        return own_optimizer(section, groups)
    factory, offered = OPTIMIZERS[section.name].factory, {"lr": section.lr, "momentum": section.momentum}
    optimizer: torch.optim.Optimizer = build_part(
        factory, "optim.name", section.options, groups, offered=offered, is_built_in=True
    )
    return optimizer


def build_schedule(section: ScheduleConfig, lr: float, *, total_steps: int, steps_per_epoch: int) -> Shape:
    """Return the learning rate at each step, from 1, before the factors of the parameter groups.

    `lr`: base learning rate, which is reached after the warm-up.
    """
    if is_component(section.name):
        factor = own_schedule(section, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        return lambda step: lr * factor(step)
    offered = {
        "lr": lr,
        "total_steps": total_steps,
        "steps_per_epoch": steps_per_epoch,
        "power": section.power,
        "min_lr": section.min_lr,
    }
    shape: Shape = build_part(
        SCHEDULES[section.name].factory, "schedule.name", section.options, offered=offered, is_built_in=True
    )
    return warmed_up(shape, section.num_warmup_steps(total_steps))


def build_plateau(section: ScheduleConfig, lr: float, *, larger_is_better: bool) -> Plateau | None:
    """Return the object that lowers the learning rate after evaluations; None for another schedule.

    `lr`: base learning rate, for `min_lr`. `larger_is_better`: True if larger values of the monitored result are
    better.
    """
    if section.name != "plateau":
        return None
    return Plateau(**section.options, lowest=section.min_lr / lr, larger_is_better=larger_is_better)


_BLOCK = re.compile(r"(?:^|\.)(?:stages|layers)[._](\d+)\.(?:.+\.)?blocks\.(\d+)\.")  # Swin, ConvNeXt, PVT
_MIT_BLOCK = re.compile(r"(?:^|\.)block(\d+)\.(\d+)\.")  # smp's SegFormer: from 1
_PLAIN_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")  # ViT
_STAGE_START = re.compile(r"(?:^|\.)(?:stages|layers)[._](\d+)\.downsample\.")
_MIT_STAGE_START = re.compile(r"(?:^|\.)patch_embed(\d+)\.")
_STAGE_END = re.compile(r"(?:^|\.)(?:stages|layers)[._](\d+)\.norm\.")
_MIT_STAGE_END = re.compile(r"(?:^|\.)norm(\d+)\.(?:weight|bias)$")
_STEM = re.compile(r"(?:^|\.)(?:stem(?:_\d+)?|patch_embed|pos_embed|(?:cls|reg|mask|dist)_token|rope|norm_pre)(?:\.|$)")
_END = re.compile(r"(?:^|\.)(?:norm|fc_norm)\.(?:weight|bias)$")
# After every number of a stage or a block.
_LAST = 10**6


def layer_depths(names: Iterable[str]) -> tuple[dict[str, int], int] | str:
    """Return the depth of each parameter of a backbone, and the depth of the layers after the backbone.

    The stem has depth 0, the blocks have 1 to L in the order in which they run, the head has L + 1 (Bao et al., BEiT,
    2022). Layers at the start of a stage belong to its first block. Layers at the end of a stage or of the backbone
    belong to the last block before them, as in timm.

    Returns:
        The depths and L + 1; or the first name that does not fit this order.

    Example:
        >>> layer_depths(["cls_token", "blocks.0.norm1.weight", "blocks.1.norm1.weight", "norm.weight"])
        ({'cls_token': 0, 'blocks.0.norm1.weight': 1, 'blocks.1.norm1.weight': 2, 'norm.weight': 2}, 3)
        >>> layer_depths(["conv1.weight", "layer1.0.conv1.weight"])
        'conv1.weight'
    """
    places: dict[str, tuple[int, int]] = {}
    for name in names:
        place = _place(name)
        if place is None:
            return name
        places[name] = place
    blocks = sorted({place for place in places.values() if place[0] >= 0 and place[1] < _LAST})
    if not blocks:
        return next(iter(places), "no parameter")
    depth_of = {block: depth for depth, block in enumerate(blocks, start=1)}
    last_of_stage = {stage: depth_of[stage, index] for stage, index in blocks}
    last_of_stage[_LAST] = len(blocks)
    return {name: _depth(place, depth_of, last_of_stage) for name, place in places.items()}, len(blocks) + 1


def _place(name: str) -> tuple[int, int] | None:
    """Return (stage, block); stem (-1, 0), end of a stage (stage, _LAST), end of the backbone (_LAST, _LAST)."""
    # The blocks come first: the names of norms inside a block also match the patterns below.
    if found := _BLOCK.search(name):
        return int(found[1]), int(found[2])
    if found := _MIT_BLOCK.search(name):
        return int(found[1]) - 1, int(found[2])
    if found := _PLAIN_BLOCK.search(name):
        return 0, int(found[1])
    if found := _STAGE_START.search(name):
        return int(found[1]), 0
    if found := _MIT_STAGE_START.search(name):
        return (-1, 0) if found[1] == "1" else (int(found[1]) - 1, 0)
    if found := _STAGE_END.search(name):
        return int(found[1]), _LAST
    if found := _MIT_STAGE_END.search(name):
        return int(found[1]) - 1, _LAST
    if _STEM.search(name):
        return -1, 0
    return (_LAST, _LAST) if _END.search(name) else None


def _depth(place: tuple[int, int], depth_of: dict[tuple[int, int], int], last_of_stage: dict[int, int]) -> int:
    stage, block = place
    if stage == -1:
        return 0
    return last_of_stage[stage] if block == _LAST else depth_of[place]
