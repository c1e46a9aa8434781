"""A function of the Python API leaves the process of its caller as it was."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from segapp import api
from segapp.errors import SegappError
from tests.support.runs import events


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
    """Return how much memory the system gets back from an array of 200 MiB."""
    array = np.ones(200 * 2**17)
    before = psutil.Process().memory_info().rss
    del array
    return (before - psutil.Process().memory_info().rss) / 2**20


@pytest.fixture
def trained(tiny: dict[str, Any], tmp_path: Path) -> Path:
    return api.train(small(tiny), run=tmp_path / "run").run


def small(tiny: dict[str, Any]) -> dict[str, Any]:
    model = {"library": "python", "name": "tests.support.own_parts:Net"}
    return {**tiny, "model": model, "train": {"epochs": 1, "batch_size": 2}}


def ends_with(error: BaseException) -> Callable[[Any], None]:
    def on_event(event: Any) -> None:
        if event.type == "step" and event.step == 2:
            raise error

    return on_event


CALLS: dict[str, Callable[[dict[str, Any], Path, Path], Any]] = {
    "train": lambda config, run, new: api.train(config, run=new),
    "train, refused": lambda config, run, new: api.train(config, run=run),
    "train, failed": lambda config, run, new: api.train(config, run=new, on_event=ends_with(ValueError("mine"))),
    "train, interrupted": lambda config, run, new: api.train(config, run=new, on_event=ends_with(KeyboardInterrupt())),
    "train, exited": lambda config, run, new: api.train(config, run=new, on_event=ends_with(SystemExit(3))),
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
}


def read_end(run: Path) -> tuple[str, str, int]:
    """Return status, reason and exit code of the last event of a run."""
    last = events(run)[-1]
    assert last["type"] == "run_end"
    return last["status"], last["reason"], last["exit_code"]


@pytest.mark.parametrize("name", CALLS)
def test_process_is_as_it_was(name: str, tiny: dict[str, Any], trained: Path, tmp_path: Path) -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    previous = os.umask(0o007)
    try:
        api.evaluate(trained)  # imports torch, scipy and other packages, some of which filter warnings
        before = state()
        errors = (SegappError, KeyboardInterrupt, SystemExit)
        with pytest.raises(errors) if "," in name else contextlib.nullcontext():
            CALLS[name](small(tiny), trained, tmp_path / "new")
        after = state()
    finally:
        os.umask(previous)
    assert not name.startswith("train, ") or "refused" in name or read_end(tmp_path / "new") == ENDS[name]
    grown = {key: Counter(after.pop(key)) - Counter(before.pop(key)) for key in ("threads", "open files", "children")}
    assert not any(grown.values()), grown  # threads of earlier tests may end meanwhile
    assert {key: value for key, value in after.items() if value != before[key]} == {}
    assert given_back_mib() > 150


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
        found = [losses(f"beside-{number}") for number in range(3)]
    finally:
        is_over.set()
        thread.join()
    assert len(alone) == 5
    assert found == [alone] * 3
