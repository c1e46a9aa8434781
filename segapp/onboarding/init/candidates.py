"""What a folder may be: layouts and annotations that can become masks, the choice between them, and a page of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import cv2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from segapp.datasets.files import shown
from segapp.datasets.images.reading import read_picture_of
from segapp.datasets.layouts.published_classes import bit_palette
from segapp.errors import ConfigError, DataError, accepted_words
from segapp.onboarding.convert import find_conversions, with_layouts
from segapp.onboarding.convert.conversion import BAD_ENTRY
from segapp.onboarding.layout import Layout, Pair, evenly
from segapp.onboarding.survey.content import stored_pixels
from segapp.onboarding.survey.hypotheses import CLOSE, find_layouts
from segapp.onboarding.survey.published import published_layout
from segapp.onboarding.survey.questions import SURE, Answer, OpenQuestionError, open_question
from segapp.onboarding.survey.tables import paired_lists, read_tables, with_listed_splits
from segapp.onboarding.survey.tree import Tree

MIN_CONFIDENCE = 0.04
_MAX_SHOWN = 6
_MAX_CANDIDATES, _MAX_PAIRS = 6, 4
_THUMBNAIL_PX = 240


@dataclass(frozen=True)
class Found:
    """What a folder may be.

    Attributes:
        candidates: the most likely first.
        unused: tables that name images but are not used -> why, by the name of the candidate.
    """

    candidates: Sequence[Layout]
    unused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def find_candidates(tree: Tree) -> Found:
    """Return what a folder may be.

    Raises:
        DataError: it can be nothing that is known; or an image is in the lists of two splits.
    """
    published = published_layout(tree)
    if published is not None:
        return Found([published])
    tables = read_tables(tree)
    layouts = [layout for layout in find_layouts(tree) if layout.confidence >= MIN_CONFIDENCE]
    listed, unused_lists = paired_lists(tree, tables)
    if listed is not None:
        layouts = _next_to_table(listed, layouts)
    unused: dict[str, Mapping[str, str]] = {}
    divided = []
    for layout in layouts:
        with_splits, unused_tables = with_listed_splits(tables, layout)
        divided.append(with_splits)
        unused[layout.name] = unused_lists | unused_tables
    conversions, problems = find_conversions(tree, has_masks=bool(layouts) and layouts[0].confidence >= 0.8)
    found: list[Layout] = with_layouts(conversions, divided)
    if not found:
        raise DataError(f"{shown(tree.root)}: {'; '.join(problems)}" if problems else _nothing_known(tree))
    return Found(sorted(found, key=lambda one: -one.confidence), unused)


def _next_to_table(listed: Layout, layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layout of a table of pairs and the others that it does not contradict or repeat.

    A table says which mask belongs to which image; another pairing of the same masks, from their names, is not used. A
    table that names only some of the pairs that names give, and no other, adds nothing.
    """
    said = listed.files
    masks = {mask for _, mask in said}
    for layout in layouts:
        pairs = layout.files
        if said < pairs and len(said) < 0.5 * len(pairs) and not any(pair.split for pair in listed.pairs):
            return list(layouts)
    others = [layout for layout in layouts if not masks & {pair.mask for pair in layout.pairs}]
    return [listed, *(replace(one, confidence=0.85 * one.confidence) for one in others if one.confidence > 0.5)]


def choose(root: Path, found: Sequence[Layout], name: str | None) -> Layout:
    """Return the named candidate, or the most likely one.

    Raises:
        ConfigError: there is none of the name.
        OpenQuestionError: the second is nearly as likely, and none is named.
    """
    if name is not None:
        for number, candidate in enumerate(found, start=1):
            if name in (candidate.name, str(number)):
                return candidate
        names = [shown(candidate.name) for candidate in found[:_MAX_SHOWN]]
        raise ConfigError(f"--layout {name}: no such layout of {shown(root)}: {accepted_words(name, names)}")
    close = [candidate for candidate in found if candidate.confidence >= CLOSE * found[0].confidence]
    if len(close) == 1:
        return found[0]
    question = f"{shown(root)} can be read in {len(close)} ways"
    raise _layout_question(question, close)


def confirm(root: Path, found: Sequence[Layout], chosen: Layout, name: str | None) -> None:
    """Check that a reading is likely enough to be used without a question, unless it was named.

    Raises:
        OpenQuestionError: it is not.
    """
    if name is None and chosen.confidence < SURE:
        question = f"no reading of {shown(root)} is likely enough to be used without a question"
        raise _layout_question(question, [chosen, *(one for one in found[:_MAX_SHOWN] if one is not chosen)])


def _layout_question(question: str, candidates: Sequence[Layout]) -> OpenQuestionError:
    answers = [Answer(one.name, evidence_of(one)) for one in candidates]
    return open_question(question, "--layout", answers, "--html FILE shows pictures")


def described(candidate: Layout) -> str:
    """Return name, confidence and evidence as text."""
    return f"{shown(candidate.name)} ({evidence_of(candidate)})"


def evidence_of(candidate: Layout) -> str:
    """Return confidence and evidence as text."""
    return f"{candidate.confidence:.0%} sure: {', '.join(candidate.evidence)}"


def found_lines(found: Sequence[Layout], chosen: Layout) -> list[str]:
    """Return what is believed, and what else is possible."""
    lines = [f"layout: {described(chosen)}"]
    return lines + [f"also possible: --layout {described(one)}" for one in found[:_MAX_SHOWN] if one is not chosen]


def _nothing_known(tree: Tree) -> str:
    entries = sorted(entry.name for entry in tree.root.iterdir() if not entry.name.startswith("."))
    there = ", ".join(shown(name) for name in entries[:8]) + (" and more" if len(entries) > 8 else "")
    advice = "".join(f"{one}; " for one in tree.advice_on_kinds)
    return (
        f"{shown(tree.root)} has no images with masks that belong together by their names, and no known "
        f"annotations: it holds {there or 'nothing'} ({tree.held}); {advice}give every mask the name "
        "of its image, such as images/a.jpg and masks/a.png, or write train.txt and val.txt with an image and its "
        "mask a line"
    )


def save_candidates(out: Path, tree: Tree, found: Sequence[Layout]) -> None:
    """Write the page.

    Raises:
        StorageError: it cannot be written.
    """
    from segapp.report.render import render, save_page  # loads torch, which no config needs

    values = {
        "name": shown(tree.root),
        "candidates": [(candidate, list(_pictures(tree, candidate))) for candidate in found[:_MAX_CANDIDATES]],
    }
    save_page(out, render("init.html.j2", values))


def _pictures(tree: Tree, candidate: Layout) -> Iterator[tuple[str, Markup, Markup]]:
    """Yield the names and the pictures of some pairs; those that cannot be read are left out."""
    for pair in evenly(candidate.pairs, _MAX_PAIRS):
        try:
            image = _picture(tree, pair)
            if pair.drawing is None:
                name = f"{shown(pair.image)} + {shown(pair.mask)}"
                mask, _ = stored_pixels(tree.root / pair.mask, as_rgb=False)
            else:
                name, mask = shown(pair.image), pair.drawing.paint().astype(np.int64)
            yield name, _thumbnail(image), _thumbnail(_colored(mask))
        except (DataError, OSError, SyntaxError) + BAD_ENTRY:  # noqa: RUF005 - mypy does not see through the star
            continue


def _picture(tree: Tree, pair: Pair) -> NDArray[np.uint8]:
    if pair.drawing is None or pair.drawing.image_bytes is None:
        return read_picture_of(tree.root / pair.image)
    if pair.drawing.preview is not None:
        return read_picture_of(tree.root / pair.drawing.preview)
    decoded = cv2.imdecode(np.frombuffer(pair.drawing.image_bytes(), np.uint8), cv2.IMREAD_COLOR)
    return np.asarray(np.asarray(decoded)[..., ::-1], np.uint8)


def _colored(mask: NDArray[np.uint8] | NDArray[np.uint8 | np.int64]) -> NDArray[np.uint8]:
    """Return a mask as colours: ids (H, W) get distinct ones, colours stay."""
    if mask.ndim == 3:
        return mask.astype(np.uint8)
    colors = np.array([(0, 0, 0), *bit_palette(254, first=1), (255, 255, 255)], np.uint8)
    return np.asarray(colors[np.asarray(mask) & 255])


def _thumbnail(pixels: NDArray[np.uint8]) -> Markup:
    from segapp.report.render import data_url

    factor = min(1.0, _THUMBNAIL_PX / max(pixels.shape[:2]))
    size = (max(1, round(pixels.shape[1] * factor)), max(1, round(pixels.shape[0] * factor)))
    small = cv2.resize(np.ascontiguousarray(pixels), size, interpolation=cv2.INTER_NEAREST)
    return Markup(data_url(np.asarray(small), ".png"))
