"""Inspect a network by running it once on the meta device: shapes only, no arithmetic, no random numbers.

Libraries build modules that a given depth never runs (a ResNet's last stages under a PSPNet) or whose output is unused.
Such parameters take memory on every device, and DistributedDataParallel waits for their gradients. A BatchNorm after a
global pooling cannot train on a batch of one image. Both depend on the backbone, so they are measured, not listed.

Shapes: N images, C classes, H x W of the input, h x w of the logits.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.func import functional_call

from segapp.custom.loading import shown_error
from segapp.errors import ConfigError
from segapp.models.network import SegmentationModel

ONE_VALUE = "Expected more than 1 value per channel"
"""torch's error for a BatchNorm over a single value."""


def inspect_model(model: SegmentationModel) -> None:
    """Measure `min_train_batch` and `logits_stride`, and remove modules and gradients that are not used.

    Modules that the network never calls are replaced by `nn.Identity`; parameters without influence on the logits no
    longer require a gradient.

    Raises:
        ConfigError: the network cannot run, as some pairs of decoder and backbone cannot.
    """
    side_px = max(2 * model.size_divisor, 64)
    size_px = model.suitable_size(side_px, side_px)
    was_training = model.training
    called: set[str] = set()
    hooks = [
        module.register_forward_hook(lambda *_, name=name: called.add(name)) for name, module in model.named_modules()
    ]
    try:
        with torch.random.fork_rng(devices=[]):
            unused = _measure(model, size_px)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    model.called_modules = frozenset(called)
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    for name in _unused_modules(model, unused, called):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())


def probabilities_problem(logits_NCHW: Tensor, of_brighter_NCHW: Tensor) -> str | None:
    """Return a sentence if the outputs of a network are probabilities instead of logits; else None.

    A criterion would apply softmax or sigmoid again, so the loss of such a network would hardly fall. Outputs of a
    softmax sum to 1 over the classes. Outputs of a sigmoid stay within 0 and 1 for any image, but outputs of a final
    ReLU with small weights grow with the image: `of_brighter_NCHW` are the outputs for the same images with values a
    thousand times as large. Logarithms of probabilities are logits.
    """
    both = (logits_NCHW.float(), of_brighter_NCHW.float())
    is_inside = all(bool(((each >= 0) & (each <= 1)).all()) for each in both)
    if not is_inside or logits_NCHW.shape[1] == 1 or not any(bool(each.any()) for each in both):
        return None
    if all(bool(((each.sum(1) - 1).abs() < 1e-3).all()) for each in both):
        return "these are probabilities (in 0..1, with the sum 1 over the classes): return logits, without softmax"
    return "these are probabilities (in 0..1 for any image): return logits, without sigmoid"


def _measure(model: SegmentationModel, size_px: tuple[int, int]) -> set[str]:
    """Run the network, record its measurements in it, and return the names of the parameters without a gradient."""
    # Some code reads a tensor's value, which a meta tensor does not have.
    with contextlib.suppress(Exception):
        return _measure_on("meta", model, size_px)
    try:
        return _measure_on("cpu", model, size_px)
    except Exception as error:
        if model.library == "python":
            raise ConfigError(
                f"model.name = {model.name} fails on images of {size_px[0]}x{size_px[1]} px with {shown_error(error)}: "
                "correct it, or set its attribute fixed_size_px to the only height and width that it takes",
                key="model.name",
                value=model.name,
            ).see("own-parts") from error
        raise ConfigError(
            f"model: {model.library} {model.name} with backbone {model.encoder_name} cannot run on images of "
            f"{size_px[0]}x{size_px[1]} px ({error}); choose another backbone or other options",
            key="model.encoder",
            value=model.encoder_name,
        ) from error


def _measure_on(device: str, model: SegmentationModel, size_px: tuple[int, int]) -> set[str]:
    logits = _run(model, device, 1, size_px, training=False)[0][0]
    min_train_batch = 1
    try:
        logits_all, tensors = _run(model, device, 1, size_px, training=True)
    except ValueError as error:
        if ONE_VALUE not in str(error):
            raise
        min_train_batch = 2
        logits_all, tensors = _run(model, device, 2, size_px, training=True)
    model.logits_stride = max(1, round(size_px[0] / logits.shape[-2]))
    model.min_train_batch = min_train_batch
    names = [name for name, _ in model.named_parameters()]
    given = [torch.empty_like(logits) for logits in logits_all]  # only the existence of gradients matters
    gradients = torch.autograd.grad(logits_all, [tensors[name] for name in names], given, allow_unused=True)
    return {name for name, gradient in zip(names, gradients, strict=True) if gradient is None}


def _run(
    model: SegmentationModel, device: str, num_images: int, size_px: tuple[int, int], *, training: bool
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the logits for images of zeros, and the copies of all parameters and buffers that computed them."""
    tensors: dict[str, Tensor] = {
        name: value.detach().to(device, copy=True).requires_grad_() for name, value in model.named_parameters()
    }
    tensors |= {name: value.detach().to(device, copy=True) for name, value in model.named_buffers()}
    model.train(training)
    images = torch.zeros(num_images, model.in_channels, *size_px, device=device)
    with torch.set_grad_enabled(training):
        return functional_call(model, tensors, (images,)), tensors


def _unused_modules(model: nn.Module, unused: set[str], called: set[str]) -> list[str]:
    """Return the outermost modules with parameters in which no module runs and no parameter has a gradient."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not name or any(name.startswith(outer + ".") for outer in found):
            continue
        inner = {f"{name}.{n}" for n, _ in module.named_parameters()}
        runs = any(c == name or c.startswith(name + ".") for c in called)
        if inner and inner <= unused and not runs:
            found.append(name)
    return found
