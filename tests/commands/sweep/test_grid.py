"""The words of a sweep's grid as axes: lists, ranges, brackets, quotes, and what is refused."""

from __future__ import annotations

import pytest

from segapp.commands.sweep.grid import combinations, parse_axes, parse_values
from segapp.commands.sweep.plan import run_name
from segapp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.001,0.003", ["0.001", "0.003"]),
        ("0..3", ["0", "1", "2", "3"]),
        ("-1..1, 7", ["-1", "0", "1", "7"]),
        ("2,2,2..3", ["2", "3"]),
        ("[96,192]", ["[96,192]"]),
        ("[96, 192], [128, 256]", ["[96, 192]", "[128, 256]"]),
        ("{a: 1, b: [2, 3]},null", ["{a: 1, b: [2, 3]}", "null"]),
        ('unet, \'a, b\', "c\\", d"', ["unet", "'a, b'", '"c\\", d"']),
        ("it's,'it''s, so'", ["it's", "'it''s, so'"]),
        ("'0..4'", ["'0..4'"]),
        ("../data,a..b", ["../data", "a..b"]),
    ],
)
def test_values_are_split_at_outer_commas(text: str, values: list[str]) -> None:
    assert parse_values(text, "key") == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,,2", "expected the node content"),
        ("", "a value is missing"),
        ("4..0", "must go up from a to b"),
        ("0..999999999999", "at most 10000"),
        ("0.1..0.5", "whole numbers"),
        ("[1,2", "close brackets and quotes"),
        ("1],2", "close brackets and quotes"),
        ("'a,b", "close brackets and quotes"),
    ],
)
def test_unusable_values_are_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_values(text, "key")


def test_all_unusable_words_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_axes(["seed", "seed=0", "seed=1", "optim.lr=1,,2", "name=a,b"])
    for part in ("4 words", "'seed' is not KEY", "seed is given twice", "optim.lr=1,,2", "named by their settings"):
        assert part in str(refused.value)


def test_last_key_changes_fastest_and_size_is_limited() -> None:
    grid = combinations({"a": ["1", "2"], "b": ["x", "y"]})
    assert [tuple(point.values()) for point in grid] == [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]
    assert combinations({}) == [{}]
    with pytest.raises(ConfigError, match="the grid has 20000 runs"):
        combinations({"seed": [str(i) for i in range(10_000)]}, num_configs=2)


def test_run_names_are_short_and_distinct() -> None:
    assert run_name("", {"optim.lr": "1e-3", "seed": "0"}, set()) == "lr1e-3-seed0"
    assert run_name("data-fold1", {}, set()) == "data-fold1"
    assert run_name("", {}, set()) == "run"
    assert run_name("", {"model.name": "unet", "loss.name": "ce"}, set()) == "model.name_unet-loss.name_ce"
    again = run_name("", {"seed": "0"}, {"seed0"})
    assert again.startswith("seed0-")
    assert len(run_name("", {"data.root": "x" * 300}, set())) < 100
    assert run_name("", {"data.root": "../a/b c/"}, set()) == "root_b_c"
