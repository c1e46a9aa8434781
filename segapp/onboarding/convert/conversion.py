"""Annotations that become masks: what a converter finds, and the writing of uint8 masks, which can be resumed.

A mask carries a digest of its annotation in a PNG text chunk. A file that is there already, with that digest and its
end marker, is kept; any other is written under a temporary name and renamed.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from segapp.datasets.files import read_header, shown
from segapp.errors import DataError, storage_errors
from segapp.onboarding.survey.hypotheses import Pair
from segapp.run.files import remove_dead_temporaries, remove_quietly, write_atomic

IGNORED = 255
MAX_CLASSES = 255
_DIGEST_KEY = "segapp-annotation"
_RULES = "1"
"""Version of the drawing rules: masks of another one are drawn again."""
_MAX_NAMED = 5

BAD_ENTRY: tuple[type[Exception], ...] = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    zlib.error,
    cv2.error,
)
"""What reading an entry raises that has other types, numbers or keys than its format says."""

Mask = NDArray[np.uint8]
WideMask = Mask | NDArray[np.uint16]
"""Ids, (H, W), of 8 bits, or of 16 bits for sets of more than eight classes."""


@dataclass(frozen=True)
class Item:
    """One image and the annotation that becomes its mask.

    Attributes:
        image: relative to the data's root; with `image_bytes`: relative to the folder of the masks.
        target: mask to write, relative to the folder of the masks, without extension.
        origin: file and entry of the annotation, for messages.
        content: what the mask depends on; its digest marks the finished file.
        paint: returns the mask, (H, W); raises DataError, or one of BAD_ENTRY.
        split: "train", "val", "test", if the data say it.
        scene: folders of the image.
        image_bytes: the image's file, if it is not one on disk already.
        has_image: returns True for such a file that is there and need not be written.
        mask: the mask, relative to the data's root, if it is a file there; none is written then.
        preview: an image of the data that stands for one of `image_bytes` in pictures.
    """

    image: str
    target: str
    origin: str
    content: Any
    paint: Callable[[], WideMask]
    split: str | None = None
    scene: tuple[str, ...] = ()
    image_bytes: Callable[[], bytes] | None = None
    has_image: Callable[[Path], bool] = Path.is_file
    mask: str | None = None
    preview: str | None = None


@dataclass(frozen=True)
class Conversion:
    """What a converter found.

    Attributes:
        name: for `--layout`.
        title: of the format.
        classes: names by id in the masks that it writes; empty: the masks say them.
        items: one for each image; may be drawn more than once.
        confidence: 0 to 1.
        evidence: sentences.
        classes_reason: where the names are from.
        notes: sentences about what is left out.
        sources: files of the folder that it reads besides the images and masks of its items: annotations, tables,
            arrays, source masks; relative to the root.
        is_multilabel: a value in its masks is a set of classes: bit c stands for class c.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    items: Sequence[Item]
    confidence: float
    evidence: tuple[str, ...] = ()
    classes_reason: str = ""
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    is_multilabel: bool = False

    @property
    def writes(self) -> str:
        """What is written: masks, with or without images, or images for masks that are there."""
        return "masks" if self.items[0].mask is None else "images"


def check_classes(names: Sequence[str], source: str) -> tuple[str, ...]:
    """Return the names.

    Raises:
        DataError: there are more than fit into uint8 masks.
    """
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{shown(source)}: {len(names)} classes, but masks of 8 bits hold {MAX_CLASSES}: keep fewer classes in it",
            path=source,
        )
    return tuple(names)


def write_files(
    conversion: Conversion, folder: Path, progress: Callable[[Iterable[Item], int], Iterable[Item]]
) -> tuple[list[Pair], list[str], int]:
    """Write the masks and images of a conversion that are not there yet.

    Args:
        conversion: what to write.
        folder: where they are written, made if needed.
        progress: shows how far the items are; gets them and their number.

    Returns:
        The pairs, each side relative to the folder where it is written, else to the data's root; a sentence for each
        bad entry; the number of pairs of which everything was there already.

    Raises:
        DataError: every entry is bad.
        StorageError: a file cannot be written.
    """
    pairs, problems, num_kept = [], [], 0
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    made: set[Path] = set()
    masks: set[str] = set()
    for item in progress(conversion.items, len(conversion.items)):
        if (item.mask or item.target) in masks:
            problems.append(f"{item.origin}: its image {shown(item.image)} has been annotated before: entry left out")
            continue
        masks.add(item.mask or item.target)
        wanted = _wanted(item, conversion.classes, folder)
        for path in wanted:
            if path.parent not in made:
                with storage_errors(path.parent):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    remove_dead_temporaries(path.parent)
                made.add(path.parent)
        try:
            missing = [path for path, (is_there, _) in wanted.items() if not is_there(path)]
            for path in missing:
                _write(path, wanted[path][1]())
        except (DataError,) + BAD_ENTRY as error:  # noqa: RUF005 - mypy does not see through the star
            for path in wanted:
                remove_quietly(path)
            problems.append(f"{item.origin}: {_reason(error)}")
            continue
        num_kept += not missing
        pairs.append(Pair(item.image, item.mask or f"{item.target}.png", item.split, None, item.scene))
    if not pairs:
        named = "; ".join(problems[:_MAX_NAMED])
        raise DataError(f"no entry of {conversion.title} can be converted: {named}: correct the annotations")
    return pairs, problems, num_kept


def _wanted(
    item: Item, classes: Sequence[str], folder: Path
) -> dict[Path, tuple[Callable[[Path], bool], Callable[[], bytes]]]:
    """Return the files of an item: whether one is there and complete, and its content."""
    wanted: dict[Path, tuple[Callable[[Path], bool], Callable[[], bytes]]] = {}
    if item.image_bytes is not None:
        wanted[folder / item.image] = (item.has_image, item.image_bytes)
    if item.mask is None:
        digest = digest_of((classes, item.content))
        is_finished = partial(is_png_of, digest=digest)
        wanted[folder / f"{item.target}.png"] = (is_finished, lambda: encode_png(item.paint(), digest))
    return wanted


def some_problems(problems: Sequence[str]) -> Iterator[str]:
    """Yield the first few problems, and the number of the others."""
    yield from problems[:_MAX_NAMED]
    if len(problems) > _MAX_NAMED:
        yield f"and {len(problems) - _MAX_NAMED} more"


def digest_of(content: Any) -> str:
    """Return 32 hexadecimal digits of a value made of plain values and bytes."""
    data = repr((_RULES, content)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    return f"the entry cannot be read ({problem_of(error)}): correct or remove it"


def problem_of(error: Exception) -> str:
    """Return what is wrong with an entry, of one of the errors of BAD_ENTRY."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error).strip().partition("\n")[0] or "no reason given"


def is_png_of(path: Path, digest: str) -> bool:
    """Return True for a complete PNG of this content; reads the header and the end of the file."""
    if not path.is_file():
        return False
    try:
        read_header(path)
        with Image.open(path) as image:
            return image.format == "PNG" and image.info.get(_DIGEST_KEY) == digest
    except (DataError, OSError, SyntaxError, ValueError):
        return False


def encode_png(pixels: NDArray[np.uint8] | NDArray[np.uint16], digest: str) -> bytes:
    """Return a PNG of ids or grey values (H, W), or RGB (H, W, 3), with the digest of its content."""
    info = PngImagePlugin.PngInfo()
    info.add_text(_DIGEST_KEY, digest)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", pnginfo=info, compress_level=4)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, after a power cut too."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
