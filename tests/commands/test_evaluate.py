"""`segapp eval` and the report use the validation split of the run."""

import json
import shutil
from pathlib import Path

import pytest

from segapp.commands.evaluate import EvalOptions, evaluate_target
from segapp.report.page import write_report
from tests.support.runs import events, merged, train


def test_validation_split_of_the_run_is_evaluated(
    tiny_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    shutil.copytree(tiny_root, root)
    for folder in root.glob("**/val"):
        folder.rename(folder.with_name("holdout"))
    config = merged(
        {
            "name": "tiny",
            "data": {"format": "folder", "root": str(root), "classes": ["ground", "box", "disc"], "workers": 0},
            "model": {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet"},
        },
        data={"crop_px": [32, 32], "val_split": "holdout"},
        train={"epochs": 1, "batch_size": 3},
    )
    assert train(config, tmp_path / "run") == 0
    (val,) = events(tmp_path / "run", "val")

    evaluate_target(str(tmp_path / "run"), EvalOptions(json_file=tmp_path / "scores.json"))
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["split"] == "holdout"
    assert scores["miou"] == pytest.approx(val["miou"], abs=1e-6)
    write_report(str(tmp_path / "run"), tmp_path / "report.html")
    assert "no pictures" not in capsys.readouterr().err
    assert "holdout" in (tmp_path / "report.html").read_text()
