"""The possible layouts of a folder of images: from its names, its tables and its annotations; which one is used."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from segapp.datasets.files import ImagePair, check_same_size, shown
from segapp.datasets.resources import evenly_spread
from segapp.datasets.walk import composed, has_cure, left_out
from segapp.errors import ConfigError, DataError, accepted_words
from segapp.onboarding.annotations import (
    find_coco,
    find_cvat,
    find_label_studio,
    find_labelme,
    find_supervisely,
    find_yolo,
)
from segapp.onboarding.arrays import find_arrays
from segapp.onboarding.class_files import published_layout
from segapp.onboarding.conversion import UNUSABLE
from segapp.onboarding.hypotheses import CLOSE, ODD_SIZES, find_layouts, probe
from segapp.onboarding.layout import SURE, Layout, OpenQuestionError, open_question
from segapp.onboarding.pieces import find_pieces, find_rle
from segapp.onboarding.tables import paired_lists, read_tables, with_listed_splits
from segapp.onboarding.tree import Tree
from segapp.run.words import first_line

MIN_CONFIDENCE = 0.04
MAX_SHOWN = 6


@contextlib.contextmanager
def _long_cells() -> Iterator[None]:
    """Let cells of CSV files have any length in the body, because a cell of run lengths may have megabytes."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


@_long_cells()
def find_candidates(tree: Tree) -> list[Layout]:
    """Return the candidates of a folder, most likely first; DataError if there are none, or if lists disagree."""
    published = published_layout(tree)
    if published is not None:
        return [published]
    _refuse_records(tree)
    tables = read_tables(tree)
    by_names = find_layouts(tree)
    layouts = [layout for layout in by_names if layout.confidence >= MIN_CONFIDENCE]
    listed = paired_lists(tree, tables)
    if listed is None:
        _refuse_channels(tree)
    else:
        adds_nothing = any(  # of the pairs found by names, it lists a few, without splits, and no others
            listed.files < one.files and len(listed.files) < 0.5 * len(one.files) for one in layouts
        ) and not any(pair.split for pair in listed.pairs)
        if not adds_nothing:
            layouts = [listed]  # a table says which mask belongs to which image
    divided = [with_listed_splits(tables, layout) for layout in layouts]
    conversions, problems = find_conversions(tree, has_masks=bool(layouts) and layouts[0].confidence >= 0.8)
    found: list[Layout] = with_layouts(conversions, divided)
    if not found:
        raise DataError(f"{shown(tree.root)}: {'; '.join(problems)}" if problems else _nothing_known(tree, by_names))
    return sorted(found, key=lambda one: -one.confidence)


def _refuse_records(tree: Tree) -> None:
    """Raise DataError for an imagefolder of Hugging Face, whose names may pair other files than its records do."""
    for path in tree.others_named(".jsonl"):
        if path.endswith("metadata.jsonl"):
            raise DataError(
                f"{shown(path)} is not read: write it as a table with pandas.read_json({path!r}, lines=True)"
                f".to_csv({path.removesuffix('.jsonl') + '.csv'!r}, index=False), and remove it"
            )


def _refuse_channels(tree: Tree) -> None:
    """Raise DataError for nnU-Net's cases of several files, of which a layout would read only one."""
    known = set(tree.images)
    for path in tree.images:
        image, other = (path.replace("_0000.", ending) for ending in (".", "_0001."))
        mask = re.sub("(^|/)images(?=[^/]*/[^/]*$)", r"\1labels", image)
        if image not in known and {other, mask} <= known:
            raise DataError(
                f"{shown(path)} and {shown(other)} are channels of one image, as nnU-Net stores them: stack the "
                f'channels of each image in one file, such as np.save("{shown(image.rpartition(".")[0])}.npy", '
                "np.stack(channels, axis=-1)), and remove them, or keep only one channel"
            )


def choose(root: Path, found: Sequence[Layout], name: str | None) -> Layout:
    """Return the candidate with a name, or the most likely one; ask if the second is nearly as likely."""
    if name is not None:
        for candidate in found:
            if composed(name) == composed(candidate.name):
                return candidate
        names = [shown(candidate.name) for candidate in found[:MAX_SHOWN]]
        raise ConfigError(f"--layout {name}: no such layout of {shown(root)}: {accepted_words(name, names)}")
    close = [candidate for candidate in found if candidate.confidence >= CLOSE * found[0].confidence]
    if len(close) == 1:
        return found[0]
    raise _layout_question(f"{shown(root)} can be read in {len(close)} ways", close)


def confirm(root: Path, found: Sequence[Layout], chosen: Layout, name: str | None) -> None:
    """Ask if an interpretation was not named and is not likely enough to be used without a question."""
    if name is None and chosen.confidence < SURE:
        question = f"no reading of {shown(root)} is likely enough to be used without a question"
        raise _layout_question(question, [chosen, *(one for one in found[:MAX_SHOWN] if one is not chosen)])


def _layout_question(question: str, candidates: Sequence[Layout]) -> OpenQuestionError:
    return open_question(question, "--layout", {one.name: evidence_of(one) for one in candidates})


def evidence_of(candidate: Layout) -> str:
    return f"{candidate.confidence:.0%} sure: {', '.join(candidate.evidence)}"


def _nothing_known(tree: Tree, by_names: Sequence[Layout]) -> str:
    for layout in (one for one in by_names if one.confidence >= SURE * ODD_SIZES):
        pair = ImagePair(tree.root / layout.pairs[0].image, tree.root / layout.pairs[0].mask, "")
        image, mask = map(probe, pair.files)
        if image and mask:
            said = f"the names of {len(layout.pairs)} masks agree with the names of their images, the sizes do not: "
            check_same_size(pair, image.header.size_px, mask.header.size_px, said)
    _refuse_siblings(tree)
    entries = sorted(entry.name for entry in tree.root.iterdir() if not entry.name.startswith("."))
    there = ", ".join(shown(name) for name in entries[:8]) + (" and more" if len(entries) > 8 else "")
    note = "".join(f"; {line}" for line in left_out(filter(has_cure, tree.others), ()))
    return (
        f"{shown(tree.root)} has no images with masks that belong together by their names, and no known "
        f"annotations: it holds {there or 'nothing'} ({len(tree.images)} images){note}; give every mask the "
        "name of its image, such as images/a.jpg and masks/a.png, or write train.txt and val.txt with an image and its "
        "mask a line"
    )


def _refuse_siblings(tree: Tree) -> None:
    """Raise DataError for annotations of a known kind that are not read."""
    for suffix, pattern, words in _SIBLINGS:
        for path in evenly_spread([path for path in (*tree.others, *tree.images) if path.endswith(suffix)], MAX_SHOWN):
            if re.search(pattern, os.fsencode(path) + b"\n" + tree.read(path, 2**16), re.MULTILINE):
                raise DataError(f"{shown(tree.root / path)}: {words}", path=path)


_NO_OUTLINES = "have no outlines: draw the objects as polygons, for example in CVAT"
_SIBLINGS = (
    (".xml", rb"<bndbox>", f"boxes of Pascal VOC {_NO_OUTLINES}"),
    (".txt", rb"^\d+( [\d.]+){4,5}\s*$", f"boxes of YOLO {_NO_OUTLINES}"),
    (".json", rb'"segments_info"', "panoptic COCO is not read: write semantic masks with panopticapi's converters"),
    (".json", rb'"dm_format_version"', "Datumaro is not read: convert it with datum convert -f coco_instances"),
    (".json", rb'"shape_attributes"', "VGG Image Annotator's format is not read: export it as COCO"),
    (".json", rb'"(bbox|keypoints)"', f"boxes and keypoints of COCO {_NO_OUTLINES}"),
    (".json", rb'"(polygon|brush)labels"', "Label Studio: accept the predictions, and export JSON, not JSON-MIN"),
    (
        ".png",
        rb"task-\d+-annotation-\d+-",
        "Label Studio's masks name no image: export JSON, which has the strokes",
    ),
)
"""Ending, pattern in the path or the first 64 KiB, and what to do."""

CONVERTERS: dict[str, Callable[[Tree], Layout | Sequence[Layout] | None]] = {
    "COCO": find_coco,
    "YOLO": find_yolo,
    "labelme": find_labelme,
    "Label Studio": find_label_studio,
    "CVAT": find_cvat,
    "Supervisely": find_supervisely,
    "tables of run lengths": find_rle,
    "arrays": find_arrays,
    "several masks for each image": find_pieces,
}
"""Each returns its findings in a folder: nothing, a layout, or one layout per possible interpretation."""


def find_conversions(tree: Tree, *, has_masks: bool) -> tuple[list[Layout], list[str]]:
    """Return the results of the converters, and the reasons why a converter cannot read its annotations.

    Existing masks are preferred to masks that a converter draws, but not to other interpretations of these masks.
    """
    found: list[Layout] = []
    problems, known = [], set(tree.images)
    for title, convert in CONVERTERS.items():
        try:
            result = convert(tree)
        except UNUSABLE as error:
            reason = f"the annotations look like {title}, but cannot be read: {first_line(error)}"
            problems.append(str(error) if isinstance(error, DataError) else reason)
            continue
        for reading in [result] if isinstance(result, Layout) else result or ():
            is_new = reading.is_drawn and not set(reading.sources) & known
            confidence = (0.85 if has_masks and is_new else 1.0) * reading.confidence
            found.append(replace(reading, confidence=confidence))
    return found, [*dict.fromkeys(problems)]  # several converters read the JSON files


def with_layouts(readings: Sequence[Layout], layouts: Sequence[Layout]) -> list[Layout]:
    """Return interpretations and layouts without repetitions.

    A layout is left out if a conversion makes its masks from all of the layout's (one of several classes), because the
    conversion reads more. A conversion of several masks per image is left out if a layout has the same pairs.
    """
    pairs = {layout.files for layout in layouts}
    kept = [one for one in readings if one.is_drawn or one.files not in pairs]
    for layout in layouts:
        masks = {pair.mask for pair in layout.pairs}
        if not any(one.is_drawn and masks.issubset(one.sources) for one in readings):
            kept.append(layout)
    return kept
