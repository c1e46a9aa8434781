"""Locks of open files that end with the process that holds them, and can be queried without being taken."""

import fcntl
import os
import struct
import sys

_FLOCK = "hhqqi4x"
"""`struct flock` of Linux on 64 bits: type, whence, start, length, pid."""


def take_lock(fd: int) -> None:
    """Lock an open file until its file description is closed (an "open file description" lock).

    Unlike a POSIX record lock it is not released when another part of the process opens and closes the same file,
    and unlike `flock` it can be queried without being taken.

    Raises:
        OSError: Another process holds the lock.
    """
    if _has_ofd_locks():
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def drop_lock(fd: int) -> None:
    """Unlock for all processes that share the file description: a new child may not have closed its copy yet."""
    if _has_ofd_locks():
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_write_locked(fd: int) -> bool | None:
    """Return the lock that conflicts with a shared one, without taking any."""
    if not _has_ofd_locks():
        return None
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    return int(struct.unpack_from("h", answer)[0]) != fcntl.F_UNLCK


def _has_ofd_locks() -> bool:
    return sys.platform.startswith("linux") and hasattr(fcntl, "F_OFD_SETLK")
