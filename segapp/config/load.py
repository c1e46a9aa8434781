"""From a file and `KEY=VALUE` words to a checked `RunConfig`, and back to text."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from segapp.config.problems import Source, combination_problems, describe_problem
from segapp.config.sections import RunConfig
from segapp.config.yaml_reader import parse_yaml
from segapp.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20
MAX_PROBLEMS = 50
"""More are counted, not told: a file with so many is no config."""


def config_places(name: str) -> list[Path]:
    """Where a config called `name` is looked for, in order: as given, under configs/, packaged."""
    given = Path(name)
    here = Path(__file__).resolve().parent.parent
    folders = [Path(), Path("configs"), here / "configs", here.parent / "configs"]
    names = [given] if given.suffix in {".yaml", ".yml"} else [given, given.with_name(f"{given.name}.yaml")]
    if given.is_absolute():
        return names
    return [folder / each for folder in folders for each in names]


def find_config(name: str) -> Path:
    """The file of a config: as given, then under configs/, then among the packaged ones.

    Raises:
        ConfigError: there is none; names the places and the configs there are.
    """
    places = config_places(name)
    for place in places:
        if os.path.isfile(place):  # unlike Path.is_file, also of a name that is too long
            return place
    known = sorted({path.name for place in places for path in place.parent.glob("*.y*ml") if place.parent != Path()})
    near = difflib.get_close_matches(Path(name).name, known, n=3, cutoff=0.5) or known
    hint = f" Known configs: {', '.join(near)}." if near else ""
    raise ConfigError(f"config {name!r} not found (looked for it as given, under configs/ and in the package).{hint}")


def parse_overrides(overrides: Iterable[str]) -> dict[tuple[str, ...], Any]:
    """Parses `dotted.key=value` words; values are YAML.

    Raises:
        ConfigError: a word that is not KEY=VALUE or whose value is not YAML.
    """
    parsed: dict[tuple[str, ...], Any] = {}
    for word in overrides:
        key, equals, text = word.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            raise ConfigError(f"override {word!r} is not KEY=VALUE, e.g. train.batch_size=4")
        parsed[path], _ = parse_yaml(text, f"override {key}")
    return parsed


def _merge(raw: dict[str, Any], overrides: Mapping[tuple[str, ...], Any]) -> None:
    for path, value in overrides.items():
        node = raw
        for part in path[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[path[-1]] = value


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a config file and overrides into a complete, checked config.

    Args:
        name: a path, or the name of a config under configs/ or in the package.
        overrides: `dotted.key=value` words that win over the file.

    Raises:
        ConfigError: with every problem found, each naming its place, key, value, and what is accepted.
    """
    path = find_config(str(name))
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"config {path} is larger than {MAX_CONFIG_BYTES} bytes: is it a config?")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from None
    raw, lines = parse_yaml(text, str(path))
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(
            f"config {path} must be a mapping of sections (name, data, model, ...), not a {type(raw).__name__}"
        )
    extra = parse_overrides(overrides)
    _merge(raw, extra)
    return validate_config(raw, Source(path, lines, frozenset(extra)))


def validate_config(raw: Mapping[str, Any], source: Source | None = None) -> RunConfig:
    """Checks a nested mapping as a config; raises one ConfigError that holds every problem."""
    source = source or Source(None, {}, frozenset())
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        items = error.errors()
        problems = list(dict.fromkeys(describe_problem(item, source) for item in items[:MAX_PROBLEMS]))
        raise _all_problems(problems, len(items) - MAX_PROBLEMS) from None
    problems = [f"{source.place(loc)}: {'.'.join(loc)}: {text}" for loc, text in combination_problems(config)]
    if problems:
        raise _all_problems(problems)
    return config


def _all_problems(problems: list[str], num_more: int = 0) -> ConfigError:
    if len(problems) == 1 and num_more <= 0:
        return ConfigError(problems[0])
    more = f"\n  and {num_more} more" if num_more > 0 else ""
    listed = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(f"{len(problems) + max(0, num_more)} problems in the config:\n{listed}{more}")


def dump_config(config: RunConfig) -> str:
    """The complete resolved config as YAML that `load_config` reads back to the same config."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def config_hash(config: RunConfig) -> str:
    """A short hash of the complete config."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]


def config_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


#: Keys that may differ between a run and its continuation: they change neither the data order nor the weights' path.
RESUME_MAY_CHANGE = (
    "name", "data.root", "data.workers", "data.cache", "data.timeout_s", "data.val_split", "data.allow_outside_root",
    "model.weights", "model.weights_backbone", "train.epochs", "train.max_bad_steps", "train.early_stop",
    "train.hang_timeout_s", "train.cudnn_benchmark", "train.channels_last", "parallel", "eval", "checkpoint", "log",
    "distill.teacher",
)  # fmt: skip


def resume_differences(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Keys that would change the course of a run if it were resumed with `config`.

    Args:
        saved: the config kept in the checkpoint, as nested plain values.
        config: the config asked for now.

    Returns:
        One line a key: "optim.lr: 0.01 -> 0.02".
    """
    return [
        f"{key}: {old!r} -> {new!r}"
        for key, old, new in _changed(dict(saved), config.model_dump(mode="json"), "")
        if not any(key == allowed or key.startswith(allowed + ".") for allowed in RESUME_MAY_CHANGE)
    ]


def _changed(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}, key=str):
            yield from _changed(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif old != new:
        yield key, old, new
