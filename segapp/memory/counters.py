"""Memory of each device of a training: counters, peaks by phase of a step, and the events about them.

The training thread calls `mark` when it enters a phase; this is one assignment. Every two seconds another thread calls
`sample`, which also requests a profile of the next step: in this profile, each mark reads and
resets the peak of the phase that ends. All counters are kept by the allocators and the operating system on the host, so
no call waits for a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from segapp.accelerator import CUDA, Gpu, gpu_of
from segapp.chunks import check_list
from segapp.errors import ConfigError
from segapp.memory.gpus import GpuPoller, GpuStatus
from segapp.memory.peaks import PHASES
from segapp.memory.split_check import usable_mib
from segapp.parallel.scatter_gather import DeviceLike, resolve_devices
from segapp.run.events import DeviceMemory, Event, Memory

IDLE = "data"
"""The phase between two steps."""

MEMORY_S = 2.0

_PROFILED_STEPS = 2  # the first may have begun before the profile


@dataclass(frozen=True)
class DeviceInfo:
    """A device of a training and the process that uses it."""

    device: str
    _: KW_ONLY
    uuid: str | None = None
    """UUID of a GPU, without the prefix "GPU-"; None for a CPU."""
    total_mib: float | None = None
    pid: int | None = None
    """Process id; None on another machine."""
    is_own: bool = True
    name: str | None = None
    usable_mib: float | None = None
    """Memory for this run when it began, measured by the device's own process; None: not measured."""
    machine: str | None = None
    """Name of the machine; None if all devices are on one."""


class AllocatorCounters:
    """Counters of torch's allocator on one GPU; other processes are only counted by the driver (`driver_used_mib`)."""

    def __init__(self, gpu: Gpu, device: torch.device) -> None:
        self._gpu, self._device = gpu, device

    def driver_used_mib(self) -> float | None:
        """Return the memory in use by all processes; it may wait for the driver. None if the call fails."""
        with suppress(RuntimeError):
            free, total = self._gpu.free_and_total_bytes(self._device)
            return (total - free) / 2**20
        return None

    def read(self) -> dict[str, float | None]:
        allocated, reserved = self._gpu.allocated_bytes(self._device), self._gpu.reserved_bytes(self._device)
        return {"allocated_mib": allocated / 2**20, "reserved_mib": reserved / 2**20}

    def pop_peak_mib(self) -> float | None:
        return self._gpu.pop_peak_bytes(self._device) / 2**20


class ProcessCounters:
    """Resident memory and processor time of a process that trains on the CPU; C's allocator does not count tensors.

    The peak can only be reset for this process, which is named by None.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._can_reset = self._pid == os.getpid()
        self._is_first_read = True
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):
            self._process = psutil.Process(self._pid)
            self._process.cpu_percent()  # the next call reports the processor time since this one

    def read(self) -> dict[str, float | None]:
        """Return the resident memory, and the share of all processors' time since the last call, 0 to 1.

        Both are None if the process is gone; the share is also None at the first call.
        """
        is_first, self._is_first_read = self._is_first_read, False
        with suppress(psutil.Error):
            if self._process is not None:
                share = min(1.0, self._process.cpu_percent() / 100 / (os.cpu_count() or 1))
                used_mib = self._process.memory_info().rss / 2**20
                return {"used_mib": used_mib, "utilization": None if is_first else share}
        return {"used_mib": None, "utilization": None}

    def pop_peak_mib(self) -> float | None:
        """Return the highest resident memory (VmHWM in proc(5)), and reset it if the system allows it."""
        try:
            status = Path(f"/proc/{self._pid}/status").read_bytes()
            peak = int(status.partition(b"VmHWM:")[2].split(None, 1)[0]) / 1024
        except (OSError, ValueError, IndexError):
            return None
        if self._can_reset:
            try:
                Path("/proc/self/clear_refs").write_bytes(b"5")  # proc(5): reset the peak of the resident memory
            except OSError:
                self._can_reset = False
        return peak


MemoryCounters = AllocatorCounters | ProcessCounters
"""Memory counters of one device: fields of a `memory` event, and the highest allocation since the last call."""


def host_memory_mib() -> float:
    """Return the memory of this machine, or the limit of its control group if it is lower, MiB."""
    limits = [psutil.virtual_memory().total]
    with suppress(OSError, ValueError):  # no control group, or no limit ("max")
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits) / 2**20


def limit_gpus(limits_mib: Sequence[float], devices: Sequence[torch.device], first: int = 0) -> None:
    """Limit the tensors on each GPU of this process to `parallel.memory_budget_mib`, by torch's allocator.

    The limits are for the devices of all ranks; `devices` of this process begin at the index `first`.

    Raises:
        ConfigError: a device has no limit, or its allocator does not support limits.
    """
    limits = limits_mib[first : first + len(devices)]
    if len(limits) < len(devices):
        raise ConfigError(
            f"parallel.memory_budget_mib names {len(limits_mib)} budgets: device {first + len(limits)} has none: "
            "give one per device",
            key="parallel.memory_budget_mib",
        )
    gpus = [gpu for device in devices if (gpu := gpu_of(device))]
    # torch has one limit per GPU, which logical devices would share.
    if len(gpus) < len(devices) or len(set(devices)) < len(devices):
        raise ConfigError(
            "parallel.memory_budget_mib limits GPUs, each named once: leave it out on other devices",
            key="parallel.memory_budget_mib",
        )
    for gpu, device, mib in zip(gpus, devices, limits, strict=True):
        gpu.limit_memory(mib * 2**20, device)


def device_info_of(device: torch.device) -> DeviceInfo:
    gpu = gpu_of(device)
    if gpu is None:
        return DeviceInfo(str(device), total_mib=host_memory_mib(), pid=os.getpid())
    facts = gpu.facts(device)
    total_mib, pid = facts.total_bytes / 2**20, os.getpid()
    return DeviceInfo(str(device), uuid=facts.uuid or None, total_mib=total_mib, pid=pid, name=facts.name)


def counters_of(info: DeviceInfo) -> MemoryCounters | None:
    """Return the counters of a device; None for another rank's GPU, whose allocator this process cannot read."""
    device = torch.device(info.device)
    if gpu := gpu_of(device):
        return AllocatorCounters(gpu, device) if info.is_own else None
    return None if info.pid is None else ProcessCounters(None if info.is_own else info.pid)


@dataclass
class _Peaks:
    """Highest allocations of one device, MiB: since the last sample, since the last reset, and by phase."""

    interval: float | None = None
    interval_phase: str | None = None
    observed: float | None = None
    phases: dict[str, float | None] = field(default_factory=dict)

    def note(self, peak: float | None, phase: str | None) -> None:
        if peak is None:
            return
        if self.interval is None or peak >= self.interval:
            self.interval, self.interval_phase = peak, phase
        self.observed = max(peak, self.observed or 0.0)
        if phase is not None:
            self.phases[phase] = peak


class DeviceMemoryTracker:
    """Tracks the memory of the devices of a training, by its phases.

    Logical devices on one real device share its counters. `sample` has the peak of each phase that was run as a whole
    after an earlier `sample`.
    """

    def __init__(
        self,
        devices: Iterable[DeviceInfo | DeviceLike],
        *,
        counters: Sequence[MemoryCounters | None] | None = None,
    ) -> None:
        given = check_list("devices", devices, "one, such as ['cuda:0', 'cuda:1'] or ['cpu']")
        self.devices = tuple(d if isinstance(d, DeviceInfo) else device_info_of(*resolve_devices([d])) for d in given)
        self.phase = "start"
        # Logical devices share counters, which are read once, because reading resets the peak.
        keys = [(info.uuid or info.device, info.pid) for info in self.devices]
        self._first = [keys.index(key) for key in keys]
        counters = counters if counters is not None else [counters_of(info) for info in self.devices]
        self._counters = {i: of_device for i, of_device in enumerate(counters) if i == self._first[i] and of_device}
        self._peaks = {i: _Peaks() for i in self._counters}
        self._lock = threading.Lock()
        self._steps_to_profile = 0
        self._is_phase_whole = False
        """True if the current phase is the only one since the last reset of the peaks."""
        self._finished_sizes: set[Hashable] = set()
        self._is_left_out = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[info.device for info in self.devices]}, phase={self.phase!r})"

    def usable_mib(self) -> list[float | None]:
        """Return each device's memory for this run: its total minus the memory of other processes; None if unknown."""
        with self._lock:
            usable: list[float | None] = []
            for info, i in zip(self.devices, self._first, strict=True):
                counters, known_mib = self._counters.get(i), info.usable_mib
                if isinstance(counters, AllocatorCounters):
                    reserved_mib = counters.read()["reserved_mib"]
                    usable.append(usable_mib(info.total_mib, counters.driver_used_mib(), reserved_mib))
                else:
                    usable.append(info.total_mib if known_mib is None else known_mib)
            return usable

    def driver_used_mib(self) -> dict[str, float]:
        """Return uuid -> memory in use by all processes, for the GPUs of this process; it may wait for the driver."""
        gpus = {i: counters for i, counters in self._counters.items() if isinstance(counters, AllocatorCounters)}
        used = {self.devices[i].uuid: counters.driver_used_mib() for i, counters in gpus.items()}
        return {uuid: mib for uuid, mib in used.items() if uuid is not None and mib is not None}

    @property
    def is_shared(self) -> bool:
        return len({info.uuid or info.device for info in self.devices}) < len(self.devices)  # ranks on the CPU share it

    def mark(self, phase: str) -> None:
        """Record that the training thread enters a phase; 'data' is the one between two steps."""
        if self._steps_to_profile:
            with self._lock:
                self._pop_peaks()
                self._is_phase_whole = True
                if phase == IDLE and self._steps_to_profile:
                    self._steps_to_profile -= 1
        else:
            self._is_phase_whole = False
        self.phase = phase

    def begin_step(self, sizes: Hashable) -> None:
        """Record that a step begins; leave the peaks out until the next one if cuDNN times its algorithms in this step.

        It does so at the first step with new sizes, in workspaces of up to all free memory, which it then frees.

        Args:
            sizes: what the shapes of the step's convolutions depend on.
        """
        has_cudnn = any(self.devices[i].device.startswith(CUDA.kind) for i in self._counters)
        is_left_out = has_cudnn and torch.backends.cudnn.benchmark and sizes not in self._finished_sizes
        if is_left_out != self._is_left_out:
            with self._lock:
                self._pop_peaks()
                self._is_left_out = is_left_out

    def end_step(self, sizes: Hashable) -> None:
        self._finished_sizes.add(sizes)

    def reset_observed(self) -> None:
        with self._lock:
            self._pop_peaks()
            for peaks in self._peaks.values():
                peaks.observed = None
                peaks.phases.clear()

    def observed_mib(self) -> list[float | None]:
        """Return the highest allocation of each device since `reset_observed`."""
        with self._lock:
            self._pop_peaks()
            return [self._peaks[i].observed if i in self._peaks else None for i in self._first]

    def sample(self) -> list[dict[str, Any]]:
        """Return each device's present use and its peak since the last sample, as fields of a `memory` event."""
        with self._lock:
            self._pop_peaks()
            self._is_phase_whole = True
            shared = {i: self._sample(i) for i in self._counters}
            self._steps_to_profile = _PROFILED_STEPS
        named = ("device", "uuid", "name", "total_mib")
        return [
            {**{name: getattr(info, name) for name in named}, **shared.get(i, {})}
            for info, i in zip(self.devices, self._first, strict=True)
        ]

    def _sample(self, index: int) -> dict[str, Any]:
        peaks = self._peaks[index]
        phase, by_phase = peaks.interval_phase or self.phase, dict(peaks.phases)
        facts = {"peak_mib": peaks.interval, "phase": phase, "phase_peak_mib": by_phase}
        peaks.interval = peaks.interval_phase = None
        return {**self._counters[index].read(), **facts}

    def _pop_peaks(self) -> None:
        phase = self.phase if self._is_phase_whole else None
        for index, counters in self._counters.items():
            peak_mib = counters.pop_peak_mib()
            if not self._is_left_out:
                self._peaks[index].note(peak_mib, phase)


@dataclass
class MemorySampler:
    """Emits a `memory` event every 2 s, from a thread that calls `poll`.

    It makes no GPU call: torch's counters are on the host. Other threads run nvidia-smi and query the CUDA driver, and
    their latest answers are used (`segapp.memory.gpus`). A value that cannot be read is null in the event.
    """

    emit: Callable[[Event], None]
    device_memory: DeviceMemoryTracker
    step: Callable[[], int | None] = lambda: None
    gpus: GpuPoller | None = None

    def __post_init__(self) -> None:
        if self.gpus is None and any(place.uuid for place in self.device_memory.devices):
            self.gpus = GpuPoller(own_used_mib=self.device_memory.driver_used_mib)

    def poll(self) -> float:
        """Emit a sample, and return the seconds until the next one."""
        if self.device_memory.phase == "start":  # `run_start` comes first, the first sample shortly after it
            return 0.25
        devices = self.device_memory.sample()
        statuses = {status.uuid: status for status in (self.gpus.poll() if self.gpus else [])}
        self.emit(Memory(devices=[merged(device, statuses) for device in devices], step=self.step()))
        return MEMORY_S


def merged(device: dict[str, Any], statuses: dict[str, GpuStatus]) -> DeviceMemory:
    """Return a device's memory fields, completed by the status of the GPU with the same uuid."""
    status = statuses.get(device.get("uuid") or "")
    phases = {name: device["phase_peak_mib"][name] for name in PHASES if name in device.get("phase_peak_mib", {})}
    fields = {**device, "phase_peak_mib": phases}
    if status is not None:
        fields["used_mib"], fields["utilization"] = status.used_mib, status.utilization
        fields["temperature"] = status.temperature
        fields["total_mib"] = device.get("total_mib") or status.total_mib
        fields["name"] = device.get("name") or status.name
    return DeviceMemory.model_validate(fields)
