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


class Probe(Protocol):
    """The memory counters of one device; MiB, None where it does not say."""

    def used_mib(self) -> float | None:
        """What the process holds, where no driver has to be asked; None on a GPU."""

    def allocated_mib(self) -> float | None:
        """What tensors hold."""

    def reserved_mib(self) -> float | None:
        """What the allocator holds for them."""

    def take_peak_mib(self) -> float | None:
        """The highest allocation since the last call."""

    def utilization(self) -> float | None:
        """Share of the processors in use since the last call, 0 to 1; None on a GPU."""


class CudaProbe:
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

    def take_peak_mib(self) -> float | None:
        """The allocator's own peak, then reset."""
        peak = torch.cuda.max_memory_allocated(self._device) / 2**20
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def utilization(self) -> float | None:
        """Nothing: the driver knows."""
        return None


class ProcessProbe:
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

    def take_peak_mib(self) -> float | None:
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


def probe_of(place: DeviceInfo) -> Probe | None:
    """What tells the memory of a place; None for another rank's GPU, which only the driver knows from here."""
    if place.uuid is None and not place.device.startswith("cuda"):
        return None if place.pid is None else ProcessProbe(None if place.is_own else place.pid)
    return CudaProbe(torch.device(place.device)) if place.is_own else None


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
        places: the training's devices, in its own order; logical devices that share a real one share its numbers.
        probes: one a place, where they are not to be made from it.
    """

    def __init__(self, places: Sequence[DeviceInfo] = (), probes: Sequence[Probe | None] | None = None) -> None:
        self.places = tuple(places)
        self.phase = self.place = "start"
        self.touched_s = time.monotonic()
        keys = [(place.device, place.pid, place.slot) for place in self.places]
        self._first = [keys.index(key) for key in keys]
        made = probes if probes is not None else [probe_of(place) for place in self.places]
        self._probes = {i: probe for i, probe in enumerate(made) if i == self._first[i] and probe is not None}
        self._peaks = {i: _Peaks() for i in self._probes}
        self._lock = threading.Lock()
        self._steps_to_profile = 0
        self._is_phase_whole = False
        """Whether everything since the last reset of the peaks happened in the present phase."""

    def meter(self, probes: Mapping[int, Probe]) -> None:
        """Takes the numbers of some places from these probes from now on."""
        with self._lock:
            self._probes.update(probes)
            self._peaks = {i: _Peaks() for i in self._probes}

    def usable_mib(self) -> list[float | None]:
        """What each device has for this run: its memory without what others hold of it."""
        with self._lock:
            return [
                self._usable_mib(place, self._probes.get(i)) for place, i in zip(self.places, self._first, strict=True)
            ]

    @staticmethod
    def _usable_mib(place: DeviceInfo, probe: Probe | None) -> float | None:
        if not isinstance(probe, CudaProbe):
            return place.total_mib
        return usable_mib(place.total_mib, probe.driver_used_mib(), probe.reserved_mib())

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
        self.touch(phase)

    def touch(self, place: str | None = None) -> None:
        """Says that the training thread gets on, and where it is.

        Args:
            place: a phase, or `read`: a batch is waited for; None: where it was.
        """
        self.place = place or self.place
        self.touched_s = time.monotonic()

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
            shared = {i: self._sample(i) for i in self._probes}
            self._steps_to_profile = _PROFILED_STEPS
        return [
            {
                "device": place.device,
                "uuid": place.uuid,
                "name": place.name,
                "total_mib": place.total_mib,
                **shared.get(i, {}),
            }
            for place, i in zip(self.places, self._first, strict=True)
        ]

    def _sample(self, index: int) -> dict[str, Any]:
        probe, peaks = self._probes[index], self._peaks[index]
        facts = {
            "used_mib": probe.used_mib(),
            "utilization": probe.utilization(),
            "allocated_mib": probe.allocated_mib(),
            "reserved_mib": probe.reserved_mib(),
            "peak_mib": peaks.interval,
            "phase": peaks.interval_phase or self.phase,
            "phase_peak_mib": dict(peaks.phases),
        }
        peaks.interval = peaks.interval_phase = None
        return facts

    def _take(self) -> None:
        phase = self.phase if self._is_phase_whole else None
        for index, probe in self._probes.items():
            self._peaks[index].note(probe.take_peak_mib(), phase)
