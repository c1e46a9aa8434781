"""LoRA with peft: low-rank adapters in a frozen backbone, which checkpoints can leave out.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022): a layer computes W x + (alpha / r) B A x. A
(r x inputs) and B (outputs x r) are trained, W is not.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from segapp.compat.torch import BatchNorm
from segapp.errors import ConfigError, install_command
from segapp.models.network import BaseReference, SegmentationModel

ATTENTION = ("q", "k", "v", "qkv", "kv", "q_proj", "k_proj", "v_proj", "proj")
MLP = ("fc1", "fc2", "fc1_g", "fc1_x")
"""Last components of the names of a transformer's linear layers in timm and smp."""


def add_adapters(
    model: SegmentationModel, *, rank: int, alpha: float, dropout: float = 0.0, targets: Sequence[str] | None = None
) -> None:
    """Freeze the backbone and put LoRA layers of peft around some of its layers, in place.

    Its BatchNorms stay in evaluation mode. `model.base` is set if tensors of the backbone came from weights files.

    Args:
        model: the network, with its pretrained weights.
        rank: r, the width of an adapter.
        alpha: the adapters' outputs are multiplied by alpha / r.
        dropout: probability of dropout before the adapters.
        targets: names of layers, ends of names, or patterns; None: the linear layers of attention and MLPs, but not of
            the MLPs if attention has reduced keys and values (MiT, PVT).

    Raises:
        ConfigError: peft is missing, the network has no backbone, or a target matches no layer that can be adapted.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"model.adapters needs the package peft: {install_command('lora')}", key="model.adapters")
    from peft import LoraConfig, inject_adapter_in_model

    prefix = model.backbone_prefix
    if all(name.startswith(prefix) for name, _ in model.named_parameters()):
        raise ConfigError(
            f"model.adapters: {model.name} has no backbone apart from its head: name one of its modules backbone or "
            "encoder",
            key="model.adapters",
        )
    chosen = _chosen_layers(model, targets)
    model.base = _reference(model, chosen)
    norms = [name for name, part in model.named_modules() if isinstance(part, BatchNorm)]
    model.base_norms = tuple(name for name in norms if name.startswith(prefix))
    inside = [name.removeprefix(prefix) for name in chosen]
    options: Any = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": inside}
    inject_adapter_in_model(LoraConfig(**options), model.backbone_module)
    model.train(model.training)


def merge_adapters(model: SegmentationModel) -> SegmentationModel:
    """Add the adapters to the weights that they adapt, in place, and return the network without adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
    vars(model.backbone_module).pop("peft_config")
    model.base, model.base_norms = None, ()
    return model


def _chosen_layers(model: SegmentationModel, targets: Sequence[str] | None) -> list[str]:
    """Return the names of the layers to adapt; if a target matches none, the ConfigError lists the available layers.

    Some transformers read a layer's weight and never call the layer, as timm's BEiT does with `qkv`; an adapter around
    it would have no effect.
    """
    inside = ((name, part) for name, part in model.named_modules() if name.startswith(model.backbone_prefix))
    layers = {name: part for name, part in inside if isinstance(part, nn.Linear | nn.Conv2d)}
    known = [name for name in layers if name in model.called_modules]
    if targets is None:
        linear = [name for name in known if isinstance(layers[name], nn.Linear)]
        is_reduced = any(name.endswith(".kv") for name in linear)
        usual = ATTENTION if is_reduced else (*ATTENTION, *MLP)
        if found := [name for name in linear if name.rpartition(".")[2] in usual]:
            return found
        raise _no_target(model, "is null, and", "no linear layer of a transformer's attention or MLP", known)
    chosen: dict[str, None] = {}
    for target in targets:
        is_meant = {name: name.endswith(f".{target}") or fnmatchcase(name, target) for name in layers}
        found = [name for name in known if is_meant[name]]
        if not found:
            what = "no layer of these names that is called" if any(is_meant.values()) else "no such layer"
            raise _no_target(model, f"has {target!r}:", what, known)
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _no_target(model: SegmentationModel, said: str, what: str, known: Sequence[str]) -> ConfigError:
    ends: dict[str, list[str]] = {}
    for name in known:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    there = ", ".join(f"{end} ({len(names)}, {names[0]})" for end, names in ends.items()) or "no linear layer at all"
    return ConfigError(
        f"model.adapters.targets {said} backbone {model.encoder_name} has {what}; it has {there}",
        key="model.adapters.targets",
    )


def _reference(model: SegmentationModel, adapted: Sequence[str]) -> BaseReference | None:
    """Return the reference to the backbone's tensors that came from weights files; None if there are none."""
    prefix = model.backbone_prefix
    taken = {name for report in model.load_reports for name in report.keys.taken}
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(prefix) and (name in taken or name.removeprefix(prefix) in taken)
    }
    if not tensors:
        return None
    content = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        content.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        content.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    layers = {name: name.rpartition(".")[0] for name in tensors}
    renamed = {
        name: f"{layer}.base_layer{name.removeprefix(layer)}" for name, layer in layers.items() if layer in adapted
    }
    names = frozenset(renamed.get(name, name) for name in tensors)
    return BaseReference(names, content.hexdigest(), tuple(report.source for report in model.load_reports))
