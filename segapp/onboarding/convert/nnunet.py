"""nnU-Net's raw 2-D data with several files per case: images*/CASE_0000.png, CASE_0001.png, ... and labels*/CASE.png.

The files of a case are the bands of one image, which is written as a TIFF; the masks are used as they are. A case with
one file needs no conversion.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import read_header, shown
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.images.raster import encode_bands
from segapp.datasets.images.reading import read_image
from segapp.errors import DataError
from segapp.onboarding.convert.conversion import file_state, split_said
from segapp.onboarding.layout import Drawing, Layout, Pair
from segapp.onboarding.survey.content import stored_pixels
from segapp.onboarding.survey.tree import Tree

_CASE = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")


def find_nnunet(tree: Tree) -> Layout | None:
    """Return the conversion of cases with several files."""
    known = set(tree.images)
    cases: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for path in tree.images:
        place = PurePosixPath(path)
        found = _CASE.fullmatch(place.stem)
        if found is not None and place.parent.name.startswith("images"):
            cases[str(place.parent), found["case"]][int(found["channel"])] = path
    labelled = {key: files for key, files in cases.items() if _label_of(key, files) in known}
    if not labelled:
        return None
    channels, _ = Counter(tuple(sorted(files)) for files in labelled.values()).most_common(1)[0]
    if len(channels) < 2 or channels != tuple(range(len(channels))):
        return None
    names = _channel_names(tree, len(channels))
    pairs, lacking = [], []
    for (folder, case), files in sorted(labelled.items()):
        if tuple(sorted(files)) != channels:
            lacking.append(f"{folder}/{case}")
            continue
        paths = [files[channel] for channel in channels]
        pairs.append(_pair(tree, f"{folder}/{case}.tif", paths, _label_of((folder, case), files), names))
    evidence = [f"{len(pairs)} cases of {len(channels)} files each, the bands of one image"]
    if lacking:
        evidence.append(f"{len(lacking)} cases have other files and are left out, such as {shown(lacking[0])}")
    notes = (f"the bands are the channels of nnU-Net: {', '.join(f'{i} {n}' for i, n in enumerate(names, start=1))}",)
    confidence = 0.97 * len(pairs) / len(labelled)
    sources = [path for _, files in sorted(labelled.items()) for path in files.values()]
    sources += [path for path in tree.others_named(".json") if path.rpartition("/")[2] == "dataset.json"]
    return Layout("nnunet-channels", pairs, confidence, tuple(evidence), tuple(sources), title="nnU-Net", notes=notes)


def _label_of(key: tuple[str, str], files: Mapping[int, str]) -> str:
    """Return the mask of a case, in labels* next to images*, with the extension of its files."""
    folder, case = key
    head, _, name = folder.rpartition("/")
    suffix = PurePosixPath(next(iter(files.values()))).suffix
    place = f"{head}/" if head else ""
    return f"{place}labels{name.removeprefix('images')}/{case}{suffix}"


def _channel_names(tree: Tree, count: int) -> list[str]:
    """Return the names in dataset.json (`channel_names`, before version 2 `modality`); without them, numbers."""
    for path in tree.others_named(".json"):
        content = tree.read_json(path) if path.rpartition("/")[2] == "dataset.json" else None
        named = (content.get("channel_names") or content.get("modality")) if isinstance(content, dict) else None
        if isinstance(named, dict):
            return [str(named.get(str(number), f"channel {number}")) for number in range(count)]
    return [f"channel {number}" for number in range(count)]


def _pair(tree: Tree, image: str, channels: Sequence[str], mask: str, names: Sequence[str]) -> Pair:
    files = [tree.root / path for path in channels]
    states = [(path, *file_state(file)) for path, file in zip(channels, files, strict=True)]
    drawing = Drawing(
        shown(channels[0]),
        (states, list(names)),
        lambda: np.asarray(stored_pixels(tree.root / mask, as_rgb=False)[0], np.uint8),
        is_mask_there=True,
        image_bytes=lambda digest: encode_bands(_stacked(files), names, digest),
        preview=channels[0],
    )
    return Pair(image, mask, split_said(image), drawing=drawing)


def _stacked(files: Sequence[Path]) -> NDArray[np.generic]:
    """Return the bands of all files, (H, W, B); raise DataError if they differ in size or dtype."""
    planes = []
    for file in files:
        stored = read_header(file).stored
        if stored is None:
            raise DataError(f"{shown(file)}: a channel is a PNG or a TIFF: convert it", path=file)
        planes.append(read_image(file, PixelFormat(tuple(range(1, stored.bands + 1)), stored.dtype)))
    kinds = {(plane.shape[:2], plane.dtype.name) for plane in planes}
    if len(kinds) > 1:
        raise DataError(
            f"{shown(files[0])}: the channels of the case differ in size or type: make them alike", path=files[0]
        )
    return np.concatenate(planes, axis=2)
