"""The config of the tests of recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def plain(tiny_root: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "seed": 3,
        "data": {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "workers": 0},
        "log": {"every_steps": 1, "tensorboard": False},
    }
