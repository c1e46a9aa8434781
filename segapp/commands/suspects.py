"""`segapp suspects`: list masks that are probably wrong, as a page with images and as a JSON file.

A region is a set of pixels, connected by their four neighbors, in which the mask has one class and the model predicts
one other class. As in confident learning (Northcutt et al., Confident Learning: Estimating Uncertainty in Dataset
Labels, JAIR 2021), the prediction counts if its probability reaches the threshold of its class, which is the mean
probability that the model gives to this class over the class's pixels in the masks. The mean over the region is
compared with the threshold, so a region is kept or dropped as a whole.

Shapes: C classes, H x W pixels of an image.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.assembly.pairs import build_pairs, split_names
from segapp.assembly.trained import TrainedModel, load_trained
from segapp.commands.predict import predictor_of
from segapp.custom.trust import using_copies
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import ImagePair, shown
from segapp.errors import ConfigError, DataError, storage_errors
from segapp.inference.predict.predictor import check_same_classes, plan_workspace, predict_strips
from segapp.report.images import pictures_of
from segapp.report.page import render, save_page
from segapp.run.files import write_atomic
from segapp.run.folder import find_run, runs_of
from segapp.run.words import printable
from segapp.view.runs import run_state
from segapp.waiting import progress_bar

Kind = Literal["class", "missing", "outline"]
MIN_AREA_SHARE = 0.0005
"""Default minimum share of an image's pixels in a region."""
MAX_PICTURED = 100
_OUTLINE_RGB = (255, 0, 255)


@dataclass(frozen=True)
class SuspectedRegion:
    """A connected set of pixels with one class in the mask and another one in the prediction."""

    given: int  # class id in the mask
    suggested: int  # class id that the model predicts
    kind: Kind
    area_px: int
    box: tuple[int, int, int, int]  # left, top, width, height in pixels
    outline: NDArray[np.int32]  # (points, 2): x and y of the outer border's pixels
    quality: float  # mean probability of the mask's class
    confidence: float  # mean probability of the predicted class


class ClassCounts:
    """Sums over images from which the thresholds and the confusion rates are computed."""

    def __init__(self, num_classes: int) -> None:
        self.pairs = np.zeros((num_classes, num_classes), np.int64)  # pixels by mask's class and predicted class
        self._probability = np.zeros(num_classes)  # sum over the pixels of each mask's class

    def add(self, target: NDArray[Any], labels: NDArray[Any], quality: NDArray[Any]) -> None:
        """Add pixels with a class: their mask's classes, predicted classes, and probabilities of the mask's classes."""
        num_classes = len(self.pairs)
        joint = target.astype(np.int64) * num_classes + labels
        self.pairs += np.bincount(joint, minlength=num_classes**2).reshape(num_classes, num_classes)
        self._probability += np.bincount(target, quality, num_classes)

    @property
    def thresholds(self) -> NDArray[np.float64]:
        """The confident threshold of each class (C,); infinite for a class that no mask has."""
        totals = self.pairs.sum(1)
        found = np.full(len(totals), np.inf)
        np.divide(self._probability, totals, out=found, where=totals > 0)
        return found


def label_quality(probabilities: NDArray[Any], target: NDArray[Any], ignore_index: int) -> NDArray[np.float32]:
    """Return the probability (H, W) of the mask's class, from probabilities (C, H, W); 1 for pixels without a class."""
    has_class = target != ignore_index
    ids = np.where(has_class, target, 0).astype(np.int64)
    own = np.take_along_axis(probabilities, ids[None], 0)[0]
    return np.where(has_class, own, 1.0).astype(np.float32)


def find_regions(
    target: NDArray[Any],
    labels: NDArray[Any],
    quality: NDArray[Any],
    confidence: NDArray[Any],
    ignore_index: int,
    *,
    min_area_px: int,
) -> Iterator[SuspectedRegion]:
    """Yield the regions of an image in which the mask and the prediction disagree; all arrays are (H, W).

    Args:
        target: class ids of the mask.
        labels: predicted class ids.
        quality: probability of the mask's class.
        confidence: probability of the predicted class.
        ignore_index: target of pixels without a class, which belong to no region.
        min_area_px: minimum number of pixels of a region.
    """
    differs = (target != ignore_index) & (labels != target)
    pairs = np.where(differs, target.astype(np.int64) << 16 | labels, -1)
    for pair in np.unique(pairs[differs]).tolist():
        given, suggested = pair >> 16, pair & 0xFFFF
        parts, boxes = _parts(pairs == pair)
        mask_parts, mask_boxes = _parts(target == given)
        for number in np.flatnonzero(boxes[:, cv2.CC_STAT_AREA] >= min_area_px).tolist():
            if number == 0:
                continue  # the background
            left, top, width, height, area = boxes[number].tolist()
            place = slice(top, top + height), slice(left, left + width)
            own = parts[place] == number
            mask_area = mask_boxes[mask_parts[place][own][0], cv2.CC_STAT_AREA]
            around = slice(max(top - 1, 0), top + height + 1), slice(max(left - 1, 0), left + width + 1)
            grown = cv2.dilate((parts[around] == number).astype(np.uint8), _CROSS) > 0
            touches = bool((target[around][grown] == suggested).any())
            kind: Kind = "class" if 2 * area >= mask_area else "outline" if touches else "missing"
            borders, _ = cv2.findContours(
                own.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top)
            )
            yield SuspectedRegion(
                given,
                suggested,
                kind,
                area,
                (left, top, width, height),
                borders[0][:, 0],
                float(quality[place][own].mean()),
                float(confidence[place][own].mean()),
            )


_CROSS = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))


def _parts(is_in: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the component of each pixel (H, W), 0 outside, and left, top, width, height and area of each component."""
    _, parts, boxes, _ = cv2.connectedComponentsWithStats(is_in.astype(np.uint8), connectivity=4)
    return parts, boxes


def rank_regions(counts: ClassCounts, regions: Iterable[tuple[JudgedImage, SuspectedRegion]]) -> list[Suspect]:
    """Return the regions that pass the thresholds, the most suspicious first, with scores from -1 to 1.

    The score is the probability of the predicted class minus the probability of the mask's class, multiplied by the
    share of the mask's class that is not predicted as this other class. A confusion that the model makes everywhere has
    a low score.
    """
    thresholds, rates = counts.thresholds, counts.pairs / np.maximum(counts.pairs.sum(1, keepdims=True), 1)
    found = [
        Suspect(judged, region, (region.confidence - region.quality) * (1 - rates[region.given, region.suggested]))
        for judged, region in regions
        if region.confidence >= thresholds[region.suggested]
    ]
    return sorted(found, key=lambda suspect: -suspect.score)


@dataclass(frozen=True)
class JudgedImage:
    """An image with a mask, and the judgment of its mask by a model that was not trained on it."""

    dataset: SegmentationDataset
    index: int
    run: str
    regions: list[SuspectedRegion]
    labels_png: bytes
    """Predicted class ids, as a PNG file."""

    @property
    def pair(self) -> ImagePair:
        return self.dataset.pairs[self.index]


@dataclass(frozen=True)
class Suspect:
    """A region of a mask that is probably wrong."""

    judged: JudgedImage
    region: SuspectedRegion
    score: float


@dataclass(frozen=True)
class JudgedMasks:
    """All regions, the most suspicious first, and the images."""

    suspects: list[Suspect]
    images: list[JudgedImage]
    runs: list[str]
    unjudged: list[Path]
    """Images that were training images of every run."""
    split: str


def write_suspects(targets: Sequence[str], *, split: str | None, out: Path | None, min_area_px: int | None) -> None:
    """Judge the masks by the runs that were not trained on them; write the page and the list, and print a summary.

    Raises:
        ConfigError: there is no such run, or the runs cannot be judged together.
        DataError: every image with a mask was a training image of all runs.
        StorageError: a file cannot be written.
    """
    runs = [name for target in targets for name in _finished_runs(target)]
    found = judge_masks(runs, split, min_area_px)
    folder = out or (Path(runs[0]).parent if runs[0] != targets[0] else find_run(targets[0]).path)
    page, listed = folder / "suspects.html", folder / "suspects.json"
    rows = rows_of(found)
    with storage_errors(folder, "choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(listed, json.dumps(rows, indent=1) + "\n")
    save_page(page, render("suspects.html.j2", template_values(found)))
    for row in rows[:10]:
        print(f"{row['score']:.3f}  {row['mask']} at {row['left']}, {row['top']}: {printable(row['reason'])}")
    masks = {row["mask"] for row in rows}
    print(
        f"{len(rows)} regions of {len(masks)} of {len(found.images)} masks are listed, the most suspicious first; "
        f"{len(found.unjudged)} training images could not be judged"
    )
    print(f"written: {page}, {listed.name} (for labeling tools)", file=sys.stderr)


def _finished_runs(target: str) -> list[str]:
    runs = runs_of(target)
    finished = [run for run in runs if run == target or run_state(Path(run)) == "finished"]
    if not finished:
        raise ConfigError(f"{target}: no run of this sweep has finished: the command that began it continues it")
    return finished


def judge_masks(runs: Sequence[str], split: str | None, min_area_px: int | None) -> JudgedMasks:
    """Return the suspicious regions of the masks; the first run that was not trained on an image judges it."""
    judged: dict[Path, JudgedImage] = {}
    trained_on: dict[Path, Path] = {}
    counts: ClassCounts | None = None
    first: TrainedModel | None = None
    splits, used = set(), []
    for run in runs:
        trained = load_trained(run, uses=("model.", "data.format"))
        first = first or trained
        check_same_classes(runs[0], first.scheme.names, run, trained.scheme.names)
        if trained.scheme.multilabel is not None:
            raise ConfigError(f"{printable(run)} has several classes per pixel, and suspects needs one: leave it out")
        counts = counts or ClassCounts(trained.scheme.num_classes)
        data, chosen = trained.config.data, split or split_names(trained.config.data)[1]
        dataset = trained.dataset(chosen)
        # A network has learned the masks that it was trained on, and would agree with their errors.
        with using_copies(trained.copies):
            own = {_key(pair): pair.image for pair in build_pairs(data, split_names(data)[0])}
        trained_on |= own
        places = [
            i for i, pair in enumerate(dataset.pairs) if pair.mask and _key(pair) not in own.keys() | judged.keys()
        ]
        if places:
            splits.add(chosen)
            used.append(run)
        with progress_bar(len(places), f"judging with {printable(run)}") as progress:
            for done, image in enumerate(_judge(trained, dataset, places, run, counts, min_area_px), start=1):
                judged[_key(image.pair)] = image
                progress(done)
    if not judged or counts is None:
        raise DataError(
            "every image with a mask is a training image of the runs: name another --split, or the runs of all folds"
        )
    ranked = rank_regions(counts, ((image, region) for image in judged.values() for region in image.regions))
    unjudged = [path for key, path in trained_on.items() if key not in judged]
    return JudgedMasks(ranked, list(judged.values()), used, unjudged, ", ".join(sorted(splits)))


def _key(pair: ImagePair) -> Path:
    return pair.image.resolve()


def _judge(
    trained: TrainedModel,
    dataset: SegmentationDataset,
    places: Sequence[int],
    run: str,
    counts: ClassCounts,
    min_area_px: int | None,
) -> Iterator[JudgedImage]:
    predictor = predictor_of(trained)
    workspace = plan_workspace(predictor, "probabilities")
    ignored = trained.scheme.ignore_index
    for index in places:
        image, target = dataset.read(index)
        parts = []
        for strip in predict_strips(predictor, image, workspace, wanted="probabilities"):
            assert strip.probabilities is not None
            quality = label_quality(strip.probabilities, target[strip.rows], ignored)
            parts.append((strip.labels, quality, strip.probabilities.max(0)))
        labels, quality, confidence = (np.concatenate(part) for part in zip(*parts, strict=True))
        has_class = target != ignored
        counts.add(target[has_class], labels[has_class], quality[has_class])
        least_px = max(1, round(MIN_AREA_SHARE * target.size)) if min_area_px is None else min_area_px
        regions = list(find_regions(target, labels, quality, confidence, ignored, min_area_px=least_px))
        yield JudgedImage(dataset, index, run, regions, cv2.imencode(".png", labels)[1].tobytes())


def reason_of(suspect: Suspect) -> str:
    names, region = suspect.judged.dataset.scheme.names, suspect.region
    given, seen = names[region.given], names[region.suggested]
    return {
        "class": f"{given} looks like {seen}",
        "missing": f"{seen} is missing: the mask has {given}",
        "outline": f"{seen} ends too early: the mask continues with {given}",
    }[region.kind]


def rows_of(found: JudgedMasks) -> list[dict[str, Any]]:
    """Return a row for each region, the most suspicious first; lengths are in pixels of the upright image."""
    rows = []
    for rank, suspect in enumerate(found.suspects, start=1):
        judged, region, names = suspect.judged, suspect.region, suspect.judged.dataset.scheme.names
        files = {"image": shown(judged.pair.image), "mask": shown(judged.pair.mask or "")}
        classes = {"in_mask": names[region.given], "predicted": names[region.suggested]}
        box = dict(zip(("left", "top", "width", "height"), region.box, strict=True))
        numbers = {"score": suspect.score, "quality": region.quality, "confidence": region.confidence}
        rows.append(
            {"rank": rank, **files, "reason": reason_of(suspect), "kind": region.kind, **classes}
            | {"area_px": region.area_px, **box, **{name: round(value, 4) for name, value in numbers.items()}}
            | {"run": judged.run}
        )
    return rows


def template_values(found: JudgedMasks) -> dict[str, Any]:
    scheme = found.images[0].dataset.scheme
    return {
        "found": found,
        "classes": list(zip(scheme.names, scheme.palette, strict=False)),
        "cards": [(each, reason_of(each), cut_out(each)) for each in found.suspects[:MAX_PICTURED]],
        "shown": shown,
    }


def cut_out(suspect: Suspect) -> dict[str, str]:
    """Return images of a region and its surroundings, with the region outlined, as `data:` addresses by name."""
    judged, region = suspect.judged, suspect.region
    image, target = judged.dataset.read(judged.index)
    rgb = np.array(judged.dataset.pixels.as_rgb(image), order="C")
    cv2.drawContours(rgb, [region.outline], -1, _OUTLINE_RGB, max(1, max(rgb.shape) // 400))
    labels: Any = cv2.imdecode(np.frombuffer(judged.labels_png, np.uint8), cv2.IMREAD_UNCHANGED)
    left, top, width, height = region.box
    side = max(2 * max(width, height), max(target.shape) // 4)
    middles = zip((top + height // 2, left + width // 2), target.shape, strict=True)
    starts = [max(0, min(middle - side // 2, size - side)) for middle, size in middles]
    place = tuple(slice(start, start + side) for start in starts)
    return pictures_of(rgb[place], target[place], labels[place], judged.dataset.scheme)
