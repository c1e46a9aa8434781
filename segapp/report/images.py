"""The images of a data split, predicted by the best checkpoints of runs: counts, scores, differences and pictures.

Shapes: H x W pixels of an image, R runs, N images, C classes. Counts are int64 (N, C, 3), of pixels with a valid
target: the pixels of a class in both target and prediction, in the target, and in the prediction. A class that is not
scored (`ignore_index` may be one) has zeros. Of the package, only this module needs torch.
"""

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.assembly.pairs import split_names
from segapp.assembly.trained import TrainedModel, load_trained
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.layouts.schemes import ClassScheme, Color
from segapp.errors import DataError
from segapp.inference.drawing import colorize, colorize_target, fitted, resized
from segapp.inference.predict.predictor import predict_image
from segapp.inference.workspace import HostLimit
from segapp.metrics import Counts, SegmentationScores, counts_for
from segapp.run.folder import RunFolder
from segapp.scores import count_scored, of_classes
from segapp.waiting import progress_bar

Network = tuple[TrainedModel, SegmentationDataset]

PICTURE_PX = 720
WRONG_RGB = (214, 39, 140)


@dataclass(frozen=True)
class ImageCounts:
    """Counts of the images of a split, predicted by one checkpoint."""

    names: tuple[str, ...]
    """Names of the images (`ImagePair.name`), in the order of the data set."""
    classes: tuple[str, ...]
    split: str
    counts: NDArray[np.int64]
    """(N, C, 3)."""
    total: Counts


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


def fold_counts(names: Sequence[str], counts: Sequence[ImageCounts], num_images: int) -> dict[str, Any]:
    """Return scores and differences of runs from their counts; DataError if no image is common to all."""
    classes = [name for name in counts[0].classes if all(name in of_run.classes for of_run in counts)]
    places = [{name: place for place, name in enumerate(of_run.names)} for of_run in counts]
    images = [name for name in counts[0].names if all(name in of_run for of_run in places)]
    shared = np.stack([
        of_run.counts[np.ix_([at[name] for name in images], [of_run.classes.index(name) for name in classes])]
        for of_run, at in zip(counts, places, strict=True)
    ])  # fmt: skip
    is_same = (shared[..., 1] == shared[:1, ..., 1]).all((0, 2))  # masks with the same pixels of each class
    if not classes or not is_same.any():
        raise DataError(
            f"{', '.join(names)} have no {'image with the same mask' if classes else 'class'} in common: name a split "
            "that all have with --split, or compare runs of one data set",
            key="data.val_split",
        )
    shared, images = shared[:, is_same], [name for name, is_kept in zip(images, is_same, strict=True) if is_kept]
    iou = iou_of(shared.sum(1))  # (R, C)
    shared[:, :, ~np.isfinite(iou).all(0)] = 0  # a class without an IoU in one run is left out of all means
    total = shared.sum(1)  # (R, C, 3)
    scored, without = iou_of(total), iou_of(total[:, None] - shared)  # (R, C); (R, N, C), over all other images
    miou, of_images = mean_of_known(scored), mean_of_known(iou_of(shared))
    effects = (miou - miou[0])[:, None] - mean_of_known(without - without[0])  # (R, N)
    worst = np.argsort(-np.abs(np.nan_to_num(effects)).max(0), kind="stable")[:num_images]
    return {
        "names": list(names),
        "split": ", ".join(dict.fromkeys(of_run.split for of_run in counts)),
        "num_images": len(images),
        "num_left_out": len(set().union(*places)) - len(images),
        "classes": classes,
        "num_scored": int(np.isfinite(iou).all(0).sum()),
        "runs": [
            {
                "name": name,
                "miou": known(miou[run]),
                "iou": _by_class(classes, iou[run]),
                **({} if run == 0 else {
                    "difference": known(miou[run] - miou[0]),
                    "iou_difference": _by_class(classes, scored[run] - scored[0]),
                }),
            }
            for run, name in enumerate(names)
        ],
        "images": [
            {
                "name": images[place],
                "miou": [known(value) for value in of_images[:, place]],
                "effects": [known(value) for value in effects[1:, place]],
            }
            for place in worst.tolist()
        ],
    }  # fmt: skip


def known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _by_class(classes: Sequence[str], values: Any) -> dict[str, float | None]:
    return {name: known(value) for name, value in zip(classes, values, strict=True)}


def count_split(
    trained: TrainedModel,
    dataset: SegmentationDataset,
    split: str,
    progress: Callable[[int], None] = lambda _: None,
) -> ImageCounts:
    """Predict every image of a split and return its counts; `progress` is called with the number of images done."""
    scheme, host = trained.scheme, HostLimit()
    total = counts_for(scheme.num_classes, scheme.ignore_index, multilabel=scheme.multilabel is not None)
    rows = []
    for index in range(len(dataset)):
        counts = counts_of(trained, *predict_pair(trained, dataset, index, host)[1:])
        total.counts += counts.counts
        rows.append(class_counts(counts.matrix, scheme.ignore_index))
        progress(index + 1)
    names = tuple(pair.name for pair in dataset.pairs)
    return ImageCounts(names, scheme.names, split, np.stack(rows), total)


def predict_pair(
    trained: TrainedModel, dataset: SegmentationDataset, index: int, host: HostLimit | None = None
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return an image (H, W, B), its target and its predicted class ids (H, W)."""
    image, target = dataset.read(index)
    return image, target, predict_image(trained.model, trained.inference, image, trained.device, host)


def counts_of(trained: TrainedModel, target: NDArray[Any], labels: NDArray[Any]) -> Counts:
    """Return the counts of one image from its target and its predicted class ids (H, W)."""
    scheme = trained.scheme
    counts = counts_for(scheme.num_classes, scheme.ignore_index, multilabel=scheme.multilabel is not None)
    counts.update(torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(target.astype(np.int64)))
    return counts


def class_counts(matrix: Tensor, unscored: int) -> NDArray[np.int64]:
    """Return the counts (C, 3) of a matrix (C, C), or of several (C, 2, 2)."""
    is_sets = matrix.ndim == 3
    parts = (matrix[:, 1, 1], matrix[:, 1].sum(1), matrix[:, :, 1].sum(1)) if is_sets else (
        matrix.diagonal(), matrix.sum(1), matrix.sum(0))  # fmt: skip
    counts = torch.stack(parts, dim=1).numpy()
    if not is_sets and 0 <= unscored < len(counts):
        counts[unscored] = 0
    return counts


@dataclass(frozen=True)
class EvaluatedImage:
    """Scores and pictures of one image."""

    name: str
    miou: float
    classes: str
    """Number of classes that `miou` averages over: the classes of the image and its prediction."""
    pixel_accuracy: float | None
    pictures: dict[str, str]
    id: str = ""
    """Pictures in the page."""
    files: tuple[str, ...] = ()
    """The image and its masks."""
    legend: Sequence[tuple[str, Color]] = ()
    """Classes of the target or the prediction, ordered by their target pixels, the most frequent class first."""
    has_ignored: bool = False


@dataclass(frozen=True)
class SplitEvaluation:
    """Scores of a split, and its most important images."""

    split: str
    scores: SegmentationScores
    matrix: NDArray[np.int64] | None
    """(C, C) counts of (target, prediction); None with several classes per pixel."""
    worst: list[EvaluatedImage]
    num_images: int


def evaluate_split(
    trained: TrainedModel,
    dataset: SegmentationDataset,
    split: str,
    num_worst: int,
    progress: Callable[[int], None] = lambda _: None,
) -> SplitEvaluation:
    """Return the scores of a data set, and pictures of the images with the lowest mIoU."""
    images = count_split(trained, dataset, split, progress)
    miou = mean_of_known(iou_of(images.counts))
    order = [index for index in np.argsort(miou, kind="stable").tolist() if np.isfinite(miou[index])][:num_worst]
    worst = [evaluate_image(trained, dataset, index, HostLimit()) for index in order]
    matrix = images.total.matrix.numpy() if trained.scheme.multilabel is None else None
    return SplitEvaluation(split, images.total.scores(), matrix, worst, len(dataset))


def evaluate_image(
    trained: TrainedModel, dataset: SegmentationDataset, index: int, host: HostLimit | None = None
) -> EvaluatedImage:
    """Predict one image with a valid pixel, and return its scores and pictures."""
    image, target, labels = predict_pair(trained, dataset, index, host)
    counts, scheme, pair = counts_of(trained, target, labels), trained.scheme, dataset.pairs[index]
    scores = counts.scores()
    by_class = class_counts(counts.matrix, scheme.ignore_index)
    order = [i for i in np.argsort(-by_class[:, 1], kind="stable").tolist() if by_class[i].any()]
    return EvaluatedImage(
        pair.image.name,
        scores.miou or 0.0,
        of_classes(count_scored(scores.iou), scheme.num_classes),
        scores.pixel_accuracy,
        pictures_of(dataset.pixels.as_rgb(image), target, labels, scheme),
        f"image-{index}",
        tuple(dict.fromkeys(map(str, pair.files))),
        legend=[(scheme.names[i], scheme.palette[i]) for i in order],
        has_ignored=bool((target == scheme.ignore_index).any()),
    )


def pictures_of(image: NDArray[Any], target: NDArray[Any], labels: NDArray[Any], scheme: ClassScheme) -> dict[str, str]:
    """Return reduced pictures of image, target, prediction and errors as `data:` addresses, by name.

    Target and prediction have the colors of the classes, and stripes at ignored pixels. The image is uint8 (H, W, 3),
    RGB; `target` and `labels` are (H, W) class ids.
    """
    small, target, labels = resized(fitted(target.shape, PICTURE_PX), image, target, labels)
    valid = target != scheme.ignore_index
    grey = np.repeat(cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)[..., None], 3, axis=2)
    errors = np.where((valid & (labels != target))[..., None], np.array(WRONG_RGB, np.uint8), grey // 3 + 160)
    return {
        "image": data_url(small, ".jpg"),
        "target": data_url(colorize_target(target, scheme), ".png"),
        "prediction": data_url(colorize(labels, scheme), ".png"),
        "wrong pixels": data_url(errors.astype(np.uint8), ".jpg"),
    }


def data_url(pixels: NDArray[Any], suffix: str) -> str:
    """Return an image, uint8 (H, W, 3), RGB, as a `data:` address of a .jpg or .png."""
    options = [cv2.IMWRITE_JPEG_QUALITY, 80] if suffix == ".jpg" else [cv2.IMWRITE_PNG_COMPRESSION, 9]
    _, data = cv2.imencode(suffix, np.ascontiguousarray(pixels[..., ::-1]), options)
    kind = "jpeg" if suffix == ".jpg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data.tobytes()).decode('ascii')}"


def compare_on_images(
    folders: Sequence[RunFolder], split: str | None, num_images: int, *, has_pictures: bool
) -> dict[str, Any]:
    """Return plain values about runs on the images whose masks they all know: the keys of `segapp compare --json`.

    Each run is evaluated with its best checkpoint on `split`, by default its own validation split.

    Raises:
        SegappError: a network or its data cannot be loaded, or the runs have no image in common.
    """
    networks: list[Network] = []
    counts = []
    for folder in folders:
        trained, dataset, own_split = _loaded(folder, split)
        networks.append((trained, dataset))
        with progress_bar(len(dataset), f"evaluating {folder.name}") as progress:
            counts.append(count_split(trained, dataset, own_split, progress))
    scores = fold_counts([folder.name for folder in folders], counts, num_images)
    if has_pictures:
        for image in scores["images"]:
            _add_pictures(image, networks, counts, scores["names"])
    return scores


def _add_pictures(
    image: dict[str, Any], networks: Sequence[Network], counts: Sequence[ImageCounts], names: Sequence[str]
) -> None:
    """Add the page's data about an image: pictures, files, and the colors of its classes.

    A row of pictures has the image and each run's prediction; the next row has the target and the wrong pixels.
    """
    shown = [
        evaluate_image(trained, dataset, of_run.names.index(image["name"]), HostLimit())
        for (trained, dataset), of_run in zip(networks, counts, strict=True)
    ]
    first, target, *_ = shown[0].pictures.items()
    rows = [[first], [target]]
    for name, evaluated in zip(names, shown, strict=True):
        for row, (what, address) in zip(rows, list(evaluated.pictures.items())[2:], strict=True):
            row.append((f"{what}, {name}", address))
    image["shown"] = {
        "pictures": [*rows[0], *rows[1]],
        "files": shown[0].files,
        "legend": list(dict(entry for evaluated in shown for entry in evaluated.legend).items()),
        "has_ignored": any(evaluated.has_ignored for evaluated in shown),
    }


def _loaded(folder: RunFolder, split: str | None) -> tuple[TrainedModel, SegmentationDataset, str]:
    """Return a run's best network, and the data set and the name of a split, by default of its validation split."""
    trained = load_trained(str(folder.path), uses=("model.", "data.format"))
    split = split or split_names(trained.config.data)[1]
    return trained, trained.dataset(split), split


def evaluate_run(folder: RunFolder, split: str | None, num_worst: int) -> SplitEvaluation:
    trained, dataset, split = _loaded(folder, split)
    with progress_bar(len(dataset), "evaluating") as progress:
        return evaluate_split(trained, dataset, split, num_worst, progress)
