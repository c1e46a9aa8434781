"""Errors for programs: their fields, and the JSON that every command with `--json` prints when it fails."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

from segapp.__main__ import main
from segapp.cli import app, schema
from segapp.config import load_config
from segapp.config import words as words_module
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.errors import ConfigError, DataError, SegappError, StorageError
from segapp.inference.predict.predictor import check_same_classes, check_same_pixels
from segapp.models import build_model
from segapp.models.weights import load_weights, read_weights_file
from segapp.onboarding.init import InitRequest, propose_config

FAILING = {
    "check": ["--config", "no.yaml"],
    "ckpt list": ["no-run"],
    "ckpt verify": ["no-run"],
    "compare": ["no-run"],
    "eval": ["no-run"],
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
    assert set(json_commands(typer.main.get_command(app))) == set(FAILING) | NEVER_FAILS


@pytest.mark.parametrize("command", FAILING)
def test_a_failure_is_json_and_a_sentence(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), *FAILING[command], "--json"])
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["exit_code"] == ended.value.code
    assert error["exit_code"] != 0
    assert error["type"].endswith("Error")
    assert error["message"].splitlines()[0] in printed.err
    assert printed.err.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["plan", "--json", "--nonsense"], "No such option: --nonsense"),
        (["status", "--json"], "Missing argument 'RUN'"),
        (["compare", "a", "b", "--json", "--images", "many"], "Invalid value for '--images'"),
        (["no-command", "--json"], "No such command 'no-command'"),
        (["eval", "run", "--json", "--nonsense"], "No such option: --nonsense"),
    ],
)
def test_a_wrong_word_is_json_too(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert (error["type"], error["exit_code"], ended.value.code) == ("ConfigError", 2, 2)
    assert problem in error["message"]
    assert problem in printed.err
    assert printed.err.startswith("Usage: ")


def test_a_removed_command_says_what_to_do_instead(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_module, "removed", lambda: {"segapp measure": "use perf"})
    with pytest.raises(SystemExit) as ended:
        main(["measure", "run", "--json"])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert json.loads(printed.out)["error"]["message"] == "segapp measure was removed: use perf"
    assert "segapp measure was removed: use perf" in printed.err


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


def test_fields_stay_with_another_message() -> None:
    error = DataError("a.png cannot be read", path="a.png", key="data.root").see("ranks")
    again = error.reworded("the first image: a.png cannot be read")
    assert again.as_json() == {**error.as_json(), "message": "the first image: a.png cannot be read"}
    assert str(error) == "a.png cannot be read"


def test_several_errors_keep_their_fields_in_one() -> None:
    errors = [DataError("a", path="a.png"), DataError("b", key="data.root", value="x")]
    both = ConfigError.together(errors, "2 of 3 cannot be used:", num_more=1)
    assert str(both) == "2 of 3 cannot be used:\n  a\n  b\n  and 1 more"
    assert both.as_json()["problems"] == [
        {"message": "a", "key": None, "path": "a.png", "value": None},
        {"message": "b", "key": "data.root", "path": None, "value": "x"},
    ]
    assert ConfigError.together(errors[:1], "1 cannot be used:") is errors[0]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["plan", "--config", "no.yaml"], {"path": "no.yaml"}),
        (["status", "no-run"], {"path": "no-run"}),
        (["sweep", "--dry-run", "--config", "demo.yaml", "optim.lr=[1"], {"key": "optim.lr", "value": "[1"}),
        (["check", "--config", "own.yaml"], {"key": "data.root", "path": "none", "value": "none"}),
        (["check", "--config", "own.yaml", "train.epochs=a: b: c"], {"key": "train.epochs"}),
        (["check", "--config", "own.yaml", "data.ignore_index=1"], {"key": "data.ignore_index", "value": 1}),
        (
            ["plan", "--config", "own.yaml", "--gpus", "8GiB", "loss.name=none.py:make"],
            {"key": "loss.name", "value": "none.py:make"},
        ),
    ],
)
def test_errors_name_their_key_and_file(
    words: list[str],
    fields: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(
        "name: a\ndata: {format: folder, root: none, classes: [a, b]}\ntrain: {batch_size: 2}\n"
    )
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert fields.items() <= error.items()


def test_schema_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    out = tmp_path / "missing" / "schema.json"
    with pytest.raises(StorageError, match=r"schema\.json cannot be written: No such file") as caught:
        schema(out)
    assert caught.value.as_json()["path"] == str(out)
    with pytest.raises(SystemExit) as ended:
        main(["schema", "--out", str(out)])
    assert ended.value.code == 10


REFUSED = {
    "weights that are no file": (
        lambda: build_model("smp", "Unet", 2, encoder="resnet18", weights="nowhere.pt"),
        {"key": "model.weights", "path": "nowhere.pt"},
    ),
    "weights without a name": (
        lambda: build_model("torchvision", "fcn", 2, encoder="resnet18", weights_backbone="IMAGENET"),
        {"key": "model.weights_backbone", "value": "IMAGENET"},
    ),
    "weights of another network": (
        lambda: load_weights(nn.Linear(2, 2), {"other": torch.zeros(1)}, "a.pt", "model.weights"),
        {"key": "model.weights", "value": "a.pt"},
    ),
    "a file of the command line": (
        lambda: read_weights_file("nowhere.pt", "weights"),
        {"path": "nowhere.pt"},
    ),
    "an unknown encoder": (
        lambda: build_model("torchvision", "fcn", 2, encoder="resnet17"),
        {"key": "model.encoder", "value": "resnet17"},
    ),
    "networks of other classes": (
        lambda: check_same_classes("a.onnx", ("road",), "b.onnx", ("sky",)),
        {"path": "b.onnx"},
    ),
    "networks of other bands": (
        lambda: check_same_pixels("a.onnx", RGB8, "b.onnx", PixelFormat((1,), "uint16")),
        {"path": "b.onnx"},
    ),
}
"""What a user gave -> a call that refuses it, and which of key, path and value its error has."""


@pytest.mark.parametrize("given", REFUSED)
def test_a_refusal_names_key_path_and_value(given: str) -> None:
    refuse, fields = REFUSED[given]
    with pytest.raises(SegappError) as raised:
        refuse()
    found = {name: getattr(raised.value, name) for name in ("key", "path", "value")}
    assert {name: value for name, value in found.items() if value is not None} == fields


def test_an_error_of_a_drafted_config_keeps_its_fields(tiny_root: Path, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise DataError("x cannot be read", key="data.root", path="x")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segapp.onboarding.init.build_pairs", fails)
        with pytest.raises(DataError, match=r"no config can be written for .*: x cannot be read") as raised:
            propose_config(InitRequest(tiny_root, tmp_path / "own.yaml"))
    assert (raised.value.key, raised.value.path) == ("data.root", "x")
