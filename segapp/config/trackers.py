"""Record of the trackers that a user has named on this machine; no other tracker in a run's own config is used.

The config of a run may come from someone else, and its trackers get metrics, settings and sample images. Each line of
`$XDG_STATE_HOME/segapp/trackers` is the override that names a tracker, such as `log.mlflow="http://box:5000"`.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from segapp.config.sections import LogConfig
from segapp.errors import without_secrets

TRACKERS = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_TRACKING_URI"}
"""Key of `log:` -> the tracker's own environment variable for its value."""

_NAMED = "SEGAPP_TRACKERS"
"""Environment variable with the overrides that name trackers to this process and its children, one per line."""


def name_trackers(log: LogConfig, keys: Iterable[str] = tuple(TRACKERS)) -> None:
    """Accept trackers that the user has named, in this process and its children."""
    if named := _overrides(log, keys).values():
        os.environ[_NAMED] = "\n".join(dict.fromkeys([*os.environ.get(_NAMED, "").split("\n"), *named]))


def unnamed_trackers(log: LogConfig) -> dict[str, str]:
    """Return the keys of the trackers that the user has not named, each with its override; record the others.

    A tracker is named by a config or an override of the user, now or earlier, or by its environment variable.
    """
    in_environment = [
        key for key, name in TRACKERS.items() if without_secrets(os.environ.get(name, "")) == getattr(log, key)
    ]
    named = {*os.environ.get(_NAMED, "").split("\n"), *_overrides(log, in_environment).values()}
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "segapp" / "trackers"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "a+", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.seek(0)
            recorded = file.read(2**20).split("\n")
            file.writelines(f"{each}\n" for each in _overrides(log).values() if each in named and each not in recorded)
        named.update(recorded)
    return {key: override for key, override in _overrides(log).items() if override not in named}


def _overrides(log: LogConfig, keys: Iterable[str] = tuple(TRACKERS)) -> dict[str, str]:
    return {key: f"log.{key}={json.dumps(value)}" for key in keys if (value := getattr(log, key)) is not None}
