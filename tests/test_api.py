"""The functions of segapp for Python: train, evaluate, predict, load."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp import evaluate, load, predict, train
from segapp.config import load_config, validate_config
from segapp.errors import ConfigError, SegappError
from segapp.run.events import Event
from tests.support.runs import events
from tests.support.runs import train as train_plainly


def small(tiny: dict[str, Any]) -> dict[str, Any]:
    model = {"library": "python", "name": "tests.support.own_parts:Net"}
    return {**tiny, "model": model, "train": {"epochs": 1, "batch_size": 2}}


def test_training_in_a_thread_equals_that_of_the_command(tiny: dict[str, Any], tmp_path: Path) -> None:
    seen: list[Event] = []
    results: list[Any] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]
    config = small(tiny)
    thread = threading.Thread(
        target=lambda: results.append(train(config, run=tmp_path / "thread", on_event=seen.append))
    )
    thread.start()
    thread.join(60)
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]
    (result,) = results
    assert (result.run, result.is_finished, result.step) == (tmp_path / "thread", True, 5)
    assert [event.type for event in seen].count("step") == 5
    assert train_plainly(validate_config(config), tmp_path / "plain") == 0
    losses = [[event["loss"] for event in events(tmp_path / name, "step")] for name in ("thread", "plain")]
    assert losses[0] == losses[1]
    assert result.val.miou == events(tmp_path / "plain", "val")[-1]["miou"]


@pytest.mark.parametrize("failing", [False, True], ids=["ends well", "fails"])
def test_no_data_worker_outlives_the_function(tiny: dict[str, Any], tmp_path: Path, failing: bool) -> None:
    others = set(multiprocessing.active_children())
    seen: list[int] = []

    def count_workers(event: Event) -> None:
        if event.type == "step":
            seen.append(len(set(multiprocessing.active_children()) - others))
            if failing:
                raise OSError("an error of the caller")

    config = {**small(tiny), "data": {**tiny["data"], "workers": 2}}
    with pytest.raises(SegappError, match="an error of the caller") if failing else nullcontext():
        train(config, run=tmp_path / "run", on_event=count_workers)
        evaluate(tmp_path / "run")
    assert set(multiprocessing.active_children()) == others
    assert seen[0] >= 2  # of training; later those of the evaluation beside them


def test_run_is_resumed_evaluated_loaded_and_predicted(tiny: dict[str, Any], tiny_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = train(small(tiny), ["optim.lr=0.002"], run=run)
    assert load_config(run / "config.yaml").optim.lr == 0.002
    again = train(resume=str(run), overrides=["train.epochs=2"])
    assert (first.step, again.step) == (5, 10)
    found = evaluate(run)
    assert set(found.iou) == {"ground", "box", "disc"}
    assert found.confusion.sum() == 4 * 48 * 62  # two columns of each mask are ignored
    network = load(run)
    path = tiny_root / "images" / "val" / "00.png"
    image = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
    labels, probabilities = network.predict(image), network.probabilities(image)
    assert (labels.shape, labels.dtype, probabilities.shape) == ((48, 64), np.uint8, (3, 48, 64))
    assert np.array_equal(probabilities.argmax(0), labels)
    assert predict(run, [path], tmp_path / "out", save=["labels"]).num_images == 1
    assert np.array_equal(cv2.imread(str(tmp_path / "out" / "labels" / "00.png"), cv2.IMREAD_UNCHANGED), labels)
    with pytest.raises(ValueError, match=r"float64 of shape \(2, 2\): give uint8 RGB"):
        network.predict(np.zeros((2, 2)))


def test_errors_are_segapp_errors_and_none_ends_the_process(tiny: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr = -1"):
        train(small(tiny), ["optim.lr=-1"])
    with pytest.raises(ConfigError, match=r"starts processes: use segapp train, or parallel.mode=dp"):
        train(small(tiny), ["parallel.mode=ddp"], run=tmp_path / "ddp")
    with pytest.raises(SegappError, match="no run"):
        load(tmp_path / "nothing")


def test_importing_the_functions_loads_no_torch() -> None:
    code = "import sys; from segapp import train; import segapp; assert callable(train); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
