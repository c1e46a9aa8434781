"""Candidates for a folder: layouts and convertible annotations, and the choice between them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from segapp.datasets.files import shown
from segapp.errors import ConfigError, DataError, accepted_words
from segapp.onboarding.converters import find_conversions, with_layouts
from segapp.onboarding.hypotheses import CLOSE, find_layouts
from segapp.onboarding.layout import Layout
from segapp.onboarding.published import published_layout
from segapp.onboarding.questions import SURE, Answer, OpenQuestionError, open_question
from segapp.onboarding.tables import paired_lists, read_tables, with_listed_splits
from segapp.onboarding.tree import Tree

MIN_CONFIDENCE = 0.04
_MAX_SHOWN = 6


@dataclass(frozen=True)
class Found:
    """The candidates of a folder, most likely first, and for each the unused tables and the reasons."""

    candidates: Sequence[Layout]
    unused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def find_candidates(tree: Tree) -> Found:
    """Return the candidates of a folder; DataError if there are none, or if lists contradict each other."""
    published = published_layout(tree)
    if published is not None:
        return Found([published])
    tables = read_tables(tree)
    layouts = [layout for layout in find_layouts(tree) if layout.confidence >= MIN_CONFIDENCE]
    listed, unused_lists = paired_lists(tree, tables)
    if listed is not None:
        layouts = _next_to_table(listed, layouts)
    else:
        _refuse_channels(tree)
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


def _next_to_table(listed: Layout, layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layout of a table of pairs, and the other layouts that it neither contradicts nor repeats.

    A table says which mask belongs to which image, so another pairing of the same masks by names is not used. A table
    that lists only some of the pairs found by names, and no others, adds nothing.
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
    """Return the candidate with a name or number, or the most likely one; ask if the second is nearly as likely."""
    if name is not None:
        for number, candidate in enumerate(found, start=1):
            if name in (candidate.name, str(number)):
                return candidate
        names = [shown(candidate.name) for candidate in found[:_MAX_SHOWN]]
        raise ConfigError(f"--layout {name}: no such layout of {shown(root)}: {accepted_words(name, names)}")
    close = [candidate for candidate in found if candidate.confidence >= CLOSE * found[0].confidence]
    if len(close) == 1:
        return found[0]
    raise _layout_question(f"{shown(root)} can be read in {len(close)} ways", close)


def confirm(root: Path, found: Sequence[Layout], chosen: Layout, name: str | None) -> None:
    """Ask if an interpretation was not named and is not likely enough to be used without a question."""
    if name is None and chosen.confidence < SURE:
        question = f"no reading of {shown(root)} is likely enough to be used without a question"
        raise _layout_question(question, [chosen, *(one for one in found[:_MAX_SHOWN] if one is not chosen)])


def _layout_question(question: str, candidates: Sequence[Layout]) -> OpenQuestionError:
    answers = [Answer(one.name, _evidence_of(one)) for one in candidates]
    return open_question(question, "--layout", answers)


def _evidence_of(candidate: Layout) -> str:
    return f"{candidate.confidence:.0%} sure: {', '.join(candidate.evidence)}"


def found_lines(found: Sequence[Layout], chosen: Layout) -> list[str]:
    """Return lines that describe the findings and the other candidates."""
    lines = [f"also possible: --layout {_described(one)}" for one in found[:_MAX_SHOWN] if one is not chosen]
    return [f"layout: {_described(chosen)}", *lines]


def _described(candidate: Layout) -> str:
    return f"{shown(candidate.name)} ({_evidence_of(candidate)})"


def _nothing_known(tree: Tree) -> str:
    entries = sorted(entry.name for entry in tree.root.iterdir() if not entry.name.startswith("."))
    there = ", ".join(shown(name) for name in entries[:8]) + (" and more" if len(entries) > 8 else "")
    return (
        f"{shown(tree.root)} has no images with masks that belong together by their names, and no known "
        f"annotations: it holds {there or 'nothing'} {tree.described()}give every mask the name of its image, such as "
        "images/a.jpg and masks/a.png, or write train.txt and val.txt with an image and its mask a line"
    )
