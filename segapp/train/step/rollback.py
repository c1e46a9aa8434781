"""Rollback of what a step changes before its update: buffers and random states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

TorchRng = tuple[Tensor, list[tuple[torch.device, Tensor]]]


class BufferGuard:
    """Keeps a copy of a model's buffers (BatchNorm statistics) from the start of a step, to restore them."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_buffers()]
        self._live = list(model.buffers())
        self.kept = [b.clone() for b in self._live]

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the present buffers."""
        if self._live:
            torch._foreach_copy_(self.kept, self._live)

    def kept_by_name(self, among: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the copies whose names are in `among`."""
        return {name: kept for name, kept in zip(self._names, self.kept, strict=True) if name in among}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers from the copies."""
        if self._live:
            torch._foreach_copy_(self._live, self.kept)

    @torch.no_grad()
    def restore_where(self, is_bad: Tensor) -> None:
        """Restore the buffers if `is_bad` (0-dim) is nonzero; on a GPU without waiting for it."""
        if is_bad.device.type == "cpu":
            if is_bad.item():
                self.restore()
            return
        for live, kept in zip(self._live, self.kept, strict=True):
            live.copy_(torch.where(is_bad.to(live.device) != 0, kept, live))


def capture_torch_rng(devices: Sequence[torch.device] = ()) -> TorchRng:
    """Return the states of torch's generators: the CPU's, and those of the given GPUs."""
    return torch.get_rng_state(), [(device, torch.cuda.get_rng_state(device)) for device in devices]


def restore_torch_rng(state: TorchRng) -> None:
    """Restore what `capture_torch_rng` returned."""
    torch.set_rng_state(state[0])
    for device, of_device in state[1]:
        torch.cuda.set_rng_state(of_device, device)


def rng_fields(state: TorchRng) -> dict[str, Any]:
    """Return the states as fields of `capture_rng`, GPUs by their index."""
    cuda = {device.index or 0: of_device for device, of_device in state[1]}
    return {"torch": state[0], **({"cuda": [cuda[index] for index in sorted(cuda)]} if cuda else {})}
