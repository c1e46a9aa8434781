"""A lease, which replaces the lock on file systems without locks: a file with a random token and a counter.

The holder renews the counter every `RENEW_S`. Another process may take the lease if the counter has not changed for
`STILL_S` by its own clock, so clocks are never compared. The former holder then finds another token, and must not write
any more. A holder that was asleep may have checked its token just before, so a lease makes two writers unlikely,
whereas a lock makes them impossible.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from segapp.run.files import fsync_directory, open_new, remove_quietly, temporary_name, write_all

RENEW_S = 10.0
"""Interval at which the holder renews the counter."""

STILL_S = 60.0
"""A lease whose counter has not changed for this time may be taken."""

_LOOK_S = 1.0
_JOIN_S = 5.0
_PAUSE_S = 2.0  # longer than another process needs from its last read of the old lease to its rename


class Lease:
    """A lease on a path; the process that created the file, or replaced it, holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_lost: Callable[[], None] = lambda: None
        """Called, possibly in another thread, after another process has taken the lease."""
        self._token, self._count, self._fd, self._pid, self._renewed_s = b"", 0, -1, 0, float("-inf")
        self._stop = threading.Event()
        self._renewal: threading.Thread

    def acquire(self, say: Callable[[str], None] | None = None) -> bool:
        """Take the lease, and renew it until `release` or the end of the process; False if another process holds it.

        Args:
            say: Called before a wait that shows whether the holder is alive. None: do not wait, the holder counts as
                alive.

        Raises:
            OSError: The file cannot be written.
        """
        self._token, self._count = secrets.token_hex(16).encode(), 0
        while not self._create(self.path):
            if say is None:
                return False
            say(f"{self.path}: waiting up to {STILL_S:g} s to see whether its holder renews it")
            seen = self._stands_still()
            if seen is not None and self._replace(seen):
                break
            if seen is not None or self.path.exists():
                return False
        self._pid, self._stop = os.getpid(), threading.Event()
        self._renewal = threading.Thread(target=self._renew, args=(self._stop,), name="lease", daemon=True)
        self._renewal.start()
        return True

    def release(self) -> None:
        """Stop renewing, and remove the file if it is still this process's."""
        if self._fd < 0 or self._pid != os.getpid():
            return
        self._stop.set()
        with contextlib.suppress(OSError):
            if self.is_own():
                self.path.unlink()
        if threading.current_thread() is not self._renewal:
            self._renewal.join(_JOIN_S)
        if not self._renewal.is_alive():  # it may write, or hang, on a disk that does not answer
            os.close(self._fd)
        self._fd = -1

    def is_own(self, max_age_s: float = 0.0) -> bool:
        """Return True while the file has this process's token; OSError if it cannot be read.

        Nothing is read if this process renewed it at most `max_age_s` ago, which must be below `STILL_S`.
        """
        if time.monotonic() - self._renewed_s < max_age_s:
            return True
        content = self._read()
        return content is not None and content.startswith(self._token)

    def _create(self, path: Path) -> bool:
        """Write the token into a new file; False if it exists."""
        try:
            self._fd = open_new(path, 0o644)
            self._write()
        except FileExistsError:
            return False
        except OSError:
            remove_quietly(path)
            raise
        return True

    def _replace(self, seen: bytes) -> bool:
        """Replace a lease that did not change; False if another process replaced it, too."""
        temporary = self.path.parent / temporary_name()
        self._create(temporary)
        if self._read() == seen:
            os.rename(temporary, self.path)
            fsync_directory(self.path.parent)
            time.sleep(_PAUSE_S)
        if self.is_own():
            return True
        os.close(self._fd)
        self._fd = -1
        remove_quietly(temporary)
        return False

    def _stands_still(self) -> bytes | None:
        """Return the content of a file that did not change for `STILL_S`; None as soon as it changes."""
        seen, looked_s, still_s = self._read(), time.monotonic(), 0.0
        while still_s < STILL_S:
            time.sleep(_LOOK_S)
            if seen is None or self._read() != seen:
                return None
            now_s = time.monotonic()
            still_s += min(now_s - looked_s, 2 * _LOOK_S)  # time in which this process was stopped does not count
            looked_s = now_s
        return seen

    def _read(self) -> bytes | None:
        """Return the content by name, as another machine sees it; None if there is none."""
        try:
            with open(self.path, "rb") as file:
                return file.read(200)
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        """Write the next count into this process's open file, never into a file that has replaced it."""
        self._count, renewed_s = self._count + 1, time.monotonic()
        os.lseek(self._fd, 0, os.SEEK_SET)
        write_all(self._fd, self._token + b" %020d\n" % self._count)
        os.fsync(self._fd)
        self._renewed_s = renewed_s

    def _renew(self, stop: threading.Event) -> None:
        while not stop.wait(RENEW_S):
            with contextlib.suppress(OSError):  # tried again
                if not self.is_own():
                    if not stop.is_set():
                        self.on_lost()
                    return
                self._write()
