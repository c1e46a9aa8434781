"""A lock on a file that ends with its process and can be queried without being taken.

If the file system has no locks, a lease next to the file is used instead.
"""

import contextlib
import errno
import fcntl
import os
import struct
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

from segapp.failpoints import failpoint
from segapp.run.files import open_of_run
from segapp.run.lease import Lease

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
        self.lease = Lease(path.with_name(f"{path.name}.lease"))
        self.has_lease = False
        """True while a lease is held, or was lost, instead of a lock, because the file system has no locks."""

    def acquire(self, say: Callable[[str], None] | None = None) -> bool:
        """Lock the file until `release` or the end of the process; False if another process holds the lock.

        `say` is called before a wait for a lease whose holder may be dead; None: do not wait, the holder counts as
        alive.

        Raises:
            OSError: the file cannot be opened or written.
        """
        fd = open_of_run(self.path, os.O_RDWR | os.O_CREAT, mode=_MODE)
        is_acquired = False
        try:
            os.fchmod(fd, _MODE)
            is_acquired = self._lock_or_lease(fd, say)
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

    def _lock_or_lease(self, fd: int, say: Callable[[str], None] | None) -> bool:
        self.has_lease = False
        try:
            _lock(fd)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self.has_lease = True
        # A machine that mounts the file system without locks may have a lease where this machine has a lock.
        self.has_lease = self.has_lease or self.lease.path.exists()
        return not self.has_lease or self.lease.acquire(say)

    def release(self) -> None:
        """Unlock for all processes that share the open file, because a new child may not have closed its copy yet."""
        if self.fd >= 0:
            self.lease.release()
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
            answer = _ofd(fd, fcntl.F_OFD_GETLK, fcntl.F_RDLCK) if _HAS_OFD_LOCKS else None
        except OSError:
            return None
        finally:
            os.close(fd)
        if answer is not None and int(struct.unpack_from("h", answer)[0]) != fcntl.F_UNLCK:
            return True
        return None if answer is None or self.lease.path.exists() else False


_HAS_OFD_LOCKS = sys.platform.startswith("linux") and hasattr(fcntl, "F_OFD_SETLK")


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
