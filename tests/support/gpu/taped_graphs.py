"""Graphs of a device, made of a tape of operators on the CPU: captured without effect, repeated on the same memory.

While a tape is captured each operator runs, and at its end the tensors that were there before, and the random state,
are as they were: a device has run nothing by then. A launch runs the operators again, on the memory that they had and
on no other, and writes their results where they were. So a tensor that has moved, a number of the host that has
changed or a gradient that is not put back shows as it would on a GPU. An operator for which the host waits raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from segapp.accelerator import ACCELERATORS
from segapp.compat.torch import TorchDispatchMode, operator_name, storage_key, tree_leaves

T = TypeVar("T")

WAITS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2")


class _Tape(TorchDispatchMode):
    """Notes operators with what they read and write, as views of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self._own: set[Any] = set()
        self._before: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator_name(func) in WAITS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and storage_key(tensor) not in self._own:
                storage = tensor.untyped_storage()
                self._before.setdefault(storage_key(tensor), (storage, storage.clone()))
        results = func(*args, **kwargs)
        made = [each for each in tree_leaves(results) if isinstance(each, Tensor)]
        self._own |= {storage_key(each) for each in made} - set(self._before)
        seen = tree_map_only(Tensor, lambda tensor: tensor.detach(), (args, kwargs))
        self.calls.append((func, *seen, [each.detach() for each in made]))
        return results

    def undo(self) -> None:
        """Restore the memory that was there before the tape."""
        for storage, kept in self._before.values():
            storage.copy_(kept)

    @torch.no_grad()
    def launch(self) -> None:
        """Run the operators again."""
        for func, args, kwargs, made in self.calls:
            again = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            for old, new in zip(made, again, strict=True):
                if storage_key(old) != storage_key(new):
                    old.copy_(new)


class TapedGraphs:
    """Stands for `segapp.accelerator.DeviceGraphs` on the CPU.

    Attributes:
        num_eager: calls of `run`.
        num_captured: graphs that were captured.
        num_launched: launches of graphs.
    """

    is_capturing = False

    def __init__(self) -> None:
        self.num_eager = self.num_captured = self.num_launched = 0

    def run(self, work: Callable[[], T]) -> T:
        """See `DeviceGraphs`."""
        self.num_eager += 1
        return work()

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """See `DeviceGraphs`."""
        tape, random_state = _Tape(), torch.get_rng_state()
        self.is_capturing = True
        try:
            with tape:
                result = work()
        finally:
            self.is_capturing = False
            tape.undo()
            torch.set_rng_state(random_state)
        self.num_captured += 1

        def launch() -> None:
            self.num_launched += 1
            tape.launch()

        return result, launch


def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> TapedGraphs:
    """Let the CPU have graphs, and return what captures them."""
    graphs, cpu = TapedGraphs(), ACCELERATORS["cpu"]
    monkeypatch.setattr(cpu, "can_capture", True, raising=False)
    monkeypatch.setattr(cpu, "new_graphs", lambda device: graphs, raising=False)
    monkeypatch.setattr(cpu, "is_capturing", lambda: graphs.is_capturing, raising=False)
    return graphs
