"""The page of `segapp check --html`: one file, with tables, bars, and pictures of the worst of each kind of finding."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.doctor import Finding, SplitReport
from segapp.datasets.files import open_bytes, read_bytes
from segapp.datasets.layouts.formats import ClassScheme
from segapp.datasets.masks import ID_MODES, read_image
from segapp.errors import DataError
from segapp.run.text import printable

if TYPE_CHECKING:
    from segapp.commands.check import Group

_MAX_PICTURED = 6
_MAX_LISTED = 500
_THUMBNAIL_PX = 240
_UNKNOWN_COLOR = (255, 0, 0)
_NO_ID = -(2**31)

_STYLE = f"""
:root {{ color-scheme: light dark; --error: #c62828; --warning: #b26a00; --line: #8884; --bar: #4a7fb5; }}
@media (prefers-color-scheme: dark) {{ :root {{ --error: #ff8a80; --warning: #ffb74d; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
table {{ border-collapse: collapse; }} th {{ text-align: left; font-weight: 600; }}
td, th {{ padding: .25rem 1.2rem .25rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
.bar {{ display: inline-block; height: .6rem; background: var(--bar); border-radius: 2px; }}
.swatch {{ display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .5rem; }}
section {{ border-left: 4px solid var(--line); padding-left: 1rem; margin: 1.6rem 0; overflow-wrap: anywhere; }}
section.error {{ border-color: var(--error); }} section.warning {{ border-color: var(--warning); }}
section h3 {{ font-size: 1rem; margin: 0; }}
.error h3 {{ color: var(--error); }} .warning h3 {{ color: var(--warning); }}
.cards {{ display: flex; flex-wrap: wrap; gap: 1rem; }} figure {{ margin: .6rem 0; }}
figcaption {{ font-size: .85rem; max-width: {2 * _THUMBNAIL_PX + 8}px; }}
img {{ max-width: {_THUMBNAIL_PX}px; margin-right: 8px; }} ul {{ margin: .4rem 0; padding-left: 1.2rem; }}
"""


def page(
    name: str,
    reports: Sequence[SplitReport],
    groups: Sequence[Group],
    scheme: ClassScheme,
    weights: Mapping[str, Sequence[float]],
) -> str:
    """The page as text.

    Args:
        name: of the config.
        reports: what each split holds.
        groups: the findings, as `grouped` gives them.
        scheme: names and colours of the classes.
        weights: class weights by the name of their rule.
    """
    counts = [sum(len(g.findings) for g in groups if g.severity == severity) for severity in ("error", "warning")]
    found = ", ".join(
        f"{n} {word}{'' if n == 1 else 's'}" for n, word in zip(counts, ("error", "warning"), strict=True)
    )
    sections = "\n".join(_section(group, scheme) for group in groups) or "<p>Nothing to complain about.</p>"
    title = _text(f"segapp check: {name}")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1><p>{found}. In masks, strong red marks ids that are no class, grey marks ignored pixels.</p>
{_splits(reports)}
<h2>Classes</h2>
{_classes(reports, scheme, weights)}
<h2>Findings</h2>
{sections}
</body></html>
"""


def _text(value: object) -> str:
    """Anything as inert text of a page."""
    return html.escape(printable(str(value)))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        marks = (' class="n"' if is_number else "" for is_number in numeric)
        return "<tr>" + "".join(f"<{tag}{m}>{c}</{tag}>" for m, c in zip(marks, cells, strict=True)) + "</tr>"

    return f"<table>{row(header, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


def _splits(reports: Sequence[SplitReport]) -> str:
    rows = []
    for report in reports:
        total = sum(report.frequencies.pixels) + report.frequencies.ignored_px
        sizes = sorted(report.sizes.items(), key=lambda item: -item[1])
        text = ", ".join(f"{height} x {width} ({n})" for (height, width), n in sizes[:5])
        more = f" and {len(sizes) - 5} more" if len(sizes) > 5 else ""
        ignored = f"{report.frequencies.ignored_px / total:.1%}" if total else "-"
        rows.append([_text(report.split), str(report.num_pairs), str(report.num_masks), text + more, ignored])
    header = ["split", "pairs", "masks", "height x width, px (images)", "ignored pixels"]
    return _table(header, rows, [False, True, True, False, True])


def _classes(reports: Sequence[SplitReport], scheme: ClassScheme, weights: Mapping[str, Sequence[float]]) -> str:
    header = ["class", *(_text(f"{report.split}: share of pixels") for report in reports)]
    header += [_text(f"{report.split}: images") for report in reports] + [_text(rule) for rule in weights]
    rows = []
    for index, (name, color) in enumerate(zip(scheme.names, scheme.palette, strict=True)):
        shares = [_share(report, index) for report in reports]
        bars = [f'<span class="bar" style="width:{100 * share:.2f}px"></span> {share:.2%}' for share in shares]
        swatch = f'<span class="swatch" style="background:rgb{tuple(int(c) for c in color)}"></span>'
        images = [str(report.frequencies.images[index]) for report in reports]
        rows.append([swatch + _text(name), *bars, *images, *(f"{column[index]:.3g}" for column in weights.values())])
    return _table(header, rows, [False] * (1 + len(reports)) + [True] * (len(reports) + len(weights)))


def _share(report: SplitReport, index: int) -> float:
    total = sum(report.frequencies.pixels)
    return report.frequencies.pixels[index] / total if total else 0.0


def _section(group: Group, scheme: ClassScheme) -> str:
    pictured = [f for f in group.findings[:_MAX_PICTURED] if f.pair is not None]
    cards = "".join(_card(finding, scheme) for finding in pictured)
    rest = [finding for finding in group.findings if finding not in pictured]
    if len(group.findings) == 1:
        rest = []
    items = "".join(f"<li>{_text(finding.message)}</li>" for finding in rest[:_MAX_LISTED])
    if len(rest) > _MAX_LISTED:
        items += f"<li>and {len(rest) - _MAX_LISTED} more: --json lists all</li>"
    heading = _text(f"{group.severity} in {group.split}: {group.kind}")
    listed = f"<ul>{items}</ul>" if items else ""
    return (
        f'<section class="{group.severity}"><h3>{heading}</h3><p>{_text(group.summary)}</p>'
        f'<div class="cards">{cards}</div>{listed}</section>'
    )


def _card(finding: Finding, scheme: ClassScheme) -> str:
    """A finding with its pictures: the image and its mask, or the two images that are alike."""
    assert finding.pair is not None
    pictures = [_image_thumbnail(finding.pair.image)]
    if finding.other is not None:
        pictures.append(_image_thumbnail(finding.other.image))
    elif finding.pair.mask is not None:
        pictures.append(_mask_thumbnail(finding.pair.mask, scheme))
    images = "".join(f'<img alt="" src="data:image/png;base64,{p}">' for p in pictures if p is not None)
    return f"<figure>{images}<figcaption>{_text(finding.message)}</figcaption></figure>"


def _image_thumbnail(path: Path) -> str | None:
    try:
        return _thumbnail(read_image(path), cv2.INTER_AREA)
    except DataError:
        return None


def _mask_thumbnail(path: Path, scheme: ClassScheme) -> str | None:
    """A mask in the colours of its classes; ids that are none of them in red, ignored pixels in grey."""
    try:
        with open_bytes(read_bytes(path), path) as image:
            stored = np.asarray(image.convert("RGB") if scheme.rgb or image.mode not in ID_MODES else image)
    except Exception:  # a damaged file is what the finding may be about
        return None
    if stored.ndim == 3:
        return _thumbnail(stored.astype(np.uint8), cv2.INTER_NEAREST)
    ids = stored.astype(np.int64)
    table = scheme.table
    train_ids = np.where((ids >= 0) & (ids < len(table)), table[np.clip(ids, 0, len(table) - 1)], _NO_ID)
    colors = np.full((*ids.shape, 3), _UNKNOWN_COLOR, np.uint8)
    colors[train_ids == scheme.ignore_index] = 128
    for train_id, color in enumerate(scheme.palette):
        colors[train_ids == train_id] = color
    return _thumbnail(colors, cv2.INTER_NEAREST)


def _thumbnail(pixels: NDArray[Any], interpolation: int) -> str | None:
    """A small PNG in base64."""
    factor = min(1.0, _THUMBNAIL_PX / max(pixels.shape[:2]))
    size = tuple(max(1, round(side * factor)) for side in (pixels.shape[1], pixels.shape[0]))
    small = cv2.resize(np.ascontiguousarray(pixels), size, interpolation=interpolation)
    is_written, data = cv2.imencode(".png", small[..., ::-1])
    return base64.b64encode(data.tobytes()).decode("ascii") if is_written else None
