"""`torch.cuda` and `torch.version` of a machine with made-up GPUs; the fixture `fake_cuda` puts them in place."""

from __future__ import annotations

import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

_REAL = torch.cuda


@dataclass
class FakeGpu:
    """What torch and the driver say about a GPU; memory is in bytes."""

    uuid: str = ""
    name: str = "card"
    capability: tuple[int, int] = (8, 0)
    total: int = 1000
    free: int = 1000
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    refusals: int = 0
    """How often the allocator had no memory."""
    random_state: int = 0
    is_lost: bool = False
    """An error of CUDA is the answer to each question about this GPU."""
    fraction: float | None = None
    """The limit of the process, as a part of `total`."""
    properties: dict[str, Any] = field(default_factory=dict)
    """More properties than name, uuid, memory and capability."""


class FakeCuda(types.ModuleType):
    """Answers for `gpus`, without which there is no CUDA here; what is not below is the real torch.cuda's."""

    def __init__(self, *gpus: FakeGpu) -> None:
        super().__init__("torch.cuda")
        self.gpus = list(gpus)
        self.version = types.SimpleNamespace(**vars(torch.version))
        self.is_begun = False
        self.is_capturing = False
        self.warnings: list[str] = []
        """What torch warns of when it looks for GPUs."""
        self.asked_memory: list[torch.device] = []

    @property
    def random_states(self) -> list[int]:
        return [gpu.random_state for gpu in self.gpus]

    def __getattr__(self, name: str) -> Any:
        return getattr(_REAL, name)

    def _of(self, device: torch.device | int) -> FakeGpu:
        gpu = self.gpus[device if isinstance(device, int) else device.index]
        if gpu.is_lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return gpu

    def is_available(self) -> bool:
        for text in self.warnings:
            warnings.warn(text, stacklevel=2)
        return bool(self.gpus)

    def is_initialized(self) -> bool:
        return self.is_begun

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def device_count(self) -> int:
        return len(self.gpus)

    def set_device(self, device: torch.device) -> None:
        self._of(device)

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return self._of(device).capability

    def get_device_properties(self, device: torch.device | int) -> Any:
        gpu = self._of(device)
        major, minor = gpu.capability
        facts = {"name": gpu.name, "uuid": gpu.uuid, "total_memory": gpu.total, "major": major, "minor": minor}
        return types.SimpleNamespace(**facts | gpu.properties)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self.asked_memory.append(device)
        gpu = self._of(device)
        return gpu.free, gpu.total

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        refusals = self._of(device).refusals
        return {"num_ooms": refusals} if refusals else {}

    def memory_allocated(self, device: torch.device) -> int:
        return self._of(device).allocated

    def memory_reserved(self, device: torch.device) -> int:
        return self._of(device).reserved

    def max_memory_allocated(self, device: torch.device) -> int:
        return self._of(device).peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        gpu = self._of(device)
        gpu.peak = gpu.allocated

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self._of(device).fraction = fraction

    def empty_cache(self) -> None:
        for index in range(len(self.gpus)):
            self._of(index)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self._of(device).random_state], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self._of(device).random_state = int(state)
