"""`segapp check-part`: try own parts as a training uses them, before one does.

Torch, albumentations and the data set's code take seconds to import: each kind of part imports what its checks need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

from segapp.commands.check_part.checks import IGNORED, NUM_CLASSES, Check, tried
from segapp.config import LossTerm, RunConfig, part_names
from segapp.config.parts import part_sections
from segapp.custom import is_part
from segapp.custom.trust import remember_parts
from segapp.errors import ConfigError, accepted_words
from segapp.run.words import printable

Kind = Literal["model", "loss", "data", "optim", "schedule", "transform"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EXIT_FAILED = 2


def check_part(name: str | None, kind: str | None, config: RunConfig | None) -> int:
    """Check one part, or all parts of a config, and print what was found.

    Args:
        name: `package.module:factory`; None: every part of the config.
        kind: what it is; None: as the config says.
        config: gives options, classes and data; None: none.

    Returns:
        0, or 2 if a check failed; a check that could not be tried is no failure.

    Raises:
        ConfigError: nothing is named, or it is not known what the part is.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--as {kind} is not known: {accepted_words(kind, KINDS)}")
    is_failed = False
    for part, part_kind, options in _chosen(name, kind, config):
        remember_parts([part])
        print(f"{printable(part)} as {part_kind}", flush=True)
        for check in _checks(part, part_kind, options, config):
            is_failed = is_failed or check.mark == "FAILED"
            problem = f": {printable(check.problem)}" if check.problem else ""
            print(f"  {check.mark:6} {check.what}{problem}", flush=True)
    return EXIT_FAILED if is_failed else 0


def sorted_words(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the part and the KEY=VALUE words of a command line.

    Raises:
        ConfigError: there are two parts.
    """
    parts = [word for word in words if "=" not in word]
    if len(parts) > 1:
        raise ConfigError(f"{', '.join(parts)}: one part can be named; a config's are all checked with --config FILE")
    return (parts[0] if parts else None), [word for word in words if "=" in word]


def _chosen(name: str | None, kind: str | None, config: RunConfig | None) -> list[tuple[str, Kind, Mapping[str, Any]]]:
    """Return the parts to check, each with what it is and its options."""
    found: list[tuple[str, Kind, Mapping[str, Any]]] = []
    for key, part in (part_names(config) if config is not None else {}).items():
        section = key.partition(".")[0]
        each: Any = "transform" if key.startswith("data.augment") else section
        if (name is None or name == part) and kind in (None, each):
            found.append((part, each, part_sections(config).get(key, {}) if config is not None else {}))
    if found:
        return found
    if name is None:
        raise ConfigError("no own part is named: give package.module:factory, or --config FILE of a config with some")
    if not is_part(name):
        raise ConfigError(f"{name!r} names no own part: write package.module:factory or file.py:factory")
    if kind is None:
        raise ConfigError(f"{name}: say what it is with --as {'|'.join(KINDS)}, or give the --config that names it")
    return [(name, kind, {})]  # type: ignore[list-item]


def _checks(name: str, kind: Kind, options: Mapping[str, Any], config: RunConfig | None) -> Iterator[Check]:
    """Make the part as a training does, and yield the checks of its kind."""
    make, checks = _OF_KIND[kind](name, options, config)
    made: list[Any] = []
    yield tried("it is imported and made", lambda: made.append(make()))
    if made:
        yield from checks(made[0])


Steps = tuple[Callable[[], Any], Callable[[Any], Iterator[Check]]]
"""What makes a part, and what yields its checks."""


def _of_model(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Steps:
    from segapp.commands.check_part.models import checks_of_model
    from segapp.models import build_model

    bands = config.data.bands if config is not None else None
    in_channels = 3 if bands is None else len(bands)

    def make() -> Any:
        return build_model("python", name, NUM_CLASSES, in_channels=in_channels, options=options)

    return make, lambda model: checks_of_model(model, make, config.data.crop_px if config is not None else None)


def _of_loss(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Steps:
    from segapp.build.own_parts import own_criterion
    from segapp.commands.check_part.losses import checks_of_loss

    term = LossTerm(name=name, options=dict(options))
    return lambda: own_criterion(term, NUM_CLASSES, IGNORED, None), checks_of_loss


def _of_data(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Steps:
    from segapp.build.pairs import own_data, split_names
    from segapp.commands.check_part.data import checks_of_data, data_section

    def make() -> Any:
        section = data_section(name, options, config)
        return own_data(section, split_names(section)[0])

    return make, lambda data: checks_of_data(data, data_section(name, options, config))


def _of_optimizer(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Steps:
    from segapp.commands.check_part.training import checks_of_optimizer, make_optimizer

    def make() -> Any:
        return make_optimizer(name, options)

    return make, lambda made: checks_of_optimizer(made, make)


def _of_schedule(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Steps:
    from segapp.commands.check_part.training import checks_of_schedule, make_schedule

    return lambda: make_schedule(name, options), checks_of_schedule


def _of_transform(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Steps:
    from segapp.commands.check_part.transforms import checks_of_transform, make_transform

    return lambda: make_transform(name, config), checks_of_transform


_OF_KIND: Mapping[Kind, Callable[[str, Mapping[str, Any], RunConfig | None], Steps]] = {
    "model": _of_model,
    "loss": _of_loss,
    "data": _of_data,
    "optim": _of_optimizer,
    "schedule": _of_schedule,
    "transform": _of_transform,
}
