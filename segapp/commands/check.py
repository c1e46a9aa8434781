"""`segapp check`: what the data doctor found, for a terminal, as JSON, or as one HTML file with pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text

from segapp.build.class_weights import RULES, class_weights
from segapp.build.data import build_location, build_pairs, build_scheme, split_names
from segapp.commands.check_html import page
from segapp.config import DataConfig, RunConfig
from segapp.datasets.doctor import Finding, SplitReport, examine, summary_of_ids
from segapp.datasets.files import ImagePair, shown
from segapp.datasets.layouts.formats import ClassScheme, leftovers
from segapp.datasets.layouts.root_guard import OutsideError, PartialError
from segapp.datasets.sums import check_sums, write_sums
from segapp.errors import DataError, StorageError
from segapp.run.text import printable

EXIT_DATA = 3
_MAX_SHOWN = 5

GROUPS = {
    "pairs": "images without a mask",
    "ids": "masks with ids outside the classes",
    "unreadable": "images that cannot be read",
    "mask": "masks that cannot be read",
    "size": "masks of another size than their image",
    "leak": "images of one split again in another",
    "sums": "files that are not those of the list of sums",
    "all_ignored": "masks without a pixel that counts",
    "duplicate": "images twice in one split",
    "class": "classes",
    "crop": "sizes against the crop",
    "link": "links",
    "file": "files that nobody reads",
}
"""The kinds of findings in the order in which they are told, with what they are in words."""


@dataclass(frozen=True)
class Group:
    """Findings of one kind in one split, the worst first."""

    severity: str
    split: str
    kind: str
    findings: tuple[Finding, ...]
    summary: str


def check_data(
    config: RunConfig,
    *,
    as_json: bool,
    html_file: Path | None,
    sums_file: Path | None = None,
    new_sums_file: Path | None = None,
) -> int:
    """Examines a config's data and tells what was found.

    Args:
        config: its data section says where and what.
        as_json: print JSON instead of tables.
        html_file: write a page there too.
        sums_file: compare every file with this list of sha256 sums.
        new_sums_file: write such a list.

    Returns:
        0, or 3 where there is an error.

    Raises:
        DataError: there is no data to examine, or the list of sums cannot be read.
        StorageError: a file cannot be written.
    """
    data, scheme = config.data, build_scheme(config.data)
    splits, before = _collect(data)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=sum(map(len, splits.values())))
        reports = examine(
            splits,
            scheme,
            crop_px=data.crop_px,
            resize_px=data.resize_px,
            threads=threads,
            progress=lambda: bar.advance(task),
        )
    if sums_file is not None:
        before += check_sums(sums_file, splits, Path(data.root))
    if new_sums_file is not None:
        _write(new_sums_file, write_sums(splits, Path(data.root)), "--write-sums")
    groups = grouped(reports, before)
    weights = suggested_weights(reports[0])
    if as_json:
        print(json.dumps(as_dict(reports, groups, scheme), indent=2))
    else:
        print_report(reports, groups, scheme, weights, Console(highlight=False))
    if html_file is not None:
        _write(html_file, page(config.name, reports, groups, scheme, weights), "--html")
    return EXIT_DATA if any(group.severity == "error" for group in groups) else 0


def _collect(data: DataConfig) -> tuple[dict[str, Sequence[ImagePair]], list[Finding]]:
    """The pairs of both splits, as far as there are any, and what was wrong before a file was opened.

    Raises:
        DataError: neither split has a pair.
    """
    splits: dict[str, Sequence[ImagePair]] = {}
    findings: list[Finding] = []
    errors: list[DataError] = []
    for name in dict.fromkeys(split_names(data)):
        try:
            splits[name] = build_pairs(data, name)
        except DataError as error:
            splits[name] = error.pairs if isinstance(error, PartialError) else ()
            errors.append(error)
            kind = "link" if isinstance(error, OutsideError) else "pairs"
            findings.append(Finding("error", kind, name, str(error)))
        if splits[name]:
            findings += _beside(data, name)
    if not any(splits.values()):
        raise errors[0]
    return splits, findings


def _beside(data: DataConfig, split: str) -> Iterator[Finding]:
    """What lies beside the pairs: worth a look."""
    left = leftovers(build_location(data), split)
    for paths, what in (
        (left.masks, "masks have no image"),
        (left.others, "files among the images are none by their name"),
        (left.hidden, "hidden files are left out"),
    ):
        if paths:
            yield Finding("warning", "file", split, f"{split}: {len(paths)} {what}: {_some(paths)}")


def _some(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _MAX_SHOWN} more" if len(paths) > _MAX_SHOWN else ""
    return ", ".join(shown(path) for path in paths[:_MAX_SHOWN]) + more


def grouped(reports: Sequence[SplitReport], before: Sequence[Finding] = ()) -> list[Group]:
    """All findings by kind and split: errors first, then in the order of `GROUPS`; in each the worst first."""
    found: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in (*before, *(f for report in reports for f in report.findings)):
        found.setdefault((finding.severity, finding.kind, finding.split), []).append(finding)
    unknown = {report.split: report.unknown_ids for report in reports}
    order = list(GROUPS)
    groups = []
    for (severity, kind, split), findings in sorted(found.items(), key=lambda i: (i[0][0], order.index(i[0][1]))):
        ids = unknown.get(split)
        if kind == "ids" and ids is not None:
            summary = summary_of_ids(ids)
        else:
            summary = findings[0].message if len(findings) == 1 else f"{len(findings)} {GROUPS[kind]}"
        worst_first = tuple(sorted(findings, key=lambda finding: -finding.num_px))
        groups.append(Group(severity, split, kind, worst_first, summary))
    return groups


def suggested_weights(report: SplitReport) -> dict[str, list[float]]:
    """Class weights by every rule, from a split's masks; empty where no pixel is valid."""
    if not any(report.frequencies.pixels):
        return {}
    return {rule: class_weights(rule, report.frequencies) for rule in RULES}


def as_dict(reports: Sequence[SplitReport], groups: Sequence[Group], scheme: ClassScheme) -> dict[str, Any]:
    """The findings as plain values for `--json`."""
    findings = [finding for group in groups for finding in group.findings]
    return {
        "errors": sum(f.severity == "error" for f in findings),
        "warnings": sum(f.severity == "warning" for f in findings),
        "classes": list(scheme.names),
        "class_weights": suggested_weights(reports[0]),
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
        "pixels": list(report.frequencies.pixels),
        "images": list(report.frequencies.images),
        "ignored_px": report.frequencies.ignored_px,
        "unknown_ids": []
        if unknown is None
        else [{"id": i, "pixels": n, "masks": unknown.masks[i]} for i, n in unknown.pixels.items()],
        "likely_cause": None if unknown is None else unknown.cause,
    }


def _by_count(report: SplitReport) -> list[tuple[tuple[int, int], int]]:
    return sorted(report.sizes.items(), key=lambda item: (-item[1], item[0]))


def print_report(
    reports: Sequence[SplitReport],
    groups: Sequence[Group],
    scheme: ClassScheme,
    weights: dict[str, list[float]],
    console: Console,
) -> None:
    """Tables of splits and classes, then the findings, errors first."""
    overview = Table("split", "pairs", "masks", "height x width, px", "ignored", box=None, pad_edge=False)
    for report in reports:
        sizes = [f"{height} x {width} ({n})" for (height, width), n in _by_count(report)]
        shown_sizes = ", ".join(sizes[:3]) + (f" and {len(sizes) - 3} more" if len(sizes) > 3 else "")
        total = sum(report.frequencies.pixels) + report.frequencies.ignored_px
        ignored = f"{report.frequencies.ignored_px / total:.1%}" if total else "-"
        name = Text(printable(report.split))
        overview.add_row(name, str(report.num_pairs), str(report.num_masks), shown_sizes or "-", ignored)
    console.print(overview)
    console.print()
    console.print(_class_table(reports, scheme, weights))
    for severity in ("error", "warning"):
        found = [group for group in groups if group.severity == severity]
        count = sum(len(group.findings) for group in found)
        if found:
            console.print(f"\n{count} {severity}{'s' if count > 1 else ''}")
        for group in found:
            _print_group(group, console)
    if not groups:
        console.print("\nnothing to complain about")


def _print_group(group: Group, console: Console) -> None:
    lines = [f"  [{group.split}] {group.kind}: {group.summary}"]
    if len(group.findings) > 1:
        lines += [f"    {finding.message}" for finding in group.findings[:_MAX_SHOWN]]
        if len(group.findings) > _MAX_SHOWN:
            lines.append(f"    and {len(group.findings) - _MAX_SHOWN} more: --json or --html FILE show all")
    for line in "\n".join(lines).splitlines():
        console.print(Text(printable(line)), soft_wrap=True)


def _class_table(reports: Sequence[SplitReport], scheme: ClassScheme, weights: dict[str, list[float]]) -> Table:
    """Share of pixels and number of images of each class and split, and the weights that the rules give."""
    splits = (Column(Text(f"{printable(report.split)}: pixels / images")) for report in reports)
    table = Table("class", *splits, *weights, box=None, pad_edge=False)
    for index, name in enumerate(scheme.names):
        cells = []
        for report in reports:
            total = sum(report.frequencies.pixels)
            share = f"{report.frequencies.pixels[index] / total:.2%}" if total else "-"
            cells.append(f"{share} / {report.frequencies.images[index]}")
        table.add_row(Text(printable(name)), *cells, *(f"{column[index]:.3g}" for column in weights.values()))
    return table


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}: choose another {option}") from None
