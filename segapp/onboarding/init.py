"""`segapp init`: examine a folder of images, and write a config for it, with the reason for each choice as a comment.

`find_candidates` finds the possible layouts of the folder, `divided` divides its images, and `config_text` makes the
config.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from segapp.assembly.pairs import build_pairs, build_scheme, split_names
from segapp.config import load_config
from segapp.datasets.files import ImagePair, check_pairs, refuse_in_data, shared_images, shown
from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.images.raster import check_same_place
from segapp.datasets.images.tiles import Tiles
from segapp.datasets.images.windows import measure_pixels, measure_ranges, nodata_note
from segapp.datasets.layouts.formats import DATASETS
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.orientation import Turns
from segapp.datasets.resources import READERS, evenly_spread, side_by_side
from segapp.errors import ConfigError, DataError, SegappError, storage_errors
from segapp.memory.plan import GpuSpec
from segapp.onboarding.candidates import MAX_SHOWN, choose, confirm, evidence_of, find_candidates
from segapp.onboarding.class_files import find_class_files
from segapp.onboarding.content import IGNORED, MAX_HEADERS, read_contents
from segapp.onboarding.conversion import refuse_foreign, write_files
from segapp.onboarding.division import Division, divided
from segapp.onboarding.encoding import MASKS, UNLABELLED, Classes, MaskChoices, read_classes
from segapp.onboarding.fingerprint import measure
from segapp.onboarding.hypotheses import with_valid_areas
from segapp.onboarding.layout import Layout, Pair
from segapp.onboarding.machine import find_machine, weights_problem
from segapp.onboarding.proposal import CPU_ENCODER, GPU_ENCODER, Facts, config_text, data_text
from segapp.onboarding.tree import Tree, survey_tree, unused_files, unused_lines
from segapp.run.files import remove_dead_temporaries, write_atomic
from segapp.run.words import printable

_MAX_BAD = 10


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
    mask_orientation: str | None = None
    gpus: Sequence[GpuSpec] | None = None
    is_tried: bool = False
    """Look for pretrained weights."""

    def check(self) -> None:
        """Raise ConfigError if the value of an option is not possible, or conflicts with another one."""
        if self.val_share is not None and self.folds is not None:
            raise ConfigError(
                "--val-share and --folds: give only one of them, because the number of folds sets their share"
            )
        known = {"masks": MASKS, "unlabelled": UNLABELLED, "mask_orientation": ("upright", "raw")}
        for name, words in known.items():
            if (word := getattr(self, name)) is not None and word not in words:
                raise ConfigError(f"--{name.replace('_', '-')} {word}: choose {' or '.join(words)}")


@dataclass(frozen=True)
class InitResult:
    """The configs that were written, lines that describe the folder, and the facts behind the first config."""

    configs: tuple[Path, ...]
    lines: tuple[str, ...]
    facts: Facts


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
    found = find_candidates(tree)
    chosen = choose(root, found, request.layout)
    if chosen.is_drawn:
        confirm(root, found, chosen, request.layout)
    others = [one for one in found[:MAX_SHOWN] if one is not chosen]
    lines = [f"layout: {shown(chosen.name)} ({evidence_of(chosen)})"]
    lines += [f"also possible: --layout {shown(one.name)} ({evidence_of(one)})" for one in others]
    chosen = with_valid_areas(root, chosen, found)
    chosen, image_root, mask_root = _written(tree, chosen, out, lines, request.mask_orientation)
    try:
        options = request.val_share, request.group, request.folds, request.seed
        division = divided(
            list(chosen.pairs), *options, lambda pairs: Tiles.of([image_root / pair.image for pair in pairs])
        )
        facts = _facts(name, tree, chosen, out, request, division, image_root, mask_root)
    except DataError as error:
        missed = lines[: len(chosen.pairs) == 1] + [line for line in lines if line.startswith("left out: ")]
        raise error.reworded("; ".join([str(error), *missed])) from error
    lines += division.lines
    confirm(root, found, chosen, request.layout)  # after the refusals, which are more specific
    names = ", ".join(shown(name) for name in facts.classes.names[:12])
    more = f" and {len(facts.classes.names) - 12} more" if len(facts.classes.names) > 12 else ""
    lines.append(f"classes: {names}{more} ({facts.classes.names_reason})")
    lines.append(f"device: {facts.machine.device}")
    if facts.pixels is not None:
        lines.append(f"images: {facts.pixels.layout}, with their measured range in data.value_range")
    if unread := facts.content.unread:
        mask, reason = next(iter(unread.items()))
        lines.append(
            f"note: {len(unread)} masks cannot be read, such as {shown(mask)} ({reason}): segapp check names all"
        )
    lines += [f"note: {note}" for note in facts.classes.notes]
    trained = [*division.train, *division.val]
    masks = set() if chosen.writes == "masks" else {each for pair in trained for each in (pair.mask, pair.valid_area)}
    used = {pair.image for pair in trained} | masks | {*chosen.sources, facts.classes.source}
    lines += unused_lines(tree, unused_files(tree, used))
    facts = write_configs(facts, division, paths, out, is_tried=request.is_tried)
    return InitResult(tuple(paths), tuple(lines), facts)


def _written(
    tree: Tree, chosen: Layout, out: Path, lines: list[str], mask_orientation: str | None
) -> tuple[Layout, Path, Path]:
    """Write the files of a layout and report it in the lines; return it and the roots of its images and masks."""
    if not chosen.is_drawn:
        return chosen, tree.root, tree.root
    folder = out.with_name(f"{out.stem}-{chosen.writes}")
    chosen, problems = write_files(chosen, folder, tree.root, mask_orientation)
    lines += [f"left out: {text}" for text in problems]
    lines.append(f"{chosen.writes}: {len(chosen.pairs)} in {shown(folder)}")
    first = chosen.pairs[0].drawing
    has_images = first is not None and first.image_bytes is not None
    return chosen, folder if has_images else tree.root, folder if chosen.writes == "masks" else tree.root


def _facts(
    name: str,
    tree: Tree,
    chosen: Layout,
    out: Path,
    choices: InitRequest,
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
    _refuse_bad_pairs([*train, *val])
    content = read_contents([*train, *val], as_rgb=choices.masks == "colors" and not chosen.is_drawn)
    turns = Turns(choices.mask_orientation)
    with contextlib.suppress(DataError):  # reported when the pairs are read
        check_pairs(evenly_spread([*train, *val], MAX_HEADERS), turns=turns)
    format, keys = "list", {"list_dir": str(out.with_name(f"{out.stem}-lists"))}
    if mask_root != root:
        keys["mask_dir"] = os.path.relpath(mask_root, root)
    if chosen.pairs[0].valid_area:
        keys["valid_area"] = "*"
    classes: Classes | None = None
    if chosen.is_drawn and chosen.classes:
        classes = Classes(chosen.classes, chosen.classes_reason or f"from {chosen.title}", notes=chosen.notes)
        if len(set(content.values) - {IGNORED}) == 1:
            raise DataError(f"{chosen.title}: no annotation draws an object: every pixel has one class")
    elif not chosen.is_drawn and not division.is_new and not content.disagreement:
        known = DATASETS.get(chosen.name)
        if known is not None and set(content.values) <= (
            known.label_map or dict.fromkeys(range(len(known.names)))
        ).keys() | {255}:
            format, keys = chosen.name, {}
            label_map = {value: IGNORED if own is None else own for value, own in (known.label_map or {}).items()}
            classes = Classes(known.names, f"the {len(known.names)} of {format}", label_map)
    if classes is None:
        folder = root.resolve().name
        masks = [f"{folder}/{pair.mask}" for pair in division.train]
        classes = read_classes(content, find_class_files(tree, masks[0]), masks, choices)
        classes = replace(classes, notes=(*chosen.notes, *classes.notes))
    if chosen.writes == "masks" and turns.choice is not None:
        keys["mask_orientation"] = "upright"  # segapp turned them as the user chose
    elif not chosen.is_drawn:
        option = "add --mask-orientation raw (data.mask_orientation: raw)"
        classes = replace(classes, notes=(*classes.notes, *(line for _, line in turns.lines(option))))
        keys |= {} if turns.choice is None else {"mask_orientation": turns.choice}
    uses_root, images = chosen.writes != "masks", [pair.image for pair in train]
    pixels = measure_pixels(images, others=[pair.image for pair in val], are_bands=uses_root and chosen.is_drawn)
    if (nodata := nodata_note(images, pixels or RGB8)) is not None:
        classes = replace(classes, notes=(*classes.notes, nodata))
    leads_outside = tree.leads_outside and uses_root
    machine = find_machine(choices.gpus)
    return Facts(name, root, format, keys, division, classes, content, machine, pixels, leads_outside=leads_outside)


def _refuse_bad_pairs(pairs: Sequence[ImagePair]) -> None:
    """Raise DataError if masks lie in another place than their images, or have another size there; it lists them."""

    def problem(pair: ImagePair) -> DataError | None:
        try:
            check_same_place(pair)
        except DataError as error:
            return error
        return None

    found = [each for each in side_by_side(problem, pairs, READERS) if each is not None]
    if found:
        heading = f"{len(found)} of {len(pairs)} masks do not lie on their image: repair them, or move them elsewhere"
        raise DataError.together(found[:_MAX_BAD], heading, len(found) - _MAX_BAD)


def write_configs(facts: Facts, division: Division, paths: Sequence[Path], out: Path, *, is_tried: bool) -> Facts:
    """Write lists and configs; return the facts with what was measured for the first config.

    Each config is loaded and its pairs are found before anything is renamed into place.
    """
    lists, stage = out.with_name(f"{out.stem}-lists"), out.with_name(f".{out.name}.partial")
    new_lists = stage / lists.name
    with storage_errors(paths[0]):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_dead_temporaries(out.parent)
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        try:
            if facts.format == "list":
                new_lists.mkdir()
                for name, pairs in division.lists.items():
                    write_atomic(new_lists / f"{name}.txt", _listed(pairs))
            fold = None if len(paths) == 1 else 0
            facts = _measured(replace(facts, fold=fold), stage / paths[0].name, new_lists, is_tried=is_tried)
            for number, path in enumerate(paths):
                fold = None if len(paths) == 1 else number
                write_atomic(stage / path.name, config_text(replace(facts, fold=fold)))
                _check_draft(stage / path.name, facts.root, new_lists)
            if facts.format == "list":
                # The lists come first, because a config must never name lists that are not there.
                lists.mkdir(exist_ok=True)  # it may have the lists of other configs, such as of folds
                for path in new_lists.iterdir():
                    os.replace(path, lists / path.name)
            for path in paths:
                os.replace(stage / path.name, path)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return facts


def _measured(facts: Facts, draft: Path, lists: Path, *, is_tried: bool) -> Facts:
    """Return the facts with the fingerprint of the training masks and, if it is tried, the weights that can be had."""
    write_atomic(draft, data_text(facts))
    scheme, pairs = _check_draft(draft, facts.root, lists)
    facts = replace(facts, fingerprint=measure(pairs, scheme, facts.pixels or RGB8, facts.content.median_px))
    if facts.pixels is not None:
        pixels = replace(facts.pixels, value_range=measure_ranges(pairs, facts.pixels, scheme))
        facts = replace(facts, pixels=pixels)
    if is_tried:
        encoder = GPU_ENCODER if facts.machine.num_gpus else CPU_ENCODER
        facts = replace(facts, weights_problem=weights_problem(encoder.name))
    return facts


def _check_draft(draft: Path, root: Path, lists: Path) -> tuple[ClassScheme, Sequence[ImagePair]]:
    """Return the classes and the training pairs of a config with its lists.

    An error, without the name of the temporary folder, is raised if it cannot be loaded or has no pairs.
    """
    try:
        data = load_config(draft, [f"data.list_dir={json.dumps(str(lists))}"] if lists.exists() else []).data
        scheme, pairs = build_scheme(data), {split: build_pairs(data, split) for split in split_names(data)}
        if empty := [split for split, own in pairs.items() if not own]:
            raise DataError(f"split {empty[0]} is empty")
    except SegappError as error:
        message = str(error).replace(f"{draft.parent.name}/", "")
        raise error.reworded(f"no config can be written for {shown(root)}: {message}") from error
    return scheme, pairs[split_names(data)[0]]


def _listed(pairs: Sequence[Pair]) -> bytes:
    """Return a list file; raise DataError for a name that cannot be written into a list."""
    lines = []
    for pair in pairs:
        image, *others = filter(None, (pair.image, pair.mask, pair.valid_area))
        if re.search(r"[\t\r\n]", image + "".join(others)) or image.startswith("#") or image != image.strip():
            raise DataError(f"{shown(image)}: a list cannot hold this name: rename the file", path=image)
        lines.append(os.fsencode("\t".join((image, *others)) + "\n"))
    return b"".join(lines)


def init_folder(request: InitRequest, *, as_json: bool) -> None:
    """Write the configs of a request; print the findings and the next commands, or everything as JSON."""
    result = propose_config(request)
    if as_json:
        print(json.dumps(as_dict(result), indent=2))
        return
    print(*map(printable, result.lines), sep="\n")
    first = result.configs[0]
    print(f"written: {', '.join(map(str, result.configs))}")
    train = f"segapp train --config {first}"
    if len(result.configs) > 1:
        train = f"segapp sweep {' '.join(map(str, result.configs))}"
    print(f"next: segapp check --config {first}; {train}")


def as_dict(result: InitResult) -> dict[str, Any]:
    facts, content = result.facts, result.facts.content
    return {
        "configs": [shown(path) for path in result.configs],
        "lines": [printable(line) for line in result.lines],
        "classes": list(facts.classes.names),
        "images": {
            "train": len(facts.division.train),
            "val": len(facts.division.val),
            "sizes": [{"size_px": list(size), "images": n} for size, n in Counter(content.sizes_px).most_common()],
            "pixels": (facts.pixels or RGB8).layout,
        },
        "fingerprint": None if facts.fingerprint is None else asdict(facts.fingerprint),
        "device": facts.machine.device,
        "weights_problem": facts.weights_problem,
    }


def _check_place(root: Path, out: Path) -> None:
    """Raise ConfigError if a config and the files next to it would be in the data folder."""
    other = shown(os.path.relpath(Path(os.path.realpath(root)).parent / out.name))
    refuse_in_data(out.parent, root, shown(out), f"name a folder outside it, such as --out {other}")
