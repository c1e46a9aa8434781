"""Trainings under control, for the tests: detached ones, and commands to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from segapp.config import RunConfig
from segapp.run.folder import RunFolder
from segapp.run.process import is_alive
from tests.support.runs import events, merged


def small(tiny: dict[str, Any], epochs: int = 3, **sections: Any) -> RunConfig:
    """Five steps an epoch of four images; no dropout, so that a loss does not depend on who draws a random number."""
    train = {"epochs": epochs, "batch_size": 2, "ema": None, **sections.pop("train", {})}
    model = {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}}
    return merged(
        tiny, model=model, optim={"name": "sgd", "lr": 0.001}, train=train, data={"crop_px": [48, 64]}, **sections
    )


def three_devices(tiny: dict[str, Any], epochs: int = 3, **sections: Any) -> RunConfig:
    """The same over three logical devices, five images a step."""
    return small(
        tiny,
        epochs,
        parallel={"mode": "dp", "devices": ["cpu", "cpu", "cpu"]},
        train={"batch_size": 5},
        **sections,
    )


def wait_for(what: Callable[[], Any], timeout_s: float = 200, process: subprocess.Popen[Any] | None = None) -> Any:
    """Waits until `what()` is true, and gives it."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline_s, "it did not happen in time"
        assert process is None or process.poll() is None, "the trainer has ended"
        time.sleep(0.05)
    return found


def seen(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind; none where there is no file yet."""
    return events(folder, kind) if (folder / "events.jsonl").exists() else []


@contextlib.contextmanager
def background(
    config: Path, *overrides: str, cwd: Path, run: str = "run", **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A training as a child of the test, which is killed at the end if it still lives."""
    command = [sys.executable, "-m", "segapp", "train", "--plain", "--config", str(config), "--run", run, *overrides]
    with open(cwd / "lines.log", "ab") as log:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def ended_after(folder: Path) -> Iterator[None]:
    """Kills the trainer of a folder at the end of the test, if it still lives."""
    try:
        yield
    finally:
        holder = RunFolder(folder).read_holder()
        if holder is not None and is_alive(holder):
            os.kill(holder.pid, signal.SIGKILL)


def assert_answered_once(folder: Path) -> dict[str, dict[str, Any]]:
    """Every command of a run has exactly one final answer; gives them by text."""
    final = [event for event in events(folder, "command") if event["status"] != "accepted"]
    ids = [event["id"] for event in final]
    assert len(ids) == len(set(ids))
    accepted = {event["id"] for event in events(folder, "command") if event["status"] == "accepted"}
    assert accepted <= set(ids)
    assert not list((folder / "commands").iterdir())
    return {event["command"]: event for event in final}
