"""Share the batches of an evaluation among several devices, each with a copy of the model.

Batch i goes to device i mod n, and each device adds its batches in order, so that the result does not depend on speed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from segapp.parallel import DataParallelModel
from segapp.parallel.rendezvous import on_device

_MAX_WAITING = 2
"""Batches that wait for a device; more would hold the memory of more batches."""

T = TypeVar("T", contravariant=True)
M = TypeVar("M", bound=nn.Module)


class Counter(Protocol[T]):
    """Adds batches on one device."""

    device: torch.device

    def add(self, batch: T) -> None:
        """Evaluate a batch and add its counts."""


class SpreadCounters(Generic[T]):
    """Passes batches to counters in turn, as a context manager.

    The first counter runs in the calling thread and every other one in a thread of its own. Under a dispatch mode, such
    as that of the memory planner, all run in the calling thread, because those modes are not thread-safe.

    Args:
        counters: one per device.
    """

    def __init__(self, counters: Sequence[Counter[T]]) -> None:
        self._counters = list(counters)
        num_threads = 0 if _get_current_dispatch_mode_stack() else len(counters) - 1
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="evaluation") for _ in range(num_threads)]
        self._waiting: list[deque[Future[None]]] = [deque() for _ in self._threads]
        self._next = 0

    def __enter__(self) -> SpreadCounters[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)

    def add(self, batch: T) -> None:
        """Pass a batch to the next counter.

        Raises:
            Exception: that of an earlier batch, or of this one.
        """
        number, self._next = self._next, (self._next + 1) % len(self._counters)
        counter = self._counters[number]
        if number == 0 or not self._threads:
            _add(counter, batch)
            return
        waiting = self._waiting[number - 1]
        while len(waiting) >= _MAX_WAITING:
            waiting.popleft().result()
        waiting.append(self._threads[number - 1].submit(_add, counter, batch))

    def finish(self) -> None:
        """Wait for all batches.

        Raises:
            Exception: that of the first batch, by device, that could not be evaluated.
        """
        for waiting in self._waiting:
            while waiting:
                waiting.popleft().result()


def further_devices(network: nn.Module) -> tuple[torch.device, ...]:
    """Return the devices beside the first that can share an evaluation: those of a `DataParallelModel`, each once."""
    return tuple(dict.fromkeys(network.devices))[1:] if isinstance(network, DataParallelModel) else ()


def _add(counter: Counter[T], batch: T) -> None:
    with on_device(counter.device), torch.no_grad():
        counter.add(batch)


def copy_to(module: M, device: torch.device) -> M:
    """Return a copy of a module on a device for inference, without a second copy on the module's own device."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach().to(device), requires_grad=False) for p in module.parameters()
    }
    memo |= {id(buffer): buffer.to(device) for buffer in module.buffers()}
    return copy.deepcopy(module, memo)
