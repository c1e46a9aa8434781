"""The code blocks of README.md and the pages of `segapp/docs`, with what is to be done with each."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from segapp.docs.pages import FOLDER
from tests.support import ROOT

_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>not run|slow|output|not output): (?P<reason>[^>]+) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```",
    re.M | re.S,
)


class Block(NamedTuple):
    """A code block of a page."""

    page: Path
    line: int
    """The line of its first line, from 1."""
    language: str
    text: str
    mark: str
    """`not run`, `slow`, `output` or `not output`, else empty."""
    reason: str
    """Reason of `not run`, `slow` and `not output`; of `output`, the commands that print the text."""
    source: Block | None
    """The block before, if nothing is between the two."""

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """Return the commands of a shell block, without comments, or those that print a transcript."""
        if self.language == "text":
            if self.mark == "output":
                return self.reason.split(" && ")
            return self.source.commands() if self.source and self.is_transcript else []
        lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in self.text.splitlines()]
        return [line for line in lines if line] if self.language in ("sh", "bash") else []

    @property
    def is_transcript(self) -> bool:
        """True for a text that a command prints: it is marked with the command, or follows a block of one command."""
        after_command = self.source is not None and self.source.language in ("sh", "bash")
        return self.language == "text" and (self.mark == "output" or (not self.mark and after_command))


def page_files() -> list[Path]:
    """Return README.md and all pages."""
    return [ROOT / "README.md", *sorted(FOLDER.rglob("*.md"))]


@functools.cache
def blocks() -> tuple[Block, ...]:
    """Return all blocks, in the order of the pages."""
    found = []
    for path in page_files():
        text = path.read_text(encoding="utf-8")
        block, end = None, 0
        for match in _BLOCK.finditer(text):
            line = text[: match.start("text")].count("\n") + 1
            mark, reason = match["mark"] or "", (match["reason"] or "").strip()
            source = block if not text[end : match.start()].strip("`\n") else None
            block, end = Block(path, line, match["language"], match["text"], mark, reason, source), match.end()
            found.append(block)
    return tuple(found)
