"""Errors for programs: their fields, and the JSON that every command with `--json` prints when it fails."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

from segapp.__main__ import main
from segapp.cli import app, schema
from segapp.config import load_config
from segapp.errors import ConfigError, DataError, SegappError, StorageError
from segapp.inference.predict.predictor import check_same_classes
from segapp.models import build_model
from segapp.models.by_name import PythonModel
from segapp.models.weights import load_weights, read_weights_file
from tests.support.recorded_runs import RecordedRun


@pytest.fixture
def failure(capsys: pytest.CaptureFixture[str]) -> Failure:
    """Run a command that fails; return the error of its JSON, with the code it ended with, and its standard error."""

    def run(*words: str) -> tuple[dict[str, Any], str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--json"])
        printed = capsys.readouterr()
        error: dict[str, Any] = json.loads(printed.out)["error"]
        assert error["exit_code"] == ended.value.code != 0
        return error, printed.err

    return run


Failure = Callable[..., tuple[dict[str, Any], str]]

FAILING = {
    "check": ["--config", "no.yaml"],
    "ckpt list": ["no-run"],
    "ckpt verify": ["no-run"],
    "compare": ["no-run"],
    "eval": ["no-run"],
    "init": ["no-folder"],
    "models": ["no-such-network", "--size", "x"],
    "plan": ["--config", "no.yaml"],
    "status": ["no-run"],
    "sweep": ["--dry-run", "--config", "no.yaml"],
    "train": ["--smoke", "--config", "no.yaml"],
}
"""Command with `--json` -> words with which it fails."""

NEVER_FAILS = {"doctor", "ls"}
"""These print what they find, also if that is nothing."""


def json_commands(command: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the commands that have `--json`."""
    if commands := getattr(command, "commands", None):
        for word, each in commands.items():
            yield from json_commands(each, f"{name} {word}".strip())
    elif any("--json" in option.opts for option in command.params):
        yield name


def test_every_command_with_json_is_tried() -> None:
    assert set(json_commands(typer.main.get_command(app))) == set(FAILING) | NEVER_FAILS, "add it to FAILING"


@pytest.mark.parametrize("command", FAILING)
def test_a_failure_is_json_and_a_sentence(command: str, failure: Failure) -> None:
    error, said = failure(*command.split(), *FAILING[command])
    assert error["type"].endswith("Error")
    assert said.startswith("error: ")
    assert error["message"].splitlines()[0] in said


def half_done(*words: Any, **options: Any) -> None:
    """Stands for a command that fails after its first lines."""
    print("[1,")
    raise ConfigError("half done")


def test_json_goes_to_the_file_that_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, with the code of a finding, and in a new folder; a command that fails leaves the file as it was."""
    file = tmp_path / "new folder" / "found.json"

    def run(*words: str) -> tuple[int | str | None, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return ended.value.code, *capsys.readouterr()

    assert run("ls", "--json", str(file), "nowhere") == (0, "", f"written: {file}\n")
    assert json.loads(file.read_text()) == []
    for name in ("a", "b", "c"):
        RecordedRun(tmp_path / "listed" / name).writer.close()
    _, printed, _ = run("status", str(tmp_path / "listed" / "b"), "--json")
    code, out, _ = run("status", "--json", str(file), str(tmp_path / "listed" / "b"))
    found, again = json.loads(printed), json.loads(file.read_text())
    assert (code, out, again.keys(), again["name"]) == (0, "", found.keys(), "b")
    printed = file.read_text()
    failed = ("status", "--json", str(file), "no-run")
    assert json.loads(run(*failed)[1])["error"]["exit_code"] == 2
    assert file.read_text() == printed
    with monkeypatch.context() as patch:
        patch.setattr("segapp.cli.app", half_done)
        assert json.loads(run(*failed)[1])["error"]["message"] == "half done"
    assert file.read_text() == printed
    (tmp_path / "a-file").write_text("")
    code, _, said = run("ls", "--json", str(tmp_path / "a-file" / "x.json"))
    assert (code, "choose another file after --json" in said) == (10, True)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["plan", "--nonsense"], "No such option: --nonsense"),
        (["status"], "Missing argument 'RUN'"),
        (["compare", "a", "b", "--images", "many"], "Invalid value for '--images'"),
        (["no-command"], "No such command 'no-command'"),
    ],
)
def test_a_wrong_word_is_json_too(words: list[str], problem: str, failure: Failure) -> None:
    error, said = failure(*words)
    assert (error["type"], error["exit_code"]) == ("ConfigError", 2)
    assert problem in error["message"]
    assert problem in said
    assert said.startswith("Usage: ")


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


def test_fields_survive_pickling() -> None:
    error = DataError("a.png cannot be read", path=Path("a.png"), key="data.root", value=[1]).see("ranks")
    again = pickle.loads(pickle.dumps(error))
    assert again.as_json() == error.as_json()
    assert (again.path, again.key, again.value, again.topic, str(again)) == (
        "a.png", "data.root", [1], "ranks", "a.png cannot be read",
    )  # fmt: skip
    other = error.reworded("the first image: a.png cannot be read")
    assert other.as_json() == {**error.as_json(), "message": "the first image: a.png cannot be read"}


def test_several_errors_keep_their_fields_in_one() -> None:
    errors = [DataError("a", path="a.png"), DataError("b", key="data.root", value="x")]
    both = ConfigError.together(errors, "2 of 3 cannot be used:", num_more=1)
    assert str(both) == "2 of 3 cannot be used:\n  a\n  b\n  and 1 more"
    assert both.as_json()["problems"] == [
        {"message": "a", "key": None, "path": "a.png", "value": None},
        {"message": "b", "key": "data.root", "path": None, "value": "x"},
    ]
    assert ConfigError.together(errors[:1], "1 cannot be used:") is errors[0]


OWN = ["--config", "own.yaml"]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["plan", "--config", "no.yaml"], {"path": "no.yaml"}),
        (["status", "no-run"], {"path": "no-run"}),
        (["sweep", "--dry-run", "--config", "demo.yaml", "optim.lr=[1"], {"key": "optim.lr", "value": "[1"}),
        (["check", *OWN], {"key": "data.root", "path": "none", "value": "none"}),
        (["check", *OWN, "train.epochs=a: b: c"], {"key": "train.epochs"}),
        (["check", *OWN, "data.ignore_index=1"], {"key": "data.ignore_index", "value": 1}),
        (["check", *OWN, "model.freeze_epochs=3"], {"key": "model.freeze_epochs", "value": 3}),
    ],
)
def test_errors_name_their_key_and_file(words: list[str], fields: dict[str, Any], failure: Failure) -> None:
    Path("own.yaml").write_text(
        "name: a\ndata: {format: folder, root: none, classes: [a, b]}\ntrain: {batch_size: 2}\n"
    )
    assert fields.items() <= failure(*words)[0].items()


def test_schema_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    out = tmp_path / "missing" / "schema.json"
    with pytest.raises(StorageError, match=r"schema\.json cannot be written: No such file") as caught:
        schema(out)
    assert caught.value.as_json()["path"] == str(out)
    with pytest.raises(SystemExit) as ended:
        main(["schema", "--out", str(out)])
    assert ended.value.code == 10


LINEAR = PythonModel(nn.Linear(2, 2), name="linear", num_classes=2, in_channels=3)
REFUSED = {
    "weights without a name": (
        lambda: build_model("torchvision", "fcn", 2, encoder="resnet18", weights_backbone="IMAGENET"),
        {"key": "model.weights_backbone", "value": "IMAGENET"},
    ),
    "weights of another network": (
        lambda: load_weights(LINEAR, {"other": torch.zeros(1)}, "a.pt", "model.weights"),
        {"key": "model.weights", "value": "a.pt"},
    ),
    "a file of the command line": (lambda: read_weights_file("nowhere.pt", "weights"), {"path": "nowhere.pt"}),
    "networks of other classes": (lambda: check_same_classes("a", ("road",), "b", ("sky",)), {"path": "b"}),
}
"""What a user gave -> a call that refuses it, and which of key, path and value its error has."""


@pytest.mark.parametrize("given", REFUSED)
def test_a_refusal_names_key_path_and_value(given: str) -> None:
    refuse, fields = REFUSED[given]
    with pytest.raises(SegappError) as raised:
        refuse()
    found = {name: getattr(raised.value, name) for name in ("key", "path", "value")}
    assert {name: value for name, value in found.items() if value is not None} == fields
