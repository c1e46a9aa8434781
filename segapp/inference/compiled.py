"""The forward pass of a training through torch.compile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from segapp.memory.oom import is_out_of_memory
from segapp.run.words import first_line


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
            reason = first_line(error)
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
