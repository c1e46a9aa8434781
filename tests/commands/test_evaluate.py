"""`segapp eval` and the report use the validation split of the run."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from segapp import evaluate
from segapp.__main__ import main
from segapp.commands.evaluate import EvalOptions, evaluate_target, score_target
from segapp.commands.predict import PredictOptions, predict_target
from segapp.errors import ConfigError
from segapp.inference.predict.reading import find_images
from segapp.report.page import write_report
from tests.support.runs import events, merged, train


def command(*words: object) -> int:
    """Run a command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(str(ended.value.code))


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

    capsys.readouterr()
    assert command("eval", tmp_path / "run") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("holdout: mIoU")
    assert command("eval", tmp_path / "run", "--json") == 0
    scores = json.loads(capsys.readouterr().out)
    assert command("eval", tmp_path / "run", "--json", tmp_path / "scores.json") == 0
    assert json.loads((tmp_path / "scores.json").read_text()) == scores
    assert "mIoU" in capsys.readouterr().out, "the table"
    assert command("eval", "--json", "scores.json") == 2
    assert "scores.json is the file to write" in capsys.readouterr().err
    assert scores["split"] == "holdout"
    assert scores["miou"] == pytest.approx(val["miou"], abs=1e-6)
    write_report(str(tmp_path / "run"), tmp_path / "report.html")
    assert "no pictures" not in capsys.readouterr().err
    assert "holdout" in (tmp_path / "report.html").read_text()


@pytest.fixture(scope="module")
def runs(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: a and b of different networks, folds of one another; c with the classes in another order."""
    folder = tmp_path_factory.mktemp("runs")
    config = {
        "name": "tiny",
        "data": {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "workers": 0,
                 "crop_px": [32, 32]},
        "model": {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet"},
        "train": {"epochs": 1, "batch_size": 3},
        "log": {"tensorboard": False},
    }  # fmt: skip
    other = merged(config, seed=7, model={"name": "FPN"}, data={"train_split": "val", "val_split": "train"})
    assert train(merged(config), folder / "a") == 0
    assert train(other, folder / "b") == 0
    assert train(merged(config, data={"classes": ["box", "ground", "disc"]}), folder / "c") == 0
    return folder


@pytest.mark.slow
def test_ensemble_scores_what_predict_writes(
    runs: Path, tiny_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(runs / "a"), str(runs / "b")]
    evaluate_target(names, EvalOptions())
    shown = capsys.readouterr()
    evaluate_target(names, EvalOptions(), is_json=True)
    scores = json.loads(capsys.readouterr().out)
    predict_target(
        names, find_images([tiny_root / "images" / "val"])[0], tmp_path / "out", PredictOptions(save=("labels",))
    )
    confusion = np.zeros((3, 3), np.int64)
    masks = sorted((tiny_root / "masks" / "val").glob("*.png"))
    for mask in masks:
        target = cv2.imread(str(mask), cv2.IMREAD_UNCHANGED)
        labels = cv2.imread(str(tmp_path / "out" / "labels" / mask.name), cv2.IMREAD_UNCHANGED)
        np.add.at(confusion, (target[target != 255], labels[target != 255]), 1)
    assert scores["confusion"] == confusion.tolist()
    union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    assert scores["miou"] == pytest.approx(np.mean(confusion.diagonal()[union > 0] / union[union > 0]))
    assert (scores["num_images"], scores["num_scored"], scores["checkpoint"]) == (len(masks), (union > 0).sum(), None)
    assert [Path(each["checkpoint"]).parent.parent.name for each in scores["networks"]] == ["a", "b"]
    assert f"(mean of 2: {names[0]}, {names[1]})" in shown.out
    assert (
        f"was trained on {len(masks)} of the {len(masks)} images evaluated here: the scores are too good" in shown.err
    )
    assert evaluate([runs / "a", runs / "b"]).confusion.tolist() == confusion.tolist()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"slide": True, "tta": True}], ids=["whole", "slide and tta"])
def test_mean_of_a_network_and_itself_is_the_network(runs: Path, options: dict[str, bool]) -> None:
    single, twice = (
        score_target(names, EvalOptions(**options)) for names in ([str(runs / "a")], [str(runs / "a")] * 2)
    )
    assert twice.found.matrix.tolist() == single.found.matrix.tolist()
    assert (single.found.loss is None, twice.found.loss) == (False, None)
    assert [*twice.networks] == [f"{runs / 'a'} (1)", f"{runs / 'a'} (2)"]


def test_networks_that_cannot_be_averaged_are_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match="have different classes: class 0 is 'ground' and 'box'"):
        score_target([str(runs / "a"), str(runs / "c")], EvalOptions())
    with pytest.raises(ConfigError, match=r"--devices cpu,cpu is for one model, and 2 are named: leave it out"):
        score_target([str(runs / "a"), str(runs / "b")], EvalOptions(devices="cpu,cpu"))
