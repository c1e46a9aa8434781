"""A training with a real budget against one that had memory enough; `test_scripted_runs.py` has the other ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from segapp.commands.runs import print_status
from segapp.config import LiveSettings, RunConfig
from segapp.models import SegmentationModel
from segapp.training.step import assembler
from segapp.view.runs import summarize
from tests.support.fault_table import case
from tests.support.live_runs import three_devices
from tests.support.runs import events, final_state, losses, merged, train

pytestmark = pytest.mark.usefixtures("logical_budgets")


@pytest.fixture
def _without_batchnorm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group instead of batch statistics: then smaller pieces are the same step to the last digits."""
    original = assembler.build_network

    def grouped(*args: Any, **kwargs: Any) -> SegmentationModel:
        model = original(*args, **kwargs)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(1, child.num_features))
        return model

    monkeypatch.setattr(assembler, "build_network", grouped)


def budgeted(base: dict[str, Any], *budgets_mib: float) -> RunConfig:
    parallel = {"memory_budget_mib": list(budgets_mib), "gpu0_bsz": 6}
    return merged(three_devices(base, 2).model_dump(mode="json"), parallel=parallel, train={"batch_size": 8})


@case(
    "N03",
    how="a memory budget below the peak of the first step",
    passes="the same losses, recomputed, then in pieces, remembered",
)
@pytest.mark.usefixtures("_without_batchnorm")
def test_step_over_memory_budget_runs_in_parts_with_equal_loss(
    base: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(budgeted(base, 900, 900, 900), tmp_path / "whole") == 0
    peak = final_state(tmp_path / "whole")["live"]["splits"]["observed"][0][1][0]
    folder = tmp_path / "run"
    assert train(budgeted(base, 0.75 * peak, 900, 900), folder) == 0
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    first, oom = events(folder, "oom")
    settings = events(folder, "settings")
    assert [each["fallbacks"] for each in settings] == [
        {"is_recomputed": True},
        {"is_recomputed": True, "num_pieces": 2},
    ]
    assert [each["step"] for each in settings] == [0, 0]
    assert "all 5 blocks recomputed" in first["action"]
    assert (oom["device"], oom["index"], oom["step"], oom["split"]) == ("cpu", 0, 0, [6, 1, 1])
    assert oom["phase"] in ("forward", "loss", "backward")
    assert oom["allocated_mib"] <= 0.75 * peak < oom["allocated_mib"] + oom["requested_mib"]
    assert "BatchNorm" in oom["action"]
    report = (folder / oom["path"]).read_text()
    assert oom["action"] in report
    assert summarize(folder).as_json()["last_oom"] == {
        key: oom[key] for key in ("device", "phase", "step", "action", "path")
    }
    print_status(str(folder), as_json=False)
    assert oom["path"] in capsys.readouterr().out
    assert LiveSettings(**final_state(folder)["live"]["settings"]).fallbacks == settings[-1]["fallbacks"]
