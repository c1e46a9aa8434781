"""The page of `segapp check --html`: tables of splits and classes, findings with pictures, and augmented samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.dataset import Sample, SegmentationDataset
from segapp.datasets.files import open_bytes, read_bytes, shown
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.images.reading import read_image
from segapp.datasets.inspection import DataProblem, FindingGroup, SplitReport
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import ID_MODES, read_masks
from segapp.datasets.sampling import Order
from segapp.errors import DataError
from segapp.inference.predict.outputs import colorize
from segapp.report.render import data_url, render

_MAX_PICTURED = 6
_MAX_LISTED = 500
_THUMBNAIL_PX = 240
PICTURE_PX = 320
"""Maximum of the longer side of the picture of a training sample."""
IGNORED_RGB = (128, 128, 128)
_UNKNOWN_COLOR = (255, 0, 0)
_NO_ID = -(2**31)


class AugmentedSample(NamedTuple):
    """A training sample as a picture: image and mask side by side."""

    caption: str
    """File name, and the class that its crop is chosen for."""
    picture: str
    """A `data:` address."""


def check_page(
    name: str,
    reports: Sequence[SplitReport],
    groups: Sequence[FindingGroup],
    scheme: ClassScheme,
    weights: Mapping[str, Sequence[float]],
    samples: Sequence[AugmentedSample],
    pixels: PixelFormat = RGB8,
) -> str:
    """Return the page as HTML; `samples` are training samples as pictures."""
    counts = {
        severity: sum(len(group.findings) for group in groups if group.severity == severity)
        for severity in ("error", "warning")
    }
    values = {
        "name": name,
        "counts": counts,
        "reports": reports,
        "scheme": scheme,
        "weights": weights,
        "samples": samples,
        "sections": [(group, _with_pictures(group, scheme, pixels), _listed(group)) for group in groups],
        "comparisons": [report.comparison.lines(report.split) for report in reports if report.comparison],
        "max_listed": _MAX_LISTED,
    }
    return render("check.html.j2", values)


def _with_pictures(
    group: FindingGroup, scheme: ClassScheme, pixels: PixelFormat
) -> list[tuple[DataProblem, list[str]]]:
    """Return the first findings about a pair, each with its image and its mask, or with both images of a duplicate."""
    found = []
    for finding in group.findings[:_MAX_PICTURED]:
        if finding.pair is not None:
            pictures = [_image_thumbnail(finding.pair.image, pixels)]
            if finding.other is not None:
                pictures.append(_image_thumbnail(finding.other.image, pixels))
            elif scheme.multilabel is not None:
                pictures.append(_sets_thumbnail(finding.pair.masks, scheme))
            elif finding.pair.mask is not None:
                pictures.append(_mask_thumbnail(finding.pair.mask, scheme))
            found.append((finding, [picture for picture in pictures if picture is not None]))
    return found


def _listed(group: FindingGroup) -> list[DataProblem]:
    """Return the findings without pictures; none if the summary of the group is its only finding."""
    if len(group.findings) == 1:
        return []
    first = [finding for finding in group.findings[:_MAX_PICTURED] if finding.pair is None]
    return [*first, *group.findings[_MAX_PICTURED:]]


def _image_thumbnail(path: Path, pixels: PixelFormat) -> str | None:
    try:
        return _thumbnail(pixels.as_rgb(read_image(path, pixels)), cv2.INTER_AREA)
    except DataError:
        return None


def _mask_thumbnail(path: Path, scheme: ClassScheme) -> str | None:
    """Return a mask in the colors of its classes, unknown ids red, ignored pixels gray; None if unreadable."""
    try:
        with open_bytes(read_bytes(path), path) as image:
            stored = np.asarray(image.convert("RGB") if scheme.rgb or image.mode not in ID_MODES else image)
    except Exception:  # the finding may be about a damaged file
        return None
    if stored.ndim == 3:
        return _thumbnail(stored.astype(np.uint8), cv2.INTER_NEAREST)
    ids = stored.astype(np.int64)
    table = scheme.table
    train_ids = np.where((ids >= 0) & (ids < len(table)), table[np.clip(ids, 0, len(table) - 1)], _NO_ID)
    colors = np.full((*ids.shape, 3), _UNKNOWN_COLOR, np.uint8)
    colors[train_ids == scheme.ignore_index] = IGNORED_RGB
    for train_id, color in enumerate(scheme.palette):
        colors[train_ids == train_id] = color
    return _thumbnail(colors, cv2.INTER_NEAREST)


def _sets_thumbnail(masks: Sequence[Path], scheme: ClassScheme) -> str | None:
    """Return a mask of several classes per pixel in their colors, ignored pixels gray; None if unreadable."""
    try:
        sets = read_masks(masks, scheme)
    except DataError:
        return None
    colors = colorize(np.maximum(sets, 0), scheme)
    colors[sets == scheme.ignore_index] = IGNORED_RGB
    return _thumbnail(colors, cv2.INTER_NEAREST)


def _thumbnail(pixels: NDArray[Any], interpolation: int) -> str:
    factor = min(1.0, _THUMBNAIL_PX / max(pixels.shape[:2]))
    size = tuple(max(1, round(side * factor)) for side in (pixels.shape[1], pixels.shape[0]))
    return data_url(cv2.resize(np.ascontiguousarray(pixels), size, interpolation=interpolation), ".png")


def augmented_samples(dataset: SegmentationDataset, order: Order, most: int = 12) -> Iterator[AugmentedSample]:
    """Yield the first samples of the first epoch as pictures; images that cannot be read are left out."""
    for key in order(1)[:most]:
        try:
            sample = dataset[key]
        except DataError:
            continue
        aim = "" if key.aim is None else f", aimed at {dataset.scheme.names[key.aim]}"
        yield AugmentedSample(f"{shown(dataset.pairs[key.image].image)}{aim}", _side_by_side(sample, dataset))


def _side_by_side(sample: Sample, dataset: SegmentationDataset) -> str:
    scheme = dataset.scheme
    image = dataset.pixels.as_rgb(np.ascontiguousarray(sample.image.permute(1, 2, 0).numpy()))
    target = sample.target.numpy()
    factor = min(1.0, PICTURE_PX / max(target.shape))
    size = max(1, round(target.shape[1] * factor)), max(1, round(target.shape[0] * factor))
    is_ignored = target == scheme.ignore_index
    colors = colorize(np.where(is_ignored, 0, target), scheme)
    colors[is_ignored] = IGNORED_RGB
    pictures = [
        cv2.resize(image, size, interpolation=cv2.INTER_AREA),
        cv2.resize(colors, size, interpolation=cv2.INTER_NEAREST),
    ]
    return data_url(np.concatenate(pictures, 1), ".jpg")
