"""Scripted trainings: every way in which the settings of a run change while it lives, and what each way recorded.

python -m tests.support.scripted_runs --write [NAME ...]   records all, or some, again in tests/training/live/recorded/
python -m tests.support.scripted_runs --whole FOLDER       records whole events into a folder, to compare two versions

A script has parts, each of them one process of the run: what is sent after which step, which fault occurs, and with
which exit code it ends. The next part resumes. A record has the events without times, ids of processes and samples of
memory. In this process steps are in float64, so that a record holds on every CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from segapp import failpoints
from segapp.config import RunConfig, dump_config
from segapp.errors import SegappError
from segapp.run.commands import parse_command, send_command
from segapp.run.events import Event, Step
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from tests.support import ROOT
from tests.support.budgets import enforce_budgets
from tests.support.golden_runs import float64
from tests.support.live_runs import small
from tests.support.runs import draw_tiny_data, events, leaves, merged, segapp

RECORDS = ROOT / "tests" / "training" / "live" / "recorded"
CPUS = ["cpu", "cpu", "cpu"]
CRASH, OOM, STOPPED = 1, 6, 75
"""Exit codes of a part that does not end with 0."""


@dataclass(frozen=True)
class Part:
    """One process of a run: the sections that it changes, the commands after each step, its fault and its end."""

    sections: dict[str, Any] = field(default_factory=dict)
    sent: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Updates made -> commands that are sent then; 0: before the start."""
    fault: str = ""
    code: int = 0


def dp(num_devices: int = 3, **parallel: Any) -> dict[str, Any]:
    """Return the section of logical devices with budgets: without one, a device has the memory of this process."""
    mode = "dp" if num_devices > 1 else "single"
    common = {"memory_budget_mib": [900] * num_devices, "gpu0_bsz": None, "shares": None}
    return {"parallel": {**common, "mode": mode, "devices": CPUS[:num_devices], **parallel}}


def ranks(**parallel: Any) -> dict[str, Any]:
    return {"parallel": {"mode": "ddp", "devices": CPUS[:2], **parallel}}


FULL, SMALL = {"memory_budget_mib": [8, 900, 900]}, {"memory_budget_mib": [14, 13, 12]}
ACCUMULATED = {"train": {"batch_size": 3, "accumulate": 2}}

SCRIPTS: dict[str, tuple[Part, ...]] = {
    "superseded": (
        Part(dp(), {0: ("set gpu0_bsz=3 lr_factor=0.5", "set gpu0_bsz=0"), 3: ("set shares=2,2,1", "set lr_factor=2")}),
    ),
    "cancelled": (
        Part(
            dp(gpu0_bsz=1),
            {
                1: ("set gpu0_bsz=2", "set lr_factor=0.1", "cancel 000000000001", "cancel 00000000000f"),
                3: ("set shares=0,1,4 recompute=all", "cancel", "cancel"),
                5: ("set shares=0,1,4", "stop epoch", "cancel 000000000009", "set gpu0_bsz=9"),
            },
        ),
    ),
    "all on device 0": (
        Part(dp(gpu0_bsz=0), {1: ("set gpu0_bsz=5",), 3: ("set gpu0_bsz=none",), 5: ("set shares=1,2,2",)}),
    ),
    "auto by command": (
        Part(dp(gpu0_bsz=5, **SMALL), {1: ("set gpu0_bsz=auto",), 5: ("set gpu0_bsz=auto", "set gpu0_bsz=2")}),
    ),
    "auto in the config": (Part(dp(gpu0_bsz="auto", **SMALL), {5: ("set lr_factor=0.25",)}),),
    "recompute": (
        Part(
            dp(),
            {0: ("set recompute=all gpu0_bsz=2",), 3: ("set recompute=off",), 5: ("set recompute=config lr_factor=3",)},
        ),
    ),
    "reverted at once": (Part(dp(), {1: ("set gpu0_bsz=3 lr_factor=0.5",)}, "train.backward=3:oom"),),
    "reverted when measured": (
        Part(
            dp(gpu0_bsz=1), {1: ("set shares=3,1,1",), 5: ("set gpu0_bsz=4", "set gpu0_bsz=3")}, "train.backward=4:oom"
        ),
    ),
    "reverted with auto": (Part(dp(gpu0_bsz=5, **SMALL), {1: ("set gpu0_bsz=auto",)}, "train.forward.1=1:oom"),),
    "recomputed, then in pieces": (Part(dp(), {5: ("set recompute=off",)}, "train.backward=2:oom*2"),),
    "over a budget": (Part(dp(gpu0_bsz=3, **FULL), {3: ("set gpu0_bsz=1",)}),),
    "no method left": (Part(dp(), {}, "train.backward=3:oom*3", OOM), Part({}, {3: ("set recompute=config",)})),
    "evaluation in windows": (
        Part(
            {**dp(), "eval": {"batch_size": 4}, "data": {"crop_px": [32, 48]}},
            {1: ("set gpu0_bsz=0",)},
            "eval.forward=1:oom*2",
        ),
    ),
    "recomputation undone": (
        Part(dp(1), {5: ("set recompute=all",)}, "train.backward=2:oom;train.forward=3:raise:RuntimeError"),
    ),
    "crash after a change": (
        Part(
            dp(), {0: ("checkpoint",), 1: ("set gpu0_bsz=3 lr_factor=0.5",)}, "train.step=5:raise:RuntimeError", CRASH
        ),
        Part({}, {7: ("set gpu0_bsz=1",)}),
    ),
    "crash after out of memory": (
        Part(dp(), {0: ("checkpoint",)}, "train.backward=2:oom*2;train.step=8:raise:RuntimeError", CRASH),
        Part({}, {5: ("set lr_factor=2",)}),
    ),
    "crash, then another split": (
        Part(
            dp(), {0: ("checkpoint",), 1: ("set gpu0_bsz=3 lr_factor=0.5",)}, "train.step=5:raise:RuntimeError", CRASH
        ),
        Part({"parallel": {"gpu0_bsz": 1}}),
    ),
    "stopped with pending changes": (
        Part(dp(gpu0_bsz=1), {1: ("set lr_factor=0.5 gpu0_bsz=2", "stop")}, code=STOPPED),
        Part({"train": {"recompute": "all"}}, {3: ("stop epoch", "set shares=5,0,0")}, code=STOPPED),
        Part(),
    ),
    "3, 1, 2 devices": (
        Part(dp(shares=[3, 1, 1]), {1: ("set lr_factor=0.5", "stop epoch")}, code=STOPPED),
        Part(dp(1), {3: ("stop epoch",)}, code=STOPPED),
        Part(dp(2), {5: ("set gpu0_bsz=4",)}),
    ),
    "2, 3 devices by gpu0_bsz": (
        Part(dp(2, gpu0_bsz=1), {3: ("set gpu0_bsz=2", "stop epoch")}, code=STOPPED),
        Part(dp(3, gpu0_bsz=1), {5: ("set gpu0_bsz=0",)}),
    ),
    "1, 3 devices with auto": (
        Part(dp(1, gpu0_bsz="auto"), {3: ("stop epoch",)}, code=STOPPED),
        Part(dp(3, gpu0_bsz="auto")),
    ),
    "accumulated": (
        Part(
            {**dp(gpu0_bsz=0), **ACCUMULATED},
            {0: ("set gpu0_bsz=3",), 2: ("set shares=1,1,1",)},
            "train.backward=4:oom",
        ),
    ),
    "ranks": (
        Part(ranks(gpu0_bsz=1), {0: ("set gpu0_bsz=0", "set shares=1,4 recompute=all")}, code=0),
        Part({"train": {"epochs": 5}}, {0: ("set lr_factor=0.5 gpu0_bsz=2",)}),
    ),
    "ranks out of memory": (
        Part(ranks(), {0: ("set gpu0_bsz=3",)}, "train.backward.rank1=7:oom"),  # the next start makes fewer steps
        Part({"train": {"epochs": 5}}, {0: ("set recompute=all",)}),
    ),
}
"""Name -> the processes of a run; each has two steps an epoch, and four epochs if nothing else is said."""


def config_of(root: Path, *parts: Part) -> RunConfig:
    """Return the config of the last of some parts: each changes sections of the one before."""
    data = {"format": "folder", "root": str(root), "classes": ["ground", "box", "disc"], "workers": 0}
    base: dict[str, Any] = {
        "name": "scripted", "seed": 3, "data": data,
        "model": {}, "optim": {}, "schedule": {"name": "constant"}, "log": {"every_steps": 1, "tensorboard": False},
        "checkpoint": {"every_epochs": None, "every_steps": 100},
    }  # fmt: skip
    config = small(base, 4, train={"batch_size": 5})
    config = merged(config.model_dump(mode="json"), data={"crop_px": [24, 40]})
    for part in parts:
        config = merged(config.model_dump(mode="json"), **part.sections)
    return config


class Sender:
    """Sends the commands of a part when its steps are done."""

    def __init__(self, folder: Path, sent: dict[int, tuple[str, ...]]) -> None:
        self.folder, self.sent = folder, dict(sent)

    def handle(self, event: Event) -> None:
        if isinstance(event, Step):
            self.send(event.step)

    def send(self, step: int) -> None:
        for text in self.sent.pop(step, ()):
            send_command(self.folder, parse_command(text), by="a@b")

    def close(self) -> None:
        """Nothing is open."""


def run_part(config: RunConfig, part: Part, folder: Path, *, is_first: bool) -> None:
    """Run one process of a script to its end, and check its exit code."""
    sender = Sender(folder, part.sent)
    sender.send(0)
    if config.parallel.mode == "ddp":
        (folder.parent / "config.yaml").write_text(dump_config(config))
        words = ("--run" if is_first else "--resume", "run", "--config", "config.yaml")
        done = segapp(
            "train", "--plain", *words, cwd=folder.parent, SEGAPP_FAILPOINTS=f"ckpt.background=each;{part.fault}"
        )
        assert done.returncode == part.code, done.stderr
        return
    failpoints.arm(f"ckpt.background=each;{part.fault}")
    try:
        request = TrainRequest(config, run=folder) if is_first else TrainRequest(config, RunFolder(folder))
        code = run_session(request, listener=sender)
    except SegappError as error:
        code = error.exit_code
    finally:
        failpoints.arm("")
    assert code == part.code, f"a part of {folder} ended with {code}, not {part.code}"
    assert not sender.sent, f"a part of {folder} ended before its commands were sent: {sender.sent}"


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Let commands have ids in their order, be read at once, and budgets hold on logical devices."""
    numbers = SimpleNamespace(token_hex=lambda _: f"{next(counted):012x}")
    counted = itertools.count(1)
    with (
        pytest.MonkeyPatch.context() as patched,
        mock.patch("segapp.run.commands.secrets", numbers),
        mock.patch("segapp.training.inbox.POLL_S", 0.0),
        float64(),
    ):
        enforce_budgets(patched)
        yield


LEFT_OUT = (
    "v", "seq", "t", "pid", "acquired_s", "devices", "images_per_s", "data_wait_frac", "step_s", "eta_epoch_s",
    "eta_run_s", "val_s", "save_s", "copy_s", "size_bytes", "sha256", "palette", "num_params",
)  # fmt: skip
KINDS_LEFT_OUT = ("memory", "heartbeat", "weights")


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run in order, without what differs from one machine or moment to another."""
    found = [event for event in events(folder) if event["type"] not in KINDS_LEFT_OUT]
    # The writer of checkpoints is a thread: what it says stands at the end.
    found.sort(key=lambda event: event["type"] == "checkpoint" or event.get("command") == "checkpoint")
    return [{name: value for name, value in event.items() if name not in LEFT_OUT} for event in found]


def record(name: str, root: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a script in an empty folder and return its events."""
    run, parts = RunFolder.create(path=folder / "run").path, SCRIPTS[name]
    with repeatable():
        for number, part in enumerate(parts):
            run_part(config_of(root, *parts[: number + 1]), part, run, is_first=number == 0)
    return events_of(run)


SHORT = {
    "run_start": ("resumed_from_step", "gpu0_bsz", "is_auto", "live", "split"),
    "epoch_start": ("epoch", "split", "lr"),
    "step": ("step", "split", "loss", "grad_norm", "lr"),
    "val": ("step", "loss", "miou"),
    "command": ("id", "command", "status", "reason", "changes", "step"),
    "gpu0_bsz": ("status", "old", "new", "split", "epoch", "step", "id", "is_auto", "live", "reason"),
    "settings": ("step", "reason", "fallbacks", "failed_split", "recompute", "topology", "split"),
    "alert": ("kind", "message", "step"),
    "oom": ("device", "index", "phase", "step", "action", "split", "advice"),
    "run_end": ("status", "reason", "exit_code", "step"),
}
"""Type of an event -> its fields in a stored record; other events are not stored."""


def shortened(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a record as they are stored: amounts of memory depend on saves that run at the time."""
    text = re.sub(r"\d+ of \d+ MiB \(\d+ %\)", "- of - MiB", json.dumps(found))
    return [
        {"type": event["type"], **{name: event[name] for name in SHORT[event["type"]] if name in event}}
        for event in json.loads(text)
        if event["type"] in SHORT and event.get("kind") not in ("classes", "learning", "precision", "schedule", "data")
    ]


def file_of(name: str) -> str:
    return f"{name.replace(',', '').replace(' ', '_')}.jsonl"


def stored(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDS / file_of(name)).read_text().splitlines()]


def differing_leaves(found: Any, expected: Any, *, rel: float) -> list[str]:
    """Return the places at which two records differ, with both values; numbers that are close are equal."""
    left, right = dict(leaves(found)), dict(leaves(expected))
    missing = object()

    def equal(a: Any, b: Any) -> bool:
        numbers = all(isinstance(each, float) for each in (a, b))
        return math.isclose(a, b, rel_tol=rel) if numbers else a == b

    return [
        f"{path}: {left.get(path)!r}, recorded {right.get(path)!r}"
        for path in sorted({*left, *right})
        if not equal(left.get(path, missing), right.get(path, missing))
    ]


def main(words: list[str]) -> None:
    if words[:1] not in (["--write"], ["--whole"]):
        sys.exit(__doc__)
    torch.set_num_threads(1)
    into = RECORDS if words[0] == "--write" else Path(words.pop(1))
    into.mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as data:
        root = draw_tiny_data(Path(data))
        for name in words[1:] or SCRIPTS:
            with tempfile.TemporaryDirectory() as folder:
                found = record(name, root, Path(folder))
            lines = shortened(found) if into == RECORDS else found
            (into / file_of(name)).write_text("".join(json.dumps(line) + "\n" for line in lines))
            print(name, len(lines), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
