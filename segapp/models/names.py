"""Names of networks, of their parts and of their parameters: patterns over them, and errors about unknown ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from segapp.errors import ConfigError, accepted_words


def unknown_name(key: str, value: str, what: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name."""
    message = f"{key}: {value!r} is not {what}: {accepted_words(value, sorted(known), most=3)}"
    return ConfigError(message, key=key, value=value)


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


BACKBONE = "backbone"
"""The pattern that stands for the backbone, whatever its name in the network."""


def parameters_matching(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Return the names of the parameters that a glob matches, itself or through a module that holds them.

    Args:
        model: the network.
        pattern: a glob, in which `*` also matches dots.
        key: the config key that holds it, for the error.

    Raises:
        ConfigError: it matches none; the message has the nearest names.
    """
    found = [name for name, _ in model.named_parameters() if any(fnmatchcase(each, pattern) for each in _within(name))]
    if not found:
        known = {each for name, _ in model.named_parameters() for each in _within(name)}
        raise unknown_name(key, pattern, "the name, or a pattern of names, of a module or parameter", known)
    return found


def modules_matching(model: nn.Module, pattern: str) -> list[str]:
    """Return the names of the outermost modules that a glob matches."""
    found: list[str] = []
    for name, _ in model.named_modules():
        if name and fnmatchcase(name, pattern) and not any(outer in found for outer in _within(name)):
            found.append(name)
    return found


def _within(name: str) -> Iterator[str]:
    """Yield a name and those of the modules that hold it, the outermost first.

    >>> list(_within("encoder.layer1.0"))
    ['encoder', 'encoder.layer1', 'encoder.layer1.0']
    """
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))
