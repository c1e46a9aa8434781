"""The monitoring thread of a training: a `memory` event every 2 s, a `heartbeat` every 5 s.

It makes no GPU call: torch's counters are on the host, and other threads run nvidia-smi and ask the CUDA driver, whose
latest answers are used (`segapp.memory.gpus`). A value that cannot be read is null in the event.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from segapp.memory.counters import PHASES, DeviceMemoryTracker
from segapp.memory.gpus import GpuPoller, GpuStatus
from segapp.run.events import Alert, DeviceMemory, EventLog, Heartbeat, Memory

MEMORY_S = 2.0
HEARTBEAT_S = 5.0

logger = logging.getLogger("segapp")


class MemorySampler:
    """Context manager that writes `memory` and `heartbeat` events from a thread of its own.

    Args:
        event_log: Takes the events.
        device_memory: The training's devices, and the phase of the training thread.
        step: Returns the steps done; None before the training begins.
        saving_s: Returns the seconds since the running checkpoint write began; None while none runs.
        gpus: Asks about GPUs; None: one is made if a device has a uuid.
        memory_s: Seconds between two samples.
        heartbeat_s: Seconds between two heartbeats.
        blocked_s: Seconds of a checkpoint write after which an alert is emitted, and again after each such interval.
    """

    def __init__(
        self,
        event_log: EventLog,
        device_memory: DeviceMemoryTracker,
        *,
        step: Callable[[], int | None] = lambda: None,
        saving_s: Callable[[], float | None] = lambda: None,
        gpus: GpuPoller | None = None,
        memory_s: float = MEMORY_S,
        heartbeat_s: float = HEARTBEAT_S,
        blocked_s: float = 30.0,
    ) -> None:
        self.event_log, self.device_memory = event_log, device_memory
        self._step, self._saving_s = step, saving_s
        has_gpus = any(place.uuid for place in device_memory.devices)
        self._gpus = gpus or (GpuPoller(own_used_mib=device_memory.driver_used_mib) if has_gpus else None)
        self._memory_s, self._heartbeat_s, self._blocked_s = memory_s, heartbeat_s, blocked_s
        self._blocked_alert_s = blocked_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def beat(self) -> None:
        """Emit a heartbeat."""
        phase = self.device_memory.phase
        activity = phase if phase in ("start", "eval", "save", "paused") else "train"
        saving_s = self._saving_s()
        self.event_log.emit(Heartbeat(pid=os.getpid(), phase=activity, step=self._step(), saving_s=saving_s))
        self._alert_blocked(saving_s)

    def _alert_blocked(self, saving_s: float | None) -> None:
        """Emit an alert after each `blocked_s` seconds of a write."""
        if saving_s is None:
            self._blocked_alert_s = self._blocked_s
        elif saving_s >= self._blocked_alert_s:
            self._blocked_alert_s = saving_s + self._blocked_s
            message = f"checkpoint write blocked: the disk has not taken it for {saving_s:.0f} s; training goes on"
            self.event_log.emit(Alert(kind="storage", message=message, step=self._step()))

    def sample(self) -> None:
        """Emit a `memory` event."""
        devices = self.device_memory.sample()
        statuses = {status.uuid: status for status in (self._gpus.poll() if self._gpus else [])}
        self.event_log.emit(Memory(devices=[merged(device, statuses) for device in devices], step=self._step()))

    def _run(self) -> None:
        next_memory_s = next_beat_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            try:
                if now_s >= next_beat_s:
                    next_beat_s = now_s + min(self._heartbeat_s, self._blocked_s)
                    self.beat()
                if self.device_memory.phase == "start":  # `run_start` comes first, the first sample shortly after it
                    next_memory_s = now_s + 0.25
                elif now_s >= next_memory_s:
                    next_memory_s = now_s + self._memory_s
                    self.sample()
            except Exception:  # an error here must end neither the training nor this thread
                logger.exception("memory sampler")
            if self._stop.wait(max(0.01, min(next_memory_s, next_beat_s) - time.monotonic())):
                return


def merged(device: dict[str, Any], statuses: dict[str, GpuStatus]) -> DeviceMemory:
    """Return a device's memory fields, completed by what is known about the GPU of the same uuid."""
    status = statuses.get(device.get("uuid") or "")
    phases = {name: device["phase_peak_mib"][name] for name in PHASES if name in device.get("phase_peak_mib", {})}
    found = {**device, "phase_peak_mib": phases}
    if status is not None:
        found["used_mib"], found["utilization"] = status.used_mib, status.utilization
        found["temperature"] = status.temperature
        found["total_mib"] = status.total_mib or device.get("total_mib")
        found["name"] = device.get("name") or status.name
    return DeviceMemory.model_validate(found)
