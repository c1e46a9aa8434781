"""`segapp init`: examine a folder of images, and write a config for it, with the reason for each choice as a comment.

`find_candidates` finds the possible layouts of the folder, `divided` divides its images, and `config_text` makes the
config.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from segapp.assembly.pairs import build_pairs, build_scheme, split_names
from segapp.config import load_config
from segapp.datasets.files import ImagePair, check_pairs, check_same_size, refuse_in_data, shared_images, shown
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.images.windows import PERCENTILES, config_values, measure_pixels, nodata_note
from segapp.datasets.layouts.formats import DATASETS
from segapp.datasets.orientation import Turns
from segapp.datasets.walk import composed, has_cure, left_out
from segapp.errors import ConfigError, DataError, SegappError, accepted_words, storage_errors
from segapp.memory.gpus import visible_gpus
from segapp.onboarding.annotations import (
    find_coco,
    find_cvat,
    find_label_studio,
    find_labelme,
    find_supervisely,
    find_yolo,
)
from segapp.onboarding.arrays import find_arrays
from segapp.onboarding.class_files import find_class_files, published_layout
from segapp.onboarding.content import IGNORED, MAX_HEADERS, MaskContent, read_contents
from segapp.onboarding.conversion import UNUSABLE, problem_of, refuse_foreign, write_files
from segapp.onboarding.division import Division, divided
from segapp.onboarding.encoding import MASKS, UNLABELLED, Classes, MaskChoices, read_classes
from segapp.onboarding.hypotheses import CLOSE, ODD_SIZES, find_layouts, probe, with_valid_areas
from segapp.onboarding.layout import SURE, Layout, OpenQuestionError, Pair, evenly, open_question
from segapp.onboarding.pieces import find_pieces, find_rle
from segapp.onboarding.tables import paired_lists, read_tables, with_listed_splits
from segapp.onboarding.tree import Tree, survey_tree, unused_files, unused_lines
from segapp.run.files import remove_dead_temporaries, write_atomic
from segapp.run.words import printable


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
    found = find_candidates(tree)
    chosen = choose(root, found, request.layout)
    if chosen.is_drawn:
        confirm(root, found, chosen, request.layout)
    others = [one for one in found[:_MAX_SHOWN] if one is not chosen]
    lines = [f"layout: {shown(chosen.name)} ({_evidence_of(chosen)})"]
    lines += [f"also possible: --layout {shown(one.name)} ({_evidence_of(one)})" for one in others]
    chosen = with_valid_areas(root, chosen, found)
    chosen, image_root, mask_root = _written(tree, chosen, out, lines, request.mask_orientation)
    try:
        division = divided(list(chosen.pairs), request.val_share, request.group, request.folds, request.seed)
        facts = _facts(name, tree, chosen, out, request, division, image_root, mask_root)
    except DataError as error:
        missed = lines[: len(chosen.pairs) == 1] + [line for line in lines if line.startswith("left out: ")]
        raise error.reworded("; ".join([str(error), *missed])) from error
    lines += division.lines
    confirm(root, found, chosen, request.layout)  # after the refusals, which are more specific
    names = ", ".join(shown(name) for name in facts.classes.names[:12])
    more = f" and {len(facts.classes.names) - 12} more" if len(facts.classes.names) > 12 else ""
    lines.append(f"classes: {names}{more} ({facts.classes.names_reason})")
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
    write_configs(facts, division, paths, out)
    return InitResult(tuple(paths), tuple(lines))


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
    content = read_contents([*train, *val], as_rgb=choices.masks == "colors" and not chosen.is_drawn)
    turns = Turns(choices.mask_orientation)
    with contextlib.suppress(DataError):  # reported when the pairs are read
        check_pairs(evenly([*train, *val], MAX_HEADERS), turns=turns)
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
    return Facts(name, root, format, keys, division, classes, content, pixels, leads_outside=leads_outside)


def write_configs(facts: Facts, division: Division, paths: Sequence[Path], out: Path) -> None:
    """Write lists and configs; each config is loaded and its pairs are found before anything is renamed into place."""
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
            for number, path in enumerate(paths):
                fold = replace(facts, name=f"{facts.name}-fold{number}", fold=number) if len(paths) > 1 else facts
                write_atomic(stage / path.name, config_text(fold))
                _check_draft(stage / path.name, facts.root, new_lists)
            if facts.format == "list":
                if lists.exists():
                    lists.rename(stage / "older")
                new_lists.rename(lists)
            for path in paths:
                os.replace(stage / path.name, path)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _check_draft(draft: Path, root: Path, lists: Path) -> None:
    """Raise an error, without the name of the temporary folder, if a config with its lists has no pairs."""
    try:
        data = load_config(draft, [f"data.list_dir={json.dumps(str(lists))}"] if lists.exists() else []).data
        build_scheme(data)
        for split in split_names(data):
            if not build_pairs(data, split):
                raise DataError(f"split {split} is empty")
    except SegappError as error:
        message = str(error).replace(f"{draft.parent.name}/", "")
        raise error.reworded(f"no config can be written for {shown(root)}: {message}") from error


def _listed(pairs: Sequence[Pair]) -> bytes:
    """Return a list file; raise DataError for a name that cannot be written into a list."""
    lines = []
    for pair in pairs:
        image, *others = filter(None, (pair.image, pair.mask, pair.valid_area))
        if re.search(r"[\t\r\n]", image + "".join(others)) or image.startswith("#") or image != image.strip():
            raise DataError(f"{shown(image)}: a list cannot hold this name: rename the file", path=image)
        lines.append(os.fsencode("\t".join((image, *others)) + "\n"))
    return b"".join(lines)


def init_folder(request: InitRequest) -> None:
    """Write the configs of a request; print the findings and the next commands."""
    result = propose_config(request)
    print(*map(printable, result.lines), sep="\n")
    first = result.configs[0]
    print(f"written: {', '.join(map(str, result.configs))}")
    train = f"segapp train --config {first}"
    if len(result.configs) > 1:
        train = f"segapp sweep {' '.join(map(str, result.configs))}"
    print(f"next: segapp check --config {first}; {train}")


def _check_place(root: Path, out: Path) -> None:
    """Raise ConfigError if a config and the files next to it would be in the data folder."""
    other = shown(os.path.relpath(Path(os.path.realpath(root)).parent / out.name))
    refuse_in_data(out.parent, root, shown(out), f"name a folder outside it, such as --out {other}")


MIN_CONFIDENCE = 0.04
_MAX_SHOWN = 6


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
    return open_question(question, "--layout", {one.name: _evidence_of(one) for one in candidates})


def _evidence_of(candidate: Layout) -> str:
    return f"{candidate.confidence:.0%} sure: {', '.join(candidate.evidence)}"


def _nothing_known(tree: Tree, by_names: Sequence[Layout]) -> str:
    for layout in (one for one in by_names if one.confidence >= SURE * ODD_SIZES):
        pair = ImagePair(tree.root / layout.pairs[0].image, tree.root / layout.pairs[0].mask, "")
        image, mask = map(probe, pair.files)
        if image and mask:
            said = f"the names of {len(layout.pairs)} masks agree with the names of their images, the sizes do not: "
            check_same_size(pair, image.header.size_px, mask.header.size_px, said)
    entries = sorted(entry.name for entry in tree.root.iterdir() if not entry.name.startswith("."))
    there = ", ".join(shown(name) for name in entries[:8]) + (" and more" if len(entries) > 8 else "")
    note = "".join(f"; {line}" for line in left_out(filter(has_cure, tree.others), ()))
    return (
        f"{shown(tree.root)} has no images with masks that belong together by their names, and no known "
        f"annotations: it holds {there or 'nothing'} ({len(tree.images)} images){note}; give every mask the "
        "name of its image, such as images/a.jpg and masks/a.png, or write train.txt and val.txt with an image and its "
        "mask a line"
    )


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
            reason = f"the annotations look like {title}, but cannot be read: {problem_of(error)}"
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


LARGE_PX = 8_000_000  # larger images are evaluated in windows: whole, they need gigabytes on the device
RARE_SHARE = 0.01  # share of the pixels below which class weights are proposed


@dataclass(frozen=True)
class Facts:
    """The facts about a data set; `root` is the folder of its images, `keys` are further keys of the `data` section.

    The pixels of 8-bit RGB images are None.
    """

    name: str
    root: Path
    format: str
    keys: Mapping[str, str]
    division: Division
    classes: Classes
    content: MaskContent
    pixels: PixelFormat | None = None
    leads_outside: bool = False
    fold: int | None = None


def config_text(facts: Facts) -> str:
    """Return a config as YAML with comments."""
    content, division = facts.content, facts.division
    height, width = content.median_px
    header = [
        f"Made by segapp init from {shown(facts.root)}",
        f"Format {facts.format}, images of about {height} x {width}",
        f"{content.num_masks} of {content.num_all} masks were read. Review class names, crop_px and epochs first;",
        "check the data: segapp check --config FILE",
        *division.lines,
        *(f"note: {note}" for note in facts.classes.notes),
    ]
    return "".join(f"{line}\n" for line in (*(f"# {printable(line)}" for line in header), *_lines(facts)))


def _line(text: str, reason: str = "") -> str:
    """Return a line of a config, with the reason for its value as a comment."""
    return f"{text}  # {printable(reason)}" if reason else text


_GPU_MODEL = """\
  name: deeplabv3_resnet50  # accurate; deeplabv3_mobilenet_v3_large is five times faster
  weights_backbone: IMAGENET1K_V1  # downloaded once; null trains from scratch"""
_CPU_MODEL = "  name: lraspp_mobilenet_v3_large  # no GPU here: the fastest model, from scratch"


def _lines(facts: Facts) -> Iterator[str]:
    """Yield the sections of a config, each without its last line break."""
    content, num_train = facts.content, len(facts.division.train)
    seen = visible_gpus()
    num_gpus = len(seen.gpus)
    (height, width), crop_reason = _crop(content)
    batch, batch_reason = _batch(num_gpus, num_train, f" ({seen.message})" if seen.cure else "")
    steps = max(1, num_train // batch)
    wanted = 20_000 if num_gpus else 2_000
    epochs = min(300, max(10, round(wanted / steps)))
    yield f"name: {json.dumps(facts.name, ensure_ascii=False)}"
    yield from _data_lines(facts)
    yield f"  crop_px: [{height}, {width}]  # {crop_reason}"
    if sum(h * w * 4 for h, w in content.sizes_px) / len(content.sizes_px) * num_train < 2 << 30:
        yield "  cache: ram  # the decoded data set needs less than 2 GiB"
    yield "model:\n  library: torchvision"
    yield _GPU_MODEL if num_gpus else _CPU_MODEL
    yield "loss:"
    yield "  name: ce"
    counts = [count for value, count in content.pixels.items() if facts.classes.class_of(value) is not None]
    rarest = min(counts, default=0) / max(1, sum(counts))
    if len(counts) > 1 and rarest < RARE_SHARE:
        yield f"  class_weights: enet  # the rarest class has {rarest:.2%} of the pixels"
    yield f"""\
optim:
  name: adamw
  lr: {5e-4 * math.sqrt(batch / 8):.1e}  # 5e-4 x sqrt(batch_size / 8)
  weight_decay: 0.01
schedule:
  name: poly
  power: 0.9
  warmup_steps: 5%
train:
  epochs: {epochs}  # about {epochs * steps} steps, {steps} per epoch
  batch_size: {batch}  # {batch_reason}"""
    yield f"eval:\n  every_epochs: {max(1, epochs // 20)}  # about twenty evaluations"
    largest_px = max(h * w for h, w in content.sizes_px)
    if largest_px > LARGE_PX:
        yield f"  slide: true  # windows of crop_px: the largest image has {largest_px / 1e6:.0f} Mpx"


def _crop(content: MaskContent) -> tuple[tuple[int, int], str]:
    """Return height and width of the crop, multiples of 32 that 90 % of the images reach, and the reason."""
    cap = 768 if min(content.median_px) >= 900 else 512
    sides = []
    for axis in (0, 1):
        lengths = sorted(size[axis] for size in content.sizes_px)
        small = lengths[len(lengths) // 10]
        sides.append(max(32, min(cap, small // 32 * 32)))
    return (sides[0], sides[1]), f"a multiple of 32 that 90 % of the images reach, at most {cap}"


def _batch(num_gpus: int, num_train: int, note: str) -> tuple[int, str]:
    per_device = 8 if num_gpus else 4
    batch = min(per_device * max(1, num_gpus), max(1, num_train))
    if num_gpus:
        return (
            batch,
            f"{per_device} for each of {num_gpus} GPUs{note}; the largest that fits: segapp plan --config FILE",
        )
    return batch, f"small, because there is no GPU{note}"


def _data_lines(facts: Facts) -> Iterator[str]:
    """Yield the lines on the locations of the files and the contents of the masks."""
    yield "data:"
    yield f"  format: {facts.format}"
    yield f"  root: {json.dumps(str(facts.root), ensure_ascii=False)}"
    if facts.leads_outside:
        yield _line("  allow_outside_root: true", "links lead outside: remove this line if you do not trust them")
    for key, value in facts.keys.items():
        yield f"  {key}: {json.dumps(value, ensure_ascii=False)}"
    if facts.pixels is not None:
        values = config_values(facts.pixels)
        yield _line(f"  bands: {values['bands']}", "pictures show the first three as RGB: reorder them to choose")
        yield _line(f"  dtype: {values['dtype']}", "as in the image files")
        low, high = PERCENTILES
        yield _line(f"  value_range: {values['value_range']}", f"{low:g} % and {high:g} % of the values, measured")
    for split in ("train", "val") if facts.fold is not None else ():
        yield f"  {split}_split: fold{facts.fold}-{split}"
    yield from _class_lines(facts)


def _class_lines(facts: Facts) -> Iterator[str]:
    classes = facts.classes
    if DATASETS[facts.format].names:
        yield f"  # classes: {classes.names_reason}"
        return
    names = yaml.safe_dump(list(classes.names), default_flow_style=True, width=10**9, allow_unicode=True).strip()
    yield _line(f"  classes: {names}", classes.names_reason)
    if facts.content.disagreement:
        yield "  rgb_masks: false  # the palettes disagree, and are not used"
    if classes.palette:
        yield "  rgb_masks: true"
        yield _line(f"  palette: {[list(color) for color in classes.palette]}", classes.stored_reason)
    if classes.label_map:
        mapping = ", ".join(f"{value}: {to}" for value, to in classes.label_map.items())
        yield _line(f"  label_map: {{{mapping}}}", classes.stored_reason)
    if classes.ignore_index is not None:
        yield f"  ignore_index: {classes.ignore_index}"
