"""Parameter groups: which parameters share a learning rate and a weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

_NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def parameter_groups(
    backbone: Iterable[nn.Parameter],
    head: Iterable[nn.Parameter],
    no_decay: set[int],
    *,
    weight_decay: float,
    head_lr_factor: float,
) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: {backbone, head} x {decay, no decay}, without empty ones.

    Args:
        backbone: parameters with learning rate lr.
        head: parameters with learning rate lr x head_lr_factor.
        no_decay: `id` of the parameters without weight decay.
        weight_decay: weight decay of the other parameters.
        head_lr_factor: stored in each group as `lr_factor`.
    """
    groups = []
    for parameters, factor in ((list(backbone), 1.0), (list(head), head_lr_factor)):
        for decays in (True, False):
            chosen = [p for p in parameters if p.requires_grad and (id(p) not in no_decay) == decays]
            if chosen:
                decay = weight_decay if decays else 0.0
                groups.append({"params": chosen, "lr_factor": factor, "weight_decay": decay})
    return groups


def norm_and_bias(model: nn.Module) -> set[int]:
    """Return the `id` of every bias and of every parameter of a normalisation layer."""
    found = {id(p) for m in model.modules() if isinstance(m, _NORM_LAYERS) for p in m.parameters(recurse=False)}
    return found | {id(p) for name, p in model.named_parameters() if name.rsplit(".", 1)[-1] == "bias"}
