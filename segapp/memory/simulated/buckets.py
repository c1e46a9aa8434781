"""Gradient buckets of DistributedDataParallel for simulations, where the wrapper itself cannot run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segapp.memory.ledger import Recorder

_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20


class Buckets:
    """Memory of DistributedDataParallel's reducer, which copies gradients into buckets in the reverse parameter order.

    With `gradient_as_bucket_view` a gradient becomes a view of its bucket; without it, buckets are additional memory. A
    bucket is allocated with its first gradient (`lazy_bucket_allocation`, which `wrap_ddp` sets where torch has it) or
    at construction.

    Args:
        parameters: in the order of the model.
        as_views: `gradient_as_bucket_view`.
        is_lazy: `lazy_bucket_allocation`.
        recorder: tags the buckets.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, as_views: bool, is_lazy: bool, recorder: Recorder
    ) -> None:
        self.as_views, self.recorder = as_views, recorder
        self._groups: list[list[nn.Parameter]] = []
        self._flat: dict[int, Tensor] = {}
        self._position: dict[nn.Parameter, tuple[int, int]] = {}
        self._fill([p for p in reversed(list(parameters)) if p.requires_grad])
        for number in range(0 if is_lazy else len(self._groups)):
            self._allocate(number)
        self.keeps_buckets = not is_lazy
        for parameter in self._position:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(self._move)

    def _fill(self, parameters: Sequence[nn.Parameter]) -> None:
        size, limit = 0, _FIRST_BUCKET_BYTES
        for parameter in parameters:
            same = self._groups and self._groups[-1][0].dtype == parameter.dtype
            if not same or size >= limit:
                limit = _FIRST_BUCKET_BYTES if not self._groups else _BUCKET_BYTES
                self._groups.append([])
                size = 0
            self._position[parameter] = len(self._groups) - 1, sum(p.numel() for p in self._groups[-1])
            self._groups[-1].append(parameter)
            size += parameter.numel() * parameter.element_size()

    def _allocate(self, number: int) -> Tensor:
        group = self._groups[number]
        flat = torch.zeros(sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device)
        self.recorder.tag([flat], "gradients" if self.as_views else "buckets")
        self._flat[number] = flat
        return flat

    def _move(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        number, offset = self._position[parameter]
        flat = self._flat.get(number)
        flat = self._allocate(number) if flat is None else flat
        if self.as_views:
            parameter.grad = flat[offset : offset + parameter.numel()].view(parameter.shape)

    def end_backward(self) -> None:
        """Free lazy buckets, which live as long as their gradients."""
        if not self.keeps_buckets:
            self._flat.clear()
