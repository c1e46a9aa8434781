"""LoRA with peft: low-rank adapters in a frozen backbone, which checkpoints can leave out.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022): a layer computes W x + (alpha / r) B A x. A
(r x inputs) and B (outputs x r) are trained, W is not.
"""

import hashlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from segapp.compat.torch import BatchNorm
from segapp.errors import ConfigError, install_command
from segapp.models.network import BaseReference, SegmentationModel

ATTENTION = ("q", "k", "v", "qkv", "kv", "q_proj", "k_proj", "v_proj", "proj")
MLP = ("fc1", "fc2", "fc1_g", "fc1_x")
"""Last components of the names of a transformer's linear layers in timm and smp."""


def add_adapters(model: SegmentationModel, rank: int) -> None:
    """Freeze the backbone and put LoRA layers of peft around the linear layers of its attention and MLPs, in place.

    Its BatchNorms stay in evaluation mode. `model.base` is set if tensors of the backbone came from weights files.
    `rank` is r, the width of an adapter, and alpha.

    Raises:
        ConfigError: peft is missing, the network has no backbone, or no layer of it can be adapted.
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
    chosen = _chosen_layers(model)
    model.base = _reference(model, chosen)
    norms = [name for name, part in model.named_modules() if isinstance(part, BatchNorm)]
    model.base_norms = tuple(name for name in norms if name.startswith(prefix))
    inside = [name.removeprefix(prefix) for name in chosen]
    options: Any = {"r": rank, "lora_alpha": rank, "target_modules": inside}
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


def _chosen_layers(model: SegmentationModel) -> list[str]:
    """Return the names of the layers to adapt: the linear layers of attention, and of MLPs.

    If attention has reduced keys and values (MiT, PVT), the MLPs are left out. So are layers whose weight is read
    although the layer is never called, as timm's BEiT does with `qkv`: an adapter around it would have no effect.

    Raises:
        ConfigError: there is no such layer.
    """
    inside = ((name, part) for name, part in model.named_modules() if name.startswith(model.backbone_prefix))
    linear = [name for name, part in inside if isinstance(part, nn.Linear) and name in model.called_modules]
    is_reduced = any(name.endswith(".kv") for name in linear)
    usual = ATTENTION if is_reduced else (*ATTENTION, *MLP)
    chosen = [name for name in linear if name.rpartition(".")[2] in usual]
    if not chosen:
        raise ConfigError(
            f"model.adapters: backbone {model.encoder_name} has no linear layer of a transformer's attention or MLP: "
            "leave adapters out, or choose a vision transformer",
            key="model.adapters",
        )
    return chosen


def _reference(model: SegmentationModel, adapted: Sequence[str]) -> BaseReference | None:
    """Return the reference to the backbone's tensors that came from weights files; None if there are none."""
    taken = {name for report in model.load_reports for name in report.keys.taken}
    inside = ((n, tensor) for n, tensor in model.state_dict().items() if n.startswith(model.backbone_prefix))
    tensors = {name: tensor for name, tensor in inside if name in taken}
    if not tensors:
        return None
    content = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        content.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        content.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    # peft moves the tensors of an adapted layer below `base_layer`.
    layers = {name: name.rpartition(".")[0] for name in tensors}
    renamed = {
        name: f"{layer}.base_layer{name.removeprefix(layer)}" for name, layer in layers.items() if layer in adapted
    }
    names = frozenset(renamed.get(name, name) for name in tensors)
    return BaseReference(names, content.hexdigest(), tuple(report.source for report in model.load_reports))
