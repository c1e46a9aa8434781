"""Dropout whose masks depend only on (seed, epoch, position of the sample, layer, call), not on the device.

torch's layers draw from the generator of their device, so a sample's mask depends on the samples that share the device.
Here, each sample of a batch comes with one key per layer, and a layer makes the sample's mask only from its key, by
integer arithmetic that is exact on every device. So loss and gradient are equal for any division over devices, ranks
and micro-batches, and if activations are recomputed; generators are not used.

Keys and masks are numbers of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
2014). A mask uses 16 bits per value: probabilities are rounded to multiples of 2^-16, and the kept values are divided
by the rounded probability.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from segapp.chunks import check_count
from segapp.parallel.recompute import computed_once, with_base
from segapp.parallel.replicas import check_module

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64: one for its sequence, and two for the multiplications that mix a number of it."""

_CALL_MULTIPLIER = 6364136223846793005
"""The multiplier of Knuth's MMIX generator, whose steps from a key are the keys of a layer's further calls."""

_NUM_LEVELS = 2**16
"""Levels of a probability, which is compared with 16 random bits per value."""

_thread_local = threading.local()


def mask_by_sample(network: nn.Module) -> None:
    """Let the layers of a network that drop values make their masks from the samples' keys, in place.

    These layers are torch's `Dropout` and `Dropout1d` to `Dropout3d`, timm's `DropPath`, torchvision's
    `StochasticDepth` by rows, and the blocks of smp's EfficientNets. Layers that drop nothing, and subclasses with
    their own `forward`, are not changed. Parameters, state-dict keys and references stay valid.

    Call it before `set_recompute`, and before the network is copied.
    """
    check_module(network)
    for layer in network.modules():
        entry: Any = _kind_of(layer)
        if entry is not None:
            kind: Any = type(layer)
            layer.__class__ = with_base(entry[0], kind, num_dims=entry[1])
            if entry[0] is _MaskedBlock:
                layer.__dict__["_has_drop_connect"] = False  # for the block's own `forward`
    for number, layer in enumerate(layer for layer in network.modules() if isinstance(layer, _Masked)):
        layer.__dict__["mask_layer"] = number


class SampleMasks:
    """Makes the keys of samples for the layers of a network after `mask_by_sample`, from the seed of the run.

    Example:
        >>> from torch import nn, ones
        >>> from segapp.parallel import SampleMasks, mask_by_sample, sample_masks
        >>> network = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5))
        >>> mask_by_sample(network)
        >>> masks = SampleMasks(network, seed=3)
        >>> with sample_masks(masks.keys(epoch=1, first=0, count=3)):
        ...     outputs = network(ones(3, 1))
        >>> with sample_masks(masks.keys(epoch=1, first=2, count=1)):
        ...     bool((network(ones(1, 1)) == outputs[2:]).all())
        True
    """

    def __init__(self, network: nn.Module, seed: int) -> None:
        check_module(network)
        self._num_layers = sum(isinstance(layer, _Masked) for layer in network.modules())
        self._seed = check_count("seed", seed, least=None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_layers={self._num_layers}, seed={self._seed})"

    def keys(self, epoch: int, first: int, count: int) -> Tensor | None:
        """Return the keys (N, layers) of N = `count` samples in int64; None if no layer drops anything.

        `first` is the position of the first sample in the epoch's order, over all ranks; the others follow it.
        """
        if not self._num_layers:
            return None
        epoch_state = _mixed(np.array([self._seed % 2**64], np.uint64), np.array([epoch]))
        layer_states = _mixed(epoch_state, np.arange(self._num_layers))
        keys = _mixed(layer_states, np.arange(first, first + count)[:, None])
        return torch.from_numpy(keys.view(np.int64))


def _mixed(states: NDArray[np.uint64], positions: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the numbers at positions, from 0, of the SplitMix64 sequences that begin with these states."""
    z = states + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


class _ForwardKeys:
    """The keys of N samples for L layers in one forward pass, copied to each device that needs them.

    It counts the calls of each layer, because every call of a layer needs other masks.
    """

    def __init__(self, keys: Tensor, calls: Mapping[int, int] = MappingProxyType({})) -> None:
        self.keys = keys
        self._keys = {keys.device: keys}
        self._calls = dict(calls)

    def cut(self, sizes: Sequence[int]) -> list[_ForwardKeys]:
        """Return the keys of consecutive samples, whose layers continue to count."""
        return [_ForwardKeys(keys, self._calls) for keys in self.keys.split_with_sizes(list(sizes))]

    def run_part(self, part: _ForwardKeys, call: Callable[[], T]) -> T:
        """Return the result of a call that uses a part of these keys, and count its calls of layers."""
        with _current(part):
            result = call()
        self._calls.update(part._calls)  # every part has the same
        return result

    def keys_of_call(self, layer: int, device: torch.device) -> Tensor:
        """Return the keys (N) of a layer's next call."""
        if device not in self._keys:
            self._keys[device] = self.keys.to(device, non_blocking=True)
        keys, call = self._keys[device][:, layer], self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        return keys if not call else keys * _signed(pow(_CALL_MULTIPLIER, call, 2**64))


def sample_masks(keys: Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Let layers make their masks from keys (N, L) of `SampleMasks` in the `with` statement, in this thread.

    The replicas of a `DataParallelModel` use the keys of their samples. If `keys` is None, layers draw from the
    generator of their device, like torch's; so does a layer whose input has not a multiple of N rows, like tokens.
    """
    return _current(None if keys is None else _ForwardKeys(keys))


@contextlib.contextmanager
def _current(keys: _ForwardKeys | None) -> Iterator[None]:
    outer = getattr(_thread_local, "current", None)
    _thread_local.current = keys
    try:
        yield
    finally:
        _thread_local.current = outer


def with_masks(calls: Sequence[Callable[[], T]], sizes: Sequence[int], module: nn.Module) -> list[Callable[[], T]]:
    """Return the calls of a module's replicas on chunks of these sizes, with the chunks' keys of this thread.

    Raises:
        ValueError: layers need a key for each sample of the batch, and there are more or fewer.
    """
    current: _ForwardKeys | None = getattr(_thread_local, "current", None)
    if current is None:
        return list(calls)
    if len(current.keys) != (num_samples := sum(sizes)):
        if num_samples and any(isinstance(layer, _Masked) and layer.training for layer in module.modules()):
            raise ValueError(
                f"sample_masks has keys of {len(current.keys)} samples, and the batch has {num_samples}: give one row"
                " per sample, or None"
            )
        return list(calls)
    if len(calls) == 1:  # it runs in this thread
        return list(calls)
    return [partial(current.run_part, part, call) for part, call in zip(current.cut(sizes), calls, strict=True)]


def _keys_of_call(layer: int, device: torch.device) -> Tensor | None:
    """Return the keys (N) of a layer's call."""
    current: _ForwardKeys | None = getattr(_thread_local, "current", None)
    return None if current is None else current.keys_of_call(layer, device)


class _Masked(nn.Module):
    """Base class of the classes that `mask_by_sample` gives to layers."""

    mask_layer: int
    num_dims: int | None = None
    """Leading dimensions along which values are dropped independently: 1, per sample; 2, per channel; None: all."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the features, some of them dropped; see the layer's own class."""
        layer: Any = self
        p = layer.drop_prob if hasattr(layer, "drop_prob") else layer.p
        dropped = self._dropped(features, p)
        output: Tensor = super().forward(features) if dropped is None else dropped
        return output

    def _dropped(self, features: Tensor, p: float) -> Tensor | None:
        """Return the features, masked by keys; None if there are no keys, or if nothing or everything is dropped."""
        if not self.training or not 0 < p < 1:
            return None
        keys = computed_once(functools.partial(_keys_of_call, self.mask_layer, features.device))
        # Layers in windows have several consecutive rows per sample; rows of another number are no samples, but tokens.
        if keys is None or not len(keys) or len(features) % len(keys):
            return None
        threshold = min(max(round(p * _NUM_LEVELS), 1), _NUM_LEVELS - 1)
        scale = _NUM_LEVELS / (_NUM_LEVELS - threshold) if getattr(self, "scale_by_keep", True) else 1.0
        shape = features.shape[: self.num_dims]
        kept = _kept(keys, math.prod(shape) // len(keys), threshold)
        kept = kept.reshape(*shape, *[1] * (features.ndim - len(shape)))
        if getattr(self, "inplace", False):
            return features.mul_(kept).mul_(scale)
        if kept.shape != features.shape:
            return features * (kept.to(features.dtype) * scale)
        if features.ndim == 4 and not features.is_contiguous():
            kept = kept.contiguous(memory_format=torch.channels_last)
        # One kernel that saves only the mask: torch's dropout applies it to a gradient in its backward pass.
        masked: Tensor = torch.ops.aten.native_dropout_backward(features, kept, scale)
        return masked


class _MaskedBlock(_Masked):
    """An `MBConvBlock` of smp; the part that it adds to its input is dropped per sample."""

    def forward(self, inputs: Tensor, drop_connect_rate: float | None = None) -> Tensor:
        """Return the block's outputs."""
        from torchvision.ops import stochastic_depth

        added: Tensor = super(_Masked, self).forward(inputs)
        p = drop_connect_rate or 0.0
        dropped = self._dropped(added, p)
        return inputs + (stochastic_depth(added, p, "row", self.training) if dropped is None else dropped)


_KINDS: dict[str, tuple[type[_Masked], int | None]] = {
    "torch.nn.modules.dropout.Dropout": (_Masked, None),
    "torch.nn.modules.dropout.Dropout1d": (_Masked, 2),
    "torch.nn.modules.dropout.Dropout2d": (_Masked, 2),
    "torch.nn.modules.dropout.Dropout3d": (_Masked, 2),
    "timm.layers.drop.DropPath": (_Masked, 1),
    "torchvision.ops.stochastic_depth.StochasticDepth": (_Masked, 1),
    "segmentation_models_pytorch.encoders._efficientnet.MBConvBlock": (_MaskedBlock, 1),
}
"""Base and `num_dims` by the name of the class that defines `forward`, so that libraries need not be imported."""


def _kind_of(layer: nn.Module) -> tuple[type[_Masked], int | None] | None:
    """Return the entry of a layer that drops values; None for others, and for layers with their own `forward`."""
    owner = next(kind for kind in type(layer).__mro__ if "forward" in vars(kind))
    kind = _KINDS.get(f"{owner.__module__}.{owner.__qualname__}")
    is_off = 0 in (getattr(layer, "p", 1), getattr(layer, "drop_prob", 1), getattr(layer, "_has_drop_connect", 1))
    is_other = "forward" in vars(layer) or getattr(layer, "mode", "row") != "row"
    return None if is_off or is_other else kind


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _words(keys: Tensor, count: int) -> Tensor:
    """Return `count` words (N, count) of 64 random bits for each of the keys (N), in int64.

    They are numbers of SplitMix64 before its last shift, with int64's arithmetic shifts, which keep the sign.
    """
    words = torch.arange(1, count + 1, device=keys.device) * _signed(_GAMMA) + keys[:, None]
    shifted = torch.empty_like(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted).mul_(_signed(factor))
    return words


def _kept(keys: Tensor, count: int, threshold: int) -> Tensor:
    """Return a mask (N, count), False if the next 16 bits for a key are below the threshold."""
    if count == 1:
        return keys[:, None] >= (threshold - _NUM_LEVELS // 2) * 2**48  # the highest bits, both as signed numbers
    words = _words(keys, -(-count // 4))
    if torch.compiler.is_compiling():  # Inductor has no views of other sizes
        shifts = torch.arange(0, 64, 16, device=keys.device)
        values = ((((words[..., None] >> shifts) + _NUM_LEVELS // 2) % _NUM_LEVELS) - _NUM_LEVELS // 2).flatten(1)
    else:
        values = words.view(torch.int16)
    return values[:, :count] >= threshold - _NUM_LEVELS // 2
