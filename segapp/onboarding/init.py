"""`segapp init`: examine a folder of images, and write a config for it, with the reason for each choice as a comment.

`candidates` finds the possible layouts of the folder, `splitting` divides its images, `text` writes the config.
"""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from segapp.build.pairs import build_pairs, build_scheme, split_names
from segapp.config import load_config
from segapp.datasets.files import ImagePair, shared_images, shown
from segapp.datasets.images.measure import measure_pixels
from segapp.datasets.layouts.formats import DATASETS
from segapp.errors import ConfigError, DataError, SegappError, storage_errors
from segapp.onboarding.candidates import Found, choose, confirm, find_candidates, found_lines
from segapp.onboarding.class_files import find_class_files, nearest_first
from segapp.onboarding.content import MaskContent, read_contents
from segapp.onboarding.conversion import refuse_foreign, write_files
from segapp.onboarding.copies import classes_of_instances
from segapp.onboarding.division import Division, divided
from segapp.onboarding.encoding import IGNORED, MASK_KINDS, UNLABELLED, Classes, MaskChoices, read_classes
from segapp.onboarding.hypotheses import common_beginning
from segapp.onboarding.layout import Layout, Pair
from segapp.onboarding.published import pairs_of_format
from segapp.onboarding.questions import OpenQuestionError
from segapp.onboarding.text import Facts, config_text
from segapp.onboarding.tree import Tree, survey_tree, unused_files, unused_lines
from segapp.run.files import remove_dead_temporaries, write_atomic
from segapp.run.words import printable

_DEFAULT_FOLDERS = {("image_dir", "images/{split}"), ("mask_dir", "masks/{split}")}
_PLAUSIBLE = 0.25  # confidence from which another interpretation is given as a possible use of an unused file


@dataclass(frozen=True)
class InitRequest(MaskChoices):
    """Arguments of `segapp init`: the data folder and the options, which are explained in its help."""

    root: Path
    out: Path | None = None
    force: bool = False
    layout: str | None = None
    val_share: float | None = None
    group: str | None = None
    folds: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError if the value of an option is not possible, or conflicts with another one."""
        if self.val_share is not None and not 0 < self.val_share < 1:
            raise ConfigError(f"--val-share {self.val_share:g}: write a share above 0 and below 1, such as 0.15")
        if self.val_share is not None and self.folds is not None:
            raise ConfigError(
                "--val-share and --folds: give only one of them, because the number of folds sets their share"
            )
        if self.folds is not None and self.folds < 2:
            raise ConfigError(f"--folds {self.folds}: write 2 or more")
        for option, word, known in (
            ("--masks", self.masks, [*MASK_KINDS]),
            ("--unlabelled", self.unlabelled, UNLABELLED),
        ):
            if word is not None and word not in known:
                raise ConfigError(f"{option} {word}: choose {', '.join(known[:-1])} or {known[-1]}")


@dataclass(frozen=True)
class InitResult:
    """The configs that were written, and lines that describe the folder."""

    configs: tuple[Path, ...]
    lines: tuple[str, ...]


def propose_config(request: InitRequest) -> InitResult:
    """Examine a data folder and write a config for it, or one per fold. Nothing is written into the folder.

    Raises:
        ConfigError: the folder or an option is wrong, or the config exists.
        OpenQuestionError: the folder has several plausible interpretations, and no option chooses one.
        DataError: the layout of the folder is unknown, or its classes cannot be determined from its masks.
        StorageError: a file cannot be written.
    """
    root = request.root
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", root.resolve().name).strip("-._") or "mine"
    out = request.out or Path(f"{name}.yaml")
    request.check()
    tree = survey_tree(root)
    _check_place(root, out)
    paths = [out.with_name(f"{out.stem}-fold{i}{out.suffix}") for i in range(request.folds)] if request.folds else [out]
    refuse_foreign(out.with_name(f"{out.stem}-lists"), lambda path: path.suffix == ".txt")
    for path in paths:
        if os.path.lexists(path) and not request.force:
            raise ConfigError(f"{shown(path)} exists: choose another --out, or add --force", path=path)
    survey = find_candidates(tree)
    found = survey.candidates
    chosen = choose(root, found, request.layout)
    if chosen.is_drawn:
        confirm(root, found, chosen, request.layout)
    lines = found_lines(found, chosen)
    used, choices = chosen, request
    if not used.is_drawn and request.masks not in (None, "ids"):
        used, choices = classes_of_instances(tree, used, str(request.masks)), replace(request, masks="ids")
    pairs, image_root, mask_root = _written(tree, used, out, lines)
    division = divided(
        pairs, request.val_share, request.group, request.folds, request.seed, is_published=chosen.name in DATASETS
    )
    lines += division.lines
    facts = _facts(name, tree, used, out, choices, division, image_root, mask_root)
    confirm(root, found, chosen, request.layout)  # after the refusals, which are more specific
    names = ", ".join(shown(name) for name in facts.classes.names[:12])
    more = f" and {len(facts.classes.names) - 12} more" if len(facts.classes.names) > 12 else ""
    lines.append(f"classes: {names}{more} ({facts.classes.names_reason})")
    if facts.pixels is not None:
        lines.append(f"images: {facts.pixels.layout}, with their measured range in data.value_range")
    if unread := facts.content.unread:
        lines.append(f"note: {len(unread)} masks cannot be read, such as {shown(unread[0])}: segapp check names all")
    lines += [f"note: {note}" for note in facts.classes.notes]
    lines += _unused(tree, survey, used, pairs, division, facts.classes)
    write_configs(facts, division, paths, out)
    return InitResult(tuple(paths), tuple(lines))


def _written(tree: Tree, chosen: Layout, out: Path, lines: list[str]) -> tuple[list[Pair], Path, Path]:
    """Write the files of a layout and report it in the lines; return its pairs and the roots of images and masks."""
    if not chosen.is_drawn:
        return list(chosen.pairs), tree.root, tree.root
    if len(chosen.classes) == 1:
        raise DataError(f"{chosen.title}: no annotation holds an object of a class: draw some, or remove them")
    folder = out.with_name(f"{out.stem}-{chosen.writes}")
    pairs, problems, num_kept = write_files(chosen, folder)
    lines += [f"left out: {text}" for text in problems]
    kept = f", {num_kept} of them there already" if num_kept else ""
    lines.append(f"{chosen.writes}: {len(pairs)} in {shown(folder)}{kept}")
    has_images = pairs[0].drawing is not None and pairs[0].drawing.image_bytes is not None
    return pairs, folder if has_images else tree.root, folder if chosen.writes == "masks" else tree.root


def _facts(
    name: str,
    tree: Tree,
    chosen: Layout,
    out: Path,
    choices: MaskChoices,
    division: Division,
    root: Path,
    mask_root: Path,
) -> Facts:
    """Return the facts from which a config is made; `root` is the folder of the images."""
    train, val = (
        [ImagePair(root / pair.image, mask_root / pair.mask, pair.image) for pair in pairs]
        for pairs in (division.train, division.val)
    )
    if both := shared_images(train, val):
        raise DataError(
            f"{len(both)} validation images are also training images, such as {shown(both[0])}: take them out of "
            "one of the lists"
        )
    content = read_contents([*train, *val])
    format, keys = "list", {"list_dir": str(out.with_name(f"{out.stem}-lists"))}
    if mask_root != root:
        keys["mask_root"] = str(mask_root)
    if chosen.is_multilabel:
        keys["multilabel"] = "bits"
    classes: Classes | None = None
    if chosen.is_drawn and chosen.classes:
        classes = Classes(chosen.classes, chosen.classes_reason or f"from {chosen.title}", notes=chosen.notes)
        if not chosen.is_multilabel:
            if len(set(content.values) - {IGNORED}) == 1:
                raise DataError(f"{chosen.title}: no annotation draws an object: every pixel has one class")
            classes = _with_ignored_note(content, classes, "by the annotations")
    elif not chosen.is_drawn and not division.is_new:
        known = DATASETS[chosen.name] if chosen.name in DATASETS and chosen.name != "list" else None
        if known is None:
            if (found := folder_keys(root, chosen, division.words)) is not None:
                format, keys = "folder", found
        elif set(content.values) <= (known.label_map or dict.fromkeys(range(len(known.names)))).keys() | {255}:
            format, keys = chosen.name, {}
            label_map = {value: IGNORED if own is None else own for value, own in (known.label_map or {}).items()}
            classes = Classes(known.names, f"the {len(known.names)} of {format}", label_map)
            classes = _with_ignored_note(content, classes, f"as {format} says")
    if classes is None:
        masks = [f"{root.resolve().name}/{pair.mask}" for pair in division.train]
        classes = read_classes(content, nearest_first(find_class_files(tree), masks[0]), masks, choices)
        classes = replace(classes, notes=(*chosen.notes, *classes.notes))
    uses_root = chosen.writes != "masks"
    pixels = measure_pixels(
        [pair.image for pair in train], others=[pair.image for pair in val], are_bands=uses_root and chosen.is_drawn
    )
    leads_outside = tree.leads_outside and uses_root
    return Facts(name, root, format, keys, division, classes, content, pixels, leads_outside=leads_outside)


def _with_ignored_note(content: MaskContent, classes: Classes, cause: str) -> Classes:
    """Return the classes with a sentence on the ignored pixels if they are more than a hundredth."""
    share = content.share(stored for stored in content.pixels if classes.class_of(stored) is None)
    note = f"{share:.1%} of the pixels are ignored, {cause}"
    return replace(classes, notes=(*classes.notes, note)) if share > 0.01 else classes


def _unused(
    tree: Tree, survey: Found, chosen: Layout, pairs: Sequence[Pair], division: Division, classes: Classes
) -> list[str]:
    """Return lines about the files that the config does not use, with the reason if it is known."""
    trained = [*division.train, *division.val]
    used = {pair.image for pair in trained} | {*chosen.sources, classes.source}
    if chosen.writes != "masks":
        used |= {pair.mask for pair in trained}
    reasons = dict(survey.unused.get(chosen.name, {}))
    for pair in pairs:
        if pair.image not in used:
            reason = f"of the {pair.split} split, which the config does not use"
            reasons |= {pair.image: reason, pair.mask: reason}
    for other in survey.candidates:
        if not other.is_drawn and other.confidence >= _PLAUSIBLE:
            for path in (path for pair in other.pairs for path in (pair.image, pair.mask)):
                reasons.setdefault(path, f"of another reading: --layout {shlex.quote(other.name)}")
    return unused_lines(tree, unused_files(tree, used, reasons))


def write_configs(facts: Facts, division: Division, paths: Sequence[Path], out: Path) -> None:
    """Write lists and configs; each config is loaded and its pairs are found before anything is renamed into place."""
    drafts = {path: path.with_name(f".{path.name}.partial") for path in paths}
    lists = out.with_name(f"{out.stem}-lists")
    new_lists, old_lists = (lists.with_name(f".{lists.name}.{word}") for word in ("partial", "older"))
    with storage_errors(paths[0]):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_dead_temporaries(out.parent)
        for left in (new_lists, old_lists):
            shutil.rmtree(left, ignore_errors=True)
        try:
            if facts.format == "list":
                new_lists.mkdir()
                for name, pairs in division.lists.items():
                    write_atomic(new_lists / f"{name}.txt", _listed(pairs))
            for number, draft in enumerate(drafts.values()):
                fold = replace(facts, name=f"{facts.name}-fold{number}", fold=number) if len(paths) > 1 else facts
                write_atomic(draft, config_text(fold))
                _check_draft(draft, facts.root, new_lists, lists)
            if facts.format == "list":
                if lists.exists():
                    lists.rename(old_lists)
                new_lists.rename(lists)
            for path, draft in drafts.items():
                os.replace(draft, path)
        except BaseException:
            if old_lists.exists():
                shutil.rmtree(lists, ignore_errors=True)
                old_lists.rename(lists)
            raise
        finally:
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
            for left in (new_lists, old_lists):
                shutil.rmtree(left, ignore_errors=True)


def _check_draft(draft: Path, root: Path, new_lists: Path, lists: Path) -> None:
    """Raise an error, without the temporary names, if a config with the new lists has no pairs."""
    try:
        data = load_config(draft, [f"data.list_dir={json.dumps(str(new_lists))}"] if new_lists.exists() else []).data
        build_scheme(data)
        for split in split_names(data):
            if not build_pairs(data, split):
                raise DataError(f"split {split} is empty")
    except SegappError as error:
        message = re.sub(rf"(?m)^(\s*){re.escape(shown(draft))}(:\d+)*: ", r"\1", str(error))
        message = message.replace(shown(new_lists), shown(lists))
        raise error.reworded(f"no config can be written for {shown(root)}: {message}") from error


def _listed(pairs: Sequence[Pair]) -> bytes:
    """Return a list file; raise DataError for a name that cannot be written into a list."""
    lines = []
    for pair in pairs:
        image = pair.image
        if re.search(r"[\t\r\n]", image + pair.mask) or image.startswith("#") or image != image.strip():
            raise DataError(f"{shown(image)}: a list cannot hold this name: rename the file", path=image)
        lines.append(os.fsencode(f"{image}\t{pair.mask}\n"))
    return b"".join(lines)


def init_folder(request: InitRequest) -> None:
    """Write the configs of a request; print the findings and the next commands.

    Open questions are asked in a terminal, and raised as OpenQuestionError in a pipe.
    """
    while True:
        try:
            result = propose_config(request)
            break
        except OpenQuestionError as question:
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise
            chosen: dict[str, Any] = {question.attribute: _answer(question)}
            request = replace(request, **chosen)
    print(*map(printable, result.lines), sep="\n")
    first = result.configs[0]
    print(f"written: {', '.join(map(str, result.configs))}")
    train = f"segapp train --config {first}"
    if len(result.configs) > 1:
        train = f"segapp sweep {' '.join(map(str, result.configs))}"
    print(f"next: segapp check --config {first}; {train}")


def _answer(question: OpenQuestionError) -> str:
    """Return the value that the user chooses in the terminal; raise the question if the input is no answer's number."""
    print(f"{printable(question.question)}:", file=sys.stderr)
    for number, answer in enumerate(question.answers, start=1):
        print(f"  {number}  {printable(answer.value)}: {printable(answer.words)}", file=sys.stderr)
    print(f"number for {question.option} (none: stop): ", end="", file=sys.stderr, flush=True)
    said = sys.stdin.readline().strip()
    if not said.isdigit() or not 1 <= int(said) <= len(question.answers):
        raise question
    return question.answers[int(said) - 1].value


def _check_place(root: Path, out: Path) -> None:
    """Raise ConfigError if a config and the files next to it would be in the data folder."""
    data, place = Path(os.path.realpath(root)), Path(os.path.realpath(out.parent))
    if place.is_relative_to(data):
        raise ConfigError(
            f"{shown(out)} lies in the data folder {shown(root)}, and segapp writes nothing there: name a folder "
            f"outside it, such as --out {shown(os.path.relpath(data.parent / out.name))}",
            path=out,
        )


def folder_keys(root: Path, layout: Layout, words: Mapping[str, str]) -> dict[str, str] | None:
    """Return `image_dir`, `mask_dir` and endings with which format `folder` finds exactly these pairs, if any.

    `words` maps the splits in the config to their names on disk.
    """
    image_dir, mask_dir = _common_folder(layout.image_pattern), _common_folder(layout.mask_pattern)
    if image_dir is None or mask_dir is None or "{split}" not in image_dir:
        return None
    ways = [{"image_dir": image_dir, "mask_dir": mask_dir}]
    if (endings := _constant_endings(layout.pairs)) is not None:
        ways.append({**ways[0], "image_suffix": endings[0], "mask_suffix": endings[1]})
    wanted = {split: {(pair.image, pair.mask) for pair in layout.pairs if pair.split == split} for split in words}
    for keys in ways:
        found = {split: pairs_of_format(root, "folder", word, **keys) for split, word in words.items()}
        if all({(pair.image, pair.mask) for pair in found[split]} == pairs for split, pairs in wanted.items()):
            return {key: value for key, value in keys.items() if (key, value) not in _DEFAULT_FOLDERS}
    return None


def _common_folder(pattern: tuple[str, ...]) -> str | None:
    """Return the folders before the first varying one; None if folders with a role follow."""
    fixed = list(pattern)
    while fixed and fixed[-1] == "*":
        fixed.pop()
    return None if "*" in fixed else "/".join(fixed)


def _constant_endings(pairs: Sequence[Pair]) -> tuple[str, str] | None:
    """Return the endings of image and mask names after their common part, if all pairs have the same ones."""
    endings = set()
    for pair in pairs:
        image, mask = os.path.basename(pair.image), os.path.basename(pair.mask)
        common = common_beginning(image, mask).rstrip(".")
        endings.add((image[len(common) :], mask[len(common) :]))
    return endings.pop() if len(endings) == 1 else None
