"""The names of `segapp.parallel`: those for an own loop, each with a docstring and on the page `own-loop`."""

from __future__ import annotations

import inspect

import segapp.parallel
from segapp.docs.pages import find_page


def test_names_for_an_own_loop_are_on_the_page() -> None:
    names = segapp.parallel.__all__
    assert dir(segapp.parallel) == names == sorted(names)
    assert len(names) < 25, "names of the trainer are imported from the modules"
    page = find_page("own-loop")[0].text()
    errors = {"ReplicaDesyncError", "ReplicaOutOfMemoryError"}  # on the page as the subclasses of ReplicaError
    assert [name for name in names if name not in errors and f"`{name}`" not in page] == []
    assert all(inspect.getdoc(getattr(segapp.parallel, name)) for name in names)
