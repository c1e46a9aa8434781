"""The training process. The package can be called: `from segapp import train; train(config)` is `segapp.api.train`."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Training(ModuleType):
    """This package, which shares its name with the function of `segapp.api`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("segapp.api").train(*args, **options)


sys.modules[__name__].__class__ = _Training
