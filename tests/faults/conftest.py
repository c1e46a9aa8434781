"""Fixtures of the fault cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_runs import FaultRun, Invariants, References


@pytest.fixture(scope="session")
def references(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """Uninterrupted runs to compare the others with."""
    return References(tiny_root, tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="session")
def invariants(references: References) -> Invariants:
    """The checks of what must hold after any fault."""
    return Invariants(references)


@pytest.fixture
def new_run(references: References, tmp_path: Path) -> Iterator[Callable[..., FaultRun]]:
    """Makes runs, `new_run(train={"precision": "fp16"})`; processes left over are killed at the end."""
    made: list[FaultRun] = []

    def make(name: str = "work", **sections: Any) -> FaultRun:
        made.append(FaultRun(tmp_path / name, references.config(**sections)))
        return made[-1]

    yield make
    for run in made:
        run.kill_all()


@pytest.fixture
def left_by(new_run: Callable[..., FaultRun], references: References) -> Callable[..., FaultRun]:
    """Makes runs that a start has left, `left_by("train.step=8:kill", train={"epochs": 2})`."""
    return lambda failpoints, **sections: references.left_by(failpoints, new_run(**sections))
