"""`segapp check`: examine a data set and report the findings in the terminal or as JSON."""

import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from segapp.assembly.pairs import (
    build_location,
    build_pairs,
    build_pixels,
    build_scheme,
    check_splits_apart,
    split_names,
    split_note,
)
from segapp.config import DataConfig, LossConfig, RunConfig
from segapp.custom.names import is_component
from segapp.datasets.files import ImagePair, refuse_in_data, shown
from segapp.datasets.images.pixel_format import DTYPES, RGB8, PixelFormat
from segapp.datasets.images.tiles import Tiles
from segapp.datasets.images.windows import PERCENTILES, config_values, kinds_of_pixels, measure_ranges, reduced_pixels
from segapp.datasets.inspection import (
    IGNORABLE_FRAC,
    DataProblem,
    FindingGroup,
    SplitReport,
    check_ranges,
    examine,
    group_findings,
)
from segapp.datasets.layouts.formats import split_list
from segapp.datasets.layouts.pairing import OutsideError, PartialError
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.resources import usable_cores
from segapp.datasets.targets import RULES, class_weights
from segapp.errors import DataError, some_names, storage_errors
from segapp.onboarding.conversion import encode_png, is_written, refuse_foreign
from segapp.onboarding.division import find_shared_groups, touching_notes
from segapp.onboarding.tree import Tree, survey_tree, unused_files, unused_lines
from segapp.run.files import write_atomic
from segapp.run.folder import FIRST_BATCH
from segapp.run.words import printable
from segapp.waiting import progress_bar

FEW_IMAGES = 1000
"""Number of images below which pretrained weights matter more than all other settings."""
_MAX_SHOWN = 5
"""Findings of a group, or files, that the terminal shows."""


def check_data(config: RunConfig, *, as_json: bool, pictures: Path | None = None) -> int:
    """Examine the data of a config, report the findings, and return the exit code: 0, or 3 if there are errors.

    `pictures` is the folder for the picture of the first batch of a training.

    Raises:
        ConfigError: `data.augment` or `data.sampling` does not fit the data, or the picture cannot be there.
        DataError: there is no data to examine.
        StorageError: the picture cannot be written.
    """
    data, scheme = config.data, build_scheme(config.data)
    splits, before = _collect(data)
    if pictures is not None:
        _check_place(pictures, data, splits)
    measured, problem = _measure(data, scheme, next(name for name in splits if splits[name]), splits)
    if problem is not None:
        before.append(problem)
    elif data.dtype == "uint8" or data.value_range is not None:
        for name, pairs in splits.items():
            before += check_ranges(name, pairs, scheme, build_pixels(data))
    with progress_bar(sum(map(len, splits.values())), "reading", unit="pair") as progress:
        read = itertools.count(1)
        reports = examine(
            splits,
            scheme,
            crop_px=data.crop_px,
            resize_px=data.resize_px,
            pixels=measured or RGB8,
            counts_pixels=_counts_pixels(config.loss),
            threads=max(1, round(usable_cores())),
            progress=lambda: progress(next(read)),
        )
    # A sample cannot be made without the range that the config lacks.
    if problem is None:
        before += _check_samples(config, scheme, reports[0], pictures)
    files = None if is_component(data.format) else _files(data, splits)
    groups = group_findings(reports, before)
    lines = advice(config, scheme, reports[0])
    if as_json:
        print(json.dumps(as_dict(reports, groups, scheme, measured, files) | {"advice": lines}, indent=2))
    else:
        print_report(reports, groups, scheme, Console(highlight=False))
        if lines:
            print("", *map(printable, lines), sep="\n")
        if files is not None:
            print("", *map(printable, unused_lines(*files)), sep="\n")
        for line in _pixel_lines(measured):
            print(line)
    return DataError.exit_code if any(found[0].severity == "error" for _, found in groups) else 0


def _collect(data: DataConfig) -> tuple[dict[str, Sequence[ImagePair]], list[DataProblem]]:
    """Return the pairs of both splits and the findings made before any file is opened; DataError without any pair."""
    note = split_note(data)
    findings = [] if note is None else [DataProblem("warning", "split", split_names(data)[1], note)]
    if is_component(data.format):
        return {name: build_pairs(data, name) for name in dict.fromkeys(split_names(data))}, findings
    splits: dict[str, Sequence[ImagePair]] = {}
    errors: list[DataError] = []
    for name in dict.fromkeys(split_names(data)):
        try:
            splits[name] = build_pairs(data, name)
        except DataError as error:
            splits[name] = error.pairs if isinstance(error, PartialError) else ()
            errors.append(error)
            kind = "link" if isinstance(error, OutsideError) else "pairs"
            findings.append(DataProblem("error", kind, name, str(error)))
    if not any(splits.values()):
        raise errors[0]
    train, val = split_names(data)
    both = None
    if train != val:
        both = find_shared_groups({name: [pair.name for pair in splits[name]] for name in (train, val)})
    if both is not None:
        findings.append(DataProblem("warning", "group", val, str(both)))
    sides = [name for name in splits for _ in splits[name]]
    tiles = Tiles.of([pair.image for pairs in splits.values() for pair in pairs])
    for note in touching_notes(tiles, sides, val, train):
        message = f"{note.removeprefix('warning: ')}; keep each scene on one side, as segapp init does for several"
        findings.append(DataProblem("warning", "group", val, message))
    try:
        if train == val:  # else pixels are compared
            check_splits_apart(data, splits[train], splits[val])
    except DataError as error:
        findings.append(DataProblem("error", "leak", val, str(error)))
    return splits, findings


def _check_place(folder: Path, data: DataConfig, splits: Mapping[str, Sequence[ImagePair]]) -> None:
    """Raise ConfigError if the picture would be in the data, or replace a file that this command did not write."""
    pairs = [] if is_component(data.format) else itertools.chain.from_iterable(splits.values())
    for place in {Path(data.root), *(file.parent for pair in pairs for file in pair.files)}:
        refuse_in_data(folder, place, f"--pictures {shown(folder)}", "name a folder outside it")
    refuse_foreign(folder / FIRST_BATCH, is_written)


def _check_samples(
    config: RunConfig, scheme: ClassScheme, report: SplitReport, pictures: Path | None
) -> list[DataProblem]:
    """Draw the first batch of a training, if a folder is given for it; return a finding if it cannot be drawn.

    Raises:
        ConfigError: `data.augment` or `data.sampling` does not fit the data.
    """
    if config.data.sampling == "uniform" and config.data.augment is None and pictures is None:
        return []
    # These import torch and albumentations, which the rest of this command does not need.
    from segapp.assembly.data import build_dataset, build_order
    from segapp.assembly.network import with_weights_defaults
    from segapp.datasets.loader import TrainLoader
    from segapp.datasets.preprocessing import Preprocessing
    from segapp.inference.drawing import MAX_SAMPLES, draw_batch

    data, order = with_weights_defaults(config)[0].data, None
    try:
        dataset = build_dataset(data, scheme, report.split, is_training=True, seed=config.seed)
        if data.sampling != "uniform" and report.num_masks == len(report.targets.frequencies.classes_of_masks):
            order = build_order(data, dataset, report.targets.frequencies, config.seed)
        if pictures is None:
            return []
        loader = TrainLoader(dataset, config.train.batch_size or MAX_SAMPLES, seed=config.seed, order=order)
        picture = draw_batch(next(loader.epoch(1)), Preprocessing(dataset.pixels), scheme)
    except DataError as error:
        message = f"the first batch cannot be drawn: {error}"  # without a picture, other findings report a bad file
        return [] if pictures is None else [DataProblem("error", "batch", report.split, message)]
    with storage_errors(pictures, "choose another --pictures"):
        pictures.mkdir(parents=True, exist_ok=True)
        write_atomic(pictures / FIRST_BATCH, encode_png(picture))
    print(f"written: {shown(pictures / FIRST_BATCH)}", file=sys.stderr)
    return []


def _counts_pixels(loss: LossConfig) -> bool:
    """Return True if every pixel counts alike in a loss, whatever its class."""
    return loss.class_weights is None and all(term.name in ("ce", "bce") for term in loss.by_key().values())


def _measure(
    data: DataConfig, scheme: ClassScheme, split: str, splits: Mapping[str, Sequence[ImagePair]]
) -> tuple[PixelFormat | None, DataProblem | None]:
    """Return the pixels of a split with the measured range of each band, and an error if the config lacks the range.

    The pixels are None for 8-bit RGB, whose range is known.
    """
    pairs = splits[split]
    kinds = kinds_of_pixels([pair.image for pair in pairs]) if data.bands is None else {}
    found = reduced_pixels(kinds)
    if data.bands is None and (found is None or found.pages or found.dtype not in DTYPES):
        return None, None
    bands = tuple(range(1, found.bands + 1)) if found is not None else data.bands
    pixels = PixelFormat(bands, data.dtype if found is None else found.dtype)
    try:
        measured = replace(pixels, value_range=measure_ranges(pairs, pixels, scheme))
    except DataError:
        return pixels, None  # each image is reported when it is read
    if found is not None:
        message = f"{shown(kinds[found][0])}: {RGB8.problem(found)}; the measured lines are below"
    elif data.dtype != "uint8" and data.value_range is None:
        message = f"data.value_range is missing: {data.dtype} has no usual range; the measured line is below"
    else:
        return measured, None
    return measured, DataProblem("error", "pixels", split, message)


def _pixel_lines(measured: PixelFormat | None) -> list[str]:
    if measured is None:
        return []
    low, high = PERCENTILES
    return [
        f"\npixels: {measured.layout}; value_range holds the middle {high - low:g} % of each class in each band:",
        *(f"  {key}: {value}" for key, value in config_values(measured).items()),
    ]


def _files(data: DataConfig, splits: Mapping[str, Sequence[ImagePair]]) -> tuple[Tree, list[list[str]]]:
    """Return the files below `data.root`, and, in groups, the files that the config does not use."""
    root, location = Path(data.root), build_location(data)
    lists = [path for name in split_names(data) if (path := split_list(location, name)) is not None]
    pairs = [pair for own in splits.values() for pair in own]
    paths = [*(path for pair in pairs for path in pair.files), *lists]
    tree = survey_tree(root)
    return tree, unused_files(tree, {os.path.relpath(path, root) for path in paths})


def suggested_weights(report: SplitReport, scheme: ClassScheme) -> dict[str, list[float]]:
    if scheme.multilabel is not None or not any(report.targets.frequencies.pixels):
        return {}
    return {rule: class_weights(rule, report.targets.frequencies) for rule in RULES}


def advice(config: RunConfig, scheme: ClassScheme, report: SplitReport) -> list[str]:
    """Return the advice of the manual for these images and masks; none of it is a problem of the data."""
    lines, model, foreground = list[str](), config.model, scheme.foreground
    is_random = model.weights is None and model.weights_backbone is None and not is_component(model.name)
    if is_random and 0 < report.num_pairs < FEW_IMAGES:
        lines.append(f"{report.num_pairs} images, and a model with random weights: set model.weights_backbone")
    counts, total = report.targets.frequencies.pixels, sum(report.targets.frequencies.pixels)
    rare = [name for name, count in zip(scheme.names, counts, strict=True) if 0 < count < IGNORABLE_FRAC * total]
    is_plain = config.loss.class_weights is None and config.data.sampling == "uniform" and scheme.multilabel is None
    if rare and is_plain and not _counts_pixels(config.loss):  # else it is a finding
        sampling = "foreground" if foreground else "class-balanced"
        lines.append(
            f"{some_names(rare, 4)}: less than {IGNORABLE_FRAC:.0%} of the pixels: if the IoU stays low, set "
            f"loss.class_weights=enet, or data.sampling={sampling}"
        )
    if foreground and 2 * counts[0] > total and config.checkpoint.monitor == "miou":
        score = f"'dice:{foreground[0]}'" if len(foreground) == 1 else "mean_dice_foreground"
        share = f"{counts[0] / total:.0%} of the pixels are {scheme.names[0]}, whose IoU is a part of mIoU"
        lines.append(f"{share}: set checkpoint.monitor={score}")
    return [f"{report.split}: {line}" for line in lines]


def as_dict(
    reports: Sequence[SplitReport],
    groups: Sequence[FindingGroup],
    scheme: ClassScheme,
    measured: PixelFormat | None = None,
    files: tuple[Tree, list[list[str]]] | None = None,
) -> dict[str, Any]:
    findings = [finding for _, found in groups for finding in found]
    return {
        "errors": sum(f.severity == "error" for f in findings),
        "warnings": sum(f.severity == "warning" for f in findings),
        "classes": list(scheme.names),
        "class_weights": suggested_weights(reports[0], scheme),
        "pixels": None if measured is None else asdict(measured),
        "files": files and {"not_used": [[*map(shown, p)] for p in files[1]], "hidden": [*map(shown, files[0].hidden)]},
        "splits": {report.split: _split_as_dict(report) for report in reports},
        "findings": [
            {
                "severity": f.severity,
                "kind": f.kind,
                "split": f.split,
                "message": printable(f.message),
                "num_px": f.num_px,
                "image": None if f.pair is None else shown(f.pair.image),
                "mask": None if f.pair is None or f.pair.mask is None else shown(f.pair.mask),
                "other": None if f.other is None else shown(f.other.image),
            }
            for f in findings
        ],
    }


def _split_as_dict(report: SplitReport) -> dict[str, Any]:
    unknown = report.unknown_ids
    return {
        "pairs": report.num_pairs,
        "masks": report.num_masks,
        "sizes": [{"size_px": list(size), "images": n} for size, n in _by_count(report)],
        "pixels": list(report.targets.frequencies.pixels),
        "images": list(report.targets.frequencies.images),
        "ignored_px": report.targets.frequencies.ignored_px,
        "outside_px": report.targets.frequencies.outside_px,
        "ignored": report.ignored,
        "unknown_ids": []
        if unknown is None
        else [{"id": i, "pixels": n, "masks": unknown.masks[i]} for i, n in unknown.pixels.items()],
        "likely_cause": None if unknown is None else unknown.cause,
    }


def _by_count(report: SplitReport) -> list[tuple[tuple[int, int], int]]:
    return sorted(report.sizes.items(), key=lambda item: (-item[1], item[0]))


def print_report(
    reports: Sequence[SplitReport],
    groups: Sequence[FindingGroup],
    scheme: ClassScheme,
    console: Console,
) -> None:
    overview = Table("split", "pairs", "masks", "height x width, px", "ignored", box=None, pad_edge=False)
    for report in reports:
        sizes = [f"{height} x {width} ({n})" for (height, width), n in _by_count(report)]
        ignored = f"{report.targets.ignored_share:.1%}" if report.targets.num_read else "-"
        name = Text(printable(report.split))
        overview.add_row(name, str(report.num_pairs), str(report.num_masks), some_names(sizes, 3) or "-", ignored)
    console.print(overview)
    console.print()
    console.print(_class_table(reports, scheme, suggested_weights(reports[0], scheme)))
    notes = [report.ignored for report in reports if report.ignored is not None]
    for line in ["", *notes] if notes else []:
        # As a plain string, brackets in a class name would be markup.
        console.print(Text(printable(line)), soft_wrap=True)
    for severity in ("error", "warning"):
        found = [group for group in groups if group[1][0].severity == severity]
        count = sum(len(findings) for _, findings in found)
        if found:
            console.print(f"\n{count} {severity}{'s' if count > 1 else ''}")
        for group in found:
            _print_group(*group, console)
    if not groups:
        console.print("\nno problems found")


def _print_group(summary: str, findings: Sequence[DataProblem], console: Console) -> None:
    lines = [f"  [{findings[0].split}] {findings[0].kind}: {summary}"]
    if len(findings) > 1:
        lines += [f"    {finding.message}" for finding in findings[:_MAX_SHOWN]]
        if len(findings) > _MAX_SHOWN:
            lines.append(f"    and {len(findings) - _MAX_SHOWN} more: --json shows all")
    for line in "\n".join(lines).splitlines():
        console.print(Text(printable(line)), soft_wrap=True)


def _class_table(reports: Sequence[SplitReport], scheme: ClassScheme, weights: dict[str, list[float]]) -> Table:
    """Return a table of each class's pixel share and number of images per split, and its weight by each rule."""
    splits = (Column(Text(f"{printable(report.split)}: pixels / images")) for report in reports)
    table = Table("class", *splits, *weights, box=None, pad_edge=False)
    for index, name in enumerate(scheme.names):
        cells = []
        for report in reports:
            total = report.targets.valid_px
            share = f"{report.targets.frequencies.pixels[index] / total:.2%}" if total else "-"
            cells.append(f"{share} / {report.targets.frequencies.images[index]}")
        table.add_row(Text(printable(name)), *cells, *(f"{column[index]:.3g}" for column in weights.values()))
    return table
