"""No command and no child of one imports a module of the current folder that has the name of another module."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
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


@functools.cache
def imported_names() -> frozenset[str]:
    """Returns the top-level names of all modules that the product imports, and its own."""
    found = {"segapp"} | EARLY
    for path in (ROOT / "segapp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found.add(node.module.partition(".")[0])
    return frozenset(found - {"__future__", "__main__"})


FINDER = """
import importlib, pathlib, sys
from importlib.machinery import PathFinder

class Missed:
    def find_spec(self, name, path=None, target=None):
        if path is not None or "segapp" not in sys.modules:
            return None
        for folder in {folders!r}:
            file = pathlib.Path(folder, name + ".py")
            if not file.exists():
                file.write_text({module!r}.replace("NAME", name))
        sys.path_importer_cache.clear()
        return PathFinder.find_spec(name)

sys.meta_path.append(Missed())
"""
"""A `sitecustomize` of every process: for each name that Python does not find, once the imports of segapp have begun,
it plants a module of that name, and looks for it again."""


@pytest.fixture
def planted(tiny: dict[str, Any], tmp_path: Path) -> Path:
    """A folder with a config in `conf`, and in both a module of every name, which makes a file in `marks` if it runs.

    The names are those that the product imports and, by `FINDER`, all that anyone looks for in vain.
    """
    folder, marks = tmp_path / "planted", tmp_path / "marks"
    folders = [str(folder), str(folder / "conf")]
    for path in (*map(Path, folders), marks, tmp_path / "site"):
        path.mkdir()
    mark = str(marks / "NAME")
    text = f"import posix\nposix.close(posix.open({mark!r}, posix.O_CREAT | posix.O_WRONLY))\nraise ImportError\n"
    for name in imported_names():
        for path in folders:
            Path(path, f"{name}.py").write_text(text.replace("NAME", name))
    (tmp_path / "site" / "sitecustomize.py").write_text(FINDER.format(folders=folders, module=text))
    own = {"optim": {"name": "torch.optim:RMSprop"}, "schedule": {"name": "./own_schedule.py:make"}}
    config = {**tiny, **own, "train": {"steps": 1, "batch_size": 2}, "name": "there"}
    (folder / "conf" / "there.yaml").write_text(yaml.safe_dump(config))
    (folder / "conf" / "own_schedule.py").write_text(
        "import own_factor\ndef make(): return lambda step: own_factor.HALF"
    )
    (folder / "conf" / "own_factor.py").write_text("HALF = 0.5")
    return folder


SCRIPT = """
import json, sys
from segapp.__main__ import main

for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        code = ended.code
        print(words[0], code, file=sys.stderr)
sys.exit(code)
"""


def start(folder: Path, *commands: tuple[str, ...], before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs commands in a process as the installed script does: the first folder of its path is that of the script."""
    script = folder.parent / "bin" / "segapp"
    script.parent.mkdir(exist_ok=True)
    script.write_text(before + SCRIPT)
    environ = {**os.environ, "PYTHONPATH": f"{folder.parent / 'site'}:{ROOT}"}
    environ.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [sys.executable, script, json.dumps(commands)],
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


def missed(folder: Path) -> set[str]:
    """Returns the names that were looked for in vain."""
    return {path.stem for path in folder.glob("*.py")} - imported_names()


def test_planted_modules_would_be_noticed(planted: Path) -> None:
    subprocess.run([sys.executable, "-c", "import json"], cwd=planted, capture_output=True, check=False)
    assert "json" in imported(planted)
    code = "\nimport contextlib, sys, segapp"
    for where in (planted, planted / "conf"):
        name = f"nowhere_{where.name}"
        code += (
            f"\nsys.path[-1:] = [sys.path[-1], {str(where)!r}]\nwith contextlib.suppress(ImportError): import {name}"
        )
        code += "\nsys.path.pop()"
    done = start(planted, (), before=code)
    assert {"nowhere_planted", "nowhere_conf"} <= {*imported(planted)}, done.stderr


RANKS = ("parallel.mode=ddp", "parallel.devices=[cpu,cpu]", "train.batch_size=4")
CONFIG = ("--config", "conf/there.yaml", "--trust-parts")
STARTS_CHILDREN = {
    "doctor without torch": ("doctor",),  # first, as the others are slow
    "doctor": ("doctor",),
    "plan": ("plan", *CONFIG, "--gpus", "1x8GiB"),
    "detached ranks": ("train", *CONFIG, "--detach", *RANKS),
    "launch": ("launch", "--nnodes", "1", "--nproc-per-node", "2", "--", "train", *CONFIG, "--run", "launched"),
    "sweep": ("sweep", *CONFIG, "optim.lr=0.1"),
    "smoke": ("train", *CONFIG, "--smoke", "data.workers=2"),
}


@pytest.mark.sampled(len(STARTS_CHILDREN))
@pytest.mark.parametrize("name", STARTS_CHILDREN)
def test_children_import_nothing_from_the_current_folder(planted: Path, name: str) -> None:
    if "without" in name:
        (planted.parent / "site" / "torch.py").write_text("raise ImportError('no such torch')")
    done = start(planted, STARTS_CHILDREN[name])
    assert imported(planted) == [], done.stderr
    assert done.returncode == 0 or (name != "plan" and done.stderr.startswith("doctor ")), done.stderr
    assert ("no such torch" in done.stdout) == ("without" in name), "the child has answered"
    if name == "detached ranks":
        deadline_s = time.monotonic() + 120
        while not events(planted / "runs" / "there", "run_end"):
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        assert imported(planted) == []


def all_commands(root: str) -> list[tuple[str, ...]]:
    """Returns every command with arguments with which it works or refuses early, for a data set."""
    words = {
        "train": ("--print-config", *CONFIG), "launch": ("--", "train", *CONFIG),
        "sweep": ("--dry-run", *CONFIG, "seed=1"),
        "attach": ("there",), "ctl": ("there", "pause"), "eval": ("there",),
        "predict": ("there", f"{root}/images/val", "--out", "out"), "export": ("there", "--out", "o.onnx"),
        "check": CONFIG, "init": (root, "--out", "i.yaml"), "report": ("there",), "compare": ("there", "there"),
        "suspects": ("there",),
        "status": ("there",), "plan": (*CONFIG, "--gpus", "1x8GiB"), "models": ("lraspp",),
        "check-part": ("torch.optim:SGD", "--as", "optim"), "docs": ("train",), "ls": (),
        "schema": (), "doctor": (), "ckpt": ("list", "there"),
    }  # fmt: skip
    assert set(words) == set(typer.main.get_command(app).commands), "a new command belongs here"  # type: ignore[attr-defined]
    return [(name, *more) for name, more in words.items()]


OFTEN = ("eval", "predict", "init", "report")


@pytest.mark.parametrize("is_often", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["often", "all"])
def test_commands_import_nothing_from_the_current_folder(planted: Path, tiny: dict[str, Any], is_often: bool) -> None:
    chosen = [words for words in all_commands(tiny["data"]["root"]) if not is_often or words[0] in OFTEN]
    done = start(planted, ("train", *CONFIG, "--plain"), *chosen)
    assert imported(planted) == [], done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert len(missed(planted)) >= 5, "the finder saw no name"
    ends = dict(line.split() for line in done.stderr.splitlines() if re.fullmatch(r"[a-z-]+ \d+", line))
    assert ends["train"] == ends["eval"] == ends["predict"] == ends["report"] == "0", done.stderr
