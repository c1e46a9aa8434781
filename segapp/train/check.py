"""`segapp check`: what the data doctor found, for a terminal, as JSON, or as one HTML file with pictures."""

from __future__ import annotations

import base64
import html
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from segapp.config import DataConfig, RunConfig
from segapp.datasets.doctor import Finding, SplitReport, examine
from segapp.datasets.files import ImagePair
from segapp.datasets.formats import ClassScheme, find_pairs
from segapp.datasets.masks import read_image
from segapp.errors import DataError, StorageError
from segapp.run.text import printable
from segapp.train.build import build_scheme, split_names
from segapp.train.class_weights import RULES, class_weights

EXIT_DATA = 3
_MAX_SHOWN = 20
_MAX_PICTURES = 60
_THUMBNAIL_PX = 240


def check_data(config: RunConfig, *, as_json: bool, html_file: Path | None) -> int:
    """Examines a config's data and tells what was found.

    Args:
        config: its data section says where and what.
        as_json: print JSON instead of tables.
        html_file: write a page there too.

    Returns:
        0, or 3 where there is an error.

    Raises:
        DataError: there is no data to examine.
        StorageError: the page cannot be written.
    """
    scheme = build_scheme(config.data)
    splits = {name: _pairs(config.data, name) for name in dict.fromkeys(split_names(config.data))}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=sum(map(len, splits.values())))
        reports = examine(
            splits,
            scheme,
            crop_px=config.data.crop_px,
            threads=os.cpu_count() or 1,
            progress=lambda: bar.advance(task),
        )
    if as_json:
        print(json.dumps(as_dict(reports, scheme), indent=2))
    else:
        print_report(reports, scheme, Console(highlight=False))
    if html_file is not None:
        _write(html_file, as_html(config.name, reports, scheme))
    return EXIT_DATA if any(f.severity == "error" for report in reports for f in report.findings) else 0


def _pairs(data: DataConfig, split: str) -> Sequence[ImagePair]:
    return find_pairs(
        data.format,
        data.root,
        split,
        image_dir=data.image_dir,
        mask_dir=data.mask_dir,
        image_suffix=data.image_suffix,
        mask_suffix=data.mask_suffix,
        allow_outside_root=data.allow_outside_root,
    )


def suggested_weights(report: SplitReport) -> dict[str, list[float]]:
    """Class weights by every rule, from a split's masks; empty where no pixel is valid."""
    if not any(report.frequencies.pixels):
        return {}
    return {rule: class_weights(rule, report.frequencies) for rule in RULES}


def as_dict(reports: Sequence[SplitReport], scheme: ClassScheme) -> dict[str, Any]:
    """The findings as plain values for `--json`."""
    findings = [finding for report in reports for finding in report.findings]
    return {
        "errors": sum(f.severity == "error" for f in findings),
        "warnings": sum(f.severity == "warning" for f in findings),
        "classes": list(scheme.names),
        "class_weights": suggested_weights(reports[0]),
        "splits": {
            report.split: {
                "pairs": report.num_pairs,
                "masks": report.num_masks,
                "sizes": [{"size_px": list(size), "images": n} for size, n in _by_count(report)],
                "pixels": list(report.frequencies.pixels),
                "images": list(report.frequencies.images),
                "ignored_px": report.frequencies.ignored_px,
            }
            for report in reports
        },
        "findings": [
            {
                "severity": f.severity,
                "kind": f.kind,
                "split": f.split,
                "message": printable(f.message),
                "image": None if f.pair is None else printable(str(f.pair.image)),
                "mask": None if f.pair is None or f.pair.mask is None else printable(str(f.pair.mask)),
            }
            for f in findings
        ],
    }


def _by_count(report: SplitReport) -> list[tuple[tuple[int, int], int]]:
    return sorted(report.sizes.items(), key=lambda item: (-item[1], item[0]))


def print_report(reports: Sequence[SplitReport], scheme: ClassScheme, console: Console) -> None:
    """Tables of splits and classes, then the findings, errors first."""
    overview = Table("split", "pairs", "masks", "height x width, px", "ignored", box=None, pad_edge=False)
    for report in reports:
        sizes = [f"{height} x {width} ({n})" for (height, width), n in _by_count(report)]
        shown = ", ".join(sizes[:3]) + (f" and {len(sizes) - 3} more" if len(sizes) > 3 else "")
        total = sum(report.frequencies.pixels) + report.frequencies.ignored_px
        ignored = f"{report.frequencies.ignored_px / total:.1%}" if total else "-"
        overview.add_row(report.split, str(report.num_pairs), str(report.num_masks), shown or "-", ignored)
    console.print(overview)
    console.print()
    console.print(_class_table(reports, scheme))
    for severity in ("error", "warning"):
        found = [f for report in reports for f in report.findings if f.severity == severity]
        if found:
            console.print(f"\n{len(found)} {severity}{'s' if len(found) > 1 else ''}")
        for finding in found[:_MAX_SHOWN]:
            line = f"  [{finding.split}] {finding.kind}: {printable(finding.message)}"
            console.print(Text(line), soft_wrap=True)
        if len(found) > _MAX_SHOWN:
            console.print(f"  and {len(found) - _MAX_SHOWN} more: --json or --html FILE show all")
    if not any(report.findings for report in reports):
        console.print("\nnothing to complain about")


def _class_table(reports: Sequence[SplitReport], scheme: ClassScheme) -> Table:
    """Share of pixels and number of images of each class and split, and the weights that the rules give."""
    weights = suggested_weights(reports[0])
    table = Table("class", *(f"{r.split}: pixels / images" for r in reports), *weights, box=None, pad_edge=False)
    for index, name in enumerate(scheme.names):
        cells = []
        for report in reports:
            total = sum(report.frequencies.pixels)
            share = f"{report.frequencies.pixels[index] / total:.2%}" if total else "-"
            cells.append(f"{share} / {report.frequencies.images[index]}")
        table.add_row(Text(printable(name)), *cells, *(f"{column[index]:.3g}" for column in weights.values()))
    return table


def as_html(name: str, reports: Sequence[SplitReport], scheme: ClassScheme) -> str:
    """One self-contained page: tables, and the findings with small pictures of the images they are about."""
    console = Console(record=True, file=io.StringIO(), width=120)
    print_report(reports, scheme, console)
    tables = html.escape(console.export_text())
    findings = sorted((f for report in reports for f in report.findings), key=lambda f: f.severity)
    rows = "\n".join(_html_row(f, is_pictured=i < _MAX_PICTURES) for i, f in enumerate(findings))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>segapp check: {html.escape(name)}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
pre {{ overflow-x: auto; }} td {{ padding: .4rem .8rem .4rem 0; vertical-align: top; overflow-wrap: anywhere; }}
.error {{ color: #c62828; }} .warning {{ color: #b26a00; }} img {{ max-width: {_THUMBNAIL_PX}px; }}
</style></head><body><h1>segapp check: {html.escape(name)}</h1>
<pre>{tables}</pre><h2>{len(findings)} findings</h2><table>{rows}</table></body></html>
"""


def _html_row(finding: Finding, *, is_pictured: bool) -> str:
    picture = _thumbnail(finding.pair.image) if is_pictured and finding.pair is not None else None
    image = f'<img alt="" src="data:image/jpeg;base64,{picture}">' if picture else ""
    words = html.escape(printable(finding.message))
    kind = html.escape(f"{finding.severity} {finding.kind} in {finding.split}")
    return f'<tr><td>{image}</td><td><b class="{finding.severity}">{kind}</b><br>{words}</td></tr>'


def _thumbnail(path: Path) -> str | None:
    """A small JPEG of an image in base64; None where it cannot be read."""
    try:
        image = read_image(path)
    except DataError:
        return None
    factor = _THUMBNAIL_PX / max(image.shape[:2])
    small = cv2.resize(image, None, fx=min(1.0, factor), fy=min(1.0, factor), interpolation=cv2.INTER_AREA)
    _, data = cv2.imencode(".jpg", small[..., ::-1])
    return base64.b64encode(data.tobytes()).decode("ascii")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}: choose another --html") from None
