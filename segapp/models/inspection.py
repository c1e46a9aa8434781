"""Inspect a network by running it once on the meta device: shapes only, no arithmetic, no random numbers.

Libraries build modules that a given depth never runs (a ResNet's last stages under a PSPNet) or whose output is unused.
Such parameters take memory on every device, and DistributedDataParallel waits for their gradients. A BatchNorm after a
global pooling cannot train on a batch of one image. Both depend on the backbone, so they are measured, not listed.

`train.deterministic` needs networks that repeat bit for bit on a GPU. torch raises at the first operation that has no
deterministic implementation on CUDA; here such operations are reported before the training begins.

Shapes: N images, C classes, H x W of the input, h x w of the logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from segapp.compat.torch import TorchDispatchMode, operator_name
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
    _remove_unused(model, unused, called)


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
    with contextlib.suppress(Exception), QuickShapes():  # type: ignore[no-untyped-call]
        return _measure_on("meta", model, size_px)
    try:
        return _measure_on("cpu", model, size_px)
    except Exception as error:
        if model.library == "python":
            raise _own_failure(model, size_px, error) from error
        raise ConfigError(
            f"model: {model.library} {model.name} with backbone {model.encoder_name} cannot run on images of "
            f"{size_px[0]}x{size_px[1]} px ({error}); choose another backbone or other options",
            key="model.encoder",
            value=model.encoder_name,
        ) from error


def _own_failure(model: SegmentationModel, size_px: tuple[int, int], error: Exception) -> ConfigError:
    """Return the error for a custom network that cannot run, with a size that it accepts."""
    failed = f"model.name = {model.name} fails on images of {size_px[0]}x{size_px[1]} px with {shown_error(error)}"
    for side in (32, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512):
        with contextlib.suppress(Exception):
            _run(model, "cpu", 1, (side, side), training=False)
            return ConfigError(
                f"{failed}; it takes {side}x{side} px: compute sizes from the input; or set fixed_size_px = ({side}, "
                f"{side}) on the model, and data.crop_px to [{side}, {side}]",
                key="model.name",
                value=model.name,
            ).see("own-parts")
    return ConfigError(f"{failed}: correct it", key="model.name", value=model.name).see("own-parts")


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


def _remove_unused(model: SegmentationModel, unused: set[str], called: set[str]) -> None:
    for name, parameter in model.named_parameters():
        if name in unused:
            parameter.requires_grad_(False)
    for name in _unused_modules(model, unused, called):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())


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


aten = torch.ops.aten


def _as_first(first: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(first)


def _itself(first: Tensor, *_: Any, **__: Any) -> Tensor:
    return first


def _batch_norm(images: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(images), images.new_empty(images.shape[1]), images.new_empty(images.shape[1])


def _batch_norm_backward(grad: Tensor, images: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
    return _masked((images, weight, weight), rest[-1])


def _layer_norm(values: Tensor, shape: list[int], *_: Any) -> tuple[Tensor, ...]:
    if [*values.shape[-len(shape) :]] != [*shape]:
        raise ValueError(f"a LayerNorm over {[*shape]} got values of shape {[*values.shape]}")
    moments = (*values.shape[: -len(shape)], *(1 for _ in shape))
    return torch.empty_like(values), values.new_empty(moments), values.new_empty(moments)


def _layer_norm_backward(grad: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    *_, weight, bias, mask = rest
    return _masked((values, weight, bias), mask)


def _masked(values: tuple[Tensor | None, ...], mask: list[bool]) -> tuple[Tensor | None, ...]:
    pairs = zip(values, mask, strict=True)
    return tuple(torch.empty_like(value) if is_asked and value is not None else None for value, is_asked in pairs)


def _upsample(images: Tensor, size: list[int], *_: Any) -> Tensor:
    return images.new_empty(*images.shape[:2], *size)


ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.relu.default: _as_first,
    aten.hardswish.default: _as_first,
    aten.hardsigmoid.default: _as_first,
    aten.gelu.default: _as_first,
    aten.threshold_backward.default: _as_first,
    aten.hardswish_backward.default: _as_first,
    aten.hardsigmoid_backward.default: _as_first,
    aten.gelu_backward.default: _as_first,
    aten.relu_.default: _itself,
    aten.hardswish_.default: _itself,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.upsample_bilinear2d.default: _upsample,
}
"""Operator -> function that returns outputs with the right shapes and dtypes for its arguments."""


class QuickShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes only the shapes of the operators in `ANSWERS`, on the meta device; all others run as usual.

    On that device, torch runs many operators in Python, which takes a millisecond or more for a BatchNorm.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False; otherwise torch imports its compiler at the first operator, which takes five seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the outputs of an operator."""
        return ANSWERS.get(func, func)(*args, **(kwargs or {}))


WITHOUT_DETERMINISTIC_CUDA = frozenset(
    {
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "avg_pool3d", "fractional_max_pool2d",
        "fractional_max_pool3d", "grid_sampler_2d", "grid_sampler_3d", "histc", "max_unpool2d", "max_unpool3d",
        "median", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "upsample_bicubic2d", "upsample_linear1d",
        "upsample_trilinear3d",
    }
)  # fmt: skip
"""Operators that raise under `torch.use_deterministic_algorithms`, most of them in the backward pass; see there.

Bilinear upsampling is not among them, because `F.interpolate` has another, slower implementation for this case.
"""


class _Finder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators that have no deterministic implementation, with the module that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[str] = []
        self.found: list[tuple[str, str]] = []

    def leave(self) -> None:
        """Record that the module that began last has finished."""
        self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator_name(func)
        if name in WITHOUT_DETERMINISTIC_CUDA:
            self.found.append((self.running[-1], name))
        return func(*args, **(kwargs or {}))


def nondeterministic_parts(model: nn.Module, example: Tensor) -> list[tuple[str, str]]:
    """Return (module, operator) for each operator without a deterministic implementation on CUDA.

    The forward pass runs on the meta device, without values; the model may be on any device and is not changed.
    `example` is (N, B, H, W) on the meta device.
    """
    finder, handles = _Finder(), []
    for name, part in model.named_modules():
        handles.append(part.register_forward_pre_hook(lambda *_, name=name: finder.running.append(name)))
        handles.append(part.register_forward_hook(lambda *_: finder.leave()))
    state = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    try:
        with finder:
            torch.func.functional_call(model, state, (example,))
    finally:
        for handle in handles:
            handle.remove()
    return finder.found


def refusal(model: nn.Module, example: Tensor) -> str | None:
    """Return why a network cannot train deterministically on CUDA, and the fix; None if it can."""
    try:
        found = nondeterministic_parts(model, example)
    except (RuntimeError, NotImplementedError):  # an operator without a meta kernel: the first step will show it
        return None
    if not found:
        return None
    named = ", ".join(sorted({f"{name or 'the model'} ({operator})" for name, operator in found}))
    return f"train.deterministic = true, but {named} has no deterministic form on CUDA: choose another model, or false"
