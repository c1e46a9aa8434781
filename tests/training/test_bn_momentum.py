"""The momentum of BatchNorm follows the length of a run, and stays with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from segapp.assembly.network import suited_momentum
from segapp.config import load_config
from segapp.models.by_name import PythonModel
from segapp.planning.auto import with_kept
from tests.support.runs import FCN, differing, final_state, merged, train


@pytest.mark.parametrize(
    ("own", "num_passes", "expected"),
    [
        ((0.01, 0.03, None), 192, 0.1),
        ((0.01, 0.03, None), 2_000, 0.05),
        ((0.01, 0.03, None), 4_000, 0.03),  # 0.025 would be less than a layer has
        ((0.01, 0.03, None), 10_000, None),
        ((0.01, 0.1), 4_000, 0.1),
        ((0.1, 0.2), 3, None),
        ((0.01, 0.2), 3, 0.2),
        ((None,), 3, None),
        ((), 3, None),
    ],
)
def test_momentum_is_raised_for_short_runs_only(
    own: tuple[float | None, ...], num_passes: int, expected: float | None
) -> None:
    layers = [nn.Conv2d(3, 2, 1), *(nn.BatchNorm2d(2, momentum=momentum) for momentum in own)]
    model = PythonModel(nn.Sequential(*layers), name="own:Net", num_classes=2, in_channels=3)
    assert suited_momentum(model, num_passes, is_thawed=False) == expected


def test_frozen_layers_count_if_they_thaw() -> None:
    layers = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2, momentum=0.001), nn.BatchNorm2d(2, momentum=0.1)
    model = PythonModel(nn.Sequential(*layers), name="own:Net", num_classes=2, in_channels=3)
    model.freeze(["network.1"])
    assert suited_momentum(model, 192, is_thawed=False) is None
    assert suited_momentum(model, 192, is_thawed=True) == 0.1


def test_run_keeps_what_auto_chose(tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """15 steps of 2 micro-batches; MobileNetV3's own momentum is 0.01."""
    runs = {}
    for name, value in (("auto", "auto"), ("named", 0.1), ("own", None)):
        config = merged({**tiny, "model": FCN}, train={"epochs": 1, "accumulate": 2, "bn_momentum": value})
        assert train(config, tmp_path / name) == 0
        said = "train.bn_momentum = 0.1, because the model's own would average the statistics of BatchNorm over too"
        assert (f"{said} many of the 6 forward passes" in capsys.readouterr().out) == (name == "auto")
        runs[name] = final_state(tmp_path / name)
    assert differing(runs["auto"]["model"], runs["named"]["model"]) == []
    changed = differing(runs["auto"]["model"], runs["own"]["model"])
    assert any(name.endswith("running_var") for name in changed)
    stored = load_config(tmp_path / "auto" / "config.yaml")
    assert (stored.train.bn_momentum, runs["auto"]["config"]["train"]["bn_momentum"]) == (0.1, 0.1)
    longer = merged({**tiny, "model": FCN}, train={"steps": 4_000, "bn_momentum": "auto"})
    assert with_kept(longer, runs["auto"]).train.bn_momentum == 0.1
    assert with_kept(longer, runs["own"]).train.bn_momentum is None
    automatic = merged({**tiny, "model": FCN}, train={"batch_size": "auto", "accumulate": 1})
    saved = runs["own"]["config"]["train"]
    kept = with_kept(automatic, runs["own"]).train
    assert (kept.batch_size, kept.accumulate) == (saved["batch_size"], 2)
