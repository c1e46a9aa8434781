"""Normalisation of images, as they are stored, on the device that runs the network, as it is or compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segapp.memory.oom import is_out_of_memory, oom_failpoint


class CompiledCall:
    """Calls a model through `torch.compile`; after a failure to compile it calls the model itself.

    The model stays as it is: state dict, evaluation and export do not know of the compilation.

    Args:
        model: called with one tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._compiled: Callable[[Tensor], Any] | None = torch.compile(lambda images: model(images))
        self._has_run = False
        self._notes: list[str] = []

    def __call__(self, images: Tensor) -> Any:
        """Return the model's outputs."""
        if self._compiled is None:
            return self._model(images)
        began = time.perf_counter()
        try:
            outputs = self._compiled(images)
        except Exception as error:
            if is_out_of_memory(error) or not _is_of_the_compiler(error):
                raise
            reason = str(error).strip().partition("\n")[0]
            self._compiled = None
            self._notes.append(
                f"train.compile: the network cannot be compiled ({type(error).__name__}: {reason}): it is trained"
                " without; set train.compile: false"
            )
            return self._model(images)
        if not self._has_run:
            self._has_run = True
            self._notes.append(f"train.compile: the first forward pass took {time.perf_counter() - began:.1f} s")
        return outputs

    def take_notes(self) -> list[str]:
        """Return what is to be reported, each once."""
        notes, self._notes = self._notes, []
        return notes


def _is_of_the_compiler(error: Exception) -> bool:
    """Return True for errors of Dynamo, Inductor and the compilers that it starts."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return any(type(each).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")) for each in chain)


class Normalizer(nn.Module):
    """Normalisation of images, on their device: (value - low) / (high - low), limited to 0..1, then mean and std.

    Without `ranges`, values are 0 to 255 and need no limits. NaN, as float images have without data, becomes 0.

    Args:
        mean: of each band, in 0..1.
        std: of each band, in 0..1.
        dtype: of the result.
        ranges: lowest and highest value of each band; None: 0 and 255.
    """

    scale: Tensor
    shift: Tensor
    low: Tensor
    span: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        ranges: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.has_ranges = ranges is not None
        top = 255 if ranges is None else 1
        constants = {"scale": [1 / (top * s) for s in std], "shift": [m / s for m, s in zip(mean, std, strict=True)]}
        if ranges is not None:
            constants |= {"low": [low for low, _ in ranges], "span": [high - low for low, high in ranges]}
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return normalised images of the same shape, from (N, B, H, W) of the type of the files."""
        pixels = images.to(torch.float32, copy=True)
        if self.has_ranges:
            pixels.sub_(self.low).div_(self.span).nan_to_num_(nan=0.0).clamp_(0, 1)
        return pixels.mul_(self.scale).sub_(self.shift).to(self.dtype)


class NormalizedInput(nn.Module):
    """Model that takes images as they are stored; copies of uint8 between devices are a quarter of float32's size.

    The inner model takes normalised images (N, B, H, W), with `channels_last` in the NHWC memory format, and returns a
    tuple, logits first.
    """

    def __init__(self, model: nn.Module, normalizer: Normalizer, *, channels_last: bool = False) -> None:
        super().__init__()
        self.model = model
        self.normalizer = normalizer
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.compiled_call: CompiledCall | None = None

    def compile_training(self) -> None:
        """Run the model's forward pass in training through torch.compile."""
        self.compiled_call = CompiledCall(self.model)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return (logits, *auxiliary logits) of stored images (N, B, H, W)."""
        if self.training:
            oom_failpoint("train.forward")
        # Evaluation meets many sizes and a rank may have no sample: each would be compiled anew.
        is_compiled = self.compiled_call is not None and self.training and len(images) > 0
        call: Any = self.compiled_call if is_compiled else self.model
        outputs: tuple[Tensor, ...] = call(self.normalized(images))
        return outputs

    def normalized(self, images: Tensor) -> Tensor:
        """Return the input of the model."""
        normalized: Tensor = self.normalizer(images)
        return normalized.contiguous(memory_format=self.memory_format)
