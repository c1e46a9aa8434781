"""The losses of segmentation_models_pytorch without the rest of the package, whose import takes many seconds."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load() -> ModuleType:
    """Return `segmentation_models_pytorch.losses` as a module of its own; the package is one of the project's."""
    package = importlib.util.find_spec("segmentation_models_pytorch")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "losses"
    spec = importlib.util.spec_from_file_location(
        "smp_losses", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
