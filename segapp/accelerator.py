"""Kinds of devices: the one place that asks torch about a GPU's memory, random states, streams and arithmetic.

`accelerator_of` serves every device, `gpu_of` those with memory of their own. ROCm's devices are called "cuda" too. A
kind that is not in `ACCELERATORS`, such as the simulated devices of a memory plan, has no memory and no random states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16_CAPABILITY = (8, 0)
"""Compute capability from which NVIDIA's GPUs have bfloat16 and TF32 in hardware (Ampere)."""


@dataclass(frozen=True)
class GpuFacts:
    """Properties of a GPU.

    Attributes:
        name: product name.
        uuid: without the prefix "GPU-"; on ROCm the PCI address, as amd-smi writes it; empty if it is unknown.
        total_bytes: its memory.
    """

    name: str
    uuid: str
    total_bytes: int


class Accelerator:
    """A kind of device. This class is the CPU, and every kind of which torch can be asked nothing.

    Args:
        kind: `torch.device.type`.
    """

    can_pin = False
    """Copies from page-locked memory of the host to the device are faster and asynchronous."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def current(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the device is the current one; the CPU needs none."""
        return contextlib.nullcontext()

    def new_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which work is issued to a stream of its own, which waits for no other work."""
        return contextlib.nullcontext()

    def synchronize(self, device: torch.device) -> None:
        """Wait for the work of the device."""

    def empty_cache(self) -> None:
        """Return the allocator's unused memory to the driver."""

    def has_bf16(self, device: torch.device) -> bool:
        """Return True if the device computes in bfloat16."""
        return True

    def has_tf32(self, device: torch.device) -> bool:
        """Return True if the device can round the inputs of float32 products to TF32."""
        return True

    def is_capturing(self) -> bool:
        """Return True while a graph is captured: the host may neither wait for the device nor ask it anything."""
        return False

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        """Start the copy of a tensor to the host; return the copy, and a function that says whether it has arrived."""
        return tensor.cpu(), lambda: True


class Gpu(Accelerator):
    """A kind of device with memory and random states of its own, by torch's module of the same name: CUDA and ROCm.

    Args:
        kind: `torch.device.type`.
        tool: program that lists the devices.
    """

    can_pin = True

    def __init__(self, kind: str, tool: str) -> None:
        super().__init__(kind)
        self.tool = tool

    @property
    def _torch(self) -> Any:
        return getattr(torch, self.kind)

    def count(self) -> int:
        """Return the number of visible devices."""
        return int(self._torch.device_count())

    def devices(self) -> list[torch.device]:
        """Return the visible devices."""
        return [torch.device(self.kind, index) for index in range(self.count())]

    def is_available(self) -> bool:
        """Return True if a device can be used."""
        return bool(self._torch.is_available())

    def is_initialized(self) -> bool:
        """Return True if this process uses one of the devices."""
        return bool(self._torch.is_initialized())

    def current_index(self) -> int:
        """Return the index of the device that a name without an index stands for."""
        return int(self._torch.current_device())

    def facts(self, device: torch.device) -> GpuFacts:
        """Return the properties of a device."""
        found = self._torch.get_device_properties(device)
        uuid = str(getattr(found, "uuid", "")).removeprefix("GPU-")
        if torch.version.hip:
            uuid = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return GpuFacts(str(getattr(found, "name", "")), uuid, found.total_memory)

    def current(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """See the base class."""
        return self._torch.device(device)  # type: ignore[no-any-return]

    def new_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """See the base class."""
        return self._torch.stream(self._torch.Stream(device))  # type: ignore[no-any-return]

    def synchronize(self, device: torch.device) -> None:
        """See the base class."""
        self._torch.synchronize(device)

    def empty_cache(self) -> None:
        """See the base class."""
        self._torch.empty_cache()

    def is_capturing(self) -> bool:
        """See the base class."""
        return bool(self._torch.is_current_stream_capturing())

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        """See the base class; the host does not wait. The copy has the strides of a dense tensor."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host, self._torch.current_stream(tensor.device).record_event().query

    def rng_state(self, device: torch.device) -> Tensor:
        """Return the state of the device's random generator."""
        return self._torch.get_rng_state(device)  # type: ignore[no-any-return]

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        """Set the state of the device's random generator."""
        self._torch.set_rng_state(state, device)

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Return the free memory of the device and all of it, as the driver reports them, which may wait for it."""
        return self._torch.mem_get_info(device)  # type: ignore[no-any-return]

    def allocated_bytes(self, device: torch.device) -> int:
        """Return the memory of live tensors."""
        return int(self._torch.memory_allocated(device))

    def reserved_bytes(self, device: torch.device) -> int:
        """Return the memory that the allocator holds."""
        return int(self._torch.memory_reserved(device))

    def peak_reserved_bytes(self, device: torch.device) -> int:
        """Return the most memory that the allocator has held."""
        return int(self._torch.max_memory_reserved(device))

    def pop_peak_bytes(self, device: torch.device) -> int:
        """Return the highest memory of live tensors since the last call, and reset it."""
        peak = int(self._torch.max_memory_allocated(device))
        self._torch.reset_peak_memory_stats(device)
        return peak

    def limit_memory(self, limit_bytes: float, device: torch.device) -> None:
        """Let the allocator refuse to hold more than this."""
        total = self._torch.get_device_properties(device).total_memory
        self._torch.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

    def segments(self) -> list[dict[str, Any]]:
        """Return the allocator's segments with their blocks.

        Raises:
            RuntimeError: the allocator, such as cudaMallocAsync, has no snapshot.
        """
        return self._torch.memory_snapshot()  # type: ignore[no-any-return]

    def has_bf16(self, device: torch.device) -> bool:
        """See the base class."""
        return bool(torch.version.hip) or bool(self._torch.get_device_capability(device) >= BF16_CAPABILITY)

    def has_tf32(self, device: torch.device) -> bool:
        """See the base class."""
        if torch.version.hip:  # its numbers are those of gfx architectures; MI300 is the first with TF32
            return "gfx94" in self._torch.get_device_properties(device).gcnArchName
        return self.has_bf16(device)


_CPU = Accelerator("cpu")

CUDA = Gpu("cuda", "nvidia-smi")

GPUS = (CUDA,)
"""The kinds of devices with memory of their own."""

ACCELERATORS: dict[str, Accelerator] = {each.kind: each for each in (_CPU, *GPUS)}
"""The kinds of devices by `torch.device.type`."""


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the kind of a device."""
    return ACCELERATORS.get(device.type, _CPU)


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the kind of a device with memory and random states of its own; None for the CPU and simulated devices."""
    found = ACCELERATORS.get(device.type)
    return found if isinstance(found, Gpu) else None


@contextlib.contextmanager
def random_states_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore torch's random states, of the CPU and of these devices, at the end of the `with` statement."""
    gpus = {device: gpu for device in devices if (gpu := gpu_of(device))}
    of_cpu, states = torch.get_rng_state(), {device: gpu.rng_state(device) for device, gpu in gpus.items()}
    try:
        yield
    finally:
        torch.set_rng_state(of_cpu)
        for device, state in states.items():
            gpus[device].set_rng_state(state, device)
