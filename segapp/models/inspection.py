"""Inspect a network by running a copy of it on the meta device: shapes only, no arithmetic, no random numbers.

Libraries build modules that a given depth never runs (a ResNet's last stages under a PSPNet) or whose output is unused.
Such parameters take memory on every device, and DistributedDataParallel waits for their gradients. A BatchNorm after a
global pooling cannot train on a batch of one image. Which sizes of images run depends on decoder, backbone and options.
So all this is measured, not listed.

Shapes: N images, C classes, H x W of the input, h x w of the logits and of feature maps.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Hashable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from segapp.compat.torch import TorchDispatchMode
from segapp.custom.loading import shown_error
from segapp.errors import ConfigError
from segapp.models.network import SegmentationModel
from segapp.models.own_generator import OwnGenerator
from segapp.parallel.dropout import SampleMasks, sample_masks
from segapp.parallel.recompute import activations_kept

ONE_VALUE = "Expected more than 1 value per channel"
"""torch's error for a BatchNorm over a single value."""
_ATTRIBUTES = (
    *("min_train_batch", "size_divisor", "fixed_size_px"),
    *("logits_stride", "coarsest_stride", "called_modules"),
)
_LOOK_UPS = {torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.embedding, torch.ops.aten.gather}
MIN_SIDE_PX = 64
MAX_DIVISOR = 256
MAX_STRIDE = 128
"""Strides are measured exactly if they divide this number or the divisor of the sides."""


_MEASURED: dict[Hashable, tuple[dict[str, Any], set[str]]] = {}
"""Of networks that were measured in this process: the attributes, and the names of the unused parameters."""


def inspect_model(model: SegmentationModel, key: Hashable = None) -> None:
    """Measure `min_train_batch`, sizes and strides of a network, and remove modules and gradients that are not used.

    Modules that the network never calls are replaced by `nn.Identity`; parameters without influence on the logits no
    longer require a gradient. `size_divisor` is doubled until the network runs; if it never does, the network gets
    `usual_size_px` as its only size. Nothing else of the network changes, because a copy runs.

    Networks with the same `key` are alike, and only the first is measured; None: this one is like no other.

    Raises:
        ConfigError: the network cannot run, as some pairs of decoder and backbone cannot.
    """
    if (found := _MEASURED.get(key)) is None:
        with OwnGenerator():
            unused = _measure(model)
        found = {name: getattr(model, name) for name in _ATTRIBUTES}, unused
        if key is not None:
            _MEASURED[key] = found
    vars(model).update(found[0])
    unused = found[1]
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    for name in _unused_modules(model, unused, model.called_modules):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity().train(model.training))


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


def _measure(model: SegmentationModel) -> set[str]:
    """Record the measurements of a network in it, and return the names of the parameters without a gradient."""
    copy_on = cache(partial(_copy_on, model))
    failures: list[tuple[tuple[int, int], Exception]] = []
    for divisor, size_px in _candidates(model):
        for device in ("meta", "cpu"):
            try:
                unused = _measure_on(copy_on(device), model, divisor, size_px)
                model.size_divisor, model.fixed_size_px = divisor, size_px
                return unused
            except Exception as error:
                failures.append((size_px or _sides(divisor, model.min_size_px), error))
                # Errors of sizes repeat on the CPU. Custom code may refuse the meta device in words of its own.
                if not _is_of_meta(error) and (model.library != "python" or len(failures) > 2):
                    break
        if next(model.parameters()).is_meta and _is_of_meta(failures[-1][1]):
            break  # a network without values cannot be tried on the CPU
    said = [each for each in failures if not _is_of_meta(each[1])] or failures[-1:]
    # At other sizes than the only one that the library names, a network may fail for no other reason than the size.
    (height_px, width_px), cause = next((each for each in said if each[0] == model.usual_size_px), said[0])
    raise _refusal(model, f"on images of {height_px}x{width_px} px: {shown_error(cause)}") from cause


class _LookUps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes look-ups by index, such as in a table of relative positions that is made for images of one size.

    Only values show that an index is out of bounds: on the meta device, any look-up succeeds.
    """

    were_made = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.were_made |= func.overloadpacket in _LOOK_UPS
        return func(*args, **(kwargs or {}))


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that draw random numbers."""

    were_made = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.were_made |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def draws_numbers(model: SegmentationModel, criterion: nn.Module) -> bool:
    """Return True if a training step draws random numbers from torch's generator, apart from masks of samples.

    The network must have been given to `mask_by_sample`. The answer is also True if no copy of it runs.
    """
    size_px = model.fixed_size_px or _sides(model.size_divisor, model.min_size_px)
    target = torch.zeros(2, *size_px, dtype=torch.uint8)
    for device in ("meta", "cpu"):
        with contextlib.suppress(Exception):
            probe, loss = _copy_on(model, device), copy.deepcopy(criterion).to(device)
            keys = SampleMasks(probe, seed=0).keys(epoch=1, first=0, count=2)
            with OwnGenerator(), _Draws() as draws, sample_masks(keys), activations_kept():  # type: ignore[no-untyped-call]
                logits, _ = _run(probe, 2, size_px, training=True)
                loss(logits, target.to(device))
            return bool(draws.were_made)
    return True


def _refusal(model: SegmentationModel, failure: str) -> ConfigError:
    if model.library == "python":
        return ConfigError(
            f"model.name = {model.name} cannot run {failure}; correct it, or set its attribute fixed_size_px to the "
            "only height and width that it takes",
            key="model.name",
            value=model.name,
        ).see("own-parts")
    return ConfigError(
        f"model: {model.library} {model.name} with backbone {model.encoder_name} cannot run {failure}; choose another "
        "backbone or other options",
        key="model.encoder",
        value=model.encoder_name,
    )


def _is_of_meta(error: Exception) -> bool:
    """Return True if some code needs a value, which a tensor on the meta device does not have."""
    return "meta" in str(error).lower()


def _candidates(model: SegmentationModel) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """Yield divisors of H and W, and the only size (H, W) if there is one, in the order in which they are tried."""
    first, only_px = model.size_divisor, model.fixed_size_px or model.usual_size_px
    if model.fixed_size_px is None:
        yield from ((first << n, None) for n in range(9) if n == 0 or first << n <= MAX_DIVISOR)
    if only_px is not None:
        yield first, only_px


def _sides(divisor: int, min_size_px: int) -> tuple[int, int]:
    """Return two different sides, odd multiples of a divisor, so that no smaller number of halvings is enough.

    >>> _sides(1, 1), _sides(32, 1), _sides(14, 1)
    ((65, 193), (96, 224), (70, 966))
    """
    short = -(-max(MIN_SIDE_PX, min_size_px) // divisor) | 1
    return short * divisor, short * divisor + math.lcm(MAX_STRIDE, 2 * divisor)


def _measure_on(
    probe: SegmentationModel, model: SegmentationModel, divisor: int, size_px: tuple[int, int] | None
) -> set[str]:
    height_px, width_px = size_px or _sides(divisor, model.min_size_px)
    with _LookUps() as look_ups:  # type: ignore[no-untyped-call]
        logits, maps = _run(probe, 1, (height_px, width_px), training=False)
    if look_ups.were_made and size_px is None and model.usual_size_px is not None:
        long_px = -(-2 * max(model.usual_size_px) // divisor) * divisor
        for sides in ((height_px, long_px), (long_px, height_px)):
            _run(_copy_on(model, "cpu"), 1, sides, training=False)
    model.min_train_batch = 1
    # The sides are exchanged, which shows the axes of a map, and its stride from two differences of lengths.
    exchanged = size_px or (width_px, height_px)
    try:
        logits_all, other_maps = _run(probe, 1, exchanged, training=True)
    except ValueError as error:
        if ONE_VALUE not in str(error):
            raise
        model.min_train_batch = 2
        logits_all, other_maps = _run(probe, 2, exchanged, training=True)
    gain_px = width_px - height_px
    of_logits = _strides(logits[0].shape, logits_all[0].shape, gain_px)
    model.logits_stride = max(of_logits, default=max(1, round(height_px / logits[0].shape[-2])))
    pairs = [pair for name in maps for pair in zip(maps[name], other_maps.get(name, ()), strict=False)]
    model.coarsest_stride = math.lcm(model.logits_stride, *(s for pair in pairs for s in _strides(*pair, gain_px)))
    model.called_modules = frozenset({*maps, *other_maps})
    given = [torch.empty_like(logits) for logits in logits_all]  # only the existence of gradients matters
    names, parameters = zip(*probe.named_parameters(), strict=True)
    gradients = torch.autograd.grad(logits_all, parameters, given, allow_unused=True)
    return {name for name, gradient in zip(names, gradients, strict=True) if gradient is None}


def _strides(shape: torch.Size, exchanged: torch.Size, gain_px: int) -> Iterator[int]:
    """Yield the stride of a map from its shapes for H x W and for W x H with W = H + `gain_px`; of others, nothing.

    >>> list(_strides(torch.Size([1, 8, 9, 25]), torch.Size([2, 8, 25, 9]), 128))  # 65 x 193 px
    [8]
    """
    for axis in (1, 2):  # of (N, H, W, C) and (N, C, H, W)
        short, long = shape[axis : axis + 2]
        if short < long and (long, short) == exchanged[axis : axis + 2] and gain_px % (long - short) == 0:
            yield gain_px // (long - short)


def _copy_on(model: SegmentationModel, device: str) -> SegmentationModel:
    """Return a copy of a network whose parameters and buffers are on another device; shared ones stay shared."""
    memo: dict[int, object] = {
        id(value): nn.Parameter(value.detach().to(device, copy=True)) for value in model.parameters()
    }
    memo |= {id(value): value.detach().to(device, copy=True) for value in model.buffers()}
    return copy.deepcopy(model, memo)


def _run(
    probe: SegmentationModel, num_images: int, size_px: tuple[int, int], *, training: bool
) -> tuple[tuple[Tensor, ...], dict[str, list[torch.Size]]]:
    """Return the logits for images of zeros, and the shapes of the maps of each called module, by its name."""
    maps: dict[str, list[torch.Size]] = {}

    def note(name: str, output: object) -> None:
        maps.setdefault(name, []).extend([output.shape] if isinstance(output, Tensor) and output.ndim == 4 else [])

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
        for name, module in probe.named_modules()
    ]
    like = next(probe.parameters())
    images = torch.zeros(num_images, probe.in_channels, *size_px, dtype=like.dtype, device=like.device)
    try:
        with torch.set_grad_enabled(training):
            return probe.train(training).compute_logits(images), maps
    finally:
        for hook in hooks:
            hook.remove()


def _unused_modules(model: nn.Module, unused: set[str], called: frozenset[str]) -> list[str]:
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
