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
    """What `init` made of a layout.

    Attributes:
        outcome: "read", "asked" or "refused".
        said: its lines, or its error.
        classes: of the config.
        wrong: what differs from the truth, as sentences.
        unusable: the error with which training refuses the config.
        config: path of the config.
        question: that was asked.
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
    """Runs `init` on a drawn layout and compares what training would read with the truth.

    Args:
        layout: that was drawn.
        truth: of the drawing.
        folder: of the data; the config is written there.
        **request: further keys of `InitRequest`, which answer questions.
    """
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
    """Yields every image of both splits as the data sets of a training read it.

    Raises:
        SegappError: one cannot be read, and was not drawn broken.
    """
    scheme = build_scheme(config.data)
    for side, split in zip(("train", "val"), split_names(config.data), strict=True):
        dataset = _readable(config, split, truth)
        for index in range(len(dataset)):
            image, mask = dataset.read(index)
            yield sample_of(side, np.asarray(image), np.asarray(mask), scheme, truth)


def sample_of(side: str, image: np.ndarray, mask: np.ndarray, scheme: ClassScheme, truth: Canvas) -> Sample:
    """Returns an image (H, W, B) and its mask of train ids as a sample, with the drawn picture that the image is."""
    planes = {name: mask == number for number, name in enumerate(scheme.names)}
    return Sample(side, recognized(image, truth), planes, mask == scheme.ignore_index)


def _readable(config: RunConfig, split: str, truth: Canvas) -> SegmentationDataset:
    """Returns the data set of a split; images that were drawn broken, and are refused by name, are left out.

    Raises:
        SegappError: another image is refused.
    """
    scheme = build_scheme(config.data)
    try:
        return build_dataset(config.data, scheme, split, is_training=False, seed=0)
    except SegappError as error:
        broken = [picture.image for picture in truth.pictures if picture.is_broken and picture.image in str(error)]
        if not broken:
            raise
    pairs = [pair for pair in build_pairs(config.data, split) if not str(pair.image).endswith(tuple(broken))]
    return SegmentationDataset(pairs, scheme, pixels=build_pixels(config.data))


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

    Args:
        sample: as read.
        truth: whose names count if the data say them; else each class must have one name, which `aliases` collects.
        aliases: name of the drawing -> name in the config.
    """
    picture = sample.picture
    assert picture is not None
    shape = picture.ignored.shape
    if sample.ignored.shape != shape:
        return None if picture.is_broken else "another size than drawn"
    missing = sample.ignored & ~picture.ignored
    if missing.any():
        return "labeled pixels are ignored"
    drawn = dict(picture.planes)
    rest = ~np.any([*picture.planes.values(), picture.ignored], axis=0)
    if "background" in sample.planes and "background" not in drawn:
        drawn["background"] = rest
    wrong = np.zeros(shape, bool)
    for name, plane in drawn.items():
        if not plane.any():
            continue
        own = aliases.get(name) or _alias(name, plane, sample, truth)
        if own is None:
            return f"no class {name}"
        if aliases.setdefault(name, own) != own or [*aliases.values()].count(own) > 1:
            return f"{name} and others are one class {own}"
        wrong |= sample.planes[own] != plane
    known = {aliases[name] for name, plane in drawn.items() if name in aliases}
    for name, plane in sample.planes.items():
        if name not in known:
            wrong |= plane
    if (wrong & picture.ignored).any():
        return "ignored pixels are trained"
    return "another mask, or other classes" if wrong.any() else None


def _alias(name: str, plane: np.ndarray, sample: Sample, truth: Canvas) -> str | None:
    """Returns the name that a class has in the config: its own, or a placeholder if the data name no classes."""
    if name in sample.planes and (sample.planes[name] & plane).any():
        return name
    if truth.names_said:
        return None
    likely = max(sample.planes, key=lambda one: int((sample.planes[one] & plane).sum()))
    return likely if _PLACEHOLDER.fullmatch(likely) else None


def division_problems(truth: Canvas, found: Mapping[str, list[Picture]], said: str) -> Iterator[str]:
    """Yields how the splits differ from those of the data, or leave images out."""
    drawn: dict[str, set[str]] = {"train": set()}
    for picture in truth.pictures:
        drawn.setdefault(picture.split or "train", set()).add(_key(picture))
    broken = {_key(picture) for picture in truth.pictures if picture.is_broken}
    train, val = ({_key(picture) for picture in found[side]} for side in ("train", "val"))
    for side, pictures in found.items():
        if len(pictures) > len({_key(picture) for picture in pictures}):
            yield f"images twice in {side}"
    if "val" in drawn:
        if wrong := (train ^ drawn["train"] | val ^ drawn["val"]) - broken:
            yield f"{len(wrong)} images are not in the split that the data say"
    elif "test" in drawn:
        if train & drawn["test"]:
            yield f"{len(train & drawn['test'])} test images are trained"
        if left := (drawn["train"] - train - val) - broken:
            yield f"{len(left)} labeled images are left out"
        if val & drawn["test"] and not re.search(r"chosen|--val-share", said):
            yield "the test images are the validation images, which is not said"
    elif left := (drawn["train"] - train - val) - broken:
        yield f"{len(left)} labeled images are left out"
    if train & val:
        yield f"{len(train & val)} images are in both splits"


def _key(picture: Picture) -> str:
    return f"{picture.image} {picture.group}"


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
