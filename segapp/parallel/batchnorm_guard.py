"""Find batches that a network cannot train on: one value per channel in BatchNorm, or a rank without samples.

BatchNorm cannot train on one value: a chunk of one sample after image-wide pooling (1 x 1 pixels, as in DeepLab's ASPP)
has no variance. Synchronized over the batch, it has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from segapp.accelerator import random_states_kept
from segapp.parallel.recompute import activations_kept
from segapp.parallel.scatter_gather import map_tensors, tensors_in
from segapp.parallel.sync_batchnorm import SyncBatchNorm, plain_batchnorms, revert_sync_batchnorm


def smallest_chunk(module: nn.Module, *inputs: Any) -> int:
    """Return the minimum number of samples per device: 2 if a BatchNorm layer gets one value per sample, else 1.

    It is also 2 if a module with such layers cannot run on the meta device: refusing a split is better than a crash.

    Args:
        module: the model in the mode in which it will be trained; layers in evaluation mode are ignored.
        *inputs: example inputs with any number of samples; only shapes and dtypes are used, nothing is computed and no
        memory is allocated.
    """
    plain = [layer for layer in plain_batchnorms(module).values() if layer.training or layer.running_mean is None]
    if not plain:
        return 1
    num_values: list[int] = []

    def note(_layer: nn.Module, args: tuple[Any, ...]) -> None:
        # Values per channel and sample: if there is one, a single sample has no variance.
        num_values.append(args[0].numel() // (args[0].size(0) * args[0].size(1)))

    hooks = [layer.register_forward_pre_hook(note) for layer in plain]
    try:
        state = {name: tensor.to("meta") for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        with torch.no_grad():
            functional_call(module, state, tuple(map_tensors(_as_two_samples, item) for item in inputs))
    except Exception:  # code of the user may refuse the meta device in words of its own
        return 2
    finally:
        for hook in hooks:
            hook.remove()
    return 2 if 1 in num_values else 1


def _sum_of_outputs(outputs: Any) -> Tensor:
    return torch.stack([tensor.float().sum() for tensor in tensors_in(outputs)]).sum()


def no_samples_problem(
    module: nn.Module,
    *inputs: Any,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    loss: Callable[[Any], Tensor] = _sum_of_outputs,
) -> str | None:
    """Return why a rank cannot train this module without samples; None if it can.

    Without samples, a rank still runs its forward and backward pass, because it takes part in the ranks' exchanges. The
    check runs both in the same way; synchronized BatchNorm uses its running statistics, because no other rank takes
    part. Gradients, buffers and torch's random states are not changed.

    Args:
        module: the model on its device, in the mode in which it will be trained.
        *inputs: example inputs on that device; only their shapes and dtypes are used.
        autocast: returns the context of the training's forward pass.
        loss: returns a 0-dim tensor from the module's outputs, for the backward pass.
    """
    for name, layer in plain_batchnorms(module).items():
        if layer.training:
            return f"BatchNorm layer {name!r} is not synchronized (sync_bn: true), and its statistics need samples"
    synced = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm) and layer.training]
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    running: list[str] = []
    hooks = []
    for name, layer in module.named_modules():
        label = f"{type(layer).__name__} {name!r}" if name else type(layer).__name__
        # The innermost module that runs during an error is named, because torch's own message says nothing of it.
        hooks.append(layer.register_forward_pre_hook(lambda *_, label=label: running.append(label)))
        hooks.append(layer.register_forward_hook(lambda *_, label=label: running.remove(label)))
    try:
        for layer in synced:
            layer.eval()
        with random_states_kept(parameter.device for parameter in module.parameters()):
            with autocast():
                total = loss(module(*(map_tensors(lambda tensor: tensor[:0], item) for item in inputs)))
            if total.requires_grad:
                torch.autograd.grad(total, trained, allow_unused=True)
    except Exception:
        failed = running[-1] if running else "the loss or the backward pass"
        return f"{failed} cannot compute a batch of 0 samples"
    finally:
        for hook in hooks:
            hook.remove()
        for layer in synced:
            layer.train()
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
    return None


def unused_parameters(module: nn.Module, *inputs: Any) -> list[str]:
    """Return the trainable parameters on which no output depends; empty if the module cannot run on the meta device.

    `DistributedDataParallel` waits for the gradient of every parameter, unless it searches for unused ones itself.

    `smallest_chunk` has the same arguments.
    """
    synced = [(layer, type(layer)) for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    trained = {name: torch.empty_like(value, device="meta", requires_grad=True) for name, value in named.items()}
    state = {name: value.to("meta") for name, value in (*module.named_parameters(), *module.named_buffers())}
    try:
        for layer, _ in synced:  # no exchange with the other ranks
            revert_sync_batchnorm(layer)
        with activations_kept():  # the backward pass is outside of `functional_call`, which replaces the parameters
            outputs = functional_call(
                module, {**state, **trained}, tuple(map_tensors(_as_two_samples, i) for i in inputs)
            )
    except Exception:
        return []
    finally:
        for layer, kind in synced:
            layer.__class__ = kind
    sums = [output.float().sum() for output in tensors_in(outputs) if output.requires_grad]
    if not sums or not trained:
        return []
    gradients = torch.autograd.grad(sums, list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]


def _as_two_samples(tensor: Tensor) -> Tensor:
    return torch.empty((2, *tensor.shape[1:]), dtype=tensor.dtype, device="meta") if tensor.dim() else tensor.to("meta")
