"""The one thread beside a training that looks at the machine: `memory` every 2 s, `heartbeat` every 5 s.

It never touches a device: torch's counters live on the host, and nvidia-smi is asked by a thread of its own, whose
answer is taken when it is there (`segapp.memory.gpus`). Whatever fails here is a null in an event.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from segapp.memory.gpus import GpuPoller, GpuStatus
from segapp.run.events import Alert, DeviceMemory, Heartbeat, Memory
from segapp.train.telemetry.device_memory import PHASES, DeviceMemoryTracker
from segapp.train.telemetry.event_log import EventLog

MEMORY_S = 2.0
HEARTBEAT_S = 5.0

logger = logging.getLogger("segapp")


class MemorySampler:
    """Writes `memory` and `heartbeat` events for as long as it is entered.

    Args:
        event_log: takes them.
        watch: the training's devices, and where the training thread is.
        gpus: asks nvidia-smi; None: only where a device has a uuid.
        memory_s: seconds between two samples.
        heartbeat_s: seconds between two heartbeats.
        blocked_s: a checkpoint that has been being written for so many seconds is an alert, which repeats.
    """

    def __init__(
        self,
        event_log: EventLog,
        watch: DeviceMemoryTracker,
        *,
        gpus: GpuPoller | None = None,
        memory_s: float = MEMORY_S,
        heartbeat_s: float = HEARTBEAT_S,
        blocked_s: float = 30.0,
    ) -> None:
        self.event_log, self.watch = event_log, watch
        self.step: Callable[[], int | None] = lambda: None
        """Gives the number of steps so far."""
        self.saving_s: Callable[[], float | None] = lambda: None
        """Gives for how long a checkpoint has been being written; None while none is."""
        has_gpus = any(place.uuid for place in watch.devices)
        self._gpus = gpus or (GpuPoller() if has_gpus else None)
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
        """Writes a heartbeat."""
        phase = self.watch.phase
        activity = phase if phase in ("start", "eval", "save", "paused") else "train"
        saving_s = self.saving_s()
        self.event_log.emit(Heartbeat(pid=os.getpid(), phase=activity, step=self.step(), saving_s=saving_s))
        self._alert_blocked(saving_s)

    def _alert_blocked(self, saving_s: float | None) -> None:
        """An alert each time that a write has been going on for another `blocked_s`."""
        if saving_s is None:
            self._blocked_alert_s = self._blocked_s
        elif saving_s >= self._blocked_alert_s:
            self._blocked_alert_s = saving_s + self._blocked_s
            message = f"checkpoint write blocked: the disk has not taken it for {saving_s:.0f} s; training goes on"
            self.event_log.emit(Alert(kind="storage", message=message, step=self.step()))

    def sample(self) -> None:
        """Writes a `memory` event."""
        devices = self.watch.sample()
        statuses = {status.uuid: status for status in (self._gpus.poll() if self._gpus else [])}
        self.event_log.emit(Memory(devices=[merged(device, statuses) for device in devices], step=self.step()))

    def _run(self) -> None:
        next_memory_s = next_beat_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            try:
                if now_s >= next_beat_s:
                    next_beat_s = now_s + min(self._heartbeat_s, self._blocked_s)
                    self.beat()
                if self.watch.phase == "start":  # `run_start` comes first, and the first sample right behind it
                    next_memory_s = now_s + 0.25
                elif now_s >= next_memory_s:
                    next_memory_s = now_s + self._memory_s
                    self.sample()
            except Exception:  # a monitor must not end a training, nor itself
                logger.exception("monitor")
            if self._stop.wait(max(0.01, min(next_memory_s, next_beat_s) - time.monotonic())):
                return


def merged(device: dict[str, Any], statuses: dict[str, GpuStatus]) -> DeviceMemory:
    """A device of the watch with what the driver says of it, by uuid.

    Args:
        device: fields of a `memory` event's device, from torch or `/proc`.
        statuses: what nvidia-smi says, by uuid.
    """
    status = statuses.get(device.get("uuid") or "")
    phases = {name: device["phase_peak_mib"][name] for name in PHASES if name in device.get("phase_peak_mib", {})}
    found = {**device, "phase_peak_mib": phases}
    if status is not None:
        found["used_mib"], found["utilization"] = status.used_mib, status.utilization
        found["temperature"] = status.temperature
        found["total_mib"] = status.total_mib or device.get("total_mib")
        found["name"] = device.get("name") or status.name
    return DeviceMemory.model_validate(found)
