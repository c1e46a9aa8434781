"""Places of a test: an empty working directory and home of its own; and a watch over those of the user.

The watch is an audit hook of Python: it sees what the process of the tests opens, lists and makes. What a subprocess
does there is seen only as a name that was not there before (`conftest.pytest_sessionfinish`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import ROOT

WATCHED_EVENTS = frozenset({"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir"})


def users_places() -> tuple[str, ...]:
    """The folders in which segapp keeps files of the user who started the tests; call it before `HOME` is changed."""
    home = Path.home()
    bases = [
        os.environ.get("XDG_CONFIG_HOME") or home / ".config",
        os.environ.get("XDG_CACHE_HOME") or home / ".cache",
        os.environ.get("XDG_STATE_HOME") or home / ".local/state",
    ]
    return (str(ROOT / "runs"), str(ROOT / "mlruns"), *(str(Path(base) / "segapp") for base in bases))


class Watch:
    """Notes uses of some folders by this process.

    Args:
        folders: absolute paths.
    """

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = folders
        self._uses: list[str] = []
        sys.addaudithook(self._note)

    def take(self) -> list[str]:
        """Returns the uses since the last call, `open /home/me/.cache/torch/hub`."""
        uses = self._uses[:]
        self._uses.clear()
        return uses

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED_EVENTS or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if path.startswith(self._folders) and any(path == f or path.startswith(f + os.sep) for f in self._folders):
            self._uses.append(f"{event} {path}")


PROGRAMS_VARIABLES = (
    *("PYTHONSAFEPATH", "SEGAPP_TRUST_PARTS", "SEGAPP_TRACKERS"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)
"""What the program sets for itself and its children."""


class Places:
    """Makes a working directory and a home for each test, and removes them after it.

    Args:
        base: an empty folder.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._count = 0
        self._between = base / "between"
        self._between.mkdir()
        for name in [name for name in os.environ if name.startswith("XDG_")]:
            del os.environ[name]  # their defaults lie in the home
        self.enter(self._between)

    @staticmethod
    def enter(place: Path) -> None:
        """Makes `place/work` and `place/home` if they are missing, and enters them."""
        for name in ("work", "home"):
            (place / name).mkdir(exist_ok=True)
        os.chdir(place / "work")
        os.environ["HOME"] = str(place / "home")

    def own(self) -> Iterator[Path]:
        """Gives one test its places; between two tests, fixtures of a module find others."""
        self._count += 1
        place = self._base / str(self._count)
        place.mkdir()
        before = dict(os.environ)
        self.enter(place)
        yield place / "work"
        for name in PROGRAMS_VARIABLES:  # a test that runs the program in this process leaves them
            os.environ.pop(name, None) if name not in before else os.environ.update({name: before[name]})
        self.enter(self._between)
        shutil.rmtree(place, ignore_errors=True)
