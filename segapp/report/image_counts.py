"""Pixel counts per image of a split, from which means over any images can be computed; kept in the run folder.

Shapes: N images, C classes. Counts are int64 (N, C, 3), of pixels with a valid target: the pixels of a class in both
    target and prediction, in the target, and in the prediction. A class that is not scored (`ignore_index` may be one)
    has zeros.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.build.trained import TrainedModel
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.own_data import OwnPair
from segapp.inference.predict import predict_image
from segapp.inference.workspace import HostLimit
from segapp.metrics import Counts, counts_for
from segapp.run.files import open_of_run, write_atomic
from segapp.run.folder import run_of_file


@dataclass(frozen=True)
class ImageCounts:
    """Counts of the images of a split, predicted by one checkpoint."""

    names: tuple[str, ...]
    """Names of the images (`ImagePair.name`), in the order of the data set."""
    classes: tuple[str, ...]
    split: str
    checkpoint: str
    """SHA-256 of the checkpoint's file."""
    counts: NDArray[np.int64]
    """(N, C, 3)."""
    total: NDArray[np.int64]
    """Confusion matrix of all images (C, C); with several classes per pixel, one matrix per class (C, 2, 2)."""


def iou_of(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return the IoU from counts (..., C, 3), float64 (..., C): NaN for a class in neither target nor prediction."""
    inter, target, predicted = np.moveaxis(np.asarray(counts, np.float64), -1, 0)
    union = target + predicted - inter
    return np.asarray(np.divide(inter, union, out=np.full(union.shape, np.nan), where=union > 0))


def mean_of_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the last axis of the values that are not NaN; NaN if there are none."""
    known = np.isfinite(values)
    count = known.sum(-1)
    total = np.where(known, values, 0.0).sum(-1)
    return np.asarray(np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0))


def count_split(
    trained: TrainedModel,
    dataset: SegmentationDataset,
    split: str,
    progress: Callable[[int], None] = lambda _: None,
) -> ImageCounts:
    """Return the counts of a split, from the run folder if they are still valid, else from a new prediction.

    Kept counts are valid for one checkpoint and config, as long as no file of the data set changes its size or time.
    New counts are written into the run folder, except for a custom data set, whose changes cannot be noticed, and for a
    checkpoint outside a run.
    """
    folder, key = run_of_file(trained.path), _key(trained, dataset, split)
    scheme, host = trained.scheme, HostLimit()
    multilabel = scheme.multilabel is not None
    total = counts_for(scheme.num_classes, scheme.ignore_index, multilabel=multilabel)
    shapes = (len(dataset), scheme.num_classes, 3), tuple(total.matrix.shape)
    counts = read_counts(folder.image_counts, key, shapes) if folder is not None and key is not None else None
    if counts is not None:
        progress(len(dataset))
    else:
        rows = []
        for index in range(len(dataset)):
            own = counts_of(trained, *predict_pair(trained, dataset, index, host)[1:])
            total.counts += own.counts
            rows.append(class_counts(own.matrix, scheme.ignore_index))
            progress(index + 1)
        counts = [np.stack(rows), total.matrix.numpy()]
        if folder is not None and key is not None:
            file = io.BytesIO()
            np.savez_compressed(file, key=np.array(key), counts=counts[0], total=counts[1])
            with contextlib.suppress(OSError):  # if the run folder cannot be written, only time is lost
                write_atomic(folder.image_counts, file.getvalue())
    names = tuple(pair.name for pair in dataset.pairs)
    return ImageCounts(names, scheme.names, split, trained.sha256, *counts)


def predict_pair(
    trained: TrainedModel, dataset: SegmentationDataset, index: int, host: HostLimit | None = None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return an image (H, W, B), its target and its predicted class ids (H, W)."""
    image, target = dataset.read(index)
    return image, target, predict_image(trained.model, trained.inference, image, trained.device, host)


def counts_of(trained: TrainedModel, target: NDArray[Any], labels: NDArray[Any]) -> Counts:
    """Return the counts of one image from its target and its predicted class ids (H, W)."""
    scheme = trained.scheme
    own = counts_for(scheme.num_classes, scheme.ignore_index, multilabel=scheme.multilabel is not None)
    own.update(torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(target.astype(np.int64)))
    return own


def class_counts(matrix: Tensor, unscored: int) -> NDArray[np.int64]:
    """Return the counts (C, 3) of a matrix (C, C), or of several (C, 2, 2)."""
    is_sets = matrix.ndim == 3
    parts = (matrix[:, 1, 1], matrix[:, 1].sum(1), matrix[:, :, 1].sum(1)) if is_sets else (
        matrix.diagonal(), matrix.sum(1), matrix.sum(0))  # fmt: skip
    counts = torch.stack(parts, dim=1).numpy()
    if not is_sets and 0 <= unscored < len(counts):
        counts[unscored] = 0
    return counts


def _key(trained: TrainedModel, dataset: SegmentationDataset, split: str) -> str | None:
    """Return a text that depends on everything that the counts depend on; None if that is not known."""
    config = trained.config
    if any(isinstance(pair, OwnPair) for pair in dataset.pairs):
        return None
    parts = [trained.sha256, split, config.data.model_dump_json(), config.eval.model_dump_json()]
    try:
        stats = [(path, os.stat(path)) for pair in dataset.pairs for path in pair.files]
    except OSError:
        return None
    files = [(os.fspath(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return hashlib.sha256(json.dumps([parts, files]).encode()).hexdigest()


def read_counts(path: Path, key: str, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.int64]] | None:
    """Return the two arrays of counts in a file; None if there are none, or if they, their key or shapes differ."""
    try:
        with open(open_of_run(path), "rb") as file, ZipFile(file) as kept:
            if _read_array(kept, "key", (), np.array(key).dtype) != key:
                return None
            return [
                _read_array(kept, *each, np.dtype(np.int64)) for each in zip(("counts", "total"), shapes, strict=True)
            ]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, NotImplementedError, RuntimeError, zlib.error):
        return None


def _read_array(kept: ZipFile, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of an .npz file; if it has another shape or type, no memory is allocated for it."""
    with kept.open(f"{name}.npy") as file:
        np.lib.format.read_magic(file)
        if np.lib.format.read_array_header_1_0(file) != (shape, False, dtype):
            raise ValueError(f"{name} has another shape or type")
        return np.frombuffer(file.read(math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()
