"""Check that the files of a data set are inside its root, with links resolved.

A data set from elsewhere may contain links to other files of this machine. They are read, and shown in images, only if
the user allows it.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from segapp.datasets.files import ImagePair, shown
from segapp.errors import DataError


class PartialError(DataError):
    """Only a part of a split can be used: `pairs`."""

    pairs: Sequence[ImagePair] = ()


class OutsideError(PartialError):
    """Files or folders are outside the root."""


class RootGuard:
    """Check that paths are inside a root folder, with links resolved; the root itself may be a link.

    Args:
        root: The folder.
        key: Config key that names the folder.
        is_open: Accept every path.
    """

    def __init__(self, root: Path, key: str = "data.root", *, is_open: bool = False) -> None:
        self.root, self.key, self._is_open = root, key, is_open
        self._real_root = os.path.realpath(root)
        self._real_parents: dict[str, str] = {}

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Return True if a path is the root or inside it."""
        if self._is_open:
            return True
        real = self._resolved(os.fspath(path))
        return real == self._real_root or is_below(real, self._real_root)

    def check(self, path: Path) -> None:
        """Raise OutsideError for a file or folder outside the root."""
        if not self.holds(path):
            raise self._outside([path])

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
            error = self._outside(outside)
            error.pairs = inside
            raise error

    def _outside(self, paths: Sequence[Path]) -> OutsideError:
        real = os.path.realpath(paths[0])
        more = f", and so are {len(paths) - 1} more" if len(paths) > 1 else ""
        return OutsideError(
            f"{shown(paths[0])} is outside {self.key} {shown(self.root)}, at {shown(real)}{more}: use a root that "
            "holds all files, or set data.allow_outside_root: true if you trust the source of the links",
            key="data.allow_outside_root",
            path=paths[0],
        )

    def listed(self, name: str, list_file: Path) -> Path:
        """Return the path of a name in a list file, relative to the root.

        Raises:
            DataError: It is the root, or outside it, directly or through a link.
        """
        path = os.path.join(self.root, name)
        clean, clean_root = os.path.abspath(path), os.path.abspath(self.root)
        problem = None
        if clean == clean_root:
            problem = "is a folder: name an image in it"
        elif not self.holds(path):
            how = "is a link out of" if is_below(clean, clean_root) else "is outside"
            problem = (
                f"{how} {self.key} {shown(self.root)}: use a {self.key.removeprefix('data.')} that holds all files, "
                "or set data.allow_outside_root: true"
            )
        if problem is not None:
            raise DataError(f"{shown(list_file)}: {shown(name)} {problem}", path=list_file)
        return Path(path)

    def name_of(self, image: Path) -> str:
        """Return an image's path below the root without its extension; its absolute path if it is outside."""
        clean, clean_root = os.path.splitext(os.path.abspath(image))[0], os.path.abspath(self.root)
        return clean[len(clean_root) :].lstrip(os.sep) if is_below(clean, clean_root) else clean[1:]

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
