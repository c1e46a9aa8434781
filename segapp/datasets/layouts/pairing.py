"""Finding a split's images and masks below a root, and naming what is missing.

Names are matched as they are and, where that finds nothing, regardless of case and of Unicode composition.
"""

import codecs
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from segapp.datasets.files import ImagePair, open_regular, shown
from segapp.datasets.layouts.root_guard import PartialError, RootGuard, is_below
from segapp.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".gif")
"""Endings taken for an image, in any case; for masks the earlier one wins where several files share a stem."""

_MAX_NAMED = 5


class UnpairedError(PartialError):
    """Images without a mask."""


@dataclass(frozen=True)
class FolderLayout:
    """One way to lay out a data set below its root. `{split}` stands for the split's name.

    Attributes:
        image_dir: Folder of the images.
        mask_dir: Folder of the masks; below it they lie as the images do below theirs.
        image_suffix: Ending of image names that is cut off to find the mask; None: any image extension.
        mask_suffixes: Endings of mask names, the first that exists is taken; empty: any image extension.
        split_file: File that lists the names of the split; None: all files of the folder.
    """

    image_dir: str
    mask_dir: str
    image_suffix: str | None = None
    mask_suffixes: tuple[str, ...] = ()
    split_file: str | None = None


def find_images(base: Path, layout: FolderLayout, fence: RootGuard, how_to_get: str) -> dict[str, Path]:
    """The images of the split by their key (path below the image folder without its ending)."""
    folder = _existing(base / layout.image_dir, how_to_get)
    files = list(_walk(folder, fence))
    suffixes = (layout.image_suffix,) if layout.image_suffix else IMAGE_SUFFIXES
    found = _by_key(folder, files, suffixes)
    if layout.split_file is None:
        return _only_ones(folder, found, files, suffixes, how_to_get)
    list_file = base / layout.split_file
    fence.check(list_file)
    keys = _Keys(found)
    images: dict[str, Path] = {}
    missing: list[str] = []
    for line in _lines(list_file, how_to_get):
        key = keys.find(line) or keys.find(_cut(line, suffixes) or line)
        if key is None:
            missing.append(line)
        else:
            images[key] = _only_one([path for path in found[key] if path.name == Path(line).name] or found[key])
    if missing:
        raise DataError(
            f"{shown(list_file)}: {len(missing)} of its names have no image below {shown(folder)} ({_some(missing)}): "
            "restore the images or take the names out"
        )
    if not images:
        raise DataError(f"{shown(list_file)} lists no image: write one name a line")
    return images


def _existing(folder: Path, how_to_get: str) -> Path:
    """The folder, if it is one; else an error that names the folders beside it."""
    if folder.is_dir():
        return folder
    parent = folder.parent
    beside = sorted(p.name for p in parent.iterdir() if p.is_dir() and p.name[0] != ".") if parent.is_dir() else []
    there = f" ({shown(parent)} holds {_some(beside)})" if beside else ""
    raise DataError(f"{shown(folder)} does not exist{there}: {how_to_get}")


def _only_ones(
    folder: Path,
    found: dict[str, list[Path]],
    files: Sequence[Path],
    suffixes: Sequence[str],
    how_to_get: str,
) -> dict[str, Path]:
    """One image a key; none at all, or two of one name, are errors."""
    if not found:
        there = Counter(path.suffix or "(no extension)" for path in files)
        seen = ", ".join(f"{count} *{shown(suffix)}" for suffix, count in there.most_common(3)) or "no file at all"
        wanted = f"*{suffixes[0]}" if len(suffixes) == 1 else "image"
        raise DataError(f"no {wanted} below {shown(folder)}, which holds {seen}: {how_to_get}")
    return {key: _only_one(paths) for key, paths in found.items()}


def _only_one(paths: Sequence[Path]) -> Path:
    """The only image of a name."""
    if len(paths) > 1:
        raise DataError(
            f"{shown(paths[0])} and {shown(paths[1])} have the same name: remove one, or set image_suffix to choose"
        )
    return paths[0]


def match_masks(
    base: Path, layout: FolderLayout, images: Mapping[str, Path], fence: RootGuard, how_to_get: str
) -> list[ImagePair]:
    """Every image with its mask.

    Raises:
        UnpairedError: Some have none.
        DataError: The folder of the masks is missing, or an image would be its own mask.
    """
    folder = _existing(base / layout.mask_dir, how_to_get)
    masks = _by_key(folder, list(_walk(folder, fence)), layout.mask_suffixes or IMAGE_SUFFIXES)
    keys = _Keys(masks)
    matches = {key: keys.find(key) for key in images}
    pairs = []
    for key, image in images.items():
        if (match := matches[key]) is not None:
            if masks[match][0] == image:
                raise DataError(f"{shown(image)} is taken for its own mask: set mask_dir or mask_suffix")
            pairs.append(ImagePair(image, masks[match][0], _name(image, base / layout.image_dir)))
    missing = [shown(images[key]) for key, match in matches.items() if match is None]
    if missing:
        unused = sorted(set(masks) - set(matches.values()))
        others = f"; {len(unused)} masks have no image ({_some(unused)})" if unused else ""
        endings = " or ".join(layout.mask_suffixes) or "the image's stem and an image extension"
        raise UnpairedError(
            f"{len(missing)} of {len(images)} images have no mask below {shown(folder)} ({_some(missing)}{others}): "
            f"masks are looked for by {endings}; {how_to_get}",
            pairs,
        )
    return pairs


def without_masks(base: Path, layout: FolderLayout, images: Mapping[str, Path]) -> list[ImagePair]:
    """The images alone, for splits whose ground truth is not needed."""
    return [ImagePair(path, None, _name(path, base / layout.image_dir)) for path in images.values()]


@dataclass(frozen=True)
class Leftovers:
    """Files beside the pairs of a split, which nobody reads.

    Attributes:
        masks: Masks without an image.
        others: Files in the images' folder that are no images by their name.
        hidden: Files in either folder whose names begin with a dot.
    """

    masks: tuple[Path, ...] = ()
    others: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()


def find_leftovers(base: Path, layout: FolderLayout, fence: RootGuard) -> Leftovers:
    """What lies in a split's folders and belongs to no pair; of folders that several splits share, nothing is said."""
    if layout.split_file is not None or not (base / layout.image_dir).is_dir():
        return Leftovers()
    folder = base / layout.image_dir
    suffixes = (layout.image_suffix,) if layout.image_suffix else IMAGE_SUFFIXES
    files, hidden = list(_walk(folder, fence)), list(_walk(folder, fence, is_hidden=True))
    images = _by_key(folder, files, suffixes)
    taken = {path for paths in images.values() for path in paths}
    masks: list[Path] = []
    if layout.mask_dir != layout.image_dir and (base / layout.mask_dir).is_dir():
        keys = _Keys(images)
        files_of_masks = _walk(base / layout.mask_dir, fence)
        found = _by_key(base / layout.mask_dir, files_of_masks, layout.mask_suffixes or IMAGE_SUFFIXES)
        masks = [paths[0] for key, paths in found.items() if keys.find(key) is None]
        hidden += _walk(base / layout.mask_dir, fence, is_hidden=True)
    others = [path for path in files if path not in taken]
    return Leftovers(tuple(masks), tuple(others) if layout.mask_dir != layout.image_dir else (), tuple(hidden))


def _name(image: Path, folder: Path) -> str:
    """The image's path below the folder, without its extension."""
    return image.relative_to(folder).with_suffix("").as_posix()


def _by_key(folder: Path, files: Iterable[Path], suffixes: Sequence[str]) -> dict[str, list[Path]]:
    """Files that end in one of the suffixes, by their path below the folder without it; earlier suffixes come first."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in files:
        name = path.relative_to(folder).as_posix()
        for rank, suffix in enumerate(suffixes):
            if name.casefold().endswith(suffix.casefold()):
                found.setdefault(name[: len(name) - len(suffix)], []).append((rank, path))
                break
    return {key: [path for _, path in sorted(ranked)] for key, ranked in found.items()}


def _cut(name: str, suffixes: Sequence[str]) -> str | None:
    """The name without the first of the suffixes it ends in."""
    return next((name[: len(name) - len(s)] for s in suffixes if name.casefold().endswith(s.casefold())), None)


class _Keys:
    """Finds a key as it is, or else the only one that differs in nothing but case and Unicode composition."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._exact = set(keys)
        self._alike: dict[str, list[str]] = {}
        for key in self._exact:
            self._alike.setdefault(self._fold(key), []).append(key)

    def find(self, key: str) -> str | None:
        if key in self._exact:
            return key
        alike = self._alike.get(self._fold(key), [])
        return alike[0] if len(alike) == 1 else None

    @staticmethod
    def _fold(key: str) -> str:
        return unicodedata.normalize("NFC", key).casefold()


def _walk(folder: Path, fence: RootGuard, *, is_hidden: bool = False) -> Iterator[Path]:
    """All files below a folder in a fixed order; links to folders are followed once, hidden folders left out.

    Args:
        folder: Where to begin.
        fence: No folder beyond it is looked into.
        is_hidden: Give the hidden files, and not the others.

    Raises:
        OutsideError: A folder lies beyond the fence.
    """
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        fence.check(Path(place))
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if name.startswith(".") == is_hidden)


def _lines(path: Path, how_to_get: str) -> list[str]:
    """The lines of a list that are neither blank nor a comment; names keep their bytes whatever they are."""
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise DataError(f"{shown(path)} cannot be read ({error.strerror}): {how_to_get}") from error
    if b"\0" in data:
        raise DataError(f"{shown(path)} is not a text file in UTF-8: write one name a line")
    text = os.fsdecode(data.removeprefix(codecs.BOM_UTF8))
    lines = (line.strip() for line in text.replace("\r", "\n").split("\n"))
    return [line for line in lines if line and not line.startswith("#")]


def _some(names: Sequence[str]) -> str:
    """The first few names and how many more there are."""
    text = ", ".join(shown(name) for name in names[:_MAX_NAMED])
    return text if len(names) <= _MAX_NAMED else f"{text} and {len(names) - _MAX_NAMED} more"


def listed_pairs(
    list_file: Path, root: Path, is_confined: bool, with_masks: bool, how_to_get: str
) -> tuple[ImagePair, ...]:
    """The pairs a text file lists; their names are the images' paths below root."""
    pairs: dict[str, ImagePair] = {}
    fence = RootGuard(root if is_confined else None)
    fence.check(list_file)
    place = _Place(root, fence, list_file)
    for line in _lines(list_file, how_to_get):
        parts = [part.strip() for part in line.split("\t")] if "\t" in line else line.split()
        if len(parts) != 2 and (with_masks or len(parts) != 1):
            raise DataError(
                f"{shown(list_file)}: {shown(line[:200])} is not an image and a mask: write both on one line, "
                "with a tab between them if a name holds spaces"
            )
        image, mask = (place.file(part) for part in (parts[0], parts[-1]))
        name = place.name_of(image)
        if name in pairs:
            raise DataError(f"{shown(list_file)}: {shown(name)} is listed twice: take one line out")
        pairs[name] = ImagePair(image, mask if with_masks else None, name)
    if not pairs:
        raise DataError(f"{shown(list_file)} lists no pair: {how_to_get}")
    return tuple(sorted(pairs.values(), key=lambda pair: os.fsencode(pair.name)))


class _Place:
    """Where a list's names lead: below root, and where they are confined to it, nowhere else.

    Args:
        root: What the names are relative to.
        fence: Where the files must lie.
        list_file: Named in errors.
    """

    def __init__(self, root: Path, fence: RootGuard, list_file: Path) -> None:
        self._root, self._fence, self._list_file = os.fspath(root), fence, list_file
        self._clean_root = os.path.abspath(root)

    def file(self, name: str) -> Path:
        """A listed path.

        Raises:
            DataError: It leaves the folder it is confined to, by itself or by a link on the way, or is that folder.
        """
        path = os.path.join(self._root, name)
        clean = os.path.abspath(path)
        if clean == self._clean_root:
            raise DataError(f"{shown(self._list_file)}: {shown(name)} is a folder: name an image in it")
        if self._fence.is_closed:
            if not is_below(clean, self._clean_root):
                raise self._outside(name, "lies outside")
            if not self._fence.holds(path):
                raise self._outside(name, "leads by a link outside")
        return Path(path)

    def name_of(self, image: Path) -> str:
        """The image's path below root without its extension; outside of it, its path from the anchor."""
        clean = os.path.splitext(os.path.abspath(image))[0]
        return clean[len(self._clean_root) :].lstrip(os.sep) if is_below(clean, self._clean_root) else clean[1:]

    def _outside(self, name: str, how: str) -> DataError:
        return DataError(
            f"{shown(self._list_file)}: {shown(name)} {how} data.root {shown(self._root)}: "
            "use a root that holds all files, or set data.allow_outside_root: true"
        )
