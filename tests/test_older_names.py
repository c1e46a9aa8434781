"""Names of older versions on disk are read with those of today, and said once."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from segapp import older as module
from segapp.config import changed_keys, load_config, validate_config
from segapp.config.options import BUILT_INS
from segapp.errors import ConfigError
from segapp.older import CHECKPOINT_KEYS, OPTIONS, renamed, upgraded
from segapp.run.events import reader
from segapp.run.events.reader import parse_line
from segapp.run.folder import RunFolder
from segapp.training.recovery import MemoryFallbacks, fallbacks_after
from tests.support import ROOT

DATA = ROOT / "tests" / "data"
BASE = {"name": "x", "data": {"format": "camvid", "root": "data/camvid"}}


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_said", set())


def test_default_of_each_key_is_that_of_a938a80() -> None:
    """Another default would refuse the resume of every run that was begun before: keep it, or name a new key.

    `train.precision: auto` refuses none, because a resume keeps the precision of the run.
    """
    before = load_config(DATA / "config_of_a938a80.yaml")
    today = validate_config({**BASE, "loss": {"plus": [{"name": "dice"}]}, "distill": {"teacher": "t"}})
    assert changed_keys(before, today) == ["train.precision: 'fp32' -> 'auto'"]


def test_default_of_each_key_is_that_of_the_stored_run(tmp_path: Path) -> None:
    with tarfile.open(DATA / "run_of_7e7f74b.tar.xz") as archive:
        archive.extract("run/config.yaml", tmp_path, filter="data")
    stored = load_config(tmp_path / "run" / "config.yaml")
    minimal = validate_config(
        {**BASE, "data": {"format": "folder", "root": "data", "classes": ["ground", "box", "disc"]}}
    )
    differing = {line.partition(":")[0] for line in changed_keys(minimal, stored)}
    assert differing == {
        "name", "seed", "data.crop_px", "data.workers", "model.library", "model.name", "model.encoder",
        "model.options.decoder_channels", "model.options.encoder_depth", "schedule.warmup_steps", "train.channels_last",
        "train.batch_size", "train.epochs", "train.precision", "checkpoint.every_steps", "checkpoint.keep",
        "log.every_steps", "log.tensorboard",
    }  # fmt: skip


CASES: list[tuple[str, str, str, str]] = [
    (section, key, name, new)
    for section, names in OPTIONS.items()
    for name, keys in names.items()
    for key, new in keys.items()
]
VALUES: dict[str, Any] = {
    "implementation": "reference", "nesterov": True, "betas": [0.5, 0.6], "step_epochs": [3], "step_steps": [9],
    "ohem_min_kept": 7, "patience": 3, "gamma": 0.25, "ohem_threshold": 0.25, "pct_start": 0.25,
}  # fmt: skip


@pytest.mark.parametrize(("section", "key", "name", "new"), CASES)
def test_former_key_is_the_option_of_today(
    section: str, key: str, name: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = VALUES.get(key, 0.75)
    raw = upgraded({**BASE, section: {"name": name, key: value}})[0][section]
    assert raw == {"name": name, "options": {new: value}}
    assert BUILT_INS[section][name].options.model_validate({new: value}).model_dump(mode="json")[new] == value
    if name != "mask_classification" and key not in ("step_epochs", "step_steps"):
        more = {"options": {"epochs": [2]}} if name == "step" else {}
        config = validate_config({**BASE, section: {"name": name, key: value, **more}})
        assert getattr(config, section).model_dump(mode="json")["options"][new] == value
        said = f"note: names of an older version: {section}.{key} is now {section}.options.{new}"
        assert said in capsys.readouterr().err


def test_keys_of_other_losses_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The config of a run had the keys of all losses; those of others had no effect."""
    plus = [{"name": "dice", "dice_smooth": 2.0, "focal_gamma": 3.0, "tversky_beta": 0.7}]
    config = validate_config({**BASE, "loss": {"name": "ce", "dice_smooth": 1.0, "plus": plus}})
    assert config.loss.options == {"implementation": "auto"}
    assert config.loss.plus[0].options == {"smooth": 2.0}
    assert capsys.readouterr().err == (
        "note: names of an older version: loss.plus.0.dice_smooth is now loss.plus.0.options.smooth\n"
    )


def test_key_that_is_gone_is_read_with_its_default_only() -> None:
    config = validate_config({**BASE, "train": {"ema": 0.9, "ema_warmup": True}})
    assert config.train.ema == 0.9
    with pytest.raises(ConfigError, match=r"unknown key train\.ema_warmup"):
        validate_config({**BASE, "train": {"ema_warmup": False}})


def test_compiled_loss_is_read_as_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        config = validate_config({**BASE, "loss": {"implementation": "compiled"}})
        assert config.loss.options == {"implementation": "auto"}
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "loss.implementation = compiled exists no longer: auto is used" in said


def test_problem_of_a_former_key_names_that_of_today(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(BASE) + "loss:\n  name: ohem\n  ohem_threshold: 7\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:5: loss\.options\.threshold = 7: "):
        load_config(path)


def test_config_of_a_run_with_another_loss_drops_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    whole = validate_config({**BASE, "optim": {"name": "adam"}}).model_dump(mode="json")
    path.write_text(yaml.safe_dump(whole))
    config = load_config(path, ["loss.name=dice", "optim.name=sgd", "optim.options.nesterov=true"])
    assert config.loss.options == {"smooth": 1.0}
    assert config.optim.options == {"nesterov": True}
    whole["optim"]["options"] = {"betas": [0.5, 0.9]}
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(ConfigError, match=r"unknown key optim\.options\.betas: no option of sgd: use nesterov"):
        load_config(path, ["optim.name=sgd"])


def test_former_key_of_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(validate_config(BASE).model_dump(mode="json")))
    assert load_config(path, ["optim.nesterov=true"]).optim.options == {"nesterov": True}


def test_former_keys_of_states_and_events_are_those_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "EVENT_KEYS", {"alert": {"text": "message"}})
    line = b'{"v":1,"seq":1,"t":1.0,"type":"%s","kind":"data","text":"hello"}'
    alert = parse_line(line % b"alert")
    assert alert is not None
    assert alert["message"] == "hello"
    assert "text" not in alert
    assert "text" in (parse_line(line % b"oom") or {})


def test_fallbacks_of_older_runs_are_read(tmp_path: Path) -> None:
    line = {"v": 1, "seq": 1, "t": 1.0, "type": "oom", "step": 4, "lessons": {"num_pieces": 2}}
    (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "rank_1_step_5.json").write_text(json.dumps({"step": 5, "lessons": {"failed_splits": [[6, 2]]}}))
    found = fallbacks_after(RunFolder(tmp_path), 4)
    assert found == [(4, MemoryFallbacks(num_pieces=2)), (5, MemoryFallbacks(failed_splits=((6, 2),)))]
    assert renamed({"lessons": {"num_pieces": 2}}, CHECKPOINT_KEYS) == {"fallbacks": {"num_pieces": 2}}


def test_only_the_first_rank_says_what_is_renamed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    validate_config({**BASE, "optim": {"nesterov": True}})
    assert capsys.readouterr().err == ""
