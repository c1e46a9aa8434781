"""How much memory each device of a training holds, and in which phase of a step it held the most.

The training thread marks where it is (`mark`), which is one assignment. Every now and then the monitor's thread takes a
`sample`; that also asks for a profile of the next step, in which each mark reads the peak of the phase that ends there
and resets it. All of it are counters of the host's allocators: nothing waits for a device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from segapp.run.verdict import usable_mib

IDLE = "data"
"""The phase between two steps."""

PHASES = ("forward", "loss", "backward", "step", "eval")
"""The phases whose peaks are kept apart."""

_PROFILED_STEPS = 2  # the first may have begun before the profile


@dataclass(frozen=True)
class DeviceInfo:
    """A device of a training, and the process that drives it.

    Args:
        device: as torch calls it in that process.
        uuid: of a GPU, without "GPU-" in front; None for a CPU.
        total_mib: its memory; None where unknown.
        pid: of the process, where it runs on this machine.
        is_own: whether it is this process.
        name: product name.
        slot: tells logical devices apart that have budgets of their own; None where they share a device's numbers.
    """

    device: str
    uuid: str | None = None
    total_mib: float | None = None
    pid: int | None = None
    is_own: bool = True
    name: str | None = None
    slot: int | None = None


class MemoryCounters(Protocol):
    """The memory counters of one device; MiB, None where it does not say."""

    def used_mib(self) -> float | None:
        """What the process holds, where no driver has to be asked; None on a GPU."""

    def allocated_mib(self) -> float | None:
        """What tensors hold."""

    def reserved_mib(self) -> float | None:
        """What the allocator holds for them."""

    def pop_peak_mib(self) -> float | None:
        """The highest allocation since the last call."""

    def utilization(self) -> float | None:
        """Share of the processors in use since the last call, 0 to 1; None on a GPU."""


class CudaCounters:
    """torch's allocator on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used_mib(self) -> float | None:
        """Nothing: the driver knows."""
        return None

    def driver_used_mib(self) -> float | None:
        """What is in use of the card, all processes together, as this process's driver tells it."""
        try:
            free, total = torch.cuda.mem_get_info(self._device)
        except RuntimeError:
            return None
        return (total - free) / 2**20

    def allocated_mib(self) -> float | None:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device) / 2**20

    def reserved_mib(self) -> float | None:
        """Bytes of the cache, tensors included."""
        return torch.cuda.memory_reserved(self._device) / 2**20

    def pop_peak_mib(self) -> float | None:
        """The allocator's own peak, then reset."""
        peak = torch.cuda.max_memory_allocated(self._device) / 2**20
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def utilization(self) -> float | None:
        """Nothing: the driver knows."""
        return None


class ProcessCounters:
    """A process on the CPU: its resident memory and processor time, as `/proc` tells them.

    Args:
        pid: the process; only of this very one can the peak be reset.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._is_own = pid is None or pid == os.getpid()
        self._folder = Path("/proc/self" if pid is None else f"/proc/{pid}")
        self._page_mib = os.sysconf("SC_PAGE_SIZE") / 2**20
        self._ticks_per_s = os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        self._last: tuple[float, float] | None = None

    def used_mib(self) -> float | None:
        """Resident memory."""
        try:
            return int((self._folder / "statm").read_bytes().split()[1]) * self._page_mib
        except (OSError, ValueError, IndexError):
            return None

    def allocated_mib(self) -> float | None:
        """Nothing: the C library's allocator does not say."""
        return None

    def reserved_mib(self) -> float | None:
        """Nothing, as above."""
        return None

    def pop_peak_mib(self) -> float | None:
        """Highest resident memory (VmHWM), then reset where the system allows it."""
        try:
            status = (self._folder / "status").read_bytes()
            peak = int(status.partition(b"VmHWM:")[2].split(None, 1)[0]) / 1024
        except (OSError, ValueError, IndexError):
            return None
        if self._is_own:
            try:
                (self._folder / "clear_refs").write_bytes(b"5")  # "reset the peak", proc(5)
            except OSError:
                self._is_own = False
        return peak

    def utilization(self) -> float | None:
        """User and system time over the time that passed, over all processors."""
        try:
            fields = (self._folder / "stat").read_bytes().rpartition(b")")[2].split()
            now = (float(Path("/proc/uptime").read_bytes().split()[0]), int(fields[11]) + int(fields[12]))
        except (OSError, ValueError, IndexError):
            return None
        last, self._last = self._last, now
        if last is None or now[0] <= last[0]:
            return None
        return min(1.0, max(0.0, (now[1] - last[1]) / ((now[0] - last[0]) * self._ticks_per_s)))


def host_memory_mib() -> float | None:
    """Memory of this machine, or of the container where that is less."""
    totals = []
    try:
        totals.append(int(Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]) / 1024)
        totals.append(int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**20)
    except (OSError, ValueError, IndexError):
        pass  # no Linux, no control group, or no limit ("max")
    return min(totals, default=None)


def device_info_of(device: torch.device) -> DeviceInfo:
    """A device of this process."""
    if device.type != "cuda":
        return DeviceInfo(str(device), total_mib=host_memory_mib(), pid=os.getpid())
    facts: Any = torch.cuda.get_device_properties(device)
    uuid = str(getattr(facts, "uuid", "")).removeprefix("GPU-") or None
    return DeviceInfo(str(device), uuid, facts.total_memory / 2**20, os.getpid(), name=facts.name)


def counters_of(info: DeviceInfo) -> MemoryCounters | None:
    """What tells the memory of a place; None for another rank's GPU, which only the driver knows from here."""
    if info.uuid is None and not info.device.startswith("cuda"):
        return None if info.pid is None else ProcessCounters(None if info.is_own else info.pid)
    return CudaCounters(torch.device(info.device)) if info.is_own else None


@dataclass
class _Peaks:
    """Highest allocations of one device, MiB."""

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
        if phase in PHASES:
            self.phases[phase] = peak


class DeviceMemoryTracker:
    """Marks and samples.

    Args:
        devices: the training's devices, in its own order; logical devices that share a real one share its numbers.
        counters: one for each device; None: made from its `DeviceInfo`.
    """

    def __init__(
        self, devices: Sequence[DeviceInfo] = (), counters: Sequence[MemoryCounters | None] | None = None
    ) -> None:
        self.devices = tuple(devices)
        self.phase = self.activity = "start"
        self.last_progress_s = time.monotonic()
        keys = [(info.device, info.pid, info.slot) for info in self.devices]
        self._first = [keys.index(key) for key in keys]
        made = counters if counters is not None else [counters_of(info) for info in self.devices]
        self._counters = {i: each for i, each in enumerate(made) if i == self._first[i] and each is not None}
        self._peaks = {i: _Peaks() for i in self._counters}
        self._lock = threading.Lock()
        self._steps_to_profile = 0
        self._is_phase_whole = False
        """Whether everything since the last reset of the peaks happened in the present phase."""

    def use_counters(self, counters: Mapping[int, MemoryCounters]) -> None:
        """Takes the numbers of some devices from these counters from now on."""
        with self._lock:
            self._counters.update(counters)
            self._peaks = {i: _Peaks() for i in self._counters}

    def usable_mib(self) -> list[float | None]:
        """What each device has for this run: its memory without what others hold of it."""
        with self._lock:
            return [
                self._usable_mib(info, self._counters.get(i)) for info, i in zip(self.devices, self._first, strict=True)
            ]

    @staticmethod
    def _usable_mib(info: DeviceInfo, counters: MemoryCounters | None) -> float | None:
        if not isinstance(counters, CudaCounters):
            return info.total_mib
        return usable_mib(info.total_mib, counters.driver_used_mib(), counters.reserved_mib())

    @property
    def is_shared(self) -> bool:
        """Whether several of the training's devices are one real device."""
        return len(set(self._first)) < len(self._first)

    def mark(self, phase: str) -> None:
        """Says that the training thread enters a phase: forward, loss, backward, step, data, eval, save or paused."""
        if self._steps_to_profile:
            with self._lock:
                self._take()
                self._is_phase_whole = True
                if phase == IDLE and self._steps_to_profile:
                    self._steps_to_profile -= 1
        else:
            self._is_phase_whole = False
        self.phase = phase
        self.report_progress(phase)

    def report_progress(self, activity: str | None = None) -> None:
        """Record that the training thread makes progress, and in which activity.

        Args:
            activity: a phase, or `read` while it waits for a batch; None: unchanged.
        """
        self.activity = activity or self.activity
        self.last_progress_s = time.monotonic()

    def observe(self) -> None:
        """Forgets the peaks seen so far: another split begins."""
        with self._lock:
            self._take()
            for peaks in self._peaks.values():
                peaks.observed = None
                peaks.phases.clear()

    def observed_mib(self) -> list[float | None]:
        """The highest allocation of each device since `observe`."""
        with self._lock:
            self._take()
            return [self._peaks[i].observed if i in self._peaks else None for i in self._first]

    def sample(self) -> list[dict[str, Any]]:
        """What each device holds now and held at most since the last sample, as fields of a `memory` event."""
        with self._lock:
            self._take()
            self._is_phase_whole = True
            shared = {i: self._sample(i) for i in self._counters}
            self._steps_to_profile = _PROFILED_STEPS
        return [
            {
                "device": info.device,
                "uuid": info.uuid,
                "name": info.name,
                "total_mib": info.total_mib,
                **shared.get(i, {}),
            }
            for info, i in zip(self.devices, self._first, strict=True)
        ]

    def _sample(self, index: int) -> dict[str, Any]:
        counters, peaks = self._counters[index], self._peaks[index]
        facts = {
            "used_mib": counters.used_mib(),
            "utilization": counters.utilization(),
            "allocated_mib": counters.allocated_mib(),
            "reserved_mib": counters.reserved_mib(),
            "peak_mib": peaks.interval,
            "phase": peaks.interval_phase or self.phase,
            "phase_peak_mib": dict(peaks.phases),
        }
        peaks.interval = peaks.interval_phase = None
        return facts

    def _take(self) -> None:
        phase = self.phase if self._is_phase_whole else None
        for index, counters in self._counters.items():
            self._peaks[index].note(counters.pop_peak_mib(), phase)
