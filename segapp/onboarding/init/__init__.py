"""`segapp init`: look at a folder of images, and write a config for it, with the reason for each choice as a comment.

`candidates` finds what the folder may be, `splitting` divides its images, `text` is the config.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from segapp.build.pairs import build_pairs, build_scheme, split_names
from segapp.config import load_config
from segapp.datasets.files import ImagePair, shared_images, shown
from segapp.datasets.images.measure import measure_pixels
from segapp.datasets.layouts.formats import DATASETS
from segapp.errors import ConfigError, DataError, SegappError, storage_errors
from segapp.onboarding.convert.blocks import ask_for_blocks, cut_into_blocks
from segapp.onboarding.convert.conversion import some_problems, write_files
from segapp.onboarding.convert.copies import copies_of
from segapp.onboarding.init.candidates import (
    Found,
    choose,
    confirm,
    find_candidates,
    found_lines,
    save_candidates,
)
from segapp.onboarding.init.splitting import DEFAULT_SHARE, Division, divided, neighbor_lines
from segapp.onboarding.init.text import Facts, config_text
from segapp.onboarding.layout import Layout, Pair
from segapp.onboarding.survey.accounting import Uses, account_for
from segapp.onboarding.survey.class_files import find_class_files, nearest_first
from segapp.onboarding.survey.content import MaskContent, read_contents
from segapp.onboarding.survey.encoding import IGNORED, Classes, MaskChoices, ignored_shares, read_classes
from segapp.onboarding.survey.hypotheses import common_beginning
from segapp.onboarding.survey.published import pairs_of_format
from segapp.onboarding.survey.questions import OpenQuestionError
from segapp.onboarding.survey.tree import Tree, survey_tree
from segapp.run.files import remove_dead_temporaries, write_atomic
from segapp.run.words import printable

_DEFAULT_FOLDERS = {("image_dir", "images/{split}"), ("mask_dir", "masks/{split}")}
_PLAUSIBLE = 0.25
"""Confidence from which the account names another reading as what an unused file may be for."""


@dataclass(frozen=True)
class InitRequest(MaskChoices):
    """What `segapp init` is asked for.

    Attributes:
        root: the data folder.
        out: the config to write; None: the name of the folder with .yaml, in the current folder.
        force: replace the config and what lies beside it.
        layout: name of the layout to take.
        val_share: share of the validation images where the data have no splits; None: 0.2.
        group: regular expression for the group of an image, which is not divided.
        folds: number of folds, each a config; None: one config.
        seed: of the division.
        html: page to write with a picture of each layout that is possible.
        clean_masks: write copies of masks that are JPEGs or smoothed, each pixel the nearest of the frequent values.
        blocks: side in pixels of the blocks into which images and masks are cut; None: they are used whole.
    """

    root: Path
    out: Path | None = None
    force: bool = False
    layout: str | None = None
    val_share: float | None = None
    group: str | None = None
    folds: int | None = None
    seed: int = 0
    html: Path | None = None
    clean_masks: bool = False
    blocks: int | None = None

    def check(self) -> None:
        """Check the values of the options, and which of them are given together.

        Raises:
            ConfigError: a value is not possible, or excludes another one.
        """
        if self.val_share is not None and not 0 < self.val_share < 1:
            raise ConfigError(f"--val-share {self.val_share:g}: a share is above 0 and below 1, such as 0.15")
        if self.val_share is not None and self.folds is not None:
            raise ConfigError(
                "--val-share and --folds: give one of them; the share of a fold follows from their number"
            )
        if self.folds is not None and self.folds < 2:
            raise ConfigError(f"--folds {self.folds}: at least 2 folds are possible")
        others = {"--folds": self.folds, "--group": self.group, "--clean-masks": self.clean_masks or None}
        given = [option for option, value in others.items() if value is not None]
        if self.blocks is not None and given:
            raise ConfigError(f"--blocks and {given[0]}: give one of them; a strip of each image validates")
        super().check()


@dataclass(frozen=True)
class InitResult:
    """The configs that were written, and what is believed about the folder, as lines."""

    configs: tuple[Path, ...]
    lines: tuple[str, ...]


def propose_config(request: InitRequest) -> InitResult:
    """Examine a data folder and write a config for it, or one for each fold. Nothing is written into the folder.

    Raises:
        ConfigError: the folder or an option is wrong, or the config exists.
        OpenQuestionError: the folder has several plausible readings, and no option says which one to use.
        DataError: the folder has no layout that can be recognised, or its masks do not say their classes.
        StorageError: a file cannot be written.
    """
    root = request.root
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", root.resolve().name).strip("-._") or "mine"
    out = request.out or Path(f"{name}.yaml")
    request.check()
    tree = survey_tree(root)
    check_place(root, out)
    paths = [out.with_name(f"{out.stem}-fold{i}{out.suffix}") for i in range(request.folds)] if request.folds else [out]
    for path in paths:
        if path.exists() and not request.force:
            raise ConfigError(f"{shown(path)} exists: choose another --out, or add --force", path=path)
    survey = find_candidates(tree)
    found = survey.candidates
    if request.html is not None:
        save_candidates(request.html, tree, found)
    chosen = choose(root, found, request.layout)
    if chosen.is_drawn:
        confirm(root, found, chosen, request.layout)
    lines = [*found_lines(found, chosen)]
    used = _in_blocks(tree, chosen, request)
    materials = _Materials(tree, used, out, request)
    pairs, root_of_images, mask_root = materials.pairs()
    lines += materials.lines
    share = None if request.blocks is not None and any(pair.split for pair in pairs) else request.val_share
    division = divided(pairs, share, request.group, request.folds, request.seed, is_published=chosen.name in DATASETS)
    lines += division.lines
    facts = materials.facts(name, division, root_of_images, mask_root)
    if not (request.clean_masks and len(found) == 1):  # masks that need it look little like masks
        confirm(root, found, chosen, request.layout)  # after the refusals that say more
    lines += neighbor_lines(division, root_of_images, facts.pixels, facts.content.median_px)
    lines += _class_lines(facts)
    if facts.pixels is not None:
        lines.append(f"images: {facts.pixels.layout}, with their measured range in data.value_range")
    if unread := facts.content.unread:
        lines.append(f"note: {len(unread)} masks cannot be read, such as {shown(unread[0])}: segapp check names all")
    for note in facts.classes.notes:
        lines.append(f"note: {note}")
    class_files = [file.source for file in find_class_files(tree)]
    lines += account_for(tree, _uses(survey, materials.chosen, pairs, division, facts.classes, class_files)).lines
    _write(facts, division, paths, out)
    return InitResult(tuple(paths), tuple(lines))


def _in_blocks(tree: Tree, chosen: Layout, request: InitRequest) -> Layout:
    """Return a candidate cut into blocks, if they are asked for.

    Raises:
        ConfigError: the candidate has no masks yet.
        DataError: an image is too small.
        OpenQuestionError: there is one large image, which can be divided only in blocks.
    """
    if chosen.is_drawn:
        if request.blocks is not None:
            raise ConfigError(f"--blocks cuts images that have masks, not {chosen.title}: leave --blocks out")
        return chosen
    if request.blocks is None:
        ask_for_blocks(tree, chosen)
        return chosen
    share = DEFAULT_SHARE if request.val_share is None else request.val_share
    return cut_into_blocks(tree, chosen, int(request.blocks), share)


class _Materials:
    """The pairs of a layout and the classes of their masks; masks are written where there are none that fit.

    Attributes:
        chosen: the layout, or that of copies of its masks.
        lines: what was written.
    """

    def __init__(self, tree: Tree, chosen: Layout, out: Path, request: InitRequest) -> None:
        self._tree, self.chosen, self._out = tree, chosen, out
        self._choices: MaskChoices = request
        self._classes: Classes | None = None
        self.lines: list[str] = []
        copies = None if chosen.is_drawn else copies_of(tree, chosen, request, clean=request.clean_masks)
        if copies is not None:
            self.chosen = copies
            self._choices = replace(request, masks="ids")

    def pairs(self) -> tuple[list[Pair], Path, Path | None]:
        """Return the pairs, the root of the images, and the root of the masks where it is another one."""
        root, chosen = self._tree.root, self.chosen
        if not chosen.is_drawn:
            return list(chosen.pairs), root, None
        if len(chosen.classes) == 1:
            raise DataError(f"{chosen.title}: no annotation holds an object of a class: draw some, or remove them")
        written = self._out.with_name(f"{self._out.stem}-{chosen.writes}")
        pairs, problems, num_kept = write_files(chosen, written, _with_progress)
        self.lines += [f"left out: {text}" for text in some_problems(problems)]
        kept = f", {num_kept} of them there already" if num_kept else ""
        self.lines.append(f"{chosen.writes}: {len(pairs)} in {shown(written)}{kept}")
        if chosen.classes:
            reason = chosen.classes_reason or f"from {chosen.title}"
            self._classes = Classes(chosen.classes, reason, notes=chosen.notes)
        has_images = pairs[0].drawing is not None and pairs[0].drawing.image_bytes is not None
        return pairs, written if has_images else root, written if chosen.writes == "masks" else root

    def facts(self, name: str, division: Division, root: Path, mask_root: Path | None) -> Facts:
        """Return what the config is made from."""
        train, val = (
            [ImagePair(root / p.image, (mask_root or root) / p.mask, p.image) for p in pairs]
            for pairs in (division.train, division.val)
        )
        if both := shared_images(train, val):
            raise DataError(
                f"{len(both)} validation images are training images too, such as {shown(both[0])}: take them out of "
                "one of the lists"
            )
        content = read_contents([*train, *val])
        format, keys = "list", {"list_dir": str(self._out.with_name(f"{self._out.stem}-lists"))}
        if mask_root is not None and mask_root != root:
            keys["mask_root"] = str(mask_root)
        if self.chosen.is_multilabel:
            keys["multilabel"] = "bits"
        is_drawn = self.chosen.is_drawn
        classes = self._classes
        if not is_drawn and self.chosen.name in DATASETS and self.chosen.name != "list" and not division.is_new:
            known = DATASETS[self.chosen.name]
            if set(content.values) <= (known.label_map or dict.fromkeys(range(len(known.names)))).keys() | {255}:
                format, keys = self.chosen.name, {}
                label_map = {value: IGNORED if own is None else own for value, own in (known.label_map or {}).items()}
                classes = Classes(known.names, f"the {len(known.names)} of {format}", label_map)
                classes = replace(classes, notes=_ignored_notes(content, classes, f"as {format} says"))
        elif not is_drawn and not division.is_new:
            found = folder_keys(root, self.chosen, division.words)
            if found is not None:
                format, keys = "folder", found
        elif classes is not None and is_drawn and not self.chosen.is_multilabel:
            if len(set(content.values) - {IGNORED}) == 1:
                raise DataError(f"{self.chosen.title}: no annotation draws an object: every pixel has one class")
            classes = replace(classes, notes=(*classes.notes, *_ignored_notes(content, classes, "by the annotations")))
        if classes is None:
            masks = [f"{root.resolve().name}/{pair.mask}" for pair in division.train]
            classes = read_classes(content, nearest_first(find_class_files(self._tree), masks[0]), masks, self._choices)
            classes = replace(classes, notes=(*self.chosen.notes, *classes.notes))
        uses_root = self.chosen.writes != "masks"
        return Facts(
            name,
            root,
            format,
            keys,
            division,
            classes,
            content,
            measure_pixels(
                [pair.image for pair in train],
                others=[pair.image for pair in val],
                are_bands=uses_root and is_drawn,
            ),
            leads_outside=self._tree.leads_outside and uses_root,
        )


def _with_progress(pairs: Iterable[Pair], total: int) -> Iterator[Pair]:
    yield from tqdm(pairs, "writing", total, unit="image", disable=None, leave=False)


def _uses(
    survey: Found,
    chosen: Layout,
    pairs: Sequence[Pair],
    division: Division,
    classes: Classes,
    class_files: Sequence[str],
) -> Uses:
    """Return the files of the folder that the config uses, and why others are not used."""
    splits = {"training": division.train, "validation": division.val}
    if division.num_folds:
        splits = {f"in {division.num_folds} folds": [*division.train, *division.val]}
    images = {split: [pair.image for pair in own] for split, own in splits.items()}
    trained = {image for own in images.values() for image in own}
    has_masks = chosen.writes != "masks"
    reasons = dict(survey.unused.get(chosen.name, {}))
    reasons |= dict.fromkeys(class_files, f"the class names are those of another source: {classes.names_reason}")
    for pair in pairs:
        if pair.image not in trained:
            reason = f"of the {pair.split} split, which the config does not use"
            reasons |= dict.fromkeys((pair.image, pair.mask) if has_masks else (pair.image,), reason)
    for other in survey.candidates:
        if not other.is_drawn and other is not chosen and other.confidence >= _PLAUSIBLE:
            reason = f"of another reading: --layout {shlex.quote(other.name)}"
            for pair in other.pairs:
                reasons.setdefault(pair.image, reason)
                reasons.setdefault(pair.mask, reason)
    masks = [pair.mask for own in splits.values() for pair in own] if has_masks else []
    sources = (*chosen.sources, classes.source) if classes.source else chosen.sources
    return Uses(images, masks, sources, reasons)


def _ignored_notes(content: MaskContent, classes: Classes, cause: str) -> tuple[str, ...]:
    """Return a sentence on the ignored pixels, if they are more than a hundredth."""
    share = sum(ignored_shares(content, classes).values())
    return (f"{share:.1%} of the pixels are ignored, {cause}",) if share > 0.01 else ()


def _class_lines(facts: Facts) -> list[str]:
    names = ", ".join(shown(name) for name in facts.classes.names[:12])
    more = f" and {len(facts.classes.names) - 12} more" if len(facts.classes.names) > 12 else ""
    return [f"classes: {names}{more} ({facts.classes.names_reason})"]


def _write(facts: Facts, division: Division, paths: Sequence[Path], out: Path) -> None:
    """Write lists and configs; each config is loaded and its pairs are found before anything is put in place."""
    lists: dict[str, bytes] = {}
    if facts.format == "list":
        lists = {f"{name}.txt": _listed(pairs) for name, pairs in division.lists.items()}
    configs = {}
    for number, path in enumerate(paths):
        fold = replace(facts, name=f"{facts.name}-fold{number}", fold=number) if len(paths) > 1 else facts
        configs[path] = config_text(fold)

    def check(draft: Path) -> None:
        try:
            data = load_config(draft).data
            build_scheme(data)
            for split in split_names(data):
                if not build_pairs(data, split):
                    raise DataError(f"split {split} is empty")
        except SegappError as error:  # of a file that is removed again
            message = re.sub(rf"(?m)^(\s*){re.escape(shown(draft))}(:\d+)*: ", r"\1", str(error))
            raise error.reworded(f"no config can be written for {shown(facts.root)}: {message}") from error

    place(lists, out.with_name(f"{out.stem}-lists"), configs, check)


def _listed(pairs: Sequence[Pair]) -> bytes:
    """Return a list file; names that a list cannot hold are refused.

    Raises:
        DataError: a name begins with #, or holds a tab or a line break.
    """
    lines = []
    for pair in pairs:
        if (
            re.search(r"[\t\r\n]", pair.image + pair.mask)
            or pair.image.startswith("#")
            or pair.image != pair.image.strip()
        ):
            raise DataError(f"{shown(pair.image)}: a list cannot hold this name: rename the file", path=pair.image)
        lines.append(os.fsencode(f"{pair.image}\t{pair.mask}\n"))
    return b"".join(lines)


def init_folder(request: InitRequest) -> None:
    """Write the configs of a request; print what is believed, and the next commands."""
    result = asked(request)
    print(*map(printable, result.lines), sep="\n")
    first = result.configs[0]
    print(f"written: {', '.join(map(str, result.configs))}")
    train = f"segapp train --config {first}"
    if len(result.configs) > 1:
        train = f"segapp sweep {' '.join(map(str, result.configs))}"
    print(f"next: segapp check --config {first}; {train}")


def asked(request: InitRequest) -> InitResult:
    """Return the result of a request; each question that the folder leaves open is asked in a terminal.

    Raises:
        OpenQuestionError: there is no terminal, or no answer.
    """
    while True:
        try:
            return propose_config(request)
        except OpenQuestionError as question:
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise
            chosen: dict[str, Any] = {question.attribute: _answer(question)}
            request = replace(request, **chosen)


def _answer(question: OpenQuestionError) -> str:
    """Return the value that the person at the terminal chooses.

    Raises:
        OpenQuestionError: the answer is empty or no number of an answer.
    """
    print(f"{printable(question.question)}:", file=sys.stderr)
    for number, answer in enumerate(question.answers, start=1):
        print(f"  {number}  {printable(answer.value)}: {printable(answer.words)}", file=sys.stderr)
    print(f"number for {question.option} (none: stop): ", end="", file=sys.stderr, flush=True)
    said = sys.stdin.readline().strip()
    if not said.isdigit() or not 1 <= int(said) <= len(question.answers):
        raise question
    return question.answers[int(said) - 1].value


def check_place(root: Path, out: Path) -> None:
    """Check that a config and what is beside it would not lie in the data folder.

    Raises:
        ConfigError: they would.
    """
    data, place = Path(os.path.realpath(root)), Path(os.path.realpath(out.parent))
    if place.is_relative_to(data):
        raise ConfigError(
            f"{shown(out)} lies in the data folder {shown(root)}, where nothing is written: name a place outside it, "
            f"such as --out {shown(os.path.relpath(data.parent / out.name))}",
            path=out,
        )


def place(
    lists: Mapping[str, bytes], list_dir: Path, configs: Mapping[Path, str], check: Callable[[Path], None]
) -> None:
    """Write lists and configs.

    Args:
        lists: name -> content of each list; none: no folder is made.
        list_dir: their folder, replaced as a whole.
        configs: path -> content.
        check: raises an error for a config that cannot be used; the lists are in place then.

    Raises:
        SegappError: of `check`; nothing has changed then.
        StorageError: a file cannot be written; nothing has changed then.
    """
    drafts = {path: path.with_name(f".{path.name}.partial") for path in configs}
    first = next(iter(configs))
    with storage_errors(first):
        first.parent.mkdir(parents=True, exist_ok=True)
        remove_dead_temporaries(first.parent)
        with _replaced_folder(lists, list_dir):
            try:
                for path, text in configs.items():
                    write_atomic(drafts[path], text)
                    check(drafts[path])
                for path, draft in drafts.items():
                    os.replace(draft, path)
            finally:
                for draft in drafts.values():
                    draft.unlink(missing_ok=True)


@contextmanager
def _replaced_folder(files: Mapping[str, bytes], folder: Path) -> Iterator[None]:
    """Put a folder of files in place of an older one; on an error in the block the older one comes back."""
    if not files:
        yield
        return
    draft, older = (folder.with_name(f".{folder.name}.{word}") for word in ("partial", "older"))
    for left in (draft, older):
        shutil.rmtree(left, ignore_errors=True)
    is_placed = False
    try:
        draft.mkdir()
        for name, content in files.items():
            write_atomic(draft / name, content)
        if folder.exists():
            folder.rename(older)
        draft.rename(folder)
        is_placed = True
        yield
    except BaseException:
        if is_placed:
            shutil.rmtree(folder, ignore_errors=True)
        if older.exists():
            older.rename(folder)
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(older, ignore_errors=True)


def folder_keys(root: Path, layout: Layout, words: Mapping[str, str]) -> dict[str, str] | None:
    """Return `image_dir`, `mask_dir` and endings with which format `folder` finds exactly these pairs; None without.

    Args:
        root: of the data set.
        layout: whose splits are folders.
        words: split -> its word on disk, of the splits that the config names.
    """
    wanted = {split: {(pair.image, pair.mask) for pair in layout.pairs if pair.split == split} for split in words}
    for keys in _keys_that_may_fit(layout):
        found = {split: pairs_of_format(root, "folder", word, **keys) for split, word in words.items()}
        if all({(pair.image, pair.mask) for pair in found[split]} == pairs for split, pairs in wanted.items()):
            return {key: value for key, value in keys.items() if (key, value) not in _DEFAULT_FOLDERS}
    return None


def _keys_that_may_fit(layout: Layout) -> Iterator[dict[str, str]]:
    image_dir, mask_dir = _common_folder(layout.image_pattern), _common_folder(layout.mask_pattern)
    if image_dir is None or mask_dir is None or "{split}" not in image_dir:
        return
    keys = {"image_dir": image_dir, "mask_dir": mask_dir}
    yield keys
    if (endings := _constant_endings(layout.pairs)) is not None:
        yield {**keys, "image_suffix": endings[0], "mask_suffix": endings[1]}


def _common_folder(pattern: tuple[str, ...]) -> str | None:
    """Return the folders up to those that vary; None if folders with a role follow them."""
    fixed = list(pattern)
    while fixed and fixed[-1] == "*":
        fixed.pop()
    return None if "*" in fixed else "/".join(fixed)


def _constant_endings(pairs: Sequence[Pair]) -> tuple[str, str] | None:
    """Return the endings of image and mask names that follow what both have in common, if all pairs have the same."""
    endings = set()
    for pair in pairs:
        image, mask = os.path.basename(pair.image), os.path.basename(pair.mask)
        common = common_beginning(image, mask).rstrip(".")
        endings.add((image[len(common) :], mask[len(common) :]))
    return endings.pop() if len(endings) == 1 else None
