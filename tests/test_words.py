"""Words of closed lists, in the config and on the command line: each with one wrong letter gets "did you mean"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from hypothesis import example, given
from hypothesis import strategies as st

from segapp.cli import app
from segapp.commands.check_part import CHECKS, check_part
from segapp.commands.export import _format
from segapp.config import RunConfig
from segapp.config.load import config_of
from segapp.config.options import BUILT_INS
from segapp.config.words import LISTS_OF_SECTIONS, VALUES_ELSEWHERE, known_keys, words_of
from segapp.docs.pages import find_page, pages
from segapp.errors import SegappError, accepted_words, closest_words, did_you_mean
from segapp.export.write import Format
from segapp.inference.predict.outputs import parse_saved
from segapp.inference.predict.reading import SAVED
from segapp.run.commands import COMMAND_NAMES, SETTINGS, parse_command

MINIMAL = {"name": "x", "data": {"format": "camvid", "root": "data/camvid"}}


def closed_keys() -> Iterator[tuple[str, list[str]]]:
    """Yield each key of the config with words of its own (not null alone), those of the entries of lists too."""
    inside = {"plus": ("loss", "plus", "0"), "groups": ("optim", "groups", "0")}
    entries = [(*inside[name], field) for name, kind in LISTS_OF_SECTIONS.items() for field in kind.model_fields]
    for path in [*known_keys(RunConfig), *entries]:
        words = [word for word in words_of(path) if len(word) > 1]
        if set(words) - {"null"}:
            yield ".".join(path), words


CLOSED = dict(closed_keys())


def misspelled(word: str, position: int, how: str) -> str:
    """Return a word with one letter left out, doubled, replaced, or exchanged with the next."""
    at = position % (len(word) - 1)
    return {
        "left out": word[:at] + word[at + 1 :],
        "doubled": word[:at] + word[at] + word[at:],
        "replaced": word[:at] + ("x" if word[at] != "x" else "y") + word[at + 1 :],
        "exchanged": word[:at] + word[at + 1] + word[at] + word[at + 2 :],
    }[how]


HOW = st.sampled_from(["left out", "doubled", "replaced", "exchanged"])


def config_error(key: str, value: str) -> str:
    """Return the refusal of a value of a key."""
    raw: dict[str, Any] = {**MINIMAL, "data": {**MINIMAL["data"]}}  # type: ignore[dict-item]
    if ".plus.0." in key or ".groups.0." in key:
        section, name, _, field = key.split(".")
        entry = {"pattern": "a"} if name == "groups" else {}
        raw[section] = {name: [{**entry, field: value}]}
        words: list[str] = []
    else:
        words = [f"{key}={value!r}"]
        if key.startswith("distill."):
            words.append("distill.teacher=t")
        section, _, option = key.partition(".options.")
        if option:
            owners = (name for name, built_in in BUILT_INS[section].items() if option in built_in.options.model_fields)
            words.append(f"{section}.name={next(owners)}")
    with pytest.raises(SegappError) as caught:
        config_of(raw, words)
    return str(caught.value)


@given(key=st.sampled_from(sorted(CLOSED)), number=st.integers(0, 20), position=st.integers(0, 20), how=HOW)
@example(key="loss.name", number=0, position=0, how="replaced")
@example(key="optim.name", number=2, position=3, how="doubled")
def test_misspelled_word_of_the_config_is_recognized(key: str, number: int, position: int, how: str) -> None:
    words = CLOSED[key]
    word = words[number % len(words)]
    wrong = misspelled(word, position, how)
    if wrong in (*words, *VALUES_ELSEWHERE.get(key, {})):
        return
    _, asks, rest = config_error(key, wrong).partition(": did you mean ")
    assert asks, f"{key}={wrong}: {config_error(key, wrong)}"
    offered = rest.partition("?")[0]
    assert offered in words
    if [each for each in words if wrong in one_letter_off(each)] == [word]:
        assert offered == word


def one_letter_off(word: str) -> set[str]:
    """Return the words that differ in one letter: left out, added, replaced, or exchanged with the next."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789-_"
    cuts = [(word[:at], word[at:]) for at in range(len(word) + 1)]
    left_out = {a + b[1:] for a, b in cuts if b}
    added = {a + letter + b for a, b in cuts for letter in letters}
    replaced = {a + letter + b[1:] for a, b in cuts if b for letter in letters}
    return left_out | added | replaced | {a + b[1] + b[0] + b[2:] for a, b in cuts if len(b) > 1}


COMMAND_LINE: dict[str, tuple[Callable[[str], object], list[str]]] = {
    "export --format": (lambda word: _format(Path("x"), word), [*get_args(Format), "safetensors"]),
    "export --out": (lambda word: _format(Path(f"x.{word}"), None), [*get_args(Format), "safetensors"]),
    "predict --save": (lambda word: parse_saved([word]), list(SAVED)),
    "check-part --as": (lambda word: check_part("a:b", word, None), list(CHECKS)),
    "ctl COMMAND": (parse_command, list(COMMAND_NAMES)),
    "ctl set": (lambda word: parse_command(f"set {word}=1"), list(SETTINGS)),
    "docs TOPIC": (find_page, [page.topic for page in pages()]),
}
"""What takes a word from a list on the command line, and the list."""


@given(what=st.sampled_from(sorted(COMMAND_LINE)), number=st.integers(0, 99), position=st.integers(0, 20), how=HOW)
def test_misspelled_word_of_the_command_line_is_recognized(what: str, number: int, position: int, how: str) -> None:
    use, words = COMMAND_LINE[what]
    wrong = misspelled(words[number % len(words)], position, how)
    if wrong in words:
        return
    with pytest.raises(SegappError, match=r"did you mean \.?[\w-]+") as caught:
        use(wrong)
    offered = str(caught.value).partition("did you mean ")[2].partition("?")[0].split(" or ")
    assert {each.removeprefix(".") for each in offered} <= set(words)


def test_every_option_with_a_list_is_tried() -> None:
    assert len(CLOSED) > 30
    group: Any = typer.main.get_command(app)
    listed = {
        f"{name} {option.opts[0]}"
        for name, command in group.commands.items()
        for option in command.params
        if "|" in str(option.metavar or "") and option.opts[0].startswith("-") and str(option.metavar).islower()
    }
    assert listed <= set(COMMAND_LINE)
    assert "export --format" in listed


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("diceloss", ["ce", "dice", "lovasz"], ["dice"]),
        ("Focal-Loss", ["ce", "focal"], ["focal"]),
        ("cr", ["ce", "dice"], ["ce"]),
        ("onx", ["pt2", "onnx"], ["onnx"]),
        ("vall", ["train", "val"], ["val"]),
        ("deeplab", ["fcn", "deeplabv3"], ["deeplabv3"]),
        ("zzz", ["ce", "dice"], []),
        ("", ["ce"], []),
    ],
)
def test_closest_word(word: str, known: list[str], meant: list[str]) -> None:
    assert closest_words(word, known) == meant


def test_long_lists_are_not_printed() -> None:
    names = [f"network{number}" for number in range(30)]
    assert accepted_words("netwrok3", names) == "did you mean network3?"
    assert accepted_words("zzz", names).startswith("there are 30, such as network0, network1, ")
    assert accepted_words("zzz", []) == "none exists"
    assert did_you_mean("ab", ["abc", "abd", "xyz"], most=2) == "did you mean abc or abd?"
