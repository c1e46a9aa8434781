"""The files below a folder: images, and files that may describe them. Only names are read."""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from segapp.datasets.files import MAX_FILE_BYTES, open_regular, shown
from segapp.datasets.layouts.pairing import IMAGE_SUFFIXES, walk_once
from segapp.datasets.layouts.root_guard import RootGuard
from segapp.errors import ConfigError, DataError

_OWN_READER = "data.format: module:Class reads them with own code (segapp docs own-parts)"
_ARRAYS = (
    "arrays are read if their names say which are images and which masks (images.npy and masks.npy, or a key image and "
    f"a key label) and their shapes agree; else {_OWN_READER}"
)
_VOLUMES = f"nii, mat and h5 files are not read: save their slices as PNG or npy; or {_OWN_READER}"
_VIDEOS = "videos are not read: save the frames that have masks as images, with the names of their masks"
_ARCHIVES = "archives are not read: unpack them"
_UNREAD_KINDS = {
    **dict.fromkeys((".npy", ".npz"), _ARRAYS),
    ".dcm": f"DICOM files are not read: save their pixels as PNG or npy with pydicom; or {_OWN_READER}",
    ".parquet": "parquet files are not read: save the images and masks in their rows as PNG with the datasets library",
    **dict.fromkeys((".nii", ".gz", ".mat", ".h5", ".hdf5"), _VOLUMES),
    **dict.fromkeys((".mp4", ".avi", ".mov"), _VIDEOS),
    **dict.fromkeys((".zip", ".tar"), _ARCHIVES),
}
"""Extensions of files with pixels that are no images, and what to do if they cannot be read."""

OTHER_SUFFIXES = (".txt", ".csv", ".tsv", ".json", ".yaml", ".yml", ".xml", ".names", ".lst", ".jsonl")


@dataclass(frozen=True)
class Tree:
    """The files below a folder, as paths relative to it in their byte order.

    `others` may contain annotations, class names or lists; `rest` are files of other kinds.
    """

    root: Path
    images: tuple[str, ...]
    others: tuple[str, ...]
    leads_outside: bool
    rest: tuple[str, ...] = ()

    def described(self) -> str:
        """Return the numbers of images and of other files with pixels by kind, and what to do with such files."""
        kinds = Counter(PurePosixPath(path).suffix.lower() for path in self.rest)
        held = [suffix for suffix in _UNREAD_KINDS if kinds[suffix]]
        counts = [f"{len(self.images)} images", *(f"{kinds[suffix]} {suffix[1:]}" for suffix in held)]
        advice = dict.fromkeys(_UNREAD_KINDS[suffix] for suffix in held)
        return f"({', '.join(counts)}); " + "".join(f"{one}; " for one in advice)

    def others_named(self, *suffixes: str) -> list[str]:
        """Return the non-image files with one of the extensions, nearest to the root first."""
        found = [path for path in (*self.others, *self.rest) if PurePosixPath(path).suffix.lower() in suffixes]
        return sorted(found, key=lambda path: (path.count("/"), path))

    def read(self, path: str, most: int = MAX_FILE_BYTES) -> bytes:
        """Return the first bytes of a file; empty if it cannot be read."""
        try:
            with open_regular(self.root / path) as file:
                return file.read(min(most, os.fstat(file.fileno()).st_size))  # of a larger number, all is allocated
        except (OSError, DataError):
            return b""

    def read_json(self, path: str) -> Any:
        """Return the content of a JSON file; None if it cannot be read or is not JSON."""
        try:
            return json.loads(self.read(path))
        except (ValueError, RecursionError):
            return None


def survey_tree(root: Path) -> Tree:
    """Return the files below a folder; hidden ones are left out, and links to folders are followed once."""
    if not root.is_dir():
        raise ConfigError(
            f"{shown(root)} is not a folder: give the folder that holds the images and the masks", path=root
        )
    guard = RootGuard(root)
    images, others, rest = list[str](), list[str](), list[str]()
    leads_outside = False
    for place, names in walk_once(root):
        below = os.path.relpath(place, root)
        if "__MACOSX" in below.split("/"):
            continue
        leads_outside |= not guard.holds(place)
        for name in names:
            if name[0] == ".":
                continue
            suffix = os.path.splitext(name)[1].lower()
            kind = images if suffix in IMAGE_SUFFIXES else others if suffix in OTHER_SUFFIXES else rest
            kind.append(name if below == "." else f"{below}/{name}")
            leads_outside |= kind is not rest and not guard.holds(os.path.join(place, name))
    return Tree(root, tuple(images), tuple(others), leads_outside, tuple(rest))
