"""Errors about unknown names, with the nearest and the known ones, and lists of names for messages."""

import difflib
from collections.abc import Collection, Iterable

from segapp.errors import ConfigError

_MAX_LISTED = 20


def unknown_name(key: str, value: str, what: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name."""
    names = sorted(known)
    message = f"{key}: {value!r} is not {what}"
    by_lower = {name.lower(): name for name in names}
    nearest = [by_lower[n] for n in difflib.get_close_matches(value.lower(), by_lower, n=3, cutoff=0.5)]
    if nearest:
        message += "; nearest: " + ", ".join(nearest)
    if not names:
        message += "; none exists"
    elif len(names) <= _MAX_LISTED:
        message += "; known: " + ", ".join(names)
    elif not nearest:
        message += f"; known are {len(names)}, such as " + ", ".join(names[:_MAX_LISTED])
    return ConfigError(message)


def check_options(options: Iterable[str], accepted: Iterable[str], owner: str) -> None:
    """Raise ConfigError for the first option that `owner` does not take."""
    accepted = tuple(accepted)
    for option in options:
        if option not in accepted:
            raise unknown_name("model.options", option, f"an option of {owner}", accepted)


def some_names(names: Collection[str], most: int = 2) -> str:
    """Return the first names and the number of the others."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + rest
