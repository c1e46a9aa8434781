"""`segapp models`: names, and the figures of a network against the network that a training builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segapp.commands import models as module
from segapp.commands.models import ModelName, all_names, matching_names, print_models
from segapp.errors import ConfigError
from segapp.models import build_model

LISTED = [
    ModelName("torchvision", "deeplabv3_resnet50"),
    ModelName("torchvision", "lraspp", "mobilenet_v3_small"),
    ModelName("smp", "Linknet", "tu-test_resnet"),
    ModelName("segapp", "eomt"),
    ModelName("smp", "Linknet", "resnet188"),
    *(ModelName("smp", "Unet", f"resnet{depth}") for depth in (18, 34, 50, 101, 188)),
]


@pytest.fixture(autouse=True)
def _no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of weights."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten names, of which some are no network, in place of all."""
    monkeypatch.setattr(module, "all_names", lambda: LISTED)


def test_names_are_of_all_libraries():
    names = all_names()
    assert {name.library for name in names} == {"torchvision", "segapp", "smp"}
    assert {name.label for name in {*LISTED} - {*names}} == {
        "segapp/eomt",
        "smp/Linknet/resnet188",
        "smp/Unet/resnet188",
    }
    assert ModelName("smp", "Unet", "tu-convnext_atto") in names


@pytest.mark.usefixtures("few")
def test_pattern_is_a_part_or_a_glob(capsys, monkeypatch):
    assert [name.label for name in matching_names("smp/unet/resnet18")] == ["smp/Unet/resnet18"]
    assert [name.name for name in matching_names("smp/*/*t188")] == ["Linknet", "Unet"]
    with pytest.raises(ConfigError, match=r"'resnet33' matches no model: did you mean .*resnet34"):
        matching_names("resnet33")
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    print_models(None, "64x96", as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "torchvision: 1, such as deeplabv3_resnet50",
        "torchvision/lraspp: 1, such as mobilenet_v3_small",
        "smp/Linknet: 2, such as tu-test_resnet, resnet188",
        "segapp: 1, such as eomt",
        "smp/Unet: 5, such as resnet18, resnet34, resnet50, resnet101",
        "10 models match; more is shown of 3 or fewer: give a pattern, e.g. smp/Unet/resnet34",
    ]
    print_models("smp", "64x96", as_json=True)
    assert [each["encoder"] for each in json.loads(capsys.readouterr().out)] == [
        name.encoder for name in LISTED if name.library == "smp"
    ]


@pytest.mark.usefixtures("few")
def test_table_and_json_show_the_same(capsys):
    print_models("*/L*", "64x93", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert [(each["size_px"], each["stride"]) for each in facts] == [([64, 96], 8), ([64, 96], 1), (None, 0)]
    model = build_model("smp", "Linknet", 19, encoder="tu-test_resnet")
    assert facts[1]["num_params"] == sum(parameter.numel() for parameter in model.parameters())
    print_models("*/L*", "64x93", as_json=False)
    header, *rows, broken = capsys.readouterr().out.splitlines()
    assert header.split() == ["NETWORK", "PARAMETERS", "SIZE", "STRIDE"]
    for row, each in zip(rows, facts[:2], strict=True):
        size = "x".join(map(str, each["size_px"]))
        assert row.split() == [each["label"], f"{each['num_params'] / 1e6:.1f}", "M", size, str(each["stride"])]
    assert " ".join(broken.split()).startswith(f"smp/Linknet/resnet188 - - {facts[2]['problem'][:20]}")
    with pytest.raises(ConfigError, match="--size 64: write HEIGHTxWIDTH"):
        print_models(None, "64", as_json=False)
