"""Which process is it, and does it still run: a process id alone is not enough, ids come back."""

import contextlib
import os
import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from segapp.run.files import is_pid_alive


class ProcessId(BaseModel):
    """One process of one boot of one host."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    host: str
    pid: int
    start_ticks: int | None = None
    """When it began, in clock ticks since boot; None where the system does not say."""
    boot_id: str | None = None
    start_s: float | None = None
    """When it began, Unix seconds."""


def this_process() -> ProcessId:
    """The process that asks."""
    ticks = _start_ticks(os.getpid())
    return ProcessId(
        host=socket.gethostname(), pid=os.getpid(), start_ticks=ticks, boot_id=_boot_id(), start_s=_start_s(ticks)
    )


def is_alive(process: ProcessId) -> bool | None:
    """Whether a process runs; None when that cannot be known from here (another host).

    A zombie does not run, and neither does a process whose id another one has by now.
    """
    if process.host != socket.gethostname():
        return None
    if process.boot_id is not None and process.boot_id != _boot_id():
        return False
    if not is_pid_alive(process.pid) or _state(process.pid) == "Z":
        return False
    return process.start_ticks is None or _start_ticks(process.pid) in (None, process.start_ticks)


def child_pids() -> list[int]:
    """The children of this process, of all its threads; empty where the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            found += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def _stat_fields(pid: int) -> list[str]:
    """`/proc/PID/stat` from its third field on (the second may hold anything, in parentheses)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str | None:
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def _start_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[19]) if len(fields) > 19 else None


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _start_s(ticks: int | None) -> float | None:
    if ticks is None:
        return None
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("btime "):
                return round(int(line.split()[1]) + ticks / os.sysconf("SC_CLK_TCK"), 2)
    except (OSError, ValueError):
        pass
    return None
