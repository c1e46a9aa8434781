"""Record of the custom components that a user has named on this machine; only these are imported for stored configs.

The config in a run folder or a checkpoint may come from someone else, and `os:system` is a valid name. So the
components of such a config are imported only if a training, a check or `--trust-parts` has named them here before;
`$XDG_STATE_HOME/segapp/parts` keeps their names and source files, one per line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from segapp.custom.names import find_source
from segapp.errors import ConfigError

TRUST_VARIABLE = "SEGAPP_TRUST_PARTS"
"""Environment variable that is 1 if the components of any config may be imported; `--trust-parts` sets it."""


def trust_parts() -> None:
    """Accept the custom components of any config, in this process and its children."""
    os.environ[TRUST_VARIABLE] = "1"


def remember_parts(names: Iterable[str]) -> None:
    """Record components that the user has named; do nothing if the record cannot be written."""
    known = _remembered()
    new = [line for line in map(_line_of, names) if line not in known]
    if not new:
        return
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        path = _memory_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in new))


def check_trusted(named: Mapping[str, str], origin: str) -> None:
    """Check that the code in a config that was not written by the user may be imported.

    `named` has the component of each config key, `origin` says where the config comes from.

    Raises:
        ConfigError: a component was never named on this machine.
    """
    if os.environ.get(TRUST_VARIABLE) == "1":
        remember_parts(named.values())
        return
    known = _remembered()
    unknown = [f"{key} = {name}" for key, name in named.items() if _line_of(name) not in known]
    if unknown:
        raise ConfigError(
            f"{origin} names code that would be imported: {', '.join(unknown)}: add --trust-parts if you know that "
            "code (once; segapp remembers it), or do not use this file",
            path=origin,
        ).see("own-parts")


def _memory_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "segapp" / "parts"


def _remembered() -> set[str]:
    try:
        path = _memory_file()
        return set(path.read_text(encoding="utf-8").splitlines()) if path.stat().st_size <= 2**22 else set()
    except (OSError, RuntimeError, UnicodeDecodeError):
        return set()


def _line_of(name: str) -> str:
    """Return a component's line: its name and its source file, because files elsewhere may have the same name."""
    return f"{name}\t{find_source(name) or ''}"
