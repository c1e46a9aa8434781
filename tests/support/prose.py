"""The rules of style that a program can check, over pages, messages, descriptions, docstrings and comments.

The rules and the word list are on the page `developing`. `python -m tests.support.prose [PART OF A PATH ...]` prints
the places that break them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from segapp.docs.pages import FOLDER
from tests.support import ROOT

PAGE, MESSAGE, DOCSTRING = "page", "message", "docstring"
_PAGES_AND_MESSAGES = (PAGE, MESSAGE)
_EVERYWHERE = (PAGE, MESSAGE, DOCSTRING)

_COUNT = r"(?:one|two|three|four|five|six|seven|eight|nine|ten|\d+(?:[.,]\d+)*)"
_QUANTITY = r"(?:images|pixels|steps|frames|lines|bytes|[KMGT]i?B|seconds|minutes|hours|ms|s)(?:/s)?"
_NO_NOUN = (
    r"(?!(?:within|in|of|for|to|is|are|was|has|have|after|before|with|without|under|as|at|on|by|or|and|if|from|than"
    r"|gives|makes|shares?|returned|reads?)\b)"
)
_UNIT = (
    r"(?:band|batch|block|call|card|cell|channel|class|color|column|core|day|device|epoch|evaluation|file|fold|frame|GPU|group"
    r"|hour|image|iteration|key|layer|line|machine|mask|micro-batch|minute|month|name|node|page|pane|parameter|pixel|process"
    r"|rank|replica|row|run|second|split|stage|step|tensor|thread|tile|update|value|week|window|worker)"
)
_WORD = r"(?:it|they|this|that|one|the \w+|an? \w+|\w+)"
_CAN = r"(?:can|may|could|has|have|does|do|exists?|needs?|allows?|supports?|requires?)"
_NO_PLACE = r"(?<!know)(?<!says)(?<!said)(?<!shows)(?<!place)(?<!folder)(?<!point)(?<!points)(?<!,)"
_NETWORK_OF_COMPUTERS = "(?:file ?system|address(?:e)?|share|drive|card|interface|connection|traffic|storage|cable)"
_BRITISH = (
    r"behaviour|centr(?:e|es|ed)\b|favour|honour|licence|labell(?:ed|ing|er)|cancell(?:ed|ing)|modell(?:ed|ing)|travell\w"
    r"|grey(?:scale|s)?\b|artefact|judgement|whilst|amongst|fulfil\b|(?<!\[)\bdistils?\b|analys(?:e|es|ed|ing)\b"
    r"|(?:capital|final|general|initial|local|maxim|minim|normal|optim|organ|parametr|quant|random|raster|real|recogn"
    r"|serial|special|standard|summar|synchron|util|visual)is(?:e|es|ed|ing|ation)\b"
)


class Rule(NamedTuple):
    """A rule that a pattern holds."""

    name: str
    pattern: str
    advice: str
    kinds: tuple[str, ...] = _EVERYWHERE


RULES = (
    Rule("S1", rf"\b(?:{_COUNT}(?: {_NO_NOUN}[\w-]+){{0,2}}|{_QUANTITY}) an? {_UNIT}\b", "write 'per'"),
    Rule("S2", r"(?:^|[.:;!?] )Where [^.?]*,[^.?]*(?:[.]|$)", "write 'if' or 'when'"),
    Rule("S2", r"\b(?:except|only|but|else|less|more|also) where\b", "write 'if', 'when' or 'unless'"),
    Rule("S2", r"\bwhere (?:there (?:is|are)|possible|necessary|needed|none|nothing|no)\b", "write 'if' or 'when'"),
    Rule("S2", rf"{_NO_PLACE} where {_WORD} {_CAN}\b", "write 'if' or 'when'"),
    Rule("S3", r"\b(?:Return|Yield|Restore|Load|Record|Free) what\b", "name the thing", (MESSAGE, DOCSTRING)),
    Rule("S4", r"\b(?:that|those) of\b", "name the noun again"),
    Rule("S4", r"\b\w+: (?:of|that) (?:an?|the|all|every|this|each)\b", "name the noun again", (DOCSTRING,)),
    Rule("S7", r"\b(?:go|goes|going|went|gone) on\b", "write 'continue'"),
    Rule("S7", r"\bbeside\b", "write 'next to'"),
    Rule("S7", r"\bin place of\b", "write 'instead of'"),
    Rule("S7", r"\balone\b", "write 'only' or 'on its own'"),
    Rule("S7", r"\bat once\b", "write 'at the same time' or 'immediately'"),
    Rule("S7", r"\btold\b", "write 'reported', 'known' or 'distinguished'"),
    Rule("S7", r"\b(?:stands?|stood|standing)\b(?! for\b|-in)", "write 'is'"),
    Rule("S7", r"\bmend(?:s|ed|ing)?\b", "write 'fix'"),
    Rule("S7", r"\bby (?:itself|themselves)\b", "write 'automatically' or 'on its own'"),
    Rule("S8", rf"\b(?:{_BRITISH})|colour|neighbour", "write American English"),
    Rule("S8", r"\bown (?:parts?|readers?|networks?|transforms?)\b", "write 'custom component'", _PAGES_AND_MESSAGES),
    Rule("S8", r"\bpictures?\b", "write 'image'; of a drawing, 'figure' or 'screenshot'", (PAGE,)),
    Rule("S8", rf"(?<!private )\bnetworks?\b(?! (?:{_NETWORK_OF_COMPUTERS}s?|net)\b)",
         "write 'model'; of computers, 'network connection', 'private network' or 'interface'", _PAGES_AND_MESSAGES),
    Rule("S8", r"\b(?:the|a|on|own) screens?\b", "write 'the TUI'", (PAGE,)),
)  # fmt: skip
_COMMENT = re.compile(r"(?:^ *|  )# (?!type:|noqa|fmt:|isort:|mypy:)([^'\"]+)$")
_ANY_RULE = re.compile("|".join(f"(?:{rule.pattern})" for rule in RULES), re.I)


class Text(NamedTuple):
    """A passage of prose, without code."""

    path: Path
    line: int
    kind: str
    text: str


class Finding(NamedTuple):
    """A place that breaks a rule."""

    text: Text
    rule: Rule
    words: str

    def __str__(self) -> str:
        """Return the place, the words and the advice."""
        place = f"{self.text.path.relative_to(ROOT)}:{self.text.line}"
        return f"{place}: {self.rule.name} {' '.join(self.words.split())!r}: {self.rule.advice}"


def page_texts(path: Path) -> Iterator[Text]:
    """Yield the paragraphs of a Markdown file without its code, comments and targets of links."""
    text = path.read_text(encoding="utf-8")
    for pattern in (r"^```.*?^```", r"<!--.*?-->", r"</?[a-z][^<>]*>"):
        text = re.sub(pattern, _blanked, text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]+`", "`x`", text))
    for paragraph in re.finditer(r"^[ \t]*\S.*(?:\n(?![ \t]*(?:[-*|#]|\d+\.|$)).*)*", text, flags=re.M):
        line = text[: paragraph.start()].count("\n") + 1
        yield Text(path, line, PAGE, paragraph[0])


def python_texts(path: Path) -> Iterator[Text]:
    """Yield the docstrings and comments of a module, and its other strings that hold a sentence."""
    source = path.read_text(encoding="utf-8")
    for number, line in enumerate(source.splitlines(), start=1):
        if "# " in line and (comment := _COMMENT.search(line)):
            yield from _paragraphs(path, number, DOCSTRING, comment[1])
    tree = ast.parse(source)
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            inside.add(id(node.value))
            yield from _paragraphs(path, node.lineno, DOCSTRING, node.value.value)
        elif isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield from _messages(path, node.lineno, "".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield from _messages(path, node.lineno, node.value)


def _messages(path: Path, line: int, text: str) -> Iterator[Text]:
    if len(re.findall(r"(?<!\S)[A-Za-z][a-z]+", text)) > 1 and not re.search(r"[;{]\s*\n|<\w+ |\(\?", text):
        yield from _paragraphs(path, line, MESSAGE, text)


def _paragraphs(path: Path, line: int, kind: str, text: str) -> Iterator[Text]:
    text = re.sub(r"``?[^`]+``?", "`x`", text)
    for paragraph in re.finditer(r"(?:^[ \t]*\S.*\n?)+", text, flags=re.M):
        if not paragraph[0].lstrip().startswith(">>>"):
            yield Text(path, line + text[: paragraph.start()].count("\n"), kind, paragraph[0])


def _blanked(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def findings(text: Text) -> Iterator[Finding]:
    """Yield the places of a text that break a rule."""
    plain = re.sub(r"[ \t]{2,}", " | ", re.sub(r"\s*\n\s*", " ", text.text)).strip()
    if _ANY_RULE.search(plain):
        for rule in RULES:
            for found in re.finditer(rule.pattern, plain, re.I if rule.name in ("S7", "S8") else 0):
                if text.kind in rule.kinds:
                    yield Finding(text, rule, found[0])


def prose_files() -> list[Path]:
    """Return the pages, the README and the modules of the product."""
    return [ROOT / "README.md", *sorted((ROOT / "segapp").rglob("*.md")), *sorted((ROOT / "segapp").rglob("*.py"))]


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the prose of a file; of `developing`, without the section of the rules, which quotes the wrong words."""
    found = page_texts(path) if path.suffix == ".md" else python_texts(path)
    if path != FOLDER / "developing.md":
        yield from found
        return
    first, last = (path.read_text().partition(title)[0].count("\n") for title in ("\n## Style\n", "\n## These pages\n"))
    yield from (text for text in found if not first <= text.line <= last)


def broken_rules(path: Path) -> list[Finding]:
    """Return each place of a file that breaks a rule."""
    return [finding for text in texts_of(path) for finding in findings(text)]


def main(words: list[str]) -> None:
    """Print the findings in the files whose path holds one of the words; in all without a word."""
    for path in prose_files():
        if not words or any(word in str(path.relative_to(ROOT)) for word in words):
            for finding in broken_rules(path):
                print(finding)


if __name__ == "__main__":
    main(sys.argv[1:])
