"""The end of a text file that grows."""

from __future__ import annotations

import os
from pathlib import Path

from segapp.run.words import printable


class LogTail:
    """Reads the last lines of a text file, and then those that are added to it."""

    def __init__(self, path: Path, max_bytes: int = 2**16) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._offset: int | None = None
        self._rest = b""

    def read(self) -> list[str]:
        """Return the new whole lines, printable; none if the file cannot be read."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                is_first = self._offset is None or size < self._offset
                start = max(0, size - self._max_bytes) if is_first else max(self._offset or 0, size - self._max_bytes)
                file.seek(start)
                block = (b"" if is_first else self._rest) + file.read(self._max_bytes)
        except OSError:
            return []
        self._offset = start + len(block) - (0 if is_first else len(self._rest))
        *lines, self._rest = block.split(b"\n")
        if is_first and start > 0:
            del lines[:1]
        return [printable(line.decode(errors="replace")) for line in lines]
