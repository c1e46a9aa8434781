"""The account of a data folder: how many of its files are used, and why the others are not."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from segapp.datasets.files import shown
from segapp.onboarding.hypotheses import SurveyedImage, inner_stem, parse_file
from segapp.onboarding.tree import Tree
from segapp.onboarding.words import affixes, role_of

_KIND_OF_SUFFIX = {
    **dict.fromkeys((".txt", ".lst", ".names"), "list"),
    **dict.fromkeys((".csv", ".tsv", ".jsonl"), "table"),
}
_KINDS = {
    "image": ("images", "no mask belongs to it"),
    "mask": ("masks", "no image belongs to it"),
    "picture": ("other pictures", "its folder or name says that it is neither an image nor a mask of classes"),
    "list": ("lists", "it names no images or classes that are used"),
    "table": ("tables", "it names no images, masks, splits or classes that are used"),
    "sidecar": ("sidecars", "it holds no annotations, splits or class names that are used"),
    "file": ("files of other kinds", "files of this kind are not read"),
}
"""The kinds of files: their plural, and the usual reason why a file is not used."""
_MAX_GROUPS = 12


@dataclass(frozen=True)
class Uses:
    """The files of a folder that a config uses, relative to the root."""

    images: Mapping[str, Collection[str]]  # split or fold, in words -> its images
    masks: Collection[str] = ()  # mask files, or files from which masks are made
    sources: Collection[str] = ()  # lists, tables, class files and annotations that were read
    reasons: Mapping[str, str] = field(default_factory=dict)  # file -> why it is not used, if that is known
    # kind -> why files of it are not used otherwise, if that differs from `_KINDS`
    usual_reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unused:
    """Files of one kind that are not used for the same reason."""

    kind: str
    reason: str
    paths: Sequence[str]


@dataclass(frozen=True)
class Account:
    """The files of a folder: kind -> use -> number of files, and groups of files that are not used."""

    used: Mapping[str, Mapping[str, int]]
    unused: Sequence[Unused]

    @property
    def lines(self) -> list[str]:
        """One line per kind with its numbers, then one line per group that is not used."""
        lines = []
        for kind in _KINDS:
            uses = self.used.get(kind, {})
            rest = sum(len(group.paths) for group in self.unused if group.kind == kind)
            if uses or rest:
                total = sum(uses.values()) + rest
                counts = [f"{count} {use}" for use, count in uses.items()] or ["0 used"]
                lines.append(f"{_counted(total, kind)}: {', '.join(counts)}, {rest} not used")
        for group in self.unused[:_MAX_GROUPS]:
            such = " such as" if len(group.paths) > 1 else ""
            count = _counted(len(group.paths), group.kind)
            lines.append(f"not used: {count}{such} {shown(group.paths[0])}: {group.reason}")
        if len(self.unused) > _MAX_GROUPS:
            rest = sum(len(group.paths) for group in self.unused[_MAX_GROUPS:])
            lines.append(f"not used: {rest} more files in {len(self.unused) - _MAX_GROUPS} groups")
        return lines

    @property
    def as_dict(self) -> dict[str, Any]:
        """The account as plain values."""
        return {
            "used": {kind: dict(uses) for kind, uses in self.used.items()},
            "not_used": [
                {"kind": group.kind, "reason": group.reason, "files": [shown(path) for path in group.paths]}
                for group in self.unused
            ],
        }


def account_for(tree: Tree, uses: Uses) -> Account:
    """Return the account of a folder; every file that is not hidden is counted exactly once."""
    used: dict[str, Counter[str]] = defaultdict(Counter)
    for split, paths in uses.images.items():
        used["image"][split] += len(set(paths))
    if uses.masks:
        used["mask"]["used"] += len(set(uses.masks))
    known = {path for paths in (*uses.images.values(), uses.masks) for path in paths}
    read = set(uses.sources)
    words = _Words(uses, tree)
    unused: dict[tuple[str, str], list[str]] = defaultdict(list)
    images = {path: "mask" if path in read else words.kind(path) for path in tree.images if path not in known}
    others = {path: _KIND_OF_SUFFIX.get(PurePosixPath(path).suffix.lower(), "sidecar") for path in tree.others}
    for path, kind in (images | others | dict.fromkeys(tree.rest, "file")).items():
        if path in read:
            used[kind]["used"] += 1
        else:
            unused[kind, uses.reasons.get(path) or words.reason(kind, path)].append(path)
    groups = [Unused(kind, reason, paths) for (kind, reason), paths in unused.items()]
    order = list(_KINDS)
    return Account(used, sorted(groups, key=lambda group: (order.index(group.kind), -len(group.paths), group.reason)))


class _Words:
    """Classifies unused images, masks and other files by their folders and names, with reasons why they are unused."""

    def __init__(self, uses: Uses, tree: Tree) -> None:
        self._tree = tree
        images = [parse_file(path) for paths in uses.images.values() for path in paths]
        self._images = {_pattern(file) for file in images}
        self._masks = {_pattern(parse_file(path)) for path in (*uses.masks, *uses.sources)}
        self._splits = {file.split for file in images}
        self._usual_reasons = uses.usual_reasons

    def kind(self, path: str) -> str:
        """Return "image", "mask" or "picture"."""
        file = parse_file(path)
        pattern = _pattern(file)
        if pattern in self._images:
            return "image"
        if pattern in self._masks:
            return "mask"
        prefix, _, ending = affixes(inner_stem(file))
        for words in (f"{prefix} {ending}", *reversed(path.split("/")[:-1])):
            role = role_of(words)
            if role.is_other:
                return "picture"
            if role.is_mask or role.is_image:
                return "mask" if role.is_mask else "image"
        return "image"

    @cached_property
    def _splits_with_images(self) -> set[str | None]:
        return {parse_file(path).split for path in self._tree.images if self.kind(path) == "image"}

    def reason(self, kind: str, path: str) -> str:
        """Return the usual reason why a file of this kind is not used."""
        split = parse_file(path).split
        if split is not None and split not in self._splits and kind in ("image", "mask", "picture"):
            if kind == "mask" and split not in self._splits_with_images:
                return f"no image belongs to it: the {split} split has none"
            return f"of the {split} split, which the config does not use"
        return self._usual_reasons.get(kind, _KINDS[kind][1])


def _pattern(file: SurveyedImage) -> tuple[object, ...]:
    prefix, _, ending = affixes(inner_stem(file))
    return (file.pattern, prefix, ending, file.suffix)


def _counted(count: int, kind: str) -> str:
    if count != 1:
        return f"{count} {_KINDS[kind][0]}"
    return f"1 {_KINDS[kind][0].removesuffix('s')}" if kind != "file" else "1 file of another kind"
