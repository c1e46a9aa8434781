"""Compares the output of a command with the transcript on a page, by the kinds of their lines.

Numbers, times, sizes, paths, hashes and bars stand for their kinds, and neighbors of one kind count once, because a
shorter run prints fewer of them. Every other character must agree.

>>> difference("epoch 1/2  loss 2.4\\nepoch 2/2  loss 2.1\\nended: 2 epochs", "epoch 1/7  loss 0.9\\nended: 7 epochs")
''
>>> print(difference("epoch 1/2  cost 2.4", "epoch 1/7  loss 0.9"))
- epoch N/N loss N
+ epoch N/N cost N
"""

from __future__ import annotations

import difflib
import re

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

    A line `...` of the transcript stands for any lines, `...` in a line for any words. A line of the output may be
    broken in the transcript after 90 characters or more.
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
