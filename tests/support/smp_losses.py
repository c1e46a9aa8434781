"""The losses of segmentation_models_pytorch without the rest of the package, whose import takes many seconds."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load() -> ModuleType:
    """Return `segmentation_models_pytorch.losses` as a module of its own; skips where the package is missing."""
    package = importlib.util.find_spec("segmentation_models_pytorch")
    if package is None or package.origin is None:
        pytest.skip("segmentation_models_pytorch is not installed", allow_module_level=True)
    folder = Path(package.origin).parent / "losses"
    spec = importlib.util.spec_from_file_location(
        "smp_losses", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
