"""Rollback of the state that a step changes before its update: buffers and random states."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from segapp.accelerator import gpu_of
from segapp.compat.torch import buffer_slots, module_slots, storage_key

_ALIGNED_BYTES = 64

TorchRng = tuple[Tensor, list[tuple[torch.device, Tensor]]]


class BufferGuard:
    """Keeps a copy of a model's buffers (BatchNorm statistics) from the start of a step, to restore them.

    The buffers become views of one storage per dtype and device, so a copy, or a restore that the device decides about,
    needs only one kernel per storage, however many buffers there are. (`torch._foreach_copy_` would need a launch for
    every 64 tensors, and there is no `where` for lists.) `live` has the storages, and `kept` the copy of each.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.live: list[Tensor] = []
        self._take_in()

    def _take_in(self) -> None:
        """Move the present buffers into common storages, and copy these."""
        # An expanded tensor cannot be changed in place, so no step changes it.
        named = {name: buffer for name, buffer in self._model.named_buffers() if not _is_expanded(buffer)}
        own = {storage_key(live) for live in self.live}
        users = Counter(storage_key(tensor) for tensor in (*self._model.parameters(), *named.values()))
        groups: dict[Any, dict[str, Tensor]] = {}
        for name, buffer in named.items():
            storage = storage_key(buffer)
            can_move = storage in own or (users[storage] == 1 and _is_dense(buffer))
            groups.setdefault((buffer.device, buffer.dtype) if can_move else name, {})[name] = buffer
        self.live, self.kept = [], []
        for key, group in groups.items():
            live = group[key] if key in group else _common_storage(list(group.values()))
            self.live.append(live)
            self.kept.append(live.clone())
        self._slots = [
            (slots, key, each)
            for module in self._model.modules()
            for slots in (buffer_slots(module), module_slots(module))
            for key, each in slots.items()
        ]

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the present buffers; buffers that were replaced since the last call are moved first."""
        if any(slots.get(key) is not known for slots, key, known in self._slots):
            self._take_in()
            return
        for kept, live in zip(self.kept, self.live, strict=True):
            kept.copy_(live)

    @torch.no_grad()
    def restore(self) -> None:
        for live, kept in zip(self.live, self.kept, strict=True):
            live.copy_(kept)

    @torch.no_grad()
    def restore_where(self, is_bad: Tensor) -> None:
        """Restore the buffers if `is_bad` (0-dim) is nonzero, without waiting for the device."""
        flags = {device: is_bad.to(device) != 0 for device in dict.fromkeys(live.device for live in self.live)}
        for live, kept in zip(self.live, self.kept, strict=True):
            torch.where(flags[live.device], kept, live, out=live)


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the tensor fills a block of memory, in the usual order or channels last."""
    is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.layout == torch.strided and (tensor.is_contiguous() or is_channels_last)


def _is_expanded(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@torch.no_grad()
def _common_storage(buffers: Sequence[Tensor]) -> Tensor:
    """Make dense tensors of one dtype and device views of a new storage, in place; return all of it as one dimension.

    The tensors stay the same objects with the same values and layouts. They begin at multiples of `_ALIGNED_BYTES`, for
    which kernels use their widest loads.
    """
    step = _ALIGNED_BYTES // buffers[0].element_size()
    *places, total = accumulate((-(-buffer.numel() // step) * step for buffer in buffers), initial=0)
    storage = torch.zeros(total, dtype=buffers[0].dtype, device=buffers[0].device)
    for buffer, place in zip(buffers, places, strict=True):
        view = storage.as_strided(buffer.shape, buffer.stride(), place)
        view.copy_(buffer)
        buffer.data = view
    return storage


def capture_torch_rng(devices: Sequence[torch.device] = ()) -> TorchRng:
    return torch.get_rng_state(), [(device, gpu.rng_state(device)) for device in devices if (gpu := gpu_of(device))]


def restore_torch_rng(state: TorchRng) -> None:
    torch.set_rng_state(state[0])
    for device, of_device in state[1]:
        if gpu := gpu_of(device):
            gpu.set_rng_state(of_device, device)
