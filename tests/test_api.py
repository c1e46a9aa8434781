"""The functions of segapp for Python: train, evaluate, predict, load."""

from __future__ import annotations

import copy
import inspect
import json
import multiprocessing
import os
import pickle
import pydoc
import re
import sys
import threading
import types
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import typer
from PIL import Image
from torch import nn

import segapp
from segapp import History, api, evaluate, predict, train
from segapp.api import StopTraining, load
from segapp.cli import app
from segapp.config import load_config, validate_config
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.errors import ConfigError, SegappError
from segapp.results import Evaluated
from segapp.run.events import Event
from segapp.scores import SCORES
from segapp.waiting import has_progress_bar
from tests.support.recorded_runs import RecordedRun
from tests.support.runs import events, merged
from tests.support.runs import train as train_plainly


def small(tiny: dict[str, Any]) -> dict[str, Any]:
    model = {"library": "python", "name": "tests.support.own_parts:Net"}
    return {**tiny, "model": model, "train": {"epochs": 1, "batch_size": 2}}


def test_training_in_a_thread_equals_that_of_the_command(tiny: dict[str, Any], tmp_path: Path) -> None:
    seen: list[Event] = []
    results: list[Any] = []
    config = small(tiny)
    thread = threading.Thread(
        target=lambda: results.append(train(config, run=tmp_path / "thread", on_event=seen.append))
    )
    thread.start()
    thread.join(60)
    (result,) = results
    assert (result.run, result.is_finished, result.step) == (tmp_path / "thread", True, 5)
    assert [event.type for event in seen].count("step") == 5
    assert train_plainly(validate_config(config), tmp_path / "plain") == 0
    losses = [[event["loss"] for event in events(tmp_path / name, "step")] for name in ("thread", "plain")]
    assert losses[0] == losses[1]
    recorded = events(tmp_path / "plain", "val")[-1]
    assert (result.val.miou, result.val.loss) == (recorded["miou"], recorded["loss"])
    assert result.val.iou == dict(zip(("ground", "box", "disc"), recorded["iou"], strict=True))
    assert result.val.train_loss == pytest.approx(np.mean(losses[0]))


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
    first = train(small(tiny), ["optim.lr=0.002", "train.epochs=2"], run=run)
    assert load_config(run / "config.yaml").optim.lr == 0.002
    again = train(resume=str(run), overrides=["train.epochs=3", "log.every_steps=2"])
    assert (first.step, again.step) == (10, 15)
    assert [(row.epoch, row.step) for row in again.history] == [(1, 5), (2, 10), (3, 15)]
    assert again.history[1] == first.val != again.history[0]
    assert api.history(run) == again.history
    found = evaluate(run, devices=["cpu", torch.device("cpu")])
    assert list(found.iou) == list(again.val.iou) == ["ground", "box", "disc"]
    assert (found.num_scored, found.num_classes) == (3, 3)
    best = max(again.history, key=lambda row: row.miou)
    assert found.iou == pytest.approx(best.iou)
    # Two columns of each mask are ignored.
    assert found.confusion.sum() == 48 * 62 + 45 * 59 + 48 * 51 + 48 * 62
    check_scores(found)
    network = load(run, device="cpu")
    assert (network.device.type, network.module.training) == ("cpu", False)
    path, other = (tiny_root / "images" / "val" / name for name in ("00.png", "03.png"))
    images = [cv2.cvtColor(cv2.imread(str(each)), cv2.COLOR_BGR2RGB) for each in (path, other)]
    (labels, others), probabilities = map(network.predict, images), network.probabilities(images[0])
    assert (labels.shape, labels.dtype, probabilities.shape) == ((48, 64), np.uint8, (3, 48, 64))
    assert np.array_equal(probabilities.argmax(0), labels)
    assert not np.array_equal(labels, others)
    batch = network.predict(np.stack(images))
    assert (batch.shape, network.probabilities(images[0][None]).shape) == ((2, 48, 64), (1, 3, 48, 64))
    listed = network.predict([path, str(other), images[0], Image.open(other)])
    assert all(np.array_equal(*each) for each in zip([*batch, *listed], [labels, others] * 3, strict=True))
    Image.fromarray(np.dstack([images[0], images[1][..., 0]])).save(tmp_path / "infrared.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network._predictor, "pixels", PixelFormat((1, 2, 3)))
        with pytest.warns(UserWarning, match=r"infrared.png: only bands \[1, 2, 3\] of 4 are used"):
            found_labels = network.predict(tmp_path / "infrared.png")
    assert np.array_equal(found_labels, labels)
    with pytest.raises(ValueError, match="image is a dict: give a path, an array, a PIL image, or a list"):
        network.predict({})
    assert network.module is network.trained.model
    done = predict(run, str(path), tmp_path / "out", save=["labels", "color"], batch=1)
    assert (done.num_images, done.problems) == (1, [])
    assert done.paths == [tmp_path / "out" / kind / "00.png" for kind in ("labels", "color")]
    assert all(each.is_file() for each in done.paths)
    for min_area_px, has_polygons in ((0, True), (48 * 64 + 1, False)):
        drawn = predict(run, path, tmp_path / "coco", polygons="coco", min_area_px=min_area_px, simplify_px=1)
        assert [each.name for each in drawn.paths] == ["coco.json"]
        assert bool(json.loads(drawn.paths[0].read_text())["annotations"]) == has_polygons
    assert np.array_equal(cv2.imread(str(tmp_path / "out" / "labels" / "00.png"), cv2.IMREAD_UNCHANGED), labels)
    every = predict(run, [str(path.parent)], tmp_path / "all", save=["labels"], batch=3)
    assert every.paths == [tmp_path / "all" / "labels" / f"{number:02}.png" for number in range(4)]
    assert np.array_equal(cv2.imread(str(every.paths[3]), cv2.IMREAD_UNCHANGED), others)
    with pytest.raises(ValueError, match=r"image of shape \(0, 4, 3\) has no pixels"):
        network.predict(np.zeros((0, 4, 3), np.uint8))
    for copied in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        copied.module.train()
        assert np.array_equal(copied.predict(images[0]), labels)
        assert (network.module.training, copied.module.training) == (False, True)


@pytest.mark.parametrize(
    ("function", "command", "only_of_command", "only_of_function"),
    [(predict, "predict", set(), {"device"}), (evaluate, "eval", {"json_out"}, set())],
)
def test_functions_have_the_options_of_their_commands(
    function: Any, command: str, only_of_command: set[str], only_of_function: set[str]
) -> None:
    options = {each.name for each in typer.main.get_command(app).commands[command].params}  # type: ignore[attr-defined]
    of_command = {"target" if name == "targets" else name for name in options - only_of_command} - {"help"}
    every = {"progress", "trust_parts"}  # options of all commands, or of the terminal
    assert of_command | every | only_of_function == set(inspect.signature(function).parameters)


def test_arguments_have_the_same_types_in_all_functions() -> None:
    kinds: dict[str, set[str]] = {}
    for function in (train, evaluate, predict, load):
        for name, parameter in inspect.signature(function).parameters.items():
            kinds.setdefault(name, set()).add(str(parameter.annotation).removesuffix(" | None"))
    several = {name: found for name, found in kinds.items() if len(found) > 1}
    assert several == {"target": {"AnyPath", "AnyPath | Sequence[AnyPath]"}}, "load returns one model"
    assert (kinds["device"], kinds["config"], kinds["progress"]) == ({"Device"}, {"Config"}, {"bool"})


WRONG_CALLS = [  # call with the folder of a run, and words of the error
    (lambda run: evaluate([]), "target is empty: give a path"),
    (lambda run: evaluate([run, None]), r"target\[1\] is None: give a path or a name"),
    (lambda run: evaluate(train(resume=run, progress=False)), "target is a TrainResult: .* such as its run"),
    (lambda run: predict(load(run), "a.png", "out"), "target is a Network: .* such as its trained.path"),
    (lambda run: evaluate(run, devices="cpu"), r"devices is 'cpu': give a list, such as \['cpu'\]"),
    (lambda run: evaluate(run, devices=0), r"devices is 0: give a list, such as \[0\]"),
    (lambda run: evaluate(run, split=3), "split is 3: give a path or a name"),
    (lambda run: evaluate(run, devices=[]), "^devices names no device: give at least one"),
    (lambda run: evaluate(run, devices=[0.5]), "^devices: device 0.5 is not a CUDA index"),
    (lambda run: evaluate(run, data_root=3), "data_root is 3: give a path"),
    (lambda run: evaluate(run, config=3), "config is a int: give a file, a dictionary or a RunConfig"),
    (lambda run: evaluate(run, progress="no"), "progress is 'no': give True or False"),
    (lambda run: load(run, device=7), "^device: device 'cuda:7': no CUDA device"),
    (lambda run: load(b"run"), "target is b'run': give a path"),
    (lambda run: load(run, slide="no"), "slide is 'no': give True or False"),
    (
        lambda run: predict(run, np.zeros((2, 3, 3)), "out"),
        r"paths is a ndarray: .*load\(target\).predict takes",
    ),
    (lambda run: predict(run, [], "out"), "paths is empty"),
    (lambda run: predict(run, "a.png", None), "out is None: give a path"),
    (lambda run: predict(run, run, "out", save=["lables"]), "^save lables is not known: did you mean labels"),
    (lambda run: predict(run, run, "out", polygons="shape"), "^polygons shape is not known"),
    (lambda run: predict(run, run, "out", save=[None]), r"save\[0\] is None"),
    (lambda run: predict(run, run, "out", polygons=True), "^polygons True is not known"),
    (lambda run: predict(run, run, "out", polygons="coco", min_area_px=-1), "^min_area_px -1 is no number of 0"),
    (lambda run: predict(run, run, "out", polygons="coco", min_area_px="5"), "^min_area_px '5' is no number"),
    (lambda run: predict(run, run, "out", polygons="coco", simplify_px=np.nan), "^simplify_px nan is no number"),
    (lambda run: predict(run, run, "out", min_area_px=3), "^min_area_px 3 changes polygons, .*: add polygons FORMAT"),
    (lambda run: predict(run, run, "out", batch=0), "^batch 0 is neither a positive number"),
    (lambda run: train(["a.yaml"]), "config is a list: give a file, a dictionary or a RunConfig"),
    (lambda run: train("demo.yaml", "train.epochs=1"), r"overrides is 'train.epochs=1': give a list such as"),
    (lambda run: train("demo.yaml", 3), "overrides is 3: give a list such as"),
    (lambda run: train("demo.yaml", {"train.epochs": "x"}), r"overrides: train.epochs = 'x': "),
    (lambda run: train("demo.yaml", {"train": {"steps": 3}}), "would replace the whole section train: .*'train.steps'"),
    (lambda run: train("demo.yaml", {"data.classes": {"a"}}), r"overrides\['data.classes'\] is a set that is no plain"),
    (lambda run: train("demo.yaml", {"name": b"x"}), r"overrides\['name'\] is a bytes that is no plain value"),
    (lambda run: train(resume=run, run="other"), "run other: resume .* continues in its own folder: leave run out"),
    (lambda run: train("demo.yaml", on_event=3), "on_event is 3: give a function of one event"),
    (lambda run: train("demo.yaml", run=run), "already holds a run: add resume to continue it"),
    (lambda run: train("demo.yaml", run=3), "run is 3: give a path"),
    (lambda run: train("demo.yaml", ["optim.lr=-1"]), r"optim\.lr = -1"),
    (lambda run: train("demo.yaml", ["parallel.mode=ddp"], run="ddp"), "starts processes: .* parallel.mode=dp"),
    (lambda run: train(resume=True), "resume is True: give a path or a name"),
    (lambda run: train({"name": "x"}, resume=run), "continues the run's config: leave config out"),
    (lambda run: in_thread(lambda: train("demo.yaml", handle_signals=True)), "in the main thread only"),
    (lambda run: api.history(3), "run is 3: give a path or a name"),
]


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_wrong_calls_are_named(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(small(tiny), {"train.steps": 1}, run=tmp_path / "run").run
    monkeypatch.chdir(tmp_path)
    for call, words in WRONG_CALLS:
        with pytest.raises(ConfigError, match=words):
            call(run)
    assert sorted(os.listdir()) == ["run"]


def test_overrides_may_be_a_mapping_of_plain_values(tiny: dict[str, Any], tmp_path: Path) -> None:
    given = {"name": "no", "seed": np.int64(3), "optim.lr": 1e-5, "data.root": tmp_path}
    given["data.crop_px"] = (np.int64(32), 48)
    config = api._read(tiny, api._words(given))
    found = (config.name, config.seed, config.optim.lr, config.data.crop_px, config.data.root)
    assert found == ("no", 3, 1e-5, (32, 48), str(tmp_path))


def test_sections_may_be_any_mapping(tiny: dict[str, Any]) -> None:
    """As OmegaConf's are; an override changes one key of a section, and nothing that the caller has."""
    given = {key: UserDict(value) if isinstance(value, dict) else value for key, value in tiny.items()}
    config = api._read(UserDict(given), ["train.epochs=7", "data.val_split=train"])
    assert config == merged(tiny, train={"epochs": 7}, data={"val_split": "train"})
    assert given["data"] == tiny["data"]


def test_module_in_training_predicts_as_evaluated(tiny: dict[str, Any], tiny_root: Path, tmp_path: Path) -> None:
    """Two threads predict at once, and the first one ends while the second one is within a layer."""
    network = load(train(small(tiny), run=tmp_path / "run").run)
    module, image = network.module, cv2.imread(str(tiny_root / "images" / "val" / "01.png"))
    state, plain = copy.deepcopy(module.state_dict()), network.probabilities(image)
    module.train()
    norm, head = (next(m for m in module.modules() if isinstance(m, kind)) for kind in (nn.BatchNorm2d, nn.Conv2d))
    head.eval()
    before = [part.training for part in module.modules()]
    entered, first_is_over, waits = threading.Event(), threading.Event(), iter([True, False])

    def wait(*_: Any) -> None:
        if next(waits, False):
            entered.set()
            assert first_is_over.wait(30)

    norm.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(network.probabilities, image)
        assert entered.wait(30)
        assert np.array_equal(network.probabilities(image), plain)
        first_is_over.set()
        assert np.array_equal(second.result(), plain)
    assert [part.training for part in module.modules()] == before
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


def test_daemonic_process_trains_without_data_workers(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        multiprocessing.Process(target=print).start()
    with pytest.raises(ConfigError, match=r"data\.workers = 2: this process was started with daemon=True and may not"):
        train(small(tiny), {"data.workers": 2}, run=tmp_path / "run")
    assert train(small(tiny), {"data.workers": "auto"}, run=tmp_path / "run").step == 5


def test_results_show_themselves_in_a_few_lines(tiny: dict[str, Any], tmp_path: Path) -> None:
    result = train(small(tiny), {"train.epochs": 3}, run=tmp_path / "a<b>")
    found, network = evaluate(result.run, progress=False), load(result.run)
    assert all(text in repr(result) for text in ("a<b>", "is_finished=True", "step=15", "3 evaluations", "epoch=3"))
    assert f"miou={found.miou:.4f}" in repr(found)
    assert all(text in repr(network) for text in ("best.pt", "3 classes", "device='cpu'"))
    for each in (result, result.history, found, network, result.val):
        assert len(repr(each).splitlines()) < 10
    table = result._repr_html_()
    assert re.findall(r"<tr><td>(\d)</td><td>(\d+)</td>", table) == [("1", "5"), ("2", "10"), ("3", "15")]
    assert "a&lt;b&gt;: finished at step 15" in table
    assert re.findall(r"<tr><td>(\w+)</td>", found._repr_html_()) == [row["class"] for row in found.rows()]
    assert (result.history[1:].rows(), len(result.history + result.history[:1])) == (result.history.rows()[1:], 4)
    assert found == evaluate(result.run, progress=False)
    assert len({found, evaluate(result.run, progress=False), *result.history}) == 4

    losses = result.plot()
    scores = losses.figure.axes[1]
    drawn = {line.get_label(): line.get_ydata().tolist() for line in [*losses.lines, *scores.lines]}
    rows = result.history.rows()
    names = {"training loss": "train_loss", "validation loss": "loss", "mIoU": "miou", "mean Dice": "mean_dice"}
    assert drawn == {label: [row[name] for row in rows] for label, name in names.items()}
    bars = found.plot(ax=losses.figure.add_subplot())
    assert [bar.get_width() for bar in bars.patches] == [row["iou"] for row in found.rows()[::-1]]


def check_scores(found: segapp.EvalResult) -> None:
    """Compare the rows and the text of a result with its scores."""
    assert found.mean_dice == pytest.approx(np.mean(list(found.dice.values())))
    rows = found.rows()
    assert [row["iou"] for row in rows] == sorted(found.iou.values())  # type: ignore[type-var]
    assert {row["class"]: row["dice"] for row in rows} == found.dice
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [row["class"] for row in rows], "as segapp eval prints them"
    assert lines[-1].startswith(f"val: mIoU {found.miou:.4f} over 3 of 3 classes")
    assert [path.name for path in found.checkpoints] == ["best.pt"]


def test_steps_of_a_run_are_those_of_its_end(tmp_path: Path) -> None:
    """Not every step has an event."""
    run = RecordedRun(tmp_path / "run", steps_per_epoch=6)
    run.epoch()
    run.step += 3
    run.end("stopped")
    assert segapp.api._read_run(tmp_path / "run")[1] == run.step == 9


def test_program_stops_a_training_at_an_event(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int]] = []

    def stop_at_three(event: Event) -> None:
        if event.type != "step":
            return
        seen.append((event.type, event.step))
        if event.step == 3:
            raise StopTraining("three are enough")

    run = tmp_path / "run"
    result = train(small(tiny), run=run, on_event=stop_at_three, progress=True)
    assert re.search(r"^epoch 1/1  step 1/5  loss \d\.\d{4}  lr ", capsys.readouterr().out, re.MULTILINE)
    assert (result.is_finished, result.step) == (False, 3)
    assert result.reason == "three are enough: a checkpoint was saved", "the banner adds how to resume it"
    assert seen == [("step", 1), ("step", 2), ("step", 3)]
    train(resume=str(run), overrides={"train.epochs": 2}, progress=False)
    assert capsys.readouterr().out == ""
    assert (result.val, len(result.history)) == (None, 0)
    again = train(resume=str(run))
    assert (again.reason, again.step, len(again.history)) == ("already complete", 10, 2)


def test_history_is_a_table_and_every_score_an_attribute() -> None:
    scores: dict[str, float | None] = {name: float(at) for at, name in enumerate(SCORES)}
    rows = [
        Evaluated(epoch=1, step=5, train_loss=1.5, iou={"a": 0.5, "b": None}, scores={**scores, "loss": None}),
        Evaluated(epoch=2, step=10, train_loss=None, iou={"a": 0.25, "b": 0.0}, scores=scores),
    ]
    table = [(row["epoch"], row["train_loss"], row["loss"], row["num_scored"]) for row in History(rows).rows()]
    assert table == [(1, 1.5, None, 1), (2, None, scores["loss"], 2)]
    assert [(row["iou a"], row["iou b"]) for row in History(rows).rows()] == [(0.5, None), (0.25, 0.0)]
    assert [getattr(rows[1], name) for name in SCORES] == list(scores.values())
    assert len({inspect.getdoc(inspect.getattr_static(Evaluated, name)) for name in SCORES}) == len(SCORES)
    of_classes = {"a": 0.5, "b": None, "c": 0.0, "d": 0.25}
    more: Any = dict.fromkeys(("dice", "precision", "recall"), of_classes)
    facts: Any = {"split": "val", "confusion": np.zeros((4, 4)), "groups": {}, "checkpoints": []}
    found = segapp.EvalResult(scores=scores, iou=of_classes, **more, **facts)
    assert [row["class"] for row in found.rows()] == ["c", "d", "a", "b"], "absent classes come last"
    assert pickle.loads(pickle.dumps(rows[0])) == copy.copy(rows[0]) == rows[0]


def test_names_and_signatures_are_those_of_the_functions() -> None:
    shown = [name for name in dir(segapp) if not name.startswith("_")]
    assert shown == sorted(segapp.__all__)
    assert all(hasattr(segapp, name) for name in shown)
    stub = (Path(segapp.__file__).parent / "__init__.pyi").read_text()
    assert sorted(re.findall(r"^from segapp(?:[.\w]+)? import (\w+) as \1$", stub, re.MULTILINE)) == shown
    assert (Path(segapp.__file__).parent / "py.typed").exists()
    assert inspect.signature(segapp.train) == inspect.signature(api.train)
    assert list(inspect.signature(train).parameters)[:3] == ["config", "overrides", "run"]
    text = pydoc.render_doc(segapp.train, renderer=pydoc.plaintext)
    assert "Train a model in this process, and return when the training has ended" in text
    assert "train(config: 'Config | None' = None, overrides: 'list[str] | tuple[str, ...] | Mapping" in text
    assert "handle_signals: stop the training with a checkpoint on Ctrl-C" in text
    for name in ("train", "evaluate", "predict", "load", "history"):
        assert "Example:" in (inspect.getdoc(getattr(segapp, name)) or ""), name


def test_bars_are_shown_in_a_terminal_or_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_progress_bar()
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert has_progress_bar()
