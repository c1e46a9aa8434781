"""The names of `segapp.parallel` and `segapp.losses`, their docstrings with examples, and the page that has them."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import segapp.losses
import segapp.parallel
from segapp.docs.pages import find_page


@pytest.mark.parametrize("package", [segapp.parallel, segapp.losses], ids=["parallel", "losses"])
def test_names_for_an_own_loop_are_on_the_page(package: ModuleType) -> None:
    names = package.__all__
    assert dir(package) == names == sorted(names)
    assert len(names) < 28, "names of the trainer are imported from the modules"
    page = find_page("own-loop")[0].text()
    assert [name for name in names if f"`{name}`" not in page] == []
    assert all(inspect.getdoc(getattr(package, name)) for name in names)


@pytest.mark.parametrize("package", [segapp.losses, segapp.parallel], ids=["losses", "parallel"])
def test_examples_in_docstrings_are_true(package: object) -> None:
    names = [each.name for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]  # type: ignore[attr-defined]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 15


def test_splits_of_a_batch_load_no_torch() -> None:
    code = "import sys, segapp.chunks; print({'torch', 'numpy', 'segapp.parallel'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
