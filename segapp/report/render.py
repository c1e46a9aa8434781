"""HTML pages from the templates next to this module; each page is one file without scripts or external references."""

import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from segapp.errors import storage_errors
from segapp.run import words
from segapp.run.files import write_atomic
from segapp.run.words import printable
from segapp.scores import NOT_FINITE, count_scored, of_classes, scored_of, with_count


def render(template: str, values: dict[str, Any]) -> str:
    """Return a page from a template; values other than markup are made printable and escaped."""
    environment = Environment(
        loader=PackageLoader("segapp.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )  # fmt: skip
    environment.filters.update(
        number=lambda value: words.number(value, 4),
        with_count=with_count,
        of_classes=lambda iou: of_classes(count_scored(iou), len(iou)),
        over=lambda iou, name: "" if (over := scored_of(name, iou)) is None else f", {of_classes(*over)}",
        loss=lambda value, is_known: NOT_FINITE if value is None and is_known else words.number(value, 4),
        percent=lambda value: "-" if value is None else f"{100 * value:.1f} %",
        gib=words.gib,
        duration=words.duration,
        split=words.dots,
        share=words.share_text,
        clock=lambda t: time.strftime("%Y-%m-%d %H:%M", time.localtime(t)),
    )
    return environment.get_template(template).render(**values)


def save_page(out: Path, page: str) -> None:
    with storage_errors(out):
        write_atomic(out, page)
