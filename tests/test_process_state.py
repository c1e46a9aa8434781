"""A function of the Python API leaves the process of its caller as it was."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from segapp import api
from segapp.errors import SegappError
from tests.support import ROOT
from tests.support.fault_runs import tiny_config
from tests.support.runs import events
from tests.test_api import small


def state() -> dict[str, Any]:
    """Return what a function may not change, by name."""
    gc.collect()
    backends = torch.backends
    with open("/proc/self/status") as status:
        umask = next(line.split()[1] for line in status if line.startswith("Umask"))
    return {
        "torch draws": torch.get_rng_state().tolist(),
        "numpy draws": str(np.random.get_state()),
        "random draws": random.getstate(),
        "umask": umask,
        "environment": dict(os.environ),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "open files": sorted(file.path for file in psutil.Process().open_files()),
        "children": [child.name() for child in psutil.Process().children()],
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "switches": [
            (backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.allow_tf32),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            (torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        ],
        "working folder": os.getcwd(),
    }


def given_back_mib() -> float:
    """Return how much memory the system gets back from 64 MiB in an array that is larger than any hole in the heap."""
    array = np.empty(2**27)
    array[: 64 * 2**17] = 1
    before = psutil.Process().memory_info().rss
    del array
    return (before - psutil.Process().memory_info().rss) / 2**20


@pytest.fixture(scope="module")
def trained(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {"library": "python", "name": "tests.support.own_parts:Net", "encoder": None, "options": {}}
    config = tiny_config(tiny_root, model=model, train={"epochs": 1, "steps": 1}, checkpoint={"every_steps": None})
    run = api.train(config, run=tmp_path_factory.mktemp("trained") / "run").run
    api.evaluate(run)  # imports torch, scipy and other packages, some of which filter warnings
    gc.collect()
    gc.freeze()  # leaves the modules out of the collections of `state`
    return run


def ends_with(error: BaseException) -> Callable[[Any], None]:
    def on_event(event: Any) -> None:
        if event.type == "step" and event.step == 2:
            raise error

    return on_event


def fails_at_the_end(event: Any) -> None:
    if event.type == "run_end":
        raise ValueError("mine")


CALLS: dict[str, Callable[[dict[str, Any], Path, Path], Any]] = {
    "train": lambda config, run, new: api.train(config, run=new),
    "train, refused": lambda config, run, new: api.train(config, run=run),
    "train, failed": lambda config, run, new: api.train(config, run=new, on_event=ends_with(ValueError("mine"))),
    "train, interrupted": lambda config, run, new: api.train(config, run=new, on_event=ends_with(KeyboardInterrupt())),
    "train, exited": lambda config, run, new: api.train(config, run=new, on_event=ends_with(SystemExit(3))),
    "train, cancelled": lambda config, run, new: api.train(config, run=new, on_event=ends_with(CancelledError())),
    "train, failed at its end": lambda config, run, new: api.train(config, run=new, on_event=fails_at_the_end),
    "evaluate": lambda config, run, new: api.evaluate(run),
    "evaluate, refused": lambda config, run, new: api.evaluate(run, split="no such split"),
    "predict": lambda config, run, new: api.predict(run, [config["data"]["root"]], out=new),
    "load": lambda config, run, new: api.load(run),
    "load, refused": lambda config, run, new: api.load(new),
    "history": lambda config, run, new: api.history(run),
}


ENDS = {
    "train, failed": ("failed", "unexpected ValueError: mine", 1),
    "train, interrupted": ("stopped", "KeyboardInterrupt: nothing was saved", 130),
    "train, exited": ("stopped", "SystemExit: nothing was saved", 130),
    "train, cancelled": ("stopped", "CancelledError: nothing was saved", 130),
    "train, failed at its end": ("finished", "1 epochs", 0),
}


def read_end(run: Path) -> tuple[str, str, int]:
    """Return status, reason and exit code of the last event of a run."""
    *_, last = events(run, "run_end")
    assert last == events(run)[-1] == events(run, "run_end")[0]
    return last["status"], last["reason"], last["exit_code"]


@pytest.mark.parametrize("name", CALLS)
def test_process_is_as_it_was(name: str, tiny: dict[str, Any], trained: Path, tmp_path: Path) -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    previous = os.umask(0o007)
    try:
        before = state()
        errors = (SegappError, KeyboardInterrupt, SystemExit, CancelledError)
        with pytest.raises(errors) if "," in name else contextlib.nullcontext():
            CALLS[name](small(tiny), trained, tmp_path / "new")
        after = state()
    finally:
        os.umask(previous)
    assert not name.startswith("train, ") or "refused" in name or read_end(tmp_path / "new") == ENDS[name]
    grown = {key: Counter(after.pop(key)) - Counter(before.pop(key)) for key in ("threads", "open files", "children")}
    assert not any(grown.values()), grown  # threads of earlier tests may end meanwhile
    assert {key: value for key, value in after.items() if value != before[key]} == {}
    assert given_back_mib() > 48


def test_draws_of_other_threads_do_not_change_a_run(tiny: dict[str, Any], tmp_path: Path) -> None:
    def losses(name: str) -> list[float]:
        return [
            event["loss"]
            for event in events(api.train(small(tiny), run=tmp_path / name).run)
            if event["type"] == "step"
        ]

    def draw() -> None:
        while not is_over.wait(0.0005):
            torch.rand(7), np.random.rand(), random.random()

    alone, is_over, thread = losses("alone"), threading.Event(), threading.Thread(target=lambda: draw())
    thread.start()
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(losses, ["beside-0", "beside-1", "beside-2"]))
    finally:
        is_over.set()
        thread.join()
    assert len(alone) == 5
    assert found == [alone] * 3


def drawing(tiny: dict[str, Any], source: str, **train: Any) -> dict[str, Any]:
    options = {"is_scaled": True} if source == "torch" else {}
    model = {"library": "python", "name": "tests.support.own_parts:NetThatDraws", "options": options}
    loss = {"loss": {"name": "tests.support.own_parts:noisy"}} if source == "loss" else {}
    return {**small(tiny), **loss, "model": model, "train": {"epochs": 1, "batch_size": 2, **train}}


@contextlib.contextmanager
def running(config: dict[str, Any], run: Path) -> Iterator[tuple[Future[Any], threading.Event]]:
    """Train in a thread, which waits after its second step until the event is set or the body ends."""
    stepped, goes_on = threading.Event(), threading.Event()

    def wait(event: Any) -> None:
        if event.type == "step" and event.step == 2:
            stepped.set()
            assert goes_on.wait(60)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(api.train, config, run=run, on_event=wait)
        try:
            assert stepped.wait(60)
            yield first, goes_on
        finally:
            goes_on.set()
        assert first.result().step == 5


def test_models_that_draw_train_one_after_the_other(tiny: dict[str, Any], tmp_path: Path) -> None:
    names = itertools.count()
    new = lambda: tmp_path / f"run-{next(names)}"  # noqa: E731
    match = "another training runs in this process, and tests.support.own_parts:NetThatDraws or its loss draws random"
    for first, second in (("", "torch"), ("torch", ""), ("", "loss")):
        with running(drawing(tiny, first), new()), pytest.raises(SegappError, match=match):
            api.train(drawing(tiny, second), run=new())
        api.train(drawing(tiny, second), run=new())
    with running(drawing(tiny, ""), new()):
        assert api.train(drawing(tiny, ""), run=new()).step == 5
        for key, value in (("deterministic", True), ("tf32", False)):
            with pytest.raises(SegappError, match=rf"train.{key} = {value}, but another training in this process"):
                api.train(drawing(tiny, "", **{key: value}), run=new())


@pytest.mark.usefixtures("trained")
def test_last_of_two_trainings_restores_the_process(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The training that begins first ends first, so each would restore what the other one has set."""
    previous = os.umask(0o007)
    try:
        before = state()
        first_run, second_run = (running(small(tiny), tmp_path / name) for name in ("first", "second"))
        with first_run as (first, goes_on), second_run:
            goes_on.set()
            first.result()
            assert (before["umask"], state()["umask"]) == ("0007", "0027")
        after = state()
    finally:
        os.umask(previous)
    assert {key for key, value in after.items() if value != before[key]} <= {"threads"}


def test_modes_of_the_caller_do_not_reach_a_call(tiny: dict[str, Any], trained: Path, tmp_path: Path) -> None:
    def results(name: str) -> list[Any]:
        losses = [event["loss"] for event in events(api.train(small(tiny), run=tmp_path / name).run, "step")]
        labels = api.load(trained).predict(np.zeros((9, 14, 3), np.uint8)).tolist()
        return [losses, labels, api.evaluate(trained).scores]

    expected = results("plain")
    for number, mode in enumerate((torch.inference_mode, torch.no_grad)):
        with mode():
            assert results(f"mode-{number}") == expected


FRESH = """
import json, multiprocessing, os, sys
before = dict(os.environ)
import segapp
run = segapp.train(json.loads(sys.argv[1]), run=sys.argv[2], progress=False).run
segapp.evaluate(run, progress=False)
network = segapp.load(run)
named = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NO_ALBUMENTATIONS_UPDATE", "LD_LIBRARY_PATH"}
named.add("SEGAPP_TRUST_PARTS")  # of a custom component
print(sorted({key for key in os.environ if os.environ[key] != before.get(key)} - named))
print(multiprocessing.get_start_method(allow_none=True))

import numpy, torch
torch.set_num_threads(2)
image = numpy.zeros((200, 300, 3), numpy.uint8)
labels = network.predict(image)
def predict():
    assert (network.predict(image) == labels).all()
process = multiprocessing.get_context("fork").Process(target=predict)
process.start()
process.join(60)
print(process.exitcode, torch.get_num_threads())
process.kill()
"""


def test_fresh_process_is_as_it_was_and_its_fork_predicts(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The other tests compare a process that has imported everything.

    The threads of OpenMP of a process that has predicted do not exist in its fork, where a second one would wait.
    """
    config = {**small(tiny), "train": {"steps": 1}}
    command = [sys.executable, "-c", FRESH, json.dumps(config), str(tmp_path / "run")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "None", "0 2"], done.stderr
