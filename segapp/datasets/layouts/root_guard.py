"""Check that the files of a data set are inside its root, with links resolved.

A data set from elsewhere may contain links to other files of this machine. They are read, and shown in pictures, only
if the user allows it.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from segapp.datasets.files import ImagePair, shown
from segapp.errors import DataError


class PartialError(DataError):
    """Only a part of a split can be used."""

    def __init__(self, message: str, pairs: Iterable[ImagePair] = (), *, path: Path | None = None) -> None:
        super().__init__(message, key="data.allow_outside_root", path=path)
        self.pairs = tuple(pairs)


class OutsideError(PartialError):
    """Files or folders are outside the root."""


class RootGuard:
    """Check that paths are inside a root folder, with links resolved; the root itself may be a link.

    Args:
        root: The folder; None: every path is accepted.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._real_root = None if root is None else os.path.realpath(root)
        self._real_parents: dict[str, str] = {}

    @property
    def is_closed(self) -> bool:
        """True if paths are checked."""
        return self._root is not None

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Return True if a path is the root or inside it."""
        if self._real_root is None:
            return True
        real = self._resolved(os.fspath(path))
        return real == self._real_root or is_below(real, self._real_root)

    def check(self, path: Path) -> None:
        """Check a file or folder.

        Raises:
            OutsideError: It is outside the root.
        """
        if not self.holds(path):
            raise OutsideError(self._message([path]), path=path)

    def check_all(self, pairs: Iterable[ImagePair]) -> None:
        """Check the files of all pairs.

        Raises:
            OutsideError: Some are outside the root; the message names the first and counts the others.
        """
        inside: list[ImagePair] = []
        outside: list[Path] = []
        for pair in pairs:
            rejected = [path for path in pair.files if not self.holds(path)]
            outside += rejected
            if not rejected:
                inside.append(pair)
        if outside:
            raise OutsideError(self._message(outside), inside, path=outside[0])

    def _message(self, paths: Sequence[Path]) -> str:
        real = os.path.realpath(paths[0])
        more = f", and so are {len(paths) - 1} more" if len(paths) > 1 else ""
        return (
            f"{shown(paths[0])} is outside data.root {shown(self._root or '')}, at {shown(real)}{more}: "
            "use a root that holds all files, or set data.allow_outside_root: true if you trust the source of the links"
        )

    def _resolved(self, path: str) -> str:
        """Return the path with links resolved; each parent folder is resolved once."""
        parent, name = os.path.split(path)
        if name in ("", ".", "..") or os.path.islink(path):
            return os.path.realpath(path)
        if parent not in self._real_parents:
            self._real_parents[parent] = os.path.realpath(parent)
        return os.path.join(self._real_parents[parent], name)


def is_below(path: str, folder: str) -> bool:
    """Return True if a path, with links resolved, is inside a folder."""
    return path.startswith(folder.rstrip(os.sep) + os.sep)
