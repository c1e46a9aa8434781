"""A plugin of pytest that records which functions of segapp each test calls: `python -m tests.mutation --record PATHS`.

Calls in the test's own process are seen, in all its threads; those in other processes are not.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.support import ROOT

VARIABLE = "SEGAPP_MUTATION_CONTEXTS"
_SEGAPP = f"{ROOT / 'segapp'}{os.sep}"

_called: set[tuple[str, int]] = set()
_contexts: dict[str, dict[str, list[str]]] = {}


def _note(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(_SEGAPP):
        _called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _called.clear()
    threading.setprofile(_note)
    sys.setprofile(_note)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        for path, line in set(_called):
            _contexts.setdefault(path.removeprefix(_SEGAPP), {}).setdefault(str(line), []).append(item.nodeid)


def pytest_sessionfinish() -> None:
    path = Path(os.environ[VARIABLE])
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {}
    for name, lines in _contexts.items():
        for line, tests in lines.items():
            known = found.setdefault(name, {}).setdefault(line, [])
            known += [test for test in tests if test not in known]
    path.write_text(json.dumps(found))
