"""`segapp suspects`: list masks that are probably wrong, as a page with images and as CSV and JSON files."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from segapp.build.data import build_dataset
from segapp.build.pairs import build_pairs, own_data, split_names
from segapp.build.trained import TrainedModel, load_trained
from segapp.commands.predict import predictor_of
from segapp.config import DataConfig
from segapp.custom.names import is_part
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import ImagePair, shown
from segapp.errors import ConfigError, DataError, storage_errors
from segapp.inference.predict.predictor import check_same_classes
from segapp.inference.predict.tiles import plan_workspace, predict_strips
from segapp.inference.suspects import (
    ClassCounts,
    SuspectedRegion,
    find_regions,
    image_quality,
    label_quality,
    rank_regions,
)
from segapp.report.images import pictures_of
from segapp.report.render import render, save_page
from segapp.run.files import write_atomic
from segapp.run.folder import find_run, runs_of
from segapp.run.state import run_state
from segapp.run.words import printable
from segapp.training.console import progress_bar

MIN_AREA_SHARE = 0.0005
"""Default minimum share of an image's pixels in a region."""
_OUTLINE_RGB = (255, 0, 255)


@dataclass(frozen=True)
class JudgedImage:
    """An image with a mask, and the judgment of its mask by a model that was not trained on it."""

    dataset: SegmentationDataset
    index: int
    run: str
    quality: float
    """Soft minimum of the label quality."""
    regions: list[SuspectedRegion]
    labels_png: bytes
    """Predicted class ids, as a PNG file."""

    @property
    def pair(self) -> ImagePair:
        """The image and mask files."""
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


def write_suspects(
    targets: Sequence[str], *, split: str | None, out: Path | None, min_area_px: int | None, most_pictured: int
) -> None:
    """Judge the masks by the runs that were not trained on them; write the page and the lists, and print a summary.

    Raises:
        ConfigError: there is no such run, or the runs cannot be judged together.
        DataError: every image with a mask was a training image of all runs.
        StorageError: a file cannot be written.
    """
    runs = [name for target in targets for name in _finished_runs(target)]
    found = judge_masks(runs, split, min_area_px)
    folder = out or (Path(runs[0]).parent if runs[0] != targets[0] else find_run(targets[0]).path)
    page, table, listed = (folder / f"suspects.{suffix}" for suffix in ("html", "csv", "json"))
    rows, text = rows_of(found), io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with storage_errors(folder, "choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(table, text.getvalue())
        write_atomic(listed, json.dumps(rows, indent=1) + "\n")
    save_page(page, render("suspects.html.j2", template_values(found, most_pictured)))
    for row in rows[:10]:
        print(f"{row['score']:.3f}  {row['mask']} at {row['left']}, {row['top']}: {printable(row['reason'])}")
    masks = {row["mask"] for row in rows}
    print(
        f"{len(rows)} regions of {len(masks)} of {len(found.images)} masks are listed, the most suspicious first; "
        f"{len(found.unjudged)} training images could not be judged"
    )
    print(
        f"written: {page}, {table.name}, {listed.name} (for labeling tools)",
        file=sys.stderr,
    )


def _finished_runs(target: str) -> list[str]:
    """Return a run, or the finished runs of a sweep."""
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
        trained = load_trained(run)
        first = first or trained
        check_same_classes(runs[0], first.scheme.names, run, trained.scheme.names)
        if trained.scheme.multilabel is not None:
            raise ConfigError(f"{printable(run)} has several classes per pixel, and suspects needs one: leave it out")
        counts = counts or ClassCounts(trained.scheme.num_classes)
        data, chosen = trained.config.data, split or split_names(trained.config.data)[1]
        dataset = build_dataset(data, trained.scheme, chosen, is_training=False, seed=trained.config.seed)
        own = {_key(pair): pair.image for pair in _pairs(data, split_names(data)[0])}
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
    return JudgedMasks(
        [Suspect(*each) for each in ranked], list(judged.values()), used, unjudged, ", ".join(sorted(splits))
    )


def _key(pair: ImagePair) -> Path:
    return pair.image.resolve()


def _pairs(data: DataConfig, split: str) -> Sequence[ImagePair]:
    return own_data(data, split).pairs() if is_part(data.format) else build_pairs(data, split)


def _judge(
    trained: TrainedModel,
    dataset: SegmentationDataset,
    places: Sequence[int],
    run: str,
    counts: ClassCounts,
    min_area_px: int | None,
) -> Iterator[JudgedImage]:
    """Yield the judgment of each mask, and add the pixels to the counts."""
    predictor = predictor_of(trained)
    workspace = plan_workspace(predictor)
    ignored = trained.scheme.ignore_index
    for index in places:
        image, target = dataset.read(index)
        shape = target.shape
        if dataset.transform is not None:  # data.resize_px
            image, target = dataset.transform(image, target, 0, None)
        parts = []
        for strip in predict_strips(predictor, image, workspace, with_probabilities=True):
            assert strip.probabilities is not None
            quality = label_quality(strip.probabilities, target[strip.rows], ignored)
            parts.append((strip.labels, quality, strip.probabilities.max(0)))
        labels, quality, confidence = (np.concatenate(part) for part in zip(*parts, strict=True))
        has_class = target != ignored
        counts.add(target[has_class], labels[has_class], quality[has_class])
        if target.shape != shape:  # regions are given in pixels of the files
            target = dataset.read_mask(index, shape)
            labels = cv2.resize(labels, shape[::-1], interpolation=cv2.INTER_NEAREST)
            quality, confidence = (cv2.resize(plane, shape[::-1]) for plane in (quality, confidence))
        least_px = max(1, round(MIN_AREA_SHARE * target.size)) if min_area_px is None else min_area_px
        regions = list(find_regions(target, labels, quality, confidence, ignored, min_area_px=least_px))
        score = image_quality(quality[target != ignored])
        yield JudgedImage(dataset, index, run, score, regions, cv2.imencode(".png", labels)[1].tobytes())


def reason_of(suspect: Suspect) -> str:
    """Return the problem of a region in words."""
    names, region = suspect.judged.dataset.scheme.names, suspect.region
    given, seen = names[region.given], names[region.suggested]
    return {
        "class": f"{given} looks like {seen}",
        "missing": f"{seen} is missing: the mask has {given}",
        "outline": f"{seen} ends too early: the mask continues with {given}",
    }[region.kind]


def rows_of(found: JudgedMasks) -> list[dict[str, Any]]:
    """Return a row for each region, the most suspicious first; lengths are in pixels of the mask's file."""
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


def template_values(found: JudgedMasks, most_pictured: int) -> dict[str, Any]:
    """Return the values for the template of the page."""
    scheme = found.images[0].dataset.scheme
    pairs = Counter((each.region.given, each.region.suggested) for each in found.suspects)
    return {
        "found": found,
        "classes": list(zip(scheme.names, scheme.palette, strict=False)),
        "cards": [(each, reason_of(each), cut_out(each)) for each in found.suspects[:most_pictured]],
        "pairs": [(scheme.names[a], scheme.names[b], count) for (a, b), count in pairs.most_common(12)],
        "images": sorted(found.images, key=lambda image: image.quality)[:50],
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
