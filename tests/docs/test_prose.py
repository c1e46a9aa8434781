"""The rules of style of the page `developing` that a program can check, over all prose of the product."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from segapp.docs.pages import FOLDER
from tests.support.prose import (
    DOCSTRING,
    MESSAGE,
    PAGE,
    Text,
    broken_rules,
    findings,
    page_texts,
    prose_files,
    python_texts,
)


def test_prose_keeps_the_rules_of_the_page_developing() -> None:
    assert [str(finding) for path in prose_files() for finding in broken_rules(path)] == []


OWN_COMPONENTS = {"custom model", "loss", "transform"}
COMPONENTS_BEFORE = {"own part", "own reader", "own network", "where both are possible"}
"""Words of a row that the row of the custom component in the glossary explains together."""


def names_of_broken_rules(sentence: str, kind: str = PAGE) -> list[str]:
    return sorted({finding.rule.name for finding in findings(Text(Path("x"), 1, kind, sentence))})


@pytest.mark.parametrize(
    ("sentence", "rules"),
    [
        ("It takes one number a band.", ["S1"]),
        ("A run writes 3 short lines a step.", ["S1"]),
        ("It reads 40 images/s a core.", ["S1"]),
        ("It ends with exit code 8 within a minute.", []),
        ("It is 1, an image is 3; one split shares a pixel.", []),
        ("exit code 8   a rank or a collective", []),
        ("It has one mask and an image.", []),
        ("The state is saved where it can be read.", ["S2"]),
        ("Where a page says more, the line names it.", ["S2"]),
        ("Where are the masks? They are in the folder where it has them.", []),
        ("It is skipped, except where a key is set.", ["S2"]),
        ("Readers find the file where they left it.", []),
        ("The peak is that of one device.", ["S4"]),
        ("It goes\non beside the run.", ["S7"]),
        ("It stands for the class, as a stand-in.", []),
        ("It is told in place of the class, at once, by itself, alone.", ["S7"]),
        ("The colour of a labelled neighbour is recognised.", ["S8"]),
        ("The recognition of a realistic, revised exercise is precise.", []),
        ("A network reads pictures on the screen as an own part.", ["S8"]),
        ("A network file system is slow.", []),
    ],
)
def test_sentences_that_break_a_rule_are_found(sentence: str, rules: list[str]) -> None:
    assert names_of_broken_rules(sentence) == rules


@pytest.mark.parametrize(
    ("sentence", "rules"),
    [
        ("Return the moments, then those of the batch.", ["S4"]),
        ("Args: seed: of the run.", ["S4"]),
        ("Args: seed: seed of the run. Two parts: one of the model.", []),
        ("Return what captures the work.", ["S3"]),
        ("Return the object that says what failed.", []),
    ],
)
def test_docstrings_name_the_thing_and_the_noun(sentence: str, rules: list[str]) -> None:
    assert names_of_broken_rules(sentence, DOCSTRING) == rules


def test_every_wrong_word_of_the_list_that_is_checked_is_found() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|$", (FOLDER / "developing.md").read_text().partition("Word list:")[2], re.M
    )
    assert rows[0][0] == "write"
    checked = [word.partition(" (")[0] for _, wrong in rows[1:15] for word in wrong.split(", ")]
    assert len(checked) > 25
    assert [word for word in checked if not names_of_broken_rules(f"It is {word} here.")] == []


def test_glossary_has_the_words_of_the_word_list() -> None:
    text = (FOLDER / "developing.md").read_text().partition("Word list:")[2]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.M)
    rows = rows[[right.partition(" ")[0] for right, _ in rows].index("custom") :]
    right, wrong = (
        [
            word.strip()
            for row in side
            for word in re.split(r"[;,]", re.sub(r"\([^)]*\)", "", row.partition("; of a ")[0]))
        ]
        for side in zip(*rows, strict=True)
    )
    glossary = re.findall(r"^\| ([^|]+) \|.*\| ([^|]*) \|$", (FOLDER / "reference/glossary.md").read_text(), re.M)
    explained = {word.strip() for own, _ in glossary for word in own.split(",")} | {"`ignore_index`", *OWN_COMPONENTS}
    replaced = {word.strip(" `") for _, others in glossary for word in others.split(",")} | COMPONENTS_BEFORE
    assert len(right) > 20
    assert [word for word in right if not {word, word.removesuffix("s")} & explained] == []
    assert [word for word in wrong if word.removeprefix("the ") not in replaced] == []


def test_every_rule_has_two_examples_that_are_found() -> None:
    section = (FOLDER / "developing.md").read_text().partition("## Style\n")[2].partition("Word list:")[0]
    rows = re.findall(r"^\|([^|]*)\| ([^|]+) \| ([^|]+) \|$", section, re.M)[1:]
    examples: dict[str, list[str]] = {}
    for rule, wrong, _ in rows:
        name = (re.findall(r"\*\*(S\d)\*\*", rule) or [*examples][-1:])[0]
        examples.setdefault(name, []).append(wrong)
    assert list(examples) == [f"S{number}" for number in range(1, 10)]
    assert {len(found) for found in examples.values()} == {2}
    for name in ("S1", "S2", "S7"):
        assert [wrong for wrong in examples[name] if name not in names_of_broken_rules(wrong)] == []


def test_prose_of_a_module_is_found_and_its_code_is_not(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""First line.\n\nIt goes on.\n\n>>> told\n"""\n'
        "raise ValueError(f'{name} stands beside `told` {value}')  # noqa: told\nword = 'alone'  # those of it\n"
    )
    assert [(text.line, text.kind, text.text.strip()) for text in python_texts(path)] == [
        (8, DOCSTRING, "those of it"),
        (1, DOCSTRING, "First line."),
        (3, DOCSTRING, "It goes on."),
        (7, MESSAGE, "{} stands beside `x` {}"),
    ]


def test_prose_of_a_page_is_found_and_its_code_is_not(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Title\n\nA [link](told.md)\n`alone` here.\n\n```sh\ntold\n```\n<!-- told -->\n- one\n  two\n")
    assert [(text.line, text.text.strip()) for text in page_texts(path)] == [
        (1, "# Title"),
        (3, "A [link]\n`x` here."),
        (10, "- one\n  two"),
    ]
