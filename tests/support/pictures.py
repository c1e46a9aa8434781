"""The SVG pictures of the pages that are made from texts, with their font inside: a code host loads nothing for them.

The font is DejaVu Sans Mono, made small with fontTools: ASCII, lines, blocks, some symbols, and all of braille,
drawn as two columns of four dots.
"""

from __future__ import annotations

import base64
import html
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from segapp.docs.pages import find_page
from tests.support import ROOT

PLAN_PICTURE = ROOT / "segapp" / "docs" / "pictures" / "plan.svg"
SCREEN = ROOT / "tests" / "tui" / "snapshots" / "live-120x36.svg"
FONTS = Path(__file__).parent / "fonts"
WEIGHTS = {"normal": "mono.woff", "bold": "mono-bold.woff"}
FAMILY = "segapp mono"
_PLAN_STYLE = """
text { font: 13px "segapp mono", monospace; fill: #1f2328; white-space: pre } rect { fill: #f6f8fa; stroke: #d1d9e0 }
.strong { font-weight: bold } .good { fill: #1a7f37; font-weight: bold } .bad { fill: #c2272d } .quiet { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } rect { fill: #161b22; stroke: #3d444d }
  .good { fill: #4cc365 } .bad { fill: #ff8a80 } .quiet { fill: #9198a1 }
}"""
_PLAN_CHARS, _LINE_PX, _CHAR_PX, _EDGE_PX = 100, 18, 7.83, 16
"""Columns of the terminal in the picture, and sizes: a character of DejaVu Sans Mono is 0.602 times as wide as high."""


def plan_picture() -> str:
    """Return the table of plan on the page `plan`, and the lines below it, as an SVG for a light and a dark theme."""
    command, _, output = find_page("plan")[0].path.read_text().partition("```sh\n")[2].partition("```text\n")
    lines = [("$ " + command.partition("\n")[0], "strong"), ("", "")]
    for line in output.partition("\n\n...")[0].splitlines():
        is_bad, is_best = "won't fit" in line, line.endswith("<- best")
        kind = "good" if is_best else "bad" if is_bad else "strong" if line.startswith("gpu0_bsz") else ""
        lines += [(part, kind) for part in textwrap.wrap(line, _PLAN_CHARS, drop_whitespace=False) or [""]]
    width, height = round(_PLAN_CHARS * _CHAR_PX) + 2 * _EDGE_PX, len(lines) * _LINE_PX + 2 * _EDGE_PX
    texts = [
        f'<text x="{_EDGE_PX}" y="{_EDGE_PX + 13 + i * _LINE_PX}" class="{kind}">{html.escape(text.rstrip())}</text>'
        for i, (text, kind) in enumerate(lines)
        if text
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" xml:space="preserve">\n<style>{font_style()}{_PLAN_STYLE}</style>\n'
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    )
    return "\n".join([head, *texts, "</svg>\n"])


def tui_picture() -> str:
    """Return the stored screen of a live run with simulated GPUs, which the tests of the TUI compare."""
    svg = re.sub(r"\s*@font-face \{.*?\}", "", SCREEN.read_text(encoding="utf-8"), flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;]*;", f'font-family: "{FAMILY}", monospace;', svg)
    return svg.replace("<style>", f"<style>\n{font_style()}", 1)


PICTURES: dict[Path, Callable[[], str]] = {PLAN_PICTURE: plan_picture, PLAN_PICTURE.with_name("tui.svg"): tui_picture}


def font_style() -> str:
    """Return the rules of CSS that define the font `FAMILY`."""
    return "\n".join(
        f'@font-face {{ font-family: "{FAMILY}"; font-weight: {weight}; '
        f"src: url(data:font/woff;base64,{base64.b64encode((FONTS / name).read_bytes()).decode()}) }}"
        for weight, name in WEIGHTS.items()
    )
