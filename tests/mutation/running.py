"""Runs tests in a process of their own, with one module mutated: forked from a process that has imported the libraries.

Importing torch and the rest takes seconds, most tests milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.mutation.operators import Mutant
from tests.mutation.selection import module_of
from tests.support import ROOT

_HOOK = Path(__file__).parent / "hook"
_LIBRARIES = ("torch", "torchvision", "albumentations", "segmentation_models_pytorch", "textual.app", "hypothesis")
_PR_SET_CHILD_SUBREAPER = 36
_FORK = multiprocessing.get_context("fork")


def adopt_orphans() -> None:
    """Make this process the parent of processes below it that lose theirs, such as a trainer that a test detached."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children() -> None:
    """Kill all processes below this one."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)


@dataclass(frozen=True)
class TestRun:
    """What a run of tests came to.

    Attributes:
        code: Of pytest; negative: the signal that ended it; None: the time was over.
        failed: The test, or the file that could not be imported, that failed first.
        is_loaded: Whether the mutated module was imported.
    """

    __test__ = False

    code: int | None
    failed: str | None
    is_loaded: bool


def import_libraries() -> None:
    """Import what segapp and its tests import, but nothing of segapp: forked runs start with it."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    assert "segapp" not in sys.modules, "a mutant would not be imported anew"


def run_tests(tests: Sequence[str], timeout_s: float, mutant: Mutant | None = None, root: Path = ROOT) -> TestRun:
    """Run tests until the first failure; after the timeout all their processes are killed.

    Args:
        tests: Files, or names of tests.
        timeout_s: The limit.
        mutant: In place of the source, which stays as it is.
        root: Where pytest runs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
        if mutant is not None:
            (folder / "source.py").write_bytes(mutant.applied_to((root / "segapp" / mutant.path).read_bytes()))
            (folder / "module").write_text(module_of(mutant.path))
            env["SEGAPP_MUTANT"] = name
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_HOOK), os.environ.get("PYTHONPATH")]))
        words = ["-n", "0", "-x", "-q", "-o", f"cache_dir={folder / 'cache'}", *tests]
        process = _FORK.Process(target=_run_pytest, args=(words, env, root))
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        failures = folder / "cache" / "v" / "cache" / "lastfailed"
        failed = next(iter(json.loads(failures.read_text())), None) if failures.exists() else None
        return TestRun(code, failed, (folder / "loaded").exists())


def _run_pytest(words: list[str], env: dict[str, str], root: Path) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.chdir(root)
    os.environ.update(env)
    if "segapp" in sys.modules:  # this process is a test of ours
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *words])
    if "SEGAPP_MUTANT" in env:
        runpy.run_path(str(_HOOK / "sitecustomize.py"))
    code = 3
    try:
        code = int(pytest.main(words))
    finally:
        os._exit(code)
