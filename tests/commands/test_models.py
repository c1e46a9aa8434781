"""`segapp models`: names, and the figures of a network against the network that a training builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segapp.commands.models import ModelName, all_names, matching_names, measure_model, print_models
from segapp.errors import ConfigError
from segapp.models import build_model


@pytest.fixture(autouse=True)
def _no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of weights."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


def test_names_are_of_all_libraries():
    assert {name.library for name in all_names()} == {"torchvision", "segapp", "smp"}
    assert ModelName("smp", "Unet", "tu-convnext_atto") in all_names()
    assert ModelName("torchvision", "deeplabv3_resnet50") in all_names()


@pytest.mark.slow
def test_pattern_is_a_part_or_a_glob():
    assert [name.label for name in matching_names("smp/unet/resnet18")] == ["smp/Unet/resnet18"]
    assert {name.encoder for name in matching_names("smp/*/tu-convnext_att*")} >= {"tu-convnext_atto"}
    with pytest.raises(ConfigError, match=r"'resnet188' matches no model: did you mean .*resnet18"):
        matching_names("resnet188")


@pytest.mark.slow
def test_figures_are_those_of_the_network():
    facts = measure_model(ModelName("torchvision", "fcn", "resnet18"), (64, 96))
    model = build_model("torchvision", "fcn", 19, encoder="resnet18")
    assert facts["problem"] is None
    assert facts["num_params"] == sum(parameter.numel() for parameter in model.parameters())
    assert (facts["size_px"], facts["stride"]) == ((64, 96), model.logits_stride)


def test_table_and_json_show_the_same(capsys):
    print_models("torchvision/lraspp/mobilenet_v3_*", "64x96", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    print_models("torchvision/lraspp/mobilenet_v3_*", "64x96", as_json=False)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["NETWORK", "PARAMETERS", "SIZE", "STRIDE"]
    assert {each["label"].rpartition("_")[2] for each in facts} == {"small", "large"}
    for row, each in zip(rows, facts, strict=True):
        assert row.split() == [each["label"], f"{each['num_params'] / 1e6:.1f}", "M", "64x96", str(each["stride"])]
    with pytest.raises(ConfigError, match="--size 64: write HEIGHTxWIDTH"):
        print_models(None, "64", as_json=False)
