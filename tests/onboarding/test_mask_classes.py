"""Every pixel of drawn masks is a class of its drawn name, or ignored with its share named, or the masks are asked."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.masks import read_mask
from segapp.errors import DataError
from segapp.onboarding.class_files import ClassFile
from segapp.onboarding.content import read_contents
from segapp.onboarding.encoding import Classes, MaskChoices, read_classes
from segapp.onboarding.layout import OpenQuestionError

NAMES = ("ground", "road", "car", "sky", "tree", "wall", "pole", "sign")
VOID = ("void", "Unlabelled", "ignore", "no data", "unknown")
SIDE = 40


def masks_of(pixels: dict[int, int], num_masks: int, seed: int) -> list[np.ndarray]:
    """Masks that together hold each value as often as `pixels` says; the first value fills the rest."""
    total = num_masks * SIDE * SIDE
    flat = np.full(total, next(iter(pixels)), np.int64)
    at = 0
    for value, count in list(pixels.items())[1:]:
        flat[at : at + count] = value
        at += count
    np.random.default_rng(seed).shuffle(flat)
    dtype = np.uint8 if max(pixels) <= 255 else np.uint16
    return list(flat.astype(dtype).reshape(num_masks, SIDE, SIDE))


@st.composite
def drawings(draw: st.DrawFn) -> tuple[dict[int, int], dict[int, str], str]:
    """Pixels by value, names by value, and how the names are written: in order, by value, or not at all."""
    kind = draw(st.sampled_from(["in order", "by value", "none"]))
    count = draw(st.integers(2, len(NAMES)))
    values = list(range(count))
    if kind == "by value":
        values = sorted(draw(st.sets(st.integers(0, 60), min_size=count, max_size=count)))
    named = dict(zip(values, NAMES, strict=False))
    if draw(st.booleans()) and kind != "none":
        named[draw(st.sampled_from(values))] = draw(st.sampled_from(VOID))
    pixels = {value: draw(st.integers(30, 700)) for value in values}
    if draw(st.booleans()):
        pixels[255] = draw(st.integers(1, 1500))
    for stray in draw(st.lists(st.sampled_from([77, 99, 120, 200, 254, 300, 1003]), max_size=3, unique=True)):
        pixels[stray] = draw(st.one_of(st.integers(1, 30), st.integers(31, 900)))
    return pixels, named, kind


def is_void(name: str) -> bool:
    return name in VOID


@settings(max_examples=30, deadline=None)
@given(drawings(), st.sampled_from([None, "ignore", "class"]), st.integers(0, 99))
def test_every_pixel_is_its_class_or_ignored_or_asked(
    drawing: tuple[dict[int, int], dict[int, str], str], unlabelled: str | None, seed: int
) -> None:
    pixels, named, kind = drawing
    masks = masks_of(pixels, 8, seed)
    counts = Counter(np.concatenate([mask.ravel() for mask in masks]).tolist())
    total = counts.total()
    files = {
        "in order": [ClassFile("classes.txt", tuple(named.values()))],
        "by value": [ClassFile("classes.json", tuple(named.values()), named)],
        "none": [],
    }[kind]
    with tempfile.TemporaryDirectory() as folder:
        pairs = []
        for number, mask in enumerate(masks):
            path = Path(folder) / f"{number}.png"
            Image.fromarray(mask).save(path)
            pairs.append(ImagePair(path, path, path.stem))
        try:
            classes = read_classes(read_contents(pairs), files, ["masks/0.png"], MaskChoices(unlabelled=unlabelled))
        except OpenQuestionError:
            assert any(value not in named and value != 255 for value in counts)  # no question if all have a name
            return
        except DataError:
            assert len(counts.keys() - {255}) < 2 or max(counts.values()) > 0.9 * total  # one value, and strays
            return
        scheme = class_scheme(
            "folder", classes=classes.names, label_map=classes.label_map or None, ignore_index=classes.ignore_index
        )
        read = [read_mask(pair.image, scheme) for pair in pairs]
    train_ids = np.concatenate([own.ravel() for own in read]).astype(np.int64)
    stored = np.concatenate([mask.ravel() for mask in masks]).astype(np.int64)
    ignored = {}
    for value, count in counts.items():
        (train_id,) = set(train_ids[stored == value].tolist())
        if train_id == scheme.ignore_index:
            ignored[value] = count / total
        elif kind != "none" and "from classes" in classes.names_reason and value in named:
            assert classes.names[train_id] == named[value]
    kept = [name for name in named.values() if not is_void(name)]
    for value, name in named.items() if "from classes" in classes.names_reason else ():
        if value in counts and unlabelled != "class" and len(kept) > 1:
            assert (value in ignored) == is_void(name), f"{name} of {value}"
    assert_said(classes, ignored)


def assert_said(classes: Classes, ignored: dict[int, float]) -> None:
    """Every ignored value above a hundredth is named, and the shares in the notes are those of the drawing."""
    notes = " | ".join(note for note in classes.notes if "ignored" in note)
    said = sum(float(number) for number in re.findall(r"([\d.]+)% of the pixels", notes)) / 100
    if sum(ignored.values()) > 0.01:
        assert said == pytest.approx(sum(ignored.values()), abs=0.001 * (1 + len(ignored)))
    for value, share in ignored.items():
        assert share <= 0.01 or re.search(rf"\b{value}\b", notes), f"{value} is ignored: {share:.1%}"
