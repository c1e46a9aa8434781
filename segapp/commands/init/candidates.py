"""What a folder may be: layouts of images and masks, and annotations that can become masks; the choice between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from segapp.datasets.convert.conversion import Conversion
from segapp.datasets.convert.converters import find_conversions
from segapp.datasets.files import shown
from segapp.datasets.survey.hypotheses import CLOSE, Layout, find_layouts
from segapp.datasets.survey.lists import paired_lists, with_listed_splits
from segapp.datasets.survey.published import published_layout
from segapp.datasets.survey.questions import Answer, open_question
from segapp.datasets.survey.tree import Tree
from segapp.errors import ConfigError, DataError

Candidate = Layout | Conversion

MIN_CONFIDENCE = 0.04
_MAX_SHOWN = 6


def find_candidates(tree: Tree) -> list[Candidate]:
    """Return what a folder may be, the most likely first.

    Raises:
        DataError: it can be nothing that is known; or an image is in the lists of two splits.
    """
    published = published_layout(tree)
    if published is not None:
        return [published]
    layouts = [layout for layout in find_layouts(tree) if layout.confidence >= MIN_CONFIDENCE]
    listed = paired_lists(tree)
    if listed is not None:
        known = {(pair.image, pair.mask) for pair in listed.pairs}
        layouts = [one for one in layouts if not known & {(pair.image, pair.mask) for pair in one.pairs}]
        layouts = [listed, *(layout for layout in layouts if layout.confidence > 0.5)]
    layouts = [with_listed_splits(tree, layout) for layout in layouts]
    conversions, problems = find_conversions(tree, has_masks=bool(layouts) and layouts[0].confidence >= 0.8)
    found: list[Candidate] = [*conversions, *layouts]
    if not found:
        raise DataError(f"{shown(tree.root)}: {'; '.join(problems)}" if problems else _nothing_known(tree))
    return sorted(found, key=lambda one: -one.confidence)


def choose(root: Path, found: Sequence[Candidate], name: str | None) -> Candidate:
    """Return the named candidate, or the most likely one.

    Raises:
        ConfigError: there is none of the name.
        OpenQuestionError: the second is nearly as likely, and none is named.
    """
    if name is not None:
        for number, candidate in enumerate(found, start=1):
            if name in (candidate.name, str(number)):
                return candidate
        names = ", ".join(shown(candidate.name) for candidate in found[:_MAX_SHOWN])
        raise ConfigError(f"--layout {name}: {shown(root)} may be {names}: name one of them")
    close = [candidate for candidate in found if candidate.confidence >= CLOSE * found[0].confidence]
    if len(close) == 1:
        return found[0]
    question = f"{shown(root)} can be read in {len(close)} ways"
    answers = [Answer(one.name, evidence_of(one)) for one in close]
    raise open_question(question, "--layout", answers, "--html FILE shows pictures")


def described(candidate: Candidate) -> str:
    """Return name, confidence and evidence as text."""
    return f"{shown(candidate.name)} ({evidence_of(candidate)})"


def evidence_of(candidate: Candidate) -> str:
    """Return confidence and evidence as text."""
    return f"{candidate.confidence:.0%} sure: {', '.join(candidate.evidence)}"


def found_lines(found: Sequence[Candidate], chosen: Candidate) -> list[str]:
    """Return what is believed, and what else is possible."""
    lines = [f"layout: {described(chosen)}"]
    return lines + [f"also possible: --layout {described(one)}" for one in found[:_MAX_SHOWN] if one is not chosen]


def _nothing_known(tree: Tree) -> str:
    entries = sorted(entry.name for entry in tree.root.iterdir() if not entry.name.startswith("."))
    there = ", ".join(shown(name) for name in entries[:8]) + (" and more" if len(entries) > 8 else "")
    return (
        f"{shown(tree.root)} has no images with masks that belong together by their names, and no known "
        f"annotations: it holds {there or 'nothing'} ({len(tree.images)} images); give every mask the name "
        "of its image, such as images/a.jpg and masks/a.png, or write train.txt and val.txt with an image and its "
        "mask a line"
    )
