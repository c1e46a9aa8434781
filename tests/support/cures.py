"""Sentences of the product that tell a user what to do: found in the code, and followed as they are written.

`tests/cures.txt` has parts of these sentences below the test that does what they say, `[tests/x.py::test_y]`, or below
the reason why none does. A test compares the words of each of the others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support import ROOT

TABLE = ROOT / "tests" / "cures.txt"
_RUN = 15

_VERBS = (
    "add ask call change check choose close convert copy correct cut define delete divide draw end export free give "
    "halve import increase install keep label leave list load look lower make map mount move name omit open pass place "
    "point put raise read rebuild reduce register remove rename repair repeat replace report restart restore resume "
    "return run save scale see send set shorten stack start stop take train try unset use wait warp write"
)
_CURE = re.compile(rf"(?:^|[:;,.)] |\bor |\band )(?:{'|'.join(_VERBS.split())})\b(?! (?:of|is|are|was)\b)[^:]")


def followed(words: Sequence[str], way: Sequence[str]) -> list[str]:
    """Return overrides after the user did what a cure says; `-KEY` leaves a key out, others replace its value."""
    names = {word.removeprefix("-").partition("=")[0] for word in way}
    kept = [word for word in words if word.partition("=")[0] not in names]
    return [*kept, *(word for word in way if not word.startswith("-"))]


def cures() -> dict[str, str]:
    """Return each sentence with an imperative in the code, `{}` for a value, and its module: `config/load.py`."""
    found = {}
    for path in sorted((ROOT / "segapp").rglob("*.py")):
        if not {"docs", "onboarding", "tui", "view"} & set(path.parts):  # no advice, or about files of other programs
            found |= dict.fromkeys(_sentences(path), str(path.relative_to(ROOT / "segapp")))
    return found


def _sentences(path: Path) -> Iterator[str]:
    """Yield the texts of a module that hold an imperative, without docstrings and the words of command lines."""
    tree = ast.parse(path.read_text())
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
    parts = {id(part) for node in texts if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part != node}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in texts:
        values = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in values)
        if id(node) not in parts and isinstance(text, str) and _CURE.search(text) and text.count(" ") > 1:
            yield text


def table() -> Iterator[tuple[str, str]]:
    """Yield the test, or the reason for none, and the part of a sentence of each line of the table."""
    head = ""
    for line in filter(None, TABLE.read_text().splitlines()):
        if line.startswith("["):
            head = line[1:-1]
        else:
            yield head, line


def compared_words() -> set[str]:
    """Return all runs of `_RUN` characters in the texts of tests, without the backslashes of regular expressions."""
    texts = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {run for text in texts for run in _runs(text.replace("\\", ""))}


def is_compared(text: str, known: set[str]) -> bool:
    """Return True if a test holds some words of a sentence."""
    return any(run in known for part in text.split("{}") for run in _runs(part))


def _runs(text: str) -> Iterator[str]:
    return (text[start : start + _RUN] for start in range(len(text) - _RUN + 1))
