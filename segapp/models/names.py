"""Errors about names: what was asked for, what is nearest, what there is."""

import difflib
from collections.abc import Iterable

from segapp.errors import ConfigError

_MAX_LISTED = 20


def unknown_name(key: str, value: str, what: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist.

    Args:
        key: the config key that holds the value, such as `model.name`.
        value: what was asked for.
        what: what it should have been, such as `a model of torchvision`.
        known: all names there are; a long list is not printed whole.
    """
    names = sorted(known)
    message = f"{key}: {value!r} is not {what}"
    by_lower = {name.lower(): name for name in names}
    nearest = [by_lower[n] for n in difflib.get_close_matches(value.lower(), by_lower, n=3, cutoff=0.5)]
    if nearest:
        message += "; nearest: " + ", ".join(nearest)
    if not names:
        message += "; there is none"
    elif len(names) <= _MAX_LISTED:
        message += "; known: " + ", ".join(names)
    elif not nearest:
        message += f"; known are {len(names)}, such as " + ", ".join(names[:_MAX_LISTED])
    return ConfigError(message)


def check_options(options: Iterable[str], accepted: Iterable[str], owner: str) -> None:
    """Raises ConfigError for the first option that `owner` does not take."""
    accepted = tuple(accepted)
    for option in options:
        if option not in accepted:
            raise unknown_name("model.options", option, f"an option of {owner}", accepted)
