"""Which files belong to a data set: those that lie in its root, links followed.

Whoever made a data set can put links into it; what they lead to is read, and shown in pictures, only if the user
says so.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from segapp.datasets.files import ImagePair, shown
from segapp.errors import DataError


class PartialError(DataError):
    """A split of which only a part can be used.

    Attributes:
        pairs: That part.
    """

    def __init__(self, message: str, pairs: Iterable[ImagePair] = ()) -> None:
        super().__init__(message)
        self.pairs = tuple(pairs)


class OutsideError(PartialError):
    """Files or folders that lead out of the root."""


class RootGuard:
    """The folder that a data set's files must lie in, links followed; the folder itself may be a link.

    Args:
        root: The folder; None: they may lie anywhere.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._real_root = None if root is None else os.path.realpath(root)
        self._real_parents: dict[str, str] = {}

    @property
    def is_closed(self) -> bool:
        """Whether there is such a folder."""
        return self._root is not None

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path is the folder, or lies in it."""
        if self._real_root is None:
            return True
        real = self._resolved(os.fspath(path))
        return real == self._real_root or is_below(real, self._real_root)

    def check(self, path: Path) -> None:
        """Refuses a file or folder that lies elsewhere.

        Raises:
            OutsideError: It does.
        """
        if not self.holds(path):
            raise OutsideError(self._message([path]))

    def check_all(self, pairs: Iterable[ImagePair]) -> None:
        """Refuses pairs with files that lie elsewhere.

        Raises:
            OutsideError: Some do; it names the first, with how many there are.
        """
        inside: list[ImagePair] = []
        outside: list[Path] = []
        for pair in pairs:
            away = [path for path in (pair.image, pair.mask) if path is not None and not self.holds(path)]
            outside += away
            if not away:
                inside.append(pair)
        if outside:
            raise OutsideError(self._message(outside), inside)

    def _message(self, paths: Sequence[Path]) -> str:
        """What is wrong with paths that lie elsewhere, and what allows them."""
        real = os.path.realpath(paths[0])
        more = f", and so do {len(paths) - 1} more" if len(paths) > 1 else ""
        return (
            f"{shown(paths[0])} leads out of data.root {shown(self._root or '')}, to {shown(real)}{more}: "
            "use a root that holds all files, or set data.allow_outside_root: true if you trust who made the links"
        )

    def _resolved(self, path: str) -> str:
        """The path without links; of the many files of a folder, the folder is resolved once."""
        parent, name = os.path.split(path)
        if name in ("", ".", "..") or os.path.islink(path):
            return os.path.realpath(path)
        if parent not in self._real_parents:
            self._real_parents[parent] = os.path.realpath(parent)
        return os.path.join(self._real_parents[parent], name)


def is_below(path: str, folder: str) -> bool:
    """Whether a path without links lies in a folder."""
    return path.startswith(folder.rstrip(os.sep) + os.sep)
