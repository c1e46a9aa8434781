"""The parallel modes that each feature supports, for config checks, planner and step assembly; the mode of `auto`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from segapp.chunks import Mode
from segapp.config.sections import RunConfig
from segapp.errors import ConfigError


@dataclass(frozen=True)
class Feature:
    """A feature that a config may use, and the modes in which it works."""

    key: str
    modes: tuple[Mode, ...]
    is_on: Callable[[RunConfig], bool]
    otherwise: str = "leave it out"
    """Advice for another mode."""
    value: str = ""
    """Value of the key, for messages."""

    def problem(self, mode: str) -> str:
        """Return the rest of a message that begins with the key, for a mode in which the feature does not work."""
        value = f"{self.value} " if self.value else ""
        return f"{value}does not support parallel.mode: {mode}: use {_listed(self.modes)}, or {self.otherwise}"


FEATURES = (
    Feature("train.compile", ("single", "ddp"), lambda config: config.train.compile is True, "set it to false"),
    Feature(
        "train.compile",
        ("single",),
        lambda config: config.train.compile == "reduce-overhead",
        "set it to true",
        "reduce-overhead",
    ),
    Feature("distill", ("single", "dp", "ddp"), lambda config: config.distill is not None),
    Feature(
        "model.name",
        ("single", "dp", "ddp"),
        lambda config: config.model.is_eomt,
        "use another model",
        "eomt",
    ),
)


def unsupported(config: RunConfig, mode: str) -> Iterator[Feature]:
    return (feature for feature in FEATURES if feature.is_on(config) and mode not in feature.modes)


def check_mode(config: RunConfig, mode: Mode) -> None:
    for feature in unsupported(config, mode):
        raise ConfigError(f"{feature.key} {feature.problem(mode)}", key=feature.key)


def auto_mode(config: RunConfig, num_devices: int, against_ddp: str | None = None) -> tuple[Mode, str]:
    """Return the mode of `parallel.mode: auto`, and the reason; no reason on one device.

    Args:
        config: the complete config; `train.batch_size` is 0 while it is unknown.
        num_devices: number of devices of the training.
        against_ddp: why ranks cannot be started on these devices; None: they can.
    """
    if num_devices == 1:
        return "single", ""
    if config.parallel.has_split:
        return "dp", "the batch split is set"
    if against_ddp is None and 0 < config.train.batch_size < num_devices:
        against_ddp = f"a batch of {config.train.batch_size} does not give every device an image"
    return ("ddp", "one process for each GPU is the fastest") if against_ddp is None else ("dp", against_ddp)


def _listed(words: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
