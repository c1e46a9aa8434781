"""segapp: semantic segmentation that is exact at any GPU split, small in memory, and steerable while it runs.

`from segapp import train, evaluate, predict, load` gives the functions of `segapp.api`, which load torch when they are
used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("evaluate", "load", "predict"):  # `train` is a package that can be called
        return getattr(import_module("segapp.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
