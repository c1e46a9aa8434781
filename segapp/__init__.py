"""Train, evaluate and use semantic segmentation models.

    >>> import segapp
    >>> result = segapp.train("demo.yaml")  # doctest: +SKIP
    >>> segapp.evaluate(result.run).miou  # doctest: +SKIP

`segapp.train`, `evaluate`, `predict`, `load` and `history` load torch when they are called. `segapp.losses`, `memory`,
`metrics`, `parallel` and `precision` are for your own training loop. Every error is a `segapp.errors.SegappError`.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("Network", "StopTraining", "evaluate", "history", "load", "predict", "train"), "segapp.api"),
    **dict.fromkeys(("EvalResult", "Evaluated", "History", "PredictResult", "TrainResult"), "segapp.results"),
    "Event": "segapp.run.events",
    "RunConfig": "segapp.config",
}
_PACKAGES = ("errors", "losses", "memory", "metrics", "parallel", "precision")

__all__ = [*_HOMES, *_PACKAGES]


def __getattr__(name: str) -> _Any:
    if name in _HOMES:
        return getattr(_import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return _import_module(f"segapp.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
