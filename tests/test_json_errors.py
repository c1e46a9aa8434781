"""Errors for programs: their fields, and the JSON that every command with `--json` prints when it fails."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from segapp.__main__ import main
from segapp.cli import app
from segapp.config import load_config
from segapp.errors import ConfigError, DataError

FAILING = {
    "check": ["--config", "no.yaml"],
    "ckpt list": ["no-run"],
    "ckpt verify": ["no-run"],
    "compare": ["no-run"],
    "eval": ["no-run"],
    "ls": ["no-folder/below"],
    "models": ["no-such-network", "--size", "x"],
    "plan": ["--config", "no.yaml"],
    "profile": ["--config", "no.yaml"],
    "status": ["no-run"],
    "sweep": ["--config", "no.yaml"],
    "train": ["--smoke", "--config", "no.yaml"],
}
"""Command with `--json` -> words with which it fails."""

NEVER_FAILS = {"doctor", "ls", "models"}
"""These print what they find, also if that is nothing."""


def json_commands(command: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the commands that have `--json`."""
    if commands := getattr(command, "commands", None):
        for word, each in commands.items():
            yield from json_commands(each, f"{name} {word}".strip())
    elif any("--json" in option.opts for option in command.params):
        yield name


def test_every_command_with_json_is_tried() -> None:
    assert set(json_commands(typer.main.get_command(app))) == set(FAILING) | NEVER_FAILS


@pytest.mark.parametrize("command", sorted(set(FAILING) - NEVER_FAILS))
def test_a_failure_is_json_and_a_sentence(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    as_json = ["--json", "result.json"] if command == "eval" else ["--json"]
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), *FAILING[command], *as_json])
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["exit_code"] == ended.value.code
    assert error["exit_code"] != 0
    assert error["type"].endswith("Error")
    assert error["message"].splitlines()[0] in printed.err
    assert printed.err.startswith("error: ")


def test_a_wrong_key_is_named_with_its_file_and_value(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("name: a\ntrain: {epochs: many}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(str(config))
    fields = raised.value.as_json()
    assert (fields["path"], fields["topic"]) == (str(config), "config-errors")
    assert {(problem["key"], problem["value"]) for problem in fields["problems"]} >= {("train.epochs", "many")}
    config.write_text("name: a\ndata: {format: folder, root: x, classes: [a, b]}\ntrain: {epochs: many}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(str(config))
    fields = raised.value.as_json()
    assert (fields["key"], fields["value"], fields["path"]) == ("train.epochs", "many", str(config))
    assert "problems" not in fields


def test_a_combination_of_values_is_named_with_its_key(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("name: a\ndata: {format: folder, root: x, classes: [a, b]}\nmodel: {freeze_epochs: 3}\n")
    with pytest.raises(ConfigError, match=r"needs model\.freeze") as raised:
        load_config(str(config))
    assert (raised.value.key, raised.value.value) == ("model.freeze_epochs", 3)


def test_fields_survive_pickling() -> None:
    error = DataError("a.png cannot be read", path=Path("a.png"), key="data.root", value=[1]).see("ranks")
    again = pickle.loads(pickle.dumps(error))
    assert again.as_json() == error.as_json()
    assert (again.path, again.key, again.value, again.topic, str(again)) == (
        "a.png", "data.root", [1], "ranks", "a.png cannot be read",
    )  # fmt: skip
