"""A lock on a file that ends with its process and can be queried without being taken; the identity of its holder.

Process ids are reused, so a process is identified by host, boot, process id and start time. `psutil` is imported only
in functions, because its import takes about as long as the rest of a viewer's start.
"""

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from segapp.errors import StorageError
from segapp.failpoints import failpoint
from segapp.run.files import boot_id, file_system_of, machine_id, open_of_run
from segapp.waiting import is_pid_alive

_MODE = 0o600  # who may read a file may keep a lock on it, and so keep a training from its run
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FileLock:
    """A lock on a file, which is created if it is missing.

    On Linux it is an "open file description" lock: unlike a POSIX record lock, it is not released when another part of
    the process opens and closes the same file, and unlike `flock`, it can be queried. Child processes do not inherit
    it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        """The open file while the lock is held; -1 otherwise."""

    def acquire(self) -> bool:
        """Lock the file until `release` or the end of the process; False if another process holds the lock.

        Raises:
            OSError: the file cannot be opened or written.
            StorageError: the file system has no locks.
        """
        if not self.path.exists():
            check_locks(self.path.parent)
        fd = open_of_run(self.path, os.O_RDWR | os.O_CREAT, mode=_MODE)
        is_acquired = False
        try:
            os.fchmod(fd, _MODE)
            is_acquired = _try_to_lock(fd, self.path.parent)
        finally:
            if not is_acquired:
                os.close(fd)
        if not is_acquired:
            return False
        self.fd = fd
        reference = weakref.ref(self)

        def close_in_child() -> None:
            if (lock := reference()) is not None:
                lock.close()

        os.register_at_fork(after_in_child=close_in_child)
        return True

    def release(self) -> None:
        """Unlock for all processes that share the open file, because a new child may not have closed its copy yet."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                _unlock(self.fd)
            self.close()

    def close(self) -> None:
        """Close this process's copy; the lock is held until every process has closed its copy."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_held(self) -> bool | None:
        """Return True if a process holds the lock; None if the system cannot tell."""
        try:
            fd = open_of_run(self.path)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        try:
            # Asking does not take the lock, so a trainer that starts now is not refused.
            answer = _ofd(fd, fcntl.F_OFD_GETLK, fcntl.F_RDLCK) if _HAS_OFD_LOCKS else None
        except OSError:
            return None
        finally:
            os.close(fd)
        return None if answer is None else int(struct.unpack_from("h", answer)[0]) != fcntl.F_UNLCK


def check_locks(folder: Path) -> None:
    """Raise StorageError if the file system of a folder, which may not exist yet, has no locks; it is not changed."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=place) as file:  # other problems are found later
        _try_to_lock(file.fileno(), folder)


_HAS_OFD_LOCKS = sys.platform.startswith("linux") and hasattr(fcntl, "F_OFD_SETLK")


def _try_to_lock(fd: int, folder: Path) -> bool:
    """Lock an open file of a folder; False if another process holds the lock."""
    try:
        _lock(fd)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in _NO_LOCKS:
            raise
        kind = f" ({name})" if (name := file_system_of(folder)) else ""
        raise StorageError(
            f"{folder} is on a file system without locks{kind}: choose a folder on a file system with locks with "
            "--run, start segapp in one, or mount Lustre with flock, NFS without nolock",
            path=folder,
        ) from error
    return True


def _lock(fd: int) -> None:
    failpoint("run.lock")
    if _HAS_OFD_LOCKS:
        _ofd(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(fd: int) -> None:
    if _HAS_OFD_LOCKS:
        _ofd(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _ofd(fd: int, command: int, kind: int) -> bytes:
    """Call fcntl with a lock on the whole file, using `struct flock` of 64-bit Linux."""
    return fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


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
    """Identifier of its machine, as `machine_id` returns it; None if unknown."""
    acquired_s: float | None = None
    """Time at which it locked the run, Unix seconds; None outside of the file `lock`."""
    inode: int | None = None
    """Inode of the file `lock` that it holds; None outside of that file."""


def this_process() -> ProcessId:
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


def child_pids(*, are_stopped: bool = False) -> list[int]:
    """Return the children of this process; with `are_stopped`, only those that a signal such as SIGSTOP has stopped."""
    import psutil

    children = psutil.Process().children()
    return [child.pid for child in children if not are_stopped or _status(child) == psutil.STATUS_STOPPED]


def _status(process: Any) -> str:
    """Return the status that psutil gives; "" if the process has ended."""
    import psutil

    try:
        return str(process.status())
    except psutil.Error:
        return ""


def _start_ticks(process: Any) -> int:
    """Return the start time in clock ticks since boot, as `/proc/PID/stat` has it."""
    import psutil

    seconds: float = process.create_time() - psutil.boot_time()
    return round(seconds * os.sysconf("SC_CLK_TCK"))
