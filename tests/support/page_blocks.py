"""The code blocks of README.md and the pages of `segapp/docs`, and how an output differs from the one on its page."""

from __future__ import annotations

import difflib
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


_CLASSES = (
    "bicycle|bicyclist|building|bus|car|fence|motorcycle|pavement|pedestrian|person|pole|rider|road|sidewalk|sign|sky|"
    "terrain|traffic light|traffic sign|train|tree|truck|vegetation|wall|"
    "construction|flat|human|nature|object|vehicle"
)
_ENDINGS = "csv|gpkg|html|jpg|json|jsonl|log|mp4|npy|npz|onnx|png|pt|pt2|pth|py|safetensors|svg|tif|txt|yaml"
_KINDS = [
    (rf"^( *)(?:{_CLASSES})(?=  )", r"\1CLASS"),  # tables of classes and groups are sorted by score
    (r"(?:\s+#+)?(?:\s+=+)?$", " BAR"),
    (r"(?<=\|)[A-Za-z]*\.{9,}(?=\|)|(?<=\|)[ ▁-█]*(?: BAR)?$", "BAR"),
    (r"-{10,}", "BAR"),
    (r"\s+", " "),
    (r" BAR$", ""),
    (rf"(?:[\w.~-]*/)*[\w.-]+\.(?:{_ENDINGS})\b|(?:\b(?:runs|data|photos|out)|(?<![\w.)]))/[\w./-]+", "PATH"),
    (r"\bis (?:better|worse) than\b", "COMPARES WITH"),
    (r"\bdemo-\d+\b", "demo"),  # a second run of the same config
    (r"\b[0-9a-f]{12,}\b", "HASH"),
    (r"\b\d+(?:x\d+)+\b", "SIZE"),
    (r"(?<![\w.+-])[+-]?\d+(?:[.,]\d+)* ?[KMGT]?i?B\b", "BYTES"),
    (r"\b\d+(?:\.\d+)? ?(?:ms|s|min|h)(?:\d+[ms])*\b(?!/)|\b\d+[dhm](?:\d+[hms]\w*)?\b", "TIME"),
    (r"(?<![\w.])\d+\.\d+\.\d+[\w.+]*", "VERSION"),
    (r"(?<![\w.])(?:(?<![\w+-])[+±-])?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", "N"),
    (r"(?<= )(?:-|absent)(?= |$)", "N"),  # a cell without a number
]
"""What stands for a kind, in the order of replacement."""

_ANY_LINES = r"(?:[^\n]*\n)*?"


def kind(line: str) -> str:
    """Return a line with each number, time, size, path, hash and bar replaced by its kind."""
    for pattern, name in _KINDS:
        line = re.sub(pattern, name, line.rstrip())
    return line


def difference(output: str, transcript: str) -> str:
    """Return how the lines of an output differ from those of a transcript; empty if they have the same kinds.

    Numbers, times, sizes, paths, hashes and bars stand for their kinds, and neighbors of one kind count once, because
    a shorter run prints fewer of them. In the transcript, a line `...` stands for any lines, `...` in a line for any
    words, and a line of the output may be broken after 90 characters or more.
    """
    shown, promised = _kinds(output), _kinds(transcript)
    pattern, before = "", ""
    for i, (line, is_long) in enumerate(promised):
        if line.strip() == "...":
            pattern, before = pattern + _ANY_LINES, promised[i - 1][0] if i else ""
            continue
        words = r"[^\n]*?".join(re.escape(part) for part in line.split("...")) + ("[\n ]" if is_long else "\n")
        is_again = line == before  # lines of one kind around the cut may be neighbors in the output
        pattern = f"{pattern.removesuffix(_ANY_LINES)}(?:{_ANY_LINES}{words})?" if is_again else pattern + words
        before = ""
    if re.fullmatch(pattern, "".join(f"{line}\n" for line, _ in shown)):
        return ""
    found = difflib.ndiff([line for line, _ in promised], [line for line, _ in shown])
    return "\n".join(line for line in found if line[0] in "+-")


def _kinds(text: str) -> list[tuple[str, bool]]:
    """Return the kind of each line, neighbors of one kind once, and if the line has at least 90 characters.

    The folders of the tests have smaller configs of the shipped names, about which the program prints a note.
    """
    lines = [line for line in text.strip("\n").splitlines() if not line.startswith("note: reading ")]
    found = [(kind(line), len(line) >= 90) for line in lines]
    return [line for i, line in enumerate(found) if i == 0 or line[0] != found[i - 1][0]]
