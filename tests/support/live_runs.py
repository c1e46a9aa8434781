"""Helpers for tests that control trainings in processes of their own."""

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
from segapp.run.lock import is_alive
from tests.support.runs import events, merged


def small(tiny: dict[str, Any], epochs: int = 3, **sections: Any) -> RunConfig:
    """Return a config with five steps an epoch; without dropout, so that the losses do not depend on the split.

    It is in float32 also on a GPU.
    """
    train = {"epochs": epochs, "batch_size": 2, "ema": None, "precision": "fp32", **sections.pop("train", {})}
    model = {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}}
    return merged(
        tiny, model=model, optim={"name": "sgd", "lr": 0.001}, train=train, data={"crop_px": [48, 64]}, **sections
    )


def three_devices(tiny: dict[str, Any], epochs: int = 3, **sections: Any) -> RunConfig:
    """Return the config of `small` over three logical devices, with five images a step."""
    return small(
        tiny,
        epochs,
        parallel={"mode": "dp", "devices": ["cpu", "cpu", "cpu"]},
        train={"batch_size": 5},
        **sections,
    )


def wait_for(condition: Callable[[], Any], timeout_s: float = 200, process: subprocess.Popen[Any] | None = None) -> Any:
    """Wait until `condition()` is true, and return its value."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "the condition was not met in time"
        assert process is None or process.poll() is None, "the trainer has ended"
        time.sleep(0.05)
    return found


def seen(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a type; an empty list while there is no file."""
    return events(folder, kind) if (folder / "events.jsonl").exists() else []


@contextlib.contextmanager
def background(
    config: Path, *overrides: str, cwd: Path, run: str = "run", **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a training as a child process, and kill it at the end if it is still alive."""
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
    """Kill the trainer of a folder at the end of the test, if it is still alive."""
    try:
        yield
    finally:
        holder = RunFolder(folder).read_holder()
        if holder is not None and is_alive(holder):
            os.kill(holder.pid, signal.SIGKILL)


def assert_answered_once(folder: Path) -> dict[str, dict[str, Any]]:
    """Assert that every command of a run has exactly one final answer; return the answers by command text."""
    final = [event for event in events(folder, "command") if event["status"] != "accepted"]
    ids = [event["id"] for event in final]
    assert len(ids) == len(set(ids))
    accepted = {event["id"] for event in events(folder, "command") if event["status"] == "accepted"}
    assert accepted <= set(ids)
    assert not list((folder / "commands").iterdir())
    return {event["command"]: event for event in final}
