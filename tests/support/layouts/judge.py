"""What `segapp init` makes of a drawn layout, compared with the truth: images are recognized by their content."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_pairs, build_pixels, build_scheme, split_names
from segapp.config import RunConfig, load_config
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import SegappError
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.layout import OpenQuestionError
from tests.support.layouts.canvas import Ask, Canvas, DrawnLayout, Picture, Refuse, thumbnail

ALIKE = 0.97
"""Least correlation of an image with the drawn one that it is."""
_PLACEHOLDER = re.compile(r"(class|value|color|label)[_ ]?\d+|background|object|other")
DATA = "my data"
MAX_QUESTIONS = 3


@dataclass(frozen=True)
class Sample:
    """An image as training reads it."""

    side: str
    picture: Picture | None
    planes: Mapping[str, np.ndarray]
    ignored: np.ndarray


@dataclass
class Verdict:
    """What `init` made of a layout: it was "read", "asked" or "refused".

    Attributes:
        said: its lines, or its error.
        wrong: what differs from the truth, as sentences.
        unusable: the error with which training refuses the config.
    """

    outcome: str
    said: str
    classes: tuple[str, ...] = ()
    wrong: list[str] = field(default_factory=list)
    unusable: str = ""
    config: Path | None = None
    question: OpenQuestionError | None = None


def judged(layout: DrawnLayout, folder: Path) -> tuple[Canvas, Verdict]:
    """Draws a layout into a folder, runs `init`, and returns the truth and the verdict."""
    truth = layout.draw(folder / DATA)
    return truth, judge(layout, truth, folder)


def judge(layout: DrawnLayout, truth: Canvas, folder: Path, /, **request: Any) -> Verdict:
    """Runs `init`, with answers as keys of `InitRequest`, and compares what training would read with the truth."""
    try:
        result = propose_config(InitRequest(folder / DATA, folder / "made.yaml", force=True, **request))
    except OpenQuestionError as question:
        return Verdict("asked", str(question), question=question)
    except SegappError as error:
        return Verdict("refused", str(error))
    verdict = Verdict("read", "\n".join(result.lines), config=result.configs[0])
    try:
        config = load_config(result.configs[0])
        compare(truth, config, samples(config, truth), verdict)
    except SegappError as error:
        verdict.unusable = str(error)
    if isinstance(layout.expected, Ask) and not request:
        verdict.wrong.append("several readings are possible, and none is asked for")
    verdict.wrong += [f"not used, and not named: {file}" for file in unnamed(truth, verdict.said)]
    return verdict


def answered(layout: DrawnLayout, truth: Canvas, folder: Path, asked: Verdict, /, **request: Any) -> Verdict | None:
    """Returns the verdict of the first answers to the open questions with which the truth is read; None without any."""
    assert asked.question is not None
    for answer in asked.question.answers:
        given = {**request, asked.question.option.removeprefix("--"): answer}
        verdict: Verdict | None = judge(layout, truth, folder, **given)
        if verdict is not None and verdict.outcome == "asked" and len(given) < MAX_QUESTIONS:
            verdict = answered(layout, truth, folder, verdict, **given)
        if verdict is not None and verdict.outcome == "read" and not verdict.wrong and not verdict.unusable:
            return verdict
    return None


def samples(config: RunConfig, truth: Canvas) -> Iterator[Sample]:
    """Yields every image of both splits as the data sets of a training read it, but those that were drawn broken."""
    scheme = build_scheme(config.data)
    broken = tuple(picture.image for picture in truth.pictures if picture.is_broken)
    for side, split in zip(("train", "val"), split_names(config.data), strict=True):
        if broken:
            pairs = [pair for pair in build_pairs(config.data, split) if not str(pair.image).endswith(broken)]
            dataset = SegmentationDataset(pairs, scheme, pixels=build_pixels(config.data))
        else:
            dataset = build_dataset(config.data, scheme, split, is_training=False, seed=0)
        for index in range(len(dataset)):
            image, mask = dataset.read(index)
            yield sample_of(side, np.asarray(image), np.asarray(mask), scheme, truth)


def sample_of(side: str, image: np.ndarray, mask: np.ndarray, scheme: ClassScheme, truth: Canvas) -> Sample:
    """Returns an image (H, W, B) and its mask of train ids as a sample, with the drawn picture that the image is."""
    planes = {name: mask == number for number, name in enumerate(scheme.names)}
    return Sample(side, recognized(image, truth), planes, mask == scheme.ignore_index)


def recognized(image: np.ndarray, truth: Canvas) -> Picture | None:
    """Returns the drawn picture that an image is; None if it is none."""
    own = thumbnail(image)
    best, likeness = None, ALIKE
    for picture in truth.pictures:
        if (found := float((own * picture.thumbnail).sum())) > likeness:
            best, likeness = picture, found
    return best


def compare(truth: Canvas, config: RunConfig, read: Iterable[Sample], verdict: Verdict) -> None:
    """Compares what is read with the truth, and notes it in the verdict."""
    verdict.classes = build_scheme(config.data).names
    found: dict[str, list[Picture]] = {"train": [], "val": []}
    aliases: dict[str, str] = {}
    problems: Counter[str] = Counter()
    for sample in read:
        if sample.picture is None:
            problems["an image that is none of the labeled ones, or lacks bands"] += 1
            continue
        found[sample.side].append(sample.picture)
        if reason := difference(sample, truth, aliases):
            problems[reason] += 1
    verdict.wrong += [f"{count} images: {reason}" for reason, count in problems.items()]
    verdict.wrong += division_problems(truth, found, verdict.said)
    if not {"train", "val"} <= {one.split for one in truth.pictures}:
        groups = [{picture.group for picture in found[side] if picture.split != "test"} for side in ("train", "val")]
        if leaks := sorted(groups[0] & groups[1]):
            verdict.wrong.append(f"groups in both splits, such as {leaks[0]}")


def difference(sample: Sample, truth: Canvas, aliases: dict[str, str]) -> str | None:
    """Returns how a mask differs from the drawn one; None if it does not.

    The names of the drawing count if the data say them; else each class must have one name, which `aliases` collects.
    """
    picture = sample.picture
    assert picture is not None
    if sample.ignored.shape != picture.ignored.shape:
        return None if picture.is_broken else "another size than drawn"
    if (sample.ignored != picture.ignored).any():
        return "other pixels are ignored"
    for name, plane in picture.planes.items():
        if plane.any():
            likely = max(sample.planes, key=lambda one: int((sample.planes[one] & plane).sum()))
            own = aliases.setdefault(name, likely)
            if own != name and (truth.names_said or not _PLACEHOLDER.fullmatch(own)):
                return f"{name} is {own}"
            if (sample.planes[own] != plane).any():
                return f"other pixels are {name}"
    return None


def division_problems(truth: Canvas, found: Mapping[str, list[Picture]], said: str) -> Iterator[str]:
    """Yields how the splits differ from those of the data, or leave images out."""
    drawn: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for picture in truth.pictures:
        if not picture.is_broken:
            drawn[picture.split or "train"].add(picture.image)
    read = {side: [one.image for one in pictures if not one.is_broken] for side, pictures in found.items()}
    train, val = set(read["train"]), set(read["val"])
    if len(read["train"]) + len(read["val"]) > len(train | val):
        yield "images are read twice"
    if drawn["val"]:
        if (train, val) != (drawn["train"], drawn["val"]):
            yield "images are not in the split that the data say"
        return
    if train & drawn["test"]:
        yield "test images are trained"
    if drawn["train"] - train - val:
        yield "labeled images are left out"
    if val & drawn["test"] and not re.search(r"chosen|--val-share", said):
        yield "the test images are the validation images, which is not said"


def unnamed(truth: Canvas, said: str) -> Iterator[str]:
    """Yields the first of each kind of unused files of which neither a name nor a folder of its own is said."""
    used = {path for picture in truth.pictures for path in (picture.image, picture.source)}
    for files in truth.unused.values():
        folders = {folder for file in files for folder in _folders(file)} - {
            folder for file in used for folder in _folders(file)
        }
        words = {*files, *(file.rpartition("/")[2] for file in files), *folders}
        if not any(re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", said) for word in words):
            yield files[0]


def _folders(file: str) -> Iterable[str]:
    parts = file.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def problems(layout: DrawnLayout, verdict: Verdict) -> list[str]:
    """Returns how a verdict differs from what is expected of `init`; empty: it does not."""
    expected = layout.expected
    if isinstance(expected, Refuse):
        missing = [word for word in expected.words if word not in verdict.said]
        return [] if verdict.outcome != "read" and not missing else [f"{verdict.outcome}, without {missing}"]
    if isinstance(expected, Ask):
        asked = verdict.question
        if asked is None or asked.option != expected.option or not set(expected.answers) <= {*asked.answers}:
            return [f"{verdict.outcome}, {expected} is not asked: {verdict.said}"]
        return []
    if verdict.outcome != "read":
        return [f"{verdict.outcome}: {verdict.said}"]
    return [*([f"written, then refused: {verdict.unusable}"] if verdict.unusable else []), *verdict.wrong]
