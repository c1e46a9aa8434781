"""No command and no child of one imports a module of the current folder that has the name of another module."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from segapp.cli import app
from tests.support import ROOT
from tests.support.runs import events

EARLY = {"json", "random", "secrets", "colorsys", "sitecustomize", "usercustomize", "numpy", "rich", "click", "sympy"}
"""Names that Python, torch, typer or rich import before or without the product."""


def imported_names() -> set[str]:
    """Returns the top-level names of all modules that the product imports, and its own."""
    found = {"segapp"} | EARLY
    for path in (ROOT / "segapp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found.add(node.module.partition(".")[0])
    return found - {"__future__", "__main__"}


@pytest.fixture
def planted(tiny: dict[str, Any], tmp_path: Path) -> Path:
    """A folder with a module of every name, which makes a file in `marks` when it is imported, and a config."""
    folder, marks = tmp_path / "planted", tmp_path / "marks"
    folder.mkdir()
    marks.mkdir()
    for name in imported_names():
        mark = str(marks / name)
        text = f"import posix\nposix.close(posix.open({mark!r}, posix.O_CREAT | posix.O_WRONLY))\nraise ImportError\n"
        (folder / f"{name}.py").write_text(text)
    config = {**tiny, "train": {"epochs": 1, "batch_size": 2}, "name": "there"}
    (folder / "there.yaml").write_text(yaml.safe_dump(config))
    return folder


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the program as its installed script does: the first folder of its path is that of the script."""
    script = folder.parent / "bin" / "segapp"
    script.parent.mkdir(exist_ok=True)
    script.write_text("from segapp.__main__ import main\nmain()\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [sys.executable, script, *words],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def imported(folder: Path) -> list[str]:
    """Returns the names of the modules that were imported from the folder."""
    return sorted(path.name for path in (folder.parent / "marks").iterdir())


def test_planted_modules_would_be_noticed(planted: Path) -> None:
    subprocess.run([sys.executable, "-c", "import json"], cwd=planted, capture_output=True, check=False)
    assert "json" in imported(planted)


RANKS = ("parallel.mode=ddp", "parallel.devices=[cpu,cpu]", "train.batch_size=4")
CONFIG = ("--config", "there.yaml")
STARTS_CHILDREN = {
    "doctor": ("doctor",),
    "plan": ("plan", *CONFIG, "--gpus", "1x8GiB"),
    "detached ranks": ("train", *CONFIG, "--detach", *RANKS),
    "launch": ("launch", "--nnodes", "1", "--nproc-per-node", "2", "--", "train", *CONFIG, "--run", "launched"),
    "sweep": ("sweep", *CONFIG, "optim.lr=0.1"),
    "smoke": ("train", *CONFIG, "--smoke", "data.workers=2"),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "doctor" else pytest.param(name, marks=pytest.mark.slow) for name in STARTS_CHILDREN],
)
def test_children_import_nothing_from_the_current_folder(planted: Path, name: str) -> None:
    done = start(planted, *STARTS_CHILDREN[name])
    assert imported(planted) == [], done.stderr
    assert done.returncode == 0 or name == "doctor", done.stderr
    if name == "detached ranks":
        deadline_s = time.monotonic() + 120
        while not events(planted / "runs" / "there", "run_end"):
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        assert imported(planted) == []


def all_commands() -> list[tuple[str, ...]]:
    """Returns every command with arguments with which it works or refuses early."""
    words = {
        "train": ("--print-config", *CONFIG), "launch": ("--", "train", *CONFIG),
        "sweep": ("--dry-run", *CONFIG, "seed=1"),
        "attach": ("there",), "ctl": ("there", "pause"), "eval": ("there",),
        "predict": ("there", ".", "--out", "out"), "export": ("there", "--out", "o.onnx"),
        "check": CONFIG, "init": (".",), "report": ("there",), "compare": ("there", "there"), "suspects": ("there",),
        "status": ("there",), "plan": (*CONFIG, "--gpus", "1x8GiB"), "models": ("lraspp",),
        "check-part": ("torch.optim:SGD", "--as", "optim"), "docs": ("train",), "ls": (),
        "schema": (), "doctor": (), "ckpt": ("list", "there"),
    }  # fmt: skip
    assert set(words) == set(typer.main.get_command(app).commands), "a new command belongs here"  # type: ignore[attr-defined]
    return [(name, *more) for name, more in words.items()]


@pytest.mark.slow
def test_commands_import_nothing_from_the_current_folder(planted: Path) -> None:
    start(planted, "train", *CONFIG, "--plain")
    for words in all_commands():
        done = start(planted, *words)
        assert imported(planted) == [], f"{words}: {done.stderr}"
        assert "Traceback" not in done.stderr, f"{words}: {done.stderr}"
