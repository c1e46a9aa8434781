"""The training process. The package can be called: `from segapp import train; train(config)` is `segapp.api.train`."""

import inspect
import sys
from types import ModuleType
from typing import Any


class _Training(ModuleType):
    """This package, which shares its name with the function of `segapp.api` and describes itself as that function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _function()(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function())

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        first, _, rest = (inspect.getdoc(_function()) or "").partition("\n")
        return f"{first}\n\ntrain{self.__signature__}\n{rest}"


def _function() -> Any:
    from importlib import import_module  # segapp.api is above this package

    return import_module("segapp.api").train


sys.modules[__name__].__class__ = _Training
