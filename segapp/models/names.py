"""Errors about unknown names of networks and their options, and lists of names in messages."""

from collections.abc import Collection, Iterable

from segapp.errors import ConfigError, accepted_words


def unknown_name(key: str, value: str, what: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name."""
    message = f"{key}: {value!r} is not {what}: {accepted_words(value, sorted(known), most=3)}"
    return ConfigError(message, key=key, value=value)


def check_options(options: Iterable[str], accepted: Iterable[str], owner: str) -> None:
    """Raise ConfigError for the first option that `owner` does not accept."""
    accepted = tuple(accepted)
    for option in options:
        if option not in accepted:
            raise unknown_name("model.options", option, f"an option of {owner}", accepted)


def some_names(names: Collection[str], most: int = 2) -> str:
    """Return the first names and the number of the rest."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + rest
