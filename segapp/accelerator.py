"""Kinds of devices: the one place that asks torch about a GPU's memory, random states, streams and arithmetic.

`accelerator_of` works for every device, `gpu_of` for devices with their own memory. ROCm's devices are also called
"cuda". Apple's have no float64. A kind that is not in `ACCELERATORS`, such as the simulated devices of a memory plan,
has no memory and no random states.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16_CAPABILITY = (8, 0)
"""Compute capability from which NVIDIA's GPUs support bfloat16 and TF32 in hardware (Ampere)."""


@dataclass(frozen=True)
class GpuFacts:
    """Properties of a GPU: product name, identity, memory."""

    name: str
    uuid: str
    """Without the prefix "GPU-"; on ROCm the PCI address, as amd-smi writes it; empty if it is unknown."""
    total_bytes: int


class Accelerator:
    """A kind of device (`torch.device.type`); the base class serves the CPU and kinds unknown to torch."""

    can_pin = False
    """Copies from page-locked memory of the host to the device are faster and asynchronous."""
    can_replicate = True
    """A training may use several devices, or processes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def current(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the device is the current one; the CPU needs none."""
        return contextlib.nullcontext()

    def new_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which work is issued to a new stream, which waits for no other work."""
        return contextlib.nullcontext()

    def synchronize(self, device: torch.device) -> None:
        """Wait for the work of the device."""

    def empty_cache(self) -> None:
        """Return the allocator's unused memory to the driver."""

    def has_bf16(self, device: torch.device) -> bool:
        return True

    def has_tf32(self, device: torch.device) -> bool:
        """Return True if the device can round the inputs of float32 products to TF32."""
        return True

    def has_float64(self, device: torch.device) -> bool:
        return True

    def is_capturing(self) -> bool:
        """Return True while a graph is captured: the host may neither wait for the device nor ask it anything."""
        return False

    def keep_with_graph(self, held: object) -> None:
        """Keep an object until the process ends if a graph is being captured: the graph reads its memory."""

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        """Start to copy a tensor to the host; return the copy, and a function that says if the copy is complete."""
        return tensor.cpu(), lambda: True


class Gpu(Accelerator):
    """A kind of device with its own memory and random states, implemented by the torch module of the same name.

    `tool` is the program that lists the devices.
    """

    can_pin = True

    def __init__(self, kind: str, tool: str) -> None:
        super().__init__(kind)
        self.tool = tool
        self.held_by_graph: list[object] = []
        """Objects whose memory captured graphs read."""

    @property
    def _torch(self) -> Any:
        return getattr(torch, self.kind)

    def count(self) -> int:
        return int(self._torch.device_count())

    def devices(self) -> list[torch.device]:
        return [torch.device(self.kind, index) for index in range(self.count())]

    def is_available(self) -> bool:
        return bool(self._torch.is_available())

    def is_initialized(self) -> bool:
        return bool(self._torch.is_initialized())

    def current_index(self) -> int:
        """Return the index of the device that a name without an index refers to."""
        return int(self._torch.current_device())

    def facts(self, device: torch.device) -> GpuFacts:
        found = self._torch.get_device_properties(device)
        uuid = str(getattr(found, "uuid", "")).removeprefix("GPU-")
        if torch.version.hip:
            uuid = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return GpuFacts(str(getattr(found, "name", "")), uuid, found.total_memory)

    def current(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return self._torch.device(device)  # type: ignore[no-any-return]

    def new_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return self._torch.stream(self._torch.Stream(device))  # type: ignore[no-any-return]

    def synchronize(self, device: torch.device) -> None:
        self._torch.synchronize(device)

    def empty_cache(self) -> None:
        self._torch.empty_cache()

    def is_capturing(self) -> bool:
        return bool(self._torch.is_current_stream_capturing())

    def keep_with_graph(self, held: object) -> None:
        if self.is_capturing():
            self.held_by_graph.append(held)

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
        """See the base class; the host does not wait. The copy has the strides of a dense tensor."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host, self._torch.current_stream(tensor.device).record_event().query

    def rng_state(self, device: torch.device) -> Tensor:
        return self._torch.get_rng_state(device)  # type: ignore[no-any-return]

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self._torch.set_rng_state(state, device)

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Return the free and the total memory of the device from the driver, which may wait for the device."""
        return self._torch.mem_get_info(device)  # type: ignore[no-any-return]

    def allocated_bytes(self, device: torch.device) -> int:
        return int(self._torch.memory_allocated(device))

    def reserved_bytes(self, device: torch.device) -> int:
        return int(self._torch.memory_reserved(device))

    def peak_reserved_bytes(self, device: torch.device) -> int:
        return int(self._torch.max_memory_reserved(device))

    def pop_peak_bytes(self, device: torch.device) -> int:
        peak = int(self._torch.max_memory_allocated(device))
        self._torch.reset_peak_memory_stats(device)
        return peak

    def has_refused(self, device: torch.device) -> bool:
        """Return True if the allocator once had no memory for a request, also because of `limit_memory`."""
        return bool(self._torch.memory_stats(device).get("num_ooms", 0))

    def limit_memory(self, limit_bytes: float, device: torch.device) -> None:
        total = self._torch.get_device_properties(device).total_memory
        self._torch.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)

    def has_bf16(self, device: torch.device) -> bool:
        return bool(torch.version.hip) or bool(self._torch.get_device_capability(device) >= BF16_CAPABILITY)

    def has_tf32(self, device: torch.device) -> bool:
        if torch.version.hip:  # HIP reports gfx architectures as capabilities; MI300 is the first with TF32
            return "gfx94" in self._torch.get_device_properties(device).gcnArchName
        return self.has_bf16(device)


class Mps(Gpu):
    """Apple's GPUs: one device, which shares the host's memory, and has no float64, no streams and no peak memory."""

    can_pin = can_replicate = False
    current, new_stream = Accelerator.current, Accelerator.new_stream
    is_capturing, copy_to_host = Accelerator.is_capturing, Accelerator.copy_to_host

    def is_available(self) -> bool:
        return self.count() > 0

    is_initialized = is_available

    def current_index(self) -> int:
        return 0

    def facts(self, device: torch.device) -> GpuFacts:
        """See the base class; the memory is the limit that Metal recommends."""
        return GpuFacts("Apple GPU", "", int(self._torch.recommended_max_memory()))

    def synchronize(self, device: torch.device) -> None:
        self._torch.synchronize()

    def rng_state(self, device: torch.device) -> Tensor:
        return self._torch.get_rng_state()  # type: ignore[no-any-return]

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self._torch.set_rng_state(state)

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """See the base class; memory of other programs is not counted."""
        total_bytes = self.facts(device).total_bytes
        return total_bytes - self.reserved_bytes(device), total_bytes

    def allocated_bytes(self, device: torch.device) -> int:
        return int(self._torch.current_allocated_memory())

    def reserved_bytes(self, device: torch.device) -> int:
        return int(self._torch.driver_allocated_memory())

    peak_reserved_bytes, pop_peak_bytes = reserved_bytes, allocated_bytes

    def has_refused(self, device: torch.device) -> bool:
        return False

    def limit_memory(self, limit_bytes: float, device: torch.device) -> None:
        self._torch.set_per_process_memory_fraction(min(1.0, limit_bytes / self.facts(device).total_bytes))

    def has_bf16(self, device: torch.device) -> bool:
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))

    def has_tf32(self, device: torch.device) -> bool:
        return False

    def has_float64(self, device: torch.device) -> bool:
        return False


_CPU = Accelerator("cpu")

CUDA = Gpu("cuda", "nvidia-smi")

GPUS = (CUDA, Mps("mps", "torch.backends.mps.is_built()"))
"""The kinds of devices with their own memory."""

ACCELERATORS: dict[str, Accelerator] = {each.kind: each for each in (_CPU, *GPUS)}


def accelerator_of(device: torch.device) -> Accelerator:
    return ACCELERATORS.get(device.type, _CPU)


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the kind of a device with its own memory and random states; None for the CPU and simulated devices."""
    found = ACCELERATORS.get(device.type)
    return found if isinstance(found, Gpu) else None


def random_states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    return {
        device: torch.get_rng_state() if (gpu := gpu_of(device)) is None else gpu.rng_state(device)
        for device in devices
    }


def set_random_states(states: Mapping[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if gpu := gpu_of(device):
            gpu.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


@contextlib.contextmanager
def random_states_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore torch's random states of the CPU and of these devices at the end of the `with` statement."""
    states = random_states({torch.device("cpu"), *devices})
    try:
        yield
    finally:
        set_random_states(states)


@contextlib.contextmanager
def all_random_states_kept() -> Iterator[None]:
    """Restore torch's random states of the CPU and of all CUDA devices at the end of the `with` statement.

    If CUDA starts in between, its generators get the seed of the CPU's: what `torch.manual_seed` had asked for.
    """
    has_cuda, seed = torch.cuda.is_initialized(), torch.initial_seed()  # type: ignore[no-untyped-call]
    with random_states_kept(CUDA.devices() if has_cuda else ()):
        try:
            yield
        finally:
            if not has_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.manual_seed_all(seed)


def wide_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if accelerator_of(device).has_float64(device) else torch.float32


def wide(values: Tensor) -> Tensor:
    """Return the values in float64; if the device has none, integers stay integers, and the others are float32."""
    dtype = wide_dtype(values.device)
    return values.to(dtype) if dtype == torch.float64 or values.is_floating_point() else values


def wide_sum(values: Tensor, dim: int | None = None) -> Tensor:
    """Return a differentiable sum in float64; over all dimensions if `dim` is None.

    If the device has no float64, integers and bools are added in int64, which is exact, and the others in float32.
    """
    dtype = wide_dtype(values.device)
    if dtype != torch.float64 and not values.is_floating_point():
        return values.sum(dim)
    return values.sum(dtype=dtype) if dim is None else values.sum(dim, dtype=dtype)
