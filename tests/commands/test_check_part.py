"""Checks of own parts, each against a part that breaks one rule."""

from __future__ import annotations

from typing import Any

import pytest

from segapp.commands.check_part import check_part
from segapp.config import RunConfig, load_config
from segapp.errors import ConfigError
from tests.support import ROOT
from tests.support.runs import merged

PARTS = "tests.support.own_parts"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{PARTS}:Net", "model"),
        (f"{PARTS}:ce", "loss"),
        (f"{PARTS}:additive_ce", "loss"),
        ("torch.nn:CrossEntropyLoss", "loss"),
        ("torch.optim:RMSprop", "optim"),
        (f"{PARTS}:falling", "schedule"),
        ("albumentations:HorizontalFlip", "transform"),
    ],
)
def test_good_parts_pass(name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_part(name, kind, None) == 0, capsys.readouterr().out
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        (f"{PARTS}:WrongChannels", "model", "return (1, 3, h, w)"),
        (f"{PARTS}:MixingNet", "model", "depend on the others in its batch"),
        (f"{PARTS}:NoisyNet", "model", "draws numbers in evaluation"),
        (f"{PARTS}:PixelOfChunk", "loss", "divide in finalize alone"),
        (f"{PARTS}:negative", "schedule", "give a number from 0 on"),
        (f"{PARTS}:counting", "schedule", "depends on earlier calls"),
        (f"{PARTS}:still", "optim", "a step leaves weights as they are"),
        (f"{PARTS}:nothing", "model", "has no 'nothing'"),
    ],
)
def test_broken_rule_is_named(name: str, kind: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_part(name, kind, None) == 2
    assert problem in capsys.readouterr().out


def test_plain_loss_that_is_no_mean_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_part(f"{PARTS}:largest_pixel", "loss", None) == 0
    said = "note   a divided step gives the same loss and gradient in float32: no mean over valid pixels"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ce", "additive_ce"])
def test_loss_is_exact_at_splits_in_both_precisions(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_part(f"{PARTS}:{name}", "loss", None) == 0
    printed = capsys.readouterr().out
    for precision in ("float32", "float64"):
        assert f"ok     a divided step gives the same loss and gradient in {precision}\n" in printed


def test_small_error_at_splits_shows_in_float64_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_part(f"{PARTS}:NearlyExact", "loss", None) == 2
    printed = capsys.readouterr().out
    assert "ok     a divided step gives the same loss and gradient in float32\n" in printed
    assert "FAILED a divided step gives the same loss and gradient in float64: off by 1e-06" in printed


def test_loss_that_rounds_to_float32_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_part(f"{PARTS}:rounded_ce", "loss", None) == 0
    assert "in float64: not tried, it rounds float64 logits" in capsys.readouterr().out


def data_config(tiny: dict[str, Any], name: str) -> RunConfig:
    return merged(tiny, data={"format": f"{PARTS}:{name}"})


def test_data_are_read_as_the_config_says(tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_part(None, None, data_config(tiny, "FolderData")) == 0
    assert check_part(None, None, data_config(tiny, "BadData")) == 2
    assert "gives float32 (48, 64, 3)" in capsys.readouterr().out


@pytest.mark.usefixtures("repository_root")
def test_all_parts_of_the_example_pass(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "none"))
    assert check_part(None, None, load_config("segapp/docs/examples/own_parts.yaml")) == 0
    assert capsys.readouterr().out.count(" as ") == 5


def test_part_without_a_kind_asks_for_it() -> None:
    with pytest.raises(ConfigError, match=r"say what it is with --as model\|loss"):
        check_part(f"{PARTS}:Net", None, None)
