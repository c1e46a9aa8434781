"""Imports look down, each heavy library has its door, and the map is true."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support import ROOT


def loaded_by(statement: str, after: str = "") -> set[str]:
    """The modules that a statement loads in a new process, those that `after` has loaded before it left out."""
    code = (
        f"import sys\n{after}\nbefore = set(sys.modules)\n{statement}\nprint(*sys.modules.keys() - before, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["segapp.parallel", "segapp.losses"])
def test_libraries_load_nothing_beyond_torch(package: str) -> None:
    beyond = loaded_by(f"import {package}", after="import torch")
    assert {name for name in beyond if not name.startswith((package, "torch", "segapp"))} <= set(
        sys.stdlib_module_names
    )
    assert not {name for name in beyond if name.startswith("segapp.") and not name.startswith(package)}


@pytest.mark.parametrize(
    "package",
    [
        "segapp.run",
        "segapp.config",
        "segapp.train.request",
        "segapp.commands.runs",
        "segapp.commands.control",
        "segapp.commands.spawn",
        "segapp.commands.plan",
        "segapp.memory.planner",
        "segapp.cli",
    ],
)
def test_viewer_packages_load_no_torch(package: str) -> None:
    assert not {"torch", "torchvision", "albumentations", "textual"} & loaded_by(f"import {package}")


def test_screen_loads_no_torch() -> None:
    loaded = loaded_by("import segapp.tui.app")
    assert "textual" in loaded
    assert not {"torch", "torchvision", "albumentations", "cv2", "GPUtil", "yaml", "PIL"} & loaded


def test_trainer_loads_no_textual() -> None:
    assert "textual" not in loaded_by("import segapp.train.session")


def test_readme_tree_lists_exactly_the_existing_files() -> None:
    tree = (ROOT / "README.md").read_text().split("## File tree", 1)[1]
    named = set(re.findall(r"^\s*([\w/.-]+\.(?:py|yaml|md))\b", tree, re.MULTILINE))
    paths = {str(p.relative_to(ROOT)) for folder in ("segapp", "configs") for p in (ROOT / folder).rglob("*.*")}
    here = {
        p
        for p in paths
        if p.endswith((".py", ".yaml", ".md")) and not p.endswith("__init__.py") and "__pycache__" not in p
    }
    assert {p for p in here if p not in named} == set()
    assert {p for p in named if not (ROOT / p).exists()} == set()
