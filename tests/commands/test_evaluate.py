"""`segapp eval` and `predict` of trained runs: scores, files and names, one network and the mean of several."""

import contextlib
import importlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp import evaluate
from segapp.commands.evaluate import EvalOptions, evaluate_target, score_target
from segapp.commands.predict import PredictOptions, predict_target
from segapp.datasets.layouts.formats import class_scheme
from segapp.inference.predict.reading import find_images
from tests.support.runs import MODEL, draw_scene, events, merged, train

CLASSES = ["ground", "box", "disc"]


@pytest.fixture(scope="module")
def runs(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, folds of one another: a validates on `holdout`, and b, of another network, on `train`."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(tiny_root, folder / "data")
    for place in (folder / "data").glob("*/val"):
        place.rename(place.with_name("holdout"))
    config = {
        "name": "tiny",
        "data": {"format": "folder", "root": str(folder / "data"), "classes": CLASSES, "workers": 0,
                 "crop_px": [32, 40], "val_split": "holdout"},
        "model": MODEL,
        "train": {"epochs": 1, "batch_size": 3},
        "log": {"tensorboard": False},
    }  # fmt: skip
    model = {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}}
    other = merged({**config, "model": model}, seed=7, data={"train_split": "holdout", "val_split": "train"})
    assert train(merged(config), folder / "a") == 0
    assert train(other, folder / "b") == 0
    return folder


def labels_of(folder: Path, name: str, kind: str = "labels") -> np.ndarray:
    pixels = cv2.imread(str(folder / kind / f"{name}.png"), cv2.IMREAD_UNCHANGED)
    assert pixels is not None
    return pixels[..., ::-1] if pixels.ndim == 3 else pixels


def test_validation_split_of_the_run_is_evaluated(runs: Path, tmp_path: Path, command: Any) -> None:
    (val,) = events(runs / "a", "val")
    assert command("eval", runs / "a")[1].splitlines()[-1].startswith("holdout: mIoU")
    scores = json.loads(command("eval", runs / "a", "--json")[1])
    assert scores["split"] == "holdout"
    assert scores["miou"] == pytest.approx(val["miou"], abs=1e-6)
    code, _, said = command("report", runs / "a", "--out", tmp_path / "report.html")
    assert (code, "no pictures" in said) == (0, False)
    assert "holdout" in (tmp_path / "report.html").read_text()


def test_mean_of_networks_scores_what_predict_writes(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And predict writes the mean of the probabilities of each; the second network is given twice."""
    data = runs / "data"
    names = [str(runs / "a"), str(runs / "b"), str(runs / "b" / "checkpoints" / "last.pt")]
    evaluate_target(names, EvalOptions())
    shown = capsys.readouterr()
    evaluate_target(names, EvalOptions(), is_json=True)
    scores = json.loads(capsys.readouterr().out)
    images = find_images([data / "images" / "holdout"])[0]
    for out, networks in (("a", names[:1]), ("b", names[1:2]), ("all", names)):
        predict_target(networks, images, tmp_path / out, PredictOptions(save=("labels", "probabilities")))
    confusion = np.zeros((3, 3), np.int64)
    masks = sorted((data / "masks" / "holdout").glob("*.png"))
    for mask in masks:
        target, labels = cv2.imread(str(mask), cv2.IMREAD_UNCHANGED), labels_of(tmp_path / "all", mask.stem)
        np.add.at(confusion, (target[target != 255], labels[target != 255]), 1)
        maps = {
            out: np.load(tmp_path / out / "probabilities" / f"{mask.stem}.npz")["probabilities"].astype(float)
            for out in ("a", "b", "all")
        }
        assert np.abs(maps["all"] - (maps["a"] + 2 * maps["b"]) / 3).max() <= 1  # 1 of 65535
        assert np.abs(maps["a"] - maps["b"]).max() > 300
    assert scores["confusion"] == confusion.tolist()
    union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    assert scores["miou"] == pytest.approx(np.mean(confusion.diagonal()[union > 0] / union[union > 0]))
    assert (scores["num_images"], scores["num_scored"], scores["checkpoint"]) == (len(masks), (union > 0).sum(), None)
    assert [each["name"] for each in scores["networks"]] == names
    assert [Path(each["checkpoint"]).parent.parent.name for each in scores["networks"]] == ["a", "b", "b"]
    assert f"(mean of 3: {', '.join(names)})" in shown.out
    for name in names[1:]:
        assert f"{name} was trained on {len(masks)} of the {len(masks)} images evaluated here" in shown.err
    assert evaluate(names).confusion.tolist() == confusion.tolist()


def official_scores(predictions: list[str], targets: list[str]) -> dict[str, Any]:
    """Return the scores of the evaluation server's own code for PNGs of label ids."""
    official = importlib.import_module("cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling")
    arguments = official.CArgs()
    vars(arguments).update(vars(official.args))
    arguments.evalInstLevelScore, arguments.JSONOutput, arguments.quiet = False, False, True
    with contextlib.redirect_stdout(io.StringIO()):
        scores: dict[str, Any] = official.evaluateImgLists(predictions, targets, arguments)
        return scores


def test_eval_equals_official_evaluator_on_written_predictions(
    tiny: dict[str, Any], tmp_path: Path, command: Any
) -> None:
    rng, root = np.random.default_rng(1), tmp_path / "city"
    for split, count in (("train", 6), ("val", 3)):
        for i in range(count):
            image, mask = draw_scene(rng, 61, 95)
            ids = np.where(mask == 255, 0, np.array([7, 11, 26], np.uint8)[np.minimum(mask, 2)])
            for kind, ending, pixels in (("leftImg8bit", "leftImg8bit", image), ("gtFine", "gtFine_labelIds", ids)):
                path = root / kind / split / "town" / f"town_000000_{i:06}_{ending}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), pixels)
    data = {"format": "cityscapes", "root": str(root), "crop_px": [32, 32], "workers": 0}
    config = merged({**tiny, "data": data}, train={"epochs": 2, "batch_size": 3})
    assert train(config, root / "run") == 0
    ours = json.loads(command("eval", root / "run", "--json", "--devices", "cpu, cpu,")[1])
    table = command("eval", root / "run")[1].splitlines()
    first = next(at for at, line in enumerate(table) if line.startswith("groups: mIoU "))
    shown = dict(line.split()[:2] for line in table[first + 1 : first + 1 + len(ours["groups"])])
    assert shown == {name: "absent" if iou is None else f"{iou:.4f}" for name, iou in ours["groups"].items()}
    assert [dice and dice / (2 - dice) for dice in ours["dice"]] == pytest.approx(ours["iou"])
    matrix = np.array(ours["confusion"])
    with np.errstate(invalid="ignore"):
        for name, total in (("precision", matrix.sum(0)), ("recall", matrix.sum(1))):
            values = np.array(ours[name], float)
            np.testing.assert_allclose(values, matrix.diagonal() / total)
            assert ours[f"mean_{name}"] == pytest.approx(np.nanmean(values))
    images = root / "leftImg8bit" / "val"
    code, _, said = command("predict", root / "run", images, "--out", tmp_path / "out", "--label-ids")
    assert code == 0, said
    truth = sorted(map(str, (root / "gtFine" / "val").rglob("*.png")))
    written = sorted(map(str, (tmp_path / "out" / "labels").rglob("*.png")))
    official = official_scores(written, truth)
    assert {*ours["groups"], "void"} == set(official["categoryScores"])  # theirs gives NaN for void
    pairs = [(official["classScores"][name], iou) for name, iou in zip(ours["classes"], ours["iou"], strict=True)]
    pairs += [(official["categoryScores"][name], iou) for name, iou in ours["groups"].items()]
    pairs.append((official["averageScoreClasses"], ours["miou"]))
    pairs.append((official["averageScoreCategories"], ours["groups_miou"]))
    for theirs, iou in pairs:
        assert np.isnan(theirs) if iou is None else theirs == pytest.approx(iou, abs=1e-6)


def test_mean_of_a_network_and_itself_is_the_network(runs: Path) -> None:
    names, options = [str(runs / "a")], EvalOptions(slide=True, tta=True)
    single, twice = score_target(names, options), score_target(names * 2, options)
    assert twice.found.matrix.tolist() == single.found.matrix.tolist()
    assert (single.found.loss is None, twice.found.loss) == (False, None)
    assert [*twice.networks] == [f"{runs / 'a'} (1)", f"{runs / 'a'} (2)"]


def test_predict_keeps_names_and_goes_on_after_a_damaged_file(runs: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "photos" / "deep").mkdir(parents=True)
    pictures = {}
    for number, (name, size) in enumerate({"a": (37, 53), "deep/b": (64, 48), "c": (20, 90)}.items()):
        pictures[name] = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
        cv2.imwrite(str(tmp_path / "photos" / f"{name}.png"), pictures[name][..., ::-1])
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"\xff\xd8 this is no picture")
    cv2.imwrite(str(tmp_path / "photos" / "wide.pgm"), np.arange(9999, dtype=np.uint16).reshape(99, 101))
    code, _, said = command("predict", runs / "a", tmp_path / "photos", "--out", tmp_path / "out")
    assert code == 3
    assert "broken.jpg" in said
    trained = "but the model was trained on uint8 RGB: convert it as the training images were"
    assert f"wide.pgm: its pixels are uint16 with 1 band, {trained}" in said
    assert "Traceback" not in said
    palette = np.array(class_scheme("folder", classes=CLASSES).palette, np.uint8)
    for name, picture in pictures.items():
        labels = labels_of(tmp_path / "out", name)
        assert labels.shape == picture.shape[:2]
        np.testing.assert_array_equal(labels_of(tmp_path / "out", name, "color"), palette[labels])
        overlay = labels_of(tmp_path / "out", name, "overlay").astype(int)
        assert np.abs(overlay - (picture.astype(int) + palette[labels]) / 2).max() <= 1


def test_checkpoint_file_predicts_without_its_run(runs: Path, tmp_path: Path, command: Any) -> None:
    shutil.copy(runs / "a" / "checkpoints" / "best.pt", tmp_path / "copy.pt")
    cv2.imwrite(str(tmp_path / "x.png"), np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8))
    code, out, said = command(
        *("predict", tmp_path / "copy.pt", tmp_path / "x.png", "--out", tmp_path / "out", "--tta", "--slide"),
        *("--save", "labels,probabilities", "--batch", "2"),
    )
    assert code == 0, said
    assert "1 images of 1 files written" in out
    assert "images/s" in out
    assert "is in no manifest" in said
    slide = "note: --slide predicts in windows of 32 x 40 px (eval.slide_px); large images are cut without it"
    assert said.splitlines().count(slide) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["labels", "probabilities"]
    with np.load(tmp_path / "out" / "probabilities" / "x.npz") as stored:
        assert stored["classes"].tolist() == CLASSES
        assert stored["probabilities"].shape == (37, 53, 3)
        labels = labels_of(tmp_path / "out", "x")[..., None]
        taken = np.take_along_axis(stored["probabilities"], labels.astype(int), -1)[..., 0]
        assert np.array_equal(taken, stored["probabilities"].max(-1))  # 16 bits can make two of them equal
        assert np.abs(stored["probabilities"].astype(int).sum(-1) - 65_535).max() <= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval RUNS/a RUNS/b --devices cpu,cpu", "--devices is for one model, and 2 are named: leave it out"),
        ("predict RUNS/a RUNS/b IMAGES --out refused --config x.yaml", "belongs to one file of weights"),
        ("predict RUNS/a IMAGES --out refused --save labels,tint,colour", "error: --save colour is not known"),
        ("predict RUNS/a IMAGES --out refused --batch 0", "error: --batch "),
        ("predict RUNS/a IMAGES --out refused --batch many", "error: --batch "),
    ],
)
def test_unsuitable_option_is_refused(runs: Path, words: str, message: str, command: Any) -> None:
    images = str(runs / "data" / "images" / "holdout")
    code, _, said = command(*words.replace("RUNS", str(runs)).replace("IMAGES", images).split())
    assert (code, message in said, Path("refused").exists()) == (2, True, False), said
