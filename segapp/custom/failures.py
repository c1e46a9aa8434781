"""Where code of a user raised an error: the innermost frame of a custom component, not those of libraries below it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import CodeType

from segapp.custom.loading import load_part
from segapp.custom.names import find_source
from segapp.errors import ConfigError


def raised_at(error: BaseException, parts: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the custom component in whose file an error was raised, and file and line; None if in none of them.

    Args:
        error: also the errors that it was raised from are looked at.
        parts: key of the config -> name of the component.

    Returns:
        `loss.name = own:focal` and `own.py:12`.
    """
    sources = {key: find_source(name) for key, name in parts.items()}
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    for each in reversed(chain):
        frames = []
        traceback = each.__traceback__
        while traceback is not None:
            frames.append((traceback.tb_frame.f_code, traceback.tb_lineno))
            traceback = traceback.tb_next
        for code, line in reversed(frames):
            path = Path(code.co_filename).resolve()
            keys = [key for key, source in sources.items() if source == path]
            if keys:
                held = _holders(keys, parts, code)
                return " or ".join(f"{key} = {parts[key]}" for key in held), f"{path.name}:{line}"
    return None


def _holders(keys: list[str], parts: Mapping[str, str], code: CodeType) -> list[str]:
    """Return which of the components of one file a function belongs to: the one whose factory has its lines, or all."""
    for key in keys:
        try:
            lines, first = inspect.getsourcelines(load_part(parts[key], key).factory)
        except (ConfigError, OSError, TypeError):
            continue
        if first <= code.co_firstlineno < first + len(lines):
            return [key]
    return keys
