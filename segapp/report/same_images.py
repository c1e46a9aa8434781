"""Several runs on the images that all of them know: scores, differences from the first run, and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from segapp.build.data import build_dataset
from segapp.build.pairs import split_names
from segapp.build.trained import TrainedModel, load_trained
from segapp.datasets.dataset import SegmentationDataset
from segapp.errors import DataError
from segapp.inference.workspace import HostLimit
from segapp.report.differences import MIN_IMAGES, Differences, differences_of
from segapp.report.image_counts import ImageCounts, count_split, iou_of, mean_of_known
from segapp.report.pictures import evaluate_image
from segapp.report.run_report import RunReport
from segapp.training.console import progress_bar

Network = tuple[TrainedModel, SegmentationDataset]


def compare_on_images(
    reports: Sequence[RunReport], split: str | None, num_images: int, *, has_pictures: bool
) -> dict[str, Any]:
    """Return plain values about runs on the images whose masks they all know: the keys of `segapp compare --json`.

    Each run is evaluated with its best checkpoint on `split`, by default its own validation split.

    Raises:
        SegappError: a network or its data cannot be loaded, or the runs have no image in common.
    """
    networks: list[Network] = []
    counts = []
    for report in reports:
        trained = load_trained(str(report.folder.path))
        own_split = split or split_names(trained.config.data)[1]
        dataset = build_dataset(
            trained.config.data, trained.scheme, own_split, is_training=False, seed=trained.config.seed
        )
        networks.append((trained, dataset))
        with progress_bar(len(dataset), f"evaluating {report.name}") as progress:
            counts.append(count_split(trained, dataset, own_split, progress))
    found = fold_counts([report.name for report in reports], counts, num_images)
    if has_pictures:
        for image in found["images"]:
            _add_pictures(image, networks, counts, found["names"])
    return found


def fold_counts(names: Sequence[str], counts: Sequence[ImageCounts], num_images: int) -> dict[str, Any]:
    """Return scores and differences of runs from their counts; DataError if no image is common to all."""
    classes = [name for name in counts[0].classes if all(name in each.classes for each in counts)]
    places = [{name: place for place, name in enumerate(each.names)} for each in counts]
    images = [name for name in counts[0].names if all(name in own for own in places)]
    shared = np.stack([
        each.counts[np.ix_([own[name] for name in images], [each.classes.index(name) for name in classes])]
        for each, own in zip(counts, places, strict=True)
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
    miou, of_images = mean_of_known(iou_of(shared.sum(1))), mean_of_known(iou_of(shared))
    differences: list[Differences | None] = [None, *(differences_of(shared[0], each) for each in shared[1:])]
    effects = np.stack([np.zeros(len(images)) if each is None else each.effects for each in differences])
    worst = np.argsort(-np.abs(np.nan_to_num(effects)).max(0), kind="stable")[:num_images]
    return {
        "names": list(names),
        "split": ", ".join(dict.fromkeys(each.split for each in counts)),
        "num_images": len(images),
        "num_left_out": max(len(each.names) for each in counts) - len(images),
        "classes": classes,
        "num_scored": int(np.isfinite(iou).all(0).sum()),
        "runs": [
            {
                "name": name,
                "miou": known(miou[run]),
                "iou": _by_class(classes, iou[run]),
                **({} if each is None else {
                    "difference": known(each.miou), "margin": known(each.miou_margin),
                    "iou_difference": _by_class(classes, each.iou), "iou_margin": _by_class(classes, each.iou_margin),
                }),
            }
            for run, (name, each) in enumerate(zip(names, differences, strict=True))
        ],
        "images": [
            {
                "name": images[place],
                "miou": [known(value) for value in of_images[:, place]],
                "effects": [known(value) for value in effects[1:, place]],
                "class": _largest_change(classes, shared[:, place]),
            }
            for place in worst.tolist()
        ],
    }  # fmt: skip


def known(value: float) -> float | None:
    """Return a number; None for NaN."""
    return None if math.isnan(value) else float(value)


def _by_class(classes: Sequence[str], values: Any) -> dict[str, float | None]:
    return {name: known(value) for name, value in zip(classes, values, strict=True)}


def _largest_change(classes: Sequence[str], counts: Any) -> dict[str, Any] | None:
    """Return the class whose wrong pixels differ most between runs on an image, with its IoU in each run."""
    wrong_px = counts[..., 1] + counts[..., 2] - 2 * counts[..., 0]  # (R, C)
    place = int(np.argmax(np.ptp(wrong_px, axis=0)))
    return {"name": classes[place], "iou": [known(value) for value in iou_of(counts[:, place])]}


def _add_pictures(
    image: dict[str, Any], networks: Sequence[Network], counts: Sequence[ImageCounts], names: Sequence[str]
) -> None:
    """Add the page's data about an image: pictures, files, confusions of each run, and the colors of its classes.

    A row of pictures has the image and each run's prediction; the next row has the target and the wrong pixels.
    """
    shown = [
        evaluate_image(trained, dataset, own.names.index(image["name"]), HostLimit())
        for (trained, dataset), own in zip(networks, counts, strict=True)
    ]
    first, target, *_ = shown[0].pictures.items()
    rows = [[first], [target]]
    for name, each in zip(names, shown, strict=True):
        for row, (what, address) in zip(rows, list(each.pictures.items())[2:], strict=True):
            row.append((f"{what}, {name}", address))
    image["shown"] = {
        "pictures": [*rows[0], *rows[1]],
        "files": shown[0].files,
        "confusions": list(zip(names, (each.confusions for each in shown), strict=True)),
        "legend": list(dict(entry for each in shown for entry in each.legend).items()),
        "has_ignored": any(each.has_ignored for each in shown),
    }


def verdict(found: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Return a sentence about the difference between a run and the first one."""
    first, margin = found["names"][0], run["margin"]
    where = f"{found['num_images']} images of {found['split']}, {found['num_scored']} classes"
    if run["difference"] is None:
        return f"{run['name']} and {first} have no class in common that has an IoU ({where})."
    points = f"mIoU {difference_text(run['difference'], margin)} points ({where}"
    if margin is None:
        return f"{run['name']} against {first}: {points}). Fewer than {MIN_IMAGES} images give no confidence."
    if abs(run["difference"]) <= margin:
        return f"{run['name']} and {first} do not differ clearly: {points}, 95 % confidence)."
    better = "better" if run["difference"] > 0 else "worse"
    return f"{run['name']} is {better} than {first}: {points}, 95 % confidence)."


def difference_text(value: float | None, margin: float | None = None) -> str:
    """Return a difference of shares in percentage points.

    >>> difference_text(0.0123, 0.008), difference_text(0.0004, 0.0001), difference_text(-0.01), difference_text(None)
    ('+1.2 ± 0.8', '+0.04 ± 0.01', '-1.0', '-')
    """
    if value is None:
        return "-"
    digits = 2 if margin is not None and margin < 0.0005 else 1
    return f"{100 * value:+.{digits}f}" + ("" if margin is None else f" ± {100 * margin:.{digits}f}")
