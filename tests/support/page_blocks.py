"""The code blocks of README.md and the pages of `segapp/docs`, with what is to be done with each."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from segapp.docs.pages import FOLDER
from tests.support import ROOT

_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>not run|slow): (?P<reason>[^>]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```", re.M | re.S
)


class Block(NamedTuple):
    """A code block of a page."""

    page: Path
    line: int
    """The line of its first line, from 1."""
    language: str
    text: str
    mark: str
    """`not run` or `slow`, else empty."""
    reason: str

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """Return the commands of a shell block, without comments."""
        lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in self.text.splitlines()]
        return [line for line in lines if line]


def page_files() -> list[Path]:
    """Return README.md and all pages."""
    return [ROOT / "README.md", *sorted(FOLDER.rglob("*.md"))]


@functools.cache
def blocks() -> tuple[Block, ...]:
    """Return all blocks, in the order of the pages."""
    found = []
    for path in page_files():
        text = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text[: match.start("text")].count("\n") + 1
            mark, reason = match["mark"] or "", (match["reason"] or "").strip()
            found.append(Block(path, line, match["language"], match["text"], mark, reason))
    return tuple(found)
