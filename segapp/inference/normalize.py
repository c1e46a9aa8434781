"""Networks that take images as stored in files, and can be compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from segapp.memory.oom import is_out_of_memory, oom_failpoint
from segapp.models.normalizer import Normalizer
from segapp.parallel import sample_masks


class CompiledCall:
    """Calls a model through `torch.compile`; if the compilation fails, it calls the model directly.

    The model, which is called with one tensor, is not modified, so state dict, evaluation and export are unaffected.
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
                f"train.compile: the model cannot be compiled ({type(error).__name__}: {reason}): it is trained"
                " without; set train.compile: false"
            )
            return self._model(images)
        if not self._has_run:
            self._has_run = True
            self._notes.append(f"train.compile: the first forward pass took {time.perf_counter() - began:.1f} s")
        return outputs

    def take_notes(self) -> list[str]:
        """Return the pending notes and clear them."""
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


class NormalizedInput(nn.Module):
    """Model that takes images as stored in files; copies of uint8 between devices are a quarter of float32's size.

    The inner model takes normalized images (N, B, H, W), with `channels_last` in the NHWC memory format, and returns a
    tuple whose first entry is the logits.
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

    def forward(self, images: Tensor, keys: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return (logits, *auxiliary logits) of stored images (N, B, H, W).

        `keys` (N, layers) are the keys of the samples' dropout masks; see `segapp.parallel.dropout`.
        """
        if self.training:
            oom_failpoint("train.forward")
        # Evaluation has many sizes, and a rank may have no sample: each would be compiled anew.
        is_compiled = self.compiled_call is not None and self.training and len(images) > 0
        call: Any = self.compiled_call if is_compiled else self.model
        with sample_masks(keys):
            outputs: tuple[Tensor, ...] = call(self.normalized(images))
        return outputs

    def normalized(self, images: Tensor) -> Tensor:
        """Return the input of the model."""
        normalized: Tensor = self.normalizer(images)
        return normalized.contiguous(memory_format=self.memory_format)
