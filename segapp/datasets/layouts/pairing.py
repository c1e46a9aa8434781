"""Find a split's images and masks below a root, and report missing ones.

Names are matched exactly or, if that finds nothing, regardless of case and Unicode composition. A data set from
elsewhere may contain links to other files of this machine. They are read, and shown in images, only if the user allows
it (`RootGuard`).
"""

import codecs
import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from segapp.datasets.files import ImagePair, open_regular, shown
from segapp.datasets.walk import IMAGE_SUFFIXES, composed, is_below, on_disk, others_note, walk
from segapp.errors import DataError, did_you_mean, some_names


class PartialError(DataError):
    """Only a part of a split can be used: `pairs`."""

    pairs: Sequence[ImagePair] = ()


class OutsideError(PartialError):
    """Files or folders are outside the root."""


class RootGuard:
    """Check that paths are inside the folder that a config key names, with links resolved; it may be a link itself.

    With `is_open`, every path is accepted.
    """

    def __init__(self, root: Path, key: str = "data.root", *, is_open: bool = False) -> None:
        self.root, self.key, self._is_open = root, key, is_open
        self._real_root = os.path.realpath(root)
        self._listed: dict[str, tuple[str, frozenset[str]]] = {}

    def holds(self, path: str | os.PathLike[str]) -> bool:
        if self._is_open:
            return True
        real = self._resolved(os.fspath(path))
        return real == self._real_root or is_below(real, self._real_root)

    def check(self, path: Path) -> None:
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
        if not name.isascii():
            path = os.fspath(on_disk(Path(path)))
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
        """Return the path with links resolved; each parent folder is resolved and listed once."""
        parent, name = os.path.split(path)
        if parent not in self._listed:
            plain_names = frozenset[str]()
            with contextlib.suppress(OSError), os.scandir(parent or ".") as entries:
                plain_names = frozenset(entry.name for entry in entries if not entry.is_symlink())
            self._listed[parent] = os.path.realpath(parent), plain_names
        real_parent, plain_names = self._listed[parent]
        return os.path.join(real_parent, name) if name in plain_names else os.path.realpath(path)


_MAX_NAMED = 5


@dataclass(frozen=True)
class FolderLayout:
    """A layout of a data set below its root. `{split}` is replaced by the split's name."""

    image_dir: str  # folder of the images
    mask_dir: str  # folder of the masks, with the same subfolders as the images
    image_suffix: str | None = None  # ending of image names, removed to find the mask; None: any image extension
    # Endings of mask names; the first that exists is used. Empty: any image extension.
    mask_suffixes: tuple[str, ...] = ()
    split_file: str | None = None  # file that lists the names of the split; None: all files of the folder


def find_images(base: Path, layout: FolderLayout, guard: RootGuard, how_to_get: str) -> dict[str, Path]:
    """Return the images of the split by key: the path below the image folder without its ending."""
    folder = existing_folder(base / layout.image_dir, how_to_get)
    files = list(_walk(folder, guard))
    suffixes = (layout.image_suffix,) if layout.image_suffix else IMAGE_SUFFIXES
    found = _by_key(folder, files, suffixes)
    if layout.split_file is None:
        if not found:
            there = Counter(path.suffix or "(no extension)" for path in files)
            seen = ", ".join(f"{count} *{shown(suffix)}" for suffix, count in there.most_common(3)) or "no file at all"
            wanted = f"*{suffixes[0]}" if len(suffixes) == 1 else "image"
            note = others_note(path.name for path in files if not path.name.lower().endswith(IMAGE_SUFFIXES))
            move = f"{note}; {how_to_get}" if note else how_to_get
            message = f"no {wanted} below {shown(folder)}, which holds {seen}: {move}"
            raise DataError(message, key="data.root", path=folder)
        return {key: _only_one(paths) for key, paths in found.items()}
    list_file = base / layout.split_file
    guard.check(list_file)
    keys = _Keys(found)
    images: dict[str, Path] = {}
    missing: list[str] = []
    for line in list_lines(list_file, how_to_get):
        # Lists name files with or without their extension.
        key = keys.find(line) or keys.find(_cut(line, suffixes) or line)
        if key is None:
            missing.append(line)
        else:
            # If two files have the same stem, the extension in the list decides.
            images[key] = _only_one([path for path in found[key] if path.name == Path(line).name] or found[key])
    if missing:
        raise DataError(
            f"{shown(list_file)}: {len(missing)} of the names in it have no image below {shown(folder)} "
            f"({shown(some_names(missing, _MAX_NAMED))}): restore the images or remove the names",
            path=list_file,
        )
    if not images:
        raise DataError(f"{shown(list_file)} lists no image: write one name per line", path=list_file)
    return images


def existing_folder(folder: Path, how_to_get: str) -> Path:
    """Return the folder; if it does not exist, raise DataError with the names of its sibling folders."""
    folder = on_disk(folder)
    if folder.is_dir():
        return folder
    parent = folder.parent
    siblings = sorted(p.name for p in parent.iterdir() if p.is_dir() and p.name[0] != ".") if parent.is_dir() else []
    there = f" ({shown(parent)} holds {shown(some_names(siblings, _MAX_NAMED))})" if siblings else ""
    hint = f"{did_you_mean(folder.name, siblings)} {how_to_get}".strip()
    raise DataError(f"{shown(folder)} does not exist{there}: {hint}", path=folder)


def _only_one(paths: Sequence[Path]) -> Path:
    """Return the single image of a name; raise DataError if there are two."""
    if len(paths) > 1:
        raise DataError(
            f"{shown(paths[0])} and {shown(paths[1])} have the same name: remove one, or set image_suffix to choose",
            path=paths[0],
        )
    return paths[0]


def match_masks(
    base: Path, layout: FolderLayout, images: Mapping[str, Path], guard: RootGuard, how_to_get: str, area: str
) -> list[ImagePair]:
    """Return every image with its mask, and with the file of its valid area; in `area`, `*` stands for its name.

    Raises:
        PartialError: Some images have no mask.
        DataError: The mask folder is missing, or an image would be its own mask.
    """
    folder = existing_folder(base / layout.mask_dir, how_to_get)
    files = list(_walk(folder, guard))
    masks = _by_key(folder, files, layout.mask_suffixes or IMAGE_SUFFIXES)
    keys = _Keys(masks)
    matches = {key: match for key in images if (match := keys.find(key)) is not None}
    image_folder = on_disk(base / layout.image_dir)
    pairs, owners = [], dict[str, str]()
    for key, match in matches.items():
        image, mask = images[key], masks[match][0]
        if mask == image:
            raise DataError(f"{shown(image)} would be its own mask: set mask_dir or mask_suffix", path=image)
        # Names also match regardless of case, so a.png and A.png may find the same mask.
        if (earlier := owners.setdefault(match, key)) != key:
            both = f"{shown(images[earlier])} and {shown(image)}"
            raise DataError(f"{both} have one mask, {shown(mask)}: give each its own mask, or remove one", path=mask)
        name = image.relative_to(image_folder).with_suffix("").as_posix()
        valid_area = on_disk(guard.root / area.replace("*", name)) if area else None
        pairs.append(ImagePair(image, mask, name, valid_area=valid_area))
    missing_keys = [key for key in images if key not in matches]
    if missing_keys:
        missing = [shown(images[key]) for key in missing_keys]
        unused = sorted(set(masks) - set(matches.values()))
        others = f"; {len(unused)} masks have no image ({shown(some_names(unused, _MAX_NAMED))})" if unused else ""
        names = [path.relative_to(folder).as_posix() for path in files]
        endings = " or ".join(layout.mask_suffixes) or "the image's stem and an image extension"
        error = PartialError(
            f"{len(missing)} of {len(images)} images have no mask below {shown(folder)} "
            f"({some_names(missing, _MAX_NAMED)}{others}): masks are searched by {endings}"
            f"{_other_ending(missing_keys, names)}; {how_to_get}",
            key="data.mask_suffix",
        )
        error.pairs = pairs
        raise error
    return pairs


def _other_ending(missing: Sequence[str], names: Sequence[str]) -> str:
    """Return the advice to set the ending of the mask names, with the ending if the file names show it."""
    begins = ((key, name) for key in missing[:_MAX_NAMED] for name in names if name.startswith(key))
    endings = {name[len(key) :] for key, name in begins if name[len(key) : len(key) + 1] in ("_", "-", ".", " ")}
    if len(endings) == 1:
        return f": set data.mask_suffix: {shown(endings.pop())}"
    there = f"; there are {shown(some_names(sorted(names), _MAX_NAMED))}" if names else ""
    return f": set data.mask_suffix if their names end otherwise, such as _mask.png{there}"


def _by_key(folder: Path, files: Iterable[Path], suffixes: Sequence[str]) -> dict[str, list[Path]]:
    """Return the files that end in a suffix, by their path below the folder without it; earlier suffixes first."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in files:
        name = path.relative_to(folder).as_posix()
        for rank, suffix in enumerate(suffixes):
            if name.casefold().endswith(suffix.casefold()):
                found.setdefault(name[: len(name) - len(suffix)], []).append((rank, path))
                break
    return {key: [path for _, path in sorted(ranked)] for key, ranked in found.items()}


def _cut(name: str, suffixes: Sequence[str]) -> str | None:
    """Return the name without the first suffix that it ends in; None if it ends in none."""
    return next((name[: len(name) - len(s)] for s in suffixes if name.casefold().endswith(s.casefold())), None)


class _Keys:
    """Lookup of a key: exact, else the only key that differs just in case and Unicode composition."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._exact = set(keys)
        self._by_folded: dict[str, list[str]] = {}
        for key in self._exact:
            self._by_folded.setdefault(self._fold(key), []).append(key)

    def find(self, key: str) -> str | None:
        if key in self._exact:
            return key
        similar = self._by_folded.get(self._fold(key), [])
        return similar[0] if len(similar) == 1 else None

    @staticmethod
    def _fold(key: str) -> str:
        return composed(key).casefold()


def _walk(folder: Path, guard: RootGuard) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden; OutsideError is raised for a folder outside the root."""
    for place in walk(folder):
        guard.check(Path(place.path))
        yield from (Path(place.path, name) for name in place.files)


def list_lines(path: Path, how_to_get: str) -> list[str]:
    """Return the lines of a list file except blank lines and comments; undecodable bytes in names are kept."""
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        lists = [] if path.exists() or not path.parent.is_dir() else [each.name for each in path.parent.glob("*.txt")]
        hint = f"{did_you_mean(path.name, sorted(lists))} {how_to_get}".strip()
        raise DataError(f"{shown(path)} cannot be read ({error.strerror}): {hint}", path=path) from error
    # UTF-16 has a zero byte in each ASCII character.
    if b"\0" in data:
        raise DataError(f"{shown(path)} is not a text file in UTF-8: write one name per line", path=path)
    text = os.fsdecode(data.removeprefix(codecs.BOM_UTF8))
    lines = (line.strip() for line in text.replace("\r", "\n").split("\n"))
    return [line for line in lines if line and not line.startswith("#")]


def listed_pairs(
    list_file: Path, images: RootGuard, masks: RootGuard, how_to_get: str, num_masks: int, area: str
) -> tuple[ImagePair, ...]:
    """Return the pairs that a text file lists, one per line; their names are the images' paths below their root.

    A line names an image and `num_masks` masks, relative to the roots of `images` and `masks`, and the `*` of `area`.
    """
    pairs: dict[str, ImagePair] = {}
    for line in list_lines(list_file, how_to_get):
        # Names may have spaces if tabs separate them.
        parts = [part.strip() for part in line.split("\t")] if "\t" in line else line.split()
        if len(parts) != 1 + num_masks + ("*" in area):
            what = "a mask: write both" if num_masks == 1 else f"{num_masks} masks, one for each class: write all"
            what = f"{what}, and then what * in data.valid_area stands for," if "*" in area else what
            raise DataError(
                f"{shown(list_file)}: {shown(line[:200])} is not an image and {what} on one line, "
                "with a tab between them if a name contains spaces",
                path=list_file,
            )
        image = images.listed(parts[0], list_file)
        mask, *others = (masks.listed(part, list_file) for part in parts[1 : 1 + num_masks])
        valid_area = images.listed(area.replace("*", parts[-1]), list_file) if area else None
        name = images.name_of(image)
        if name in pairs:
            raise DataError(f"{shown(list_file)}: {shown(name)} is listed twice: remove one line", path=list_file)
        pairs[name] = ImagePair(image, mask, name, tuple(others), valid_area)
    if not pairs:
        raise DataError(f"{shown(list_file)} lists no pair: {how_to_get}", path=list_file)
    return tuple(sorted(pairs.values(), key=lambda pair: os.fsencode(pair.name)))
