"""Parameter groups: which parameters share a learning rate and a weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True, order=True)
class GroupSettings:
    """What the parameters of a group share. Groups are ordered by these fields, which a resume relies on.

    Attributes:
        is_head: outside the backbone.
        layer: depth of the block, from 0 at the stem; 0 everywhere without layer-wise decay.
        pattern: number of the entry of `optim.groups`, from 1; 0: none.
        is_norm_or_bias: exempt from weight decay where `optim.decay_norm_and_bias` is false.
        lr_factor: factor on the learning rate.
        weight_decay: weight decay.
    """

    is_head: bool
    layer: int
    pattern: int
    is_norm_or_bias: bool
    lr_factor: float
    weight_decay: float


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], settings: Mapping[str, GroupSettings]
) -> dict[GroupSettings, dict[str, nn.Parameter]]:
    """Return the trainable parameters by their settings, in the order of the groups.

    Args:
        named: parameters by name; those that need no gradient are left out.
        settings: of each parameter, by name.
    """
    groups: dict[GroupSettings, dict[str, nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            groups.setdefault(settings[name], {})[name] = parameter
    return {key: groups[key] for key in sorted(groups)}


def as_optimizer_group(settings: GroupSettings, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
    """Return a group as torch's optimizers take it, with the key `lr_factor` for `set_lr`."""
    return {
        "params": list(parameters),
        "lr_factor": settings.lr_factor,
        "weight_decay": settings.weight_decay,
    }


def norm_and_bias(model: nn.Module) -> set[int]:
    """Return the `id` of every bias and of every parameter of a normalisation layer."""
    found = {id(p) for m in model.modules() if isinstance(m, _NORM_LAYERS) for p in m.parameters(recurse=False)}
    return found | {id(p) for name, p in model.named_parameters() if name.rsplit(".", 1)[-1] == "bias"}
