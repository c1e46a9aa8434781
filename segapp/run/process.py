"""Identity and liveness of a process: host, boot, process id and start time, because process ids are reused.

`psutil` is imported only in functions, because its import takes about as long as the rest of a viewer's start.
"""

import os
import socket
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from segapp.run.files import boot_id, is_pid_alive, machine_id

if TYPE_CHECKING:
    import psutil


class ProcessId(BaseModel):
    """A process on one boot of one host."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    host: str
    pid: int
    start_ticks: int | None = None
    """Start time in clock ticks since boot; None if unknown."""
    boot_id: str | None = None
    start_s: float | None = None
    """Start time, Unix seconds."""
    machine: str | None = None
    """See `machine_id`; None in files of earlier versions."""


def this_process() -> ProcessId:
    """Return the identity of the calling process."""
    import psutil

    process = psutil.Process()
    return ProcessId(
        host=socket.gethostname(),
        pid=process.pid,
        start_ticks=_start_ticks(process),
        boot_id=boot_id(),
        start_s=round(process.create_time(), 2),
        machine=machine_id(),
    )


def is_alive(process: ProcessId) -> bool | None:
    """Return True if a process runs; None if it is on another host, or in a container with separate process ids.

    False for a zombie, and for a process id that now belongs to another process.
    """
    if process.host != socket.gethostname():
        return None
    if process.boot_id is not None and process.boot_id != boot_id():
        return False
    if process.machine not in (None, machine_id()):
        return None
    if not is_pid_alive(process.pid):
        return False
    import psutil

    try:
        found = psutil.Process(process.pid)
        is_same = process.start_ticks is None or process.start_ticks == _start_ticks(found)
        return is_same and found.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # the process exists, but the system hides its facts
        return True


def child_pids() -> list[int]:
    """Return the process ids of this process's children."""
    import psutil

    return [child.pid for child in psutil.Process().children()]


def _start_ticks(process: "psutil.Process") -> int:
    """Return the start time in clock ticks since boot, as `/proc/PID/stat` has it."""
    import psutil

    return round((process.create_time() - psutil.boot_time()) * os.sysconf("SC_CLK_TCK"))
