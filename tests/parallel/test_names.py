"""The names of `segapp.parallel` and `segapp.losses`: those for an own loop, each with a docstring and on its page."""

from __future__ import annotations

import inspect
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
