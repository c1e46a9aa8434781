"""Load a config file and `KEY=VALUE` overrides as a validated `RunConfig`, and write it back as text."""

import copy
import filecmp
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any
from unicodedata import normalize

import yaml
from pydantic import ValidationError

from segapp.bounds import check_values, decoded
from segapp.config.options import BUILT_INS, BuiltIn
from segapp.config.problems import KeyLocations, combination_problems, describe_problems, wrong_keys
from segapp.config.sections import RunConfig
from segapp.config.trust import named_code, with_component_paths
from segapp.config.values import OnResume, section_of
from segapp.config.yaml_reader import MAX_CHARS, MAX_NODES, parse_yaml
from segapp.custom.sources import Sources
from segapp.custom.trust import check_known
from segapp.errors import ConfigError, SegappError, closest_words, without_secrets
from segapp.scores import CLASS_SCORES

MAX_PROBLEMS = 50
"""Maximum number of listed problems; further ones are only counted."""

_TRACKING_URI = re.compile(  # of MLflow; without a password, and for http without a user
    r"(?i)https?://(?:[\w.-]+|\[[\da-f:.]+\])(?::\d+)?(?:[/?#]\S*)?|databricks[\w:/.-]*|(?:arn|azureml):[\w:/.-]+"
    r"|(?:postgresql|mysql|mssql)(?:\+\w+)?://(?:(?:[\w.-]|%40)+@)?[^@\\\s]*"
    r"|(?:sqlite(?:\+\w+)?|file):(?=/)(?!//[^/]).*|[^:@\\]+",  # files and folders
)


def config_places(name: str) -> list[Path]:
    """Return the paths at which a config is searched, in order: as given, under configs/, in the package."""
    given = Path(name)
    here = Path(__file__).resolve().parent.parent
    folders = [Path(), Path("configs"), here / "configs", here.parent / "configs"]
    has_ending = given.suffix in {".yaml", ".yml"} or not given.name
    names = [given] if has_ending else [given, given.with_name(f"{given.name}.yaml")]
    if given.is_absolute():
        return names
    return [folder / each for folder in folders for each in names]


def find_config(name: str) -> Path:
    """Return the file of a config, searched in these places; the ConfigError suggests known configs."""
    given, places = Path(name), config_places(name)
    for place in places:
        if os.path.isfile(place):  # unlike Path.is_file, also of a name that is too long
            return place
        if os.path.exists(place) and not os.path.isdir(place):
            raise ConfigError(f"config {name!r} is a pipe or a device: save it as a file", path=name)
    found = {path for place in places for path in place.parent.glob("*.y*ml")}
    known = {path.stem: os.fspath(path) if path.parent == given.parent else path.name for path in sorted(found)}
    near = closest_words(given.stem, known, most=3)
    hint = f"did you mean {' or '.join(known[stem] for stem in near)}?" if near else _known_configs(places)
    places_shown = "looked for it as given, under configs/ and in the package"
    raise ConfigError(f"config {name!r} not found ({places_shown}): {hint}", path=name).see("config-errors")


@cache
def _note_shadowed(path: Path, name: str) -> None:
    """Print once, on the first rank, that a local file hides a shipped config of the same name."""
    for shipped in config_places(name):
        is_hidden = shipped.is_absolute() and shipped.is_file() and not filecmp.cmp(shipped, path, shallow=False)
        if is_hidden and "RANK" not in os.environ:
            print(f"note: reading {path} in this folder, not the shipped config {shipped}", file=sys.stderr)


def _known_configs(places: Iterable[Path]) -> str:
    names = {path.name for place in places for path in place.parent.glob("*.y*ml") if place.parent != Path()}
    return f"known configs: {', '.join(sorted(names))}" if names else "name a file"


def is_config_name(word: str) -> bool:
    return Path(word).suffix in {".yaml", ".yml"} or any(os.path.isfile(place) for place in config_places(word))


def named_config(config: str | None, overrides: Sequence[str] = (), advice: str = "name a config") -> str:
    """Return the value of `--config`; without one, a ConfigError points to a config among the other words."""
    if config is not None:
        return config
    files = [word for word in overrides if "=" not in word and is_config_name(word)]
    if files:
        raise ConfigError(f"--config is missing before {files[0]}: write --config {files[0]}", path=files[0])
    raise ConfigError(f"--config FILE is missing: {advice}, e.g. --config demo.yaml")


def parse_overrides(overrides: Iterable[str]) -> dict[tuple[str, ...], Any]:
    """Parse `dotted.key=value` words with YAML values; raise ConfigError for any other word."""
    parsed: dict[tuple[str, ...], Any] = {}
    repeated: dict[tuple[str, ...], str] = {}
    for word in overrides:
        key, equals, text = word.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            if is_config_name(word):
                raise ConfigError(f"{word!r} is a config: write --config {word}", path=word)
            raise ConfigError(f"override {word!r} is not KEY=VALUE, e.g. train.batch_size=4", value=word)
        repeated |= {path: word} if path in parsed else {}
        if path == ("checkpoint", "monitor") and text.startswith(tuple(f"{kind}:" for kind in CLASS_SCORES)):
            parsed[path] = text  # the name of a class may hold ": " or " #", which YAML would read as its own signs
        else:
            parsed[path], _ = parse_yaml(text, f"override {key}", key=key)
    for word in repeated.values():
        _note_repeated(word)
    return parsed


@cache
def _note_repeated(word: str) -> None:
    """Print once, on the first rank, which of several overrides of a key counts."""
    if "RANK" not in os.environ:
        print(f"note: {word.partition('=')[0].strip()} is given more than once: {word} counts", file=sys.stderr)


def _merge(raw: dict[str, Any], overrides: Mapping[tuple[str, ...], Any]) -> None:
    for path, value in overrides.items():
        node = raw
        for part in path[:-1]:
            inner = node.get(part)
            node[part] = dict(inner) if isinstance(inner, Mapping) else {}
            node = node[part]
        if path[-1] == "name" and path[0] in BUILT_INS:
            _drop_defaults(node, BUILT_INS[path[0]])
        node[path[-1]] = value


def _drop_defaults(section: dict[str, Any], table: Mapping[str, BuiltIn]) -> None:
    """Remove options with default values from a section for which another loss, optimizer or schedule is named.

    The config of a run has all options; another loss would be refused for options that the user never set.
    """
    options, named = section.get("options"), table.get(section.get("name", ""))
    if named is not None and isinstance(options, Mapping):
        defaults = named.options().model_dump(mode="json")
        section["options"] = {
            key: value for key, value in options.items() if key not in defaults or value != defaults[key]
        }


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config file with overrides as a complete, validated config.

    Args:
        name: a path, or the name of a config under configs/ or in the package.
        overrides: `dotted.key=value` words, which take precedence over the file.

    Raises:
        ConfigError: lists every problem with place, key, value, and what is accepted.
    """
    path = find_config(str(name))
    _note_shadowed(path, str(name))
    try:
        if path.stat().st_size > MAX_CHARS:
            raise ConfigError(f"config {path} is larger than {MAX_CHARS} bytes: is it a config?", path=path)
        text = decoded(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}", path=path) from None
    raw, lines = parse_yaml(text, str(path), path=path)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(
            f"config {path} must be a mapping of sections (name, data, model, ...), not a {type(raw).__name__}",
            path=path,
        )
    raw = with_component_paths(raw, path.parent)
    extra = parse_overrides(overrides)
    merged = copy.deepcopy(raw)
    _merge(merged, extra)
    locations = KeyLocations(path, lines, frozenset(extra))
    _check_secrets(merged, locations)
    try:
        return validate_config(merged, locations)
    except ConfigError:  # without the command line, to find out where a problem comes from
        return validate_config(merged, replace(locations, wrong_in_file=wrong_keys(raw)))


def load_runnable(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a config as `load_config` does, and check that the code that it names may run; see `check_known`."""
    config = load_config(name, overrides)
    check_code(config, find_config(str(name)), overrides, is_stored=False)
    return config


def check_code(
    config: RunConfig,
    origin: Path,
    overrides: Sequence[str] = (),
    *,
    is_stored: bool = True,
    uses: Sequence[str] = ("",),
    copies: Mapping[str, Sources] | None = None,
) -> None:
    """Check that the custom components of a config may run; those that the overrides name are the user's own.

    For `uses` and `copies` see `named_code`.
    """
    typed = set(_texts(parse_overrides(overrides)))
    check_known(named_code(config, uses, copies), origin.resolve(), typed, is_stored=is_stored)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        yield from (text for each in (value.values() if isinstance(value, Mapping) else value) for text in _texts(each))


def config_of(raw: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Return a config from nested plain values, which are modified, and `dotted.key=value` words."""
    _merge(raw, parse_overrides(overrides))
    _check_secrets(raw, KeyLocations())
    return validate_config(raw)


def _check_secrets(raw: Any, locations: KeyLocations, loc: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for an address with a password or token in a user's config, which many files would copy."""
    inner = raw.items() if isinstance(raw, Mapping) else enumerate(raw) if isinstance(raw, list | tuple) else ()
    for key, value in inner:
        _check_secrets(value, locations, (*loc, str(key)))
    key, problem = ".".join(loc), ""
    if any(isinstance(text, str) and without_secrets(text) != text for text in (raw, *loc[-1:])):
        problem = "holds a password or token, which the files of the run would contain: write the address without it"
    # Normalized, because a full-width @ or colon could hide a password.
    elif loc[:2] == ("log", "mlflow") and isinstance(raw, str) and not _TRACKING_URI.fullmatch(normalize("NFKC", raw)):
        problem = "is no plain address (not shown, as it may hold a password): write http://HOST:PORT, sqlite:///FILE"
    if problem:
        raise ConfigError(
            f"{locations.place(loc)}: {key} {problem}, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD "
            "for a server of MLflow, MLFLOW_TRACKING_URI to the whole address of a database, or WANDB_API_KEY for W&B",
            key=key,
        ).see("trackers")


def validate_config(raw: Mapping[str, Any], locations: KeyLocations | None = None) -> RunConfig:
    """Return a nested mapping as a config; raise one ConfigError that lists every problem."""
    locations = locations or KeyLocations()
    try:
        check_values(raw, MAX_NODES, MAX_CHARS)
    except ValueError as error:
        raise ConfigError(f"the config cannot be read: {error}", path=locations.path) from None
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        items = error.errors()
        found = describe_problems(items[:MAX_PROBLEMS], locations)
        raise _all_problems(found, locations.path, len(items) - MAX_PROBLEMS) from None
    problems = [
        ConfigError(f"{locations.place(loc)}: {key}: {text}", key=key, value=_value_at(raw, loc))
        for key, text in combination_problems(config)
        for loc in [tuple(key.split("."))]
    ]
    if problems:
        raise _all_problems(problems, locations.path)
    return config


def _all_problems(problems: list[ConfigError], path: Path | None, num_more: int = 0) -> SegappError:
    heading = f"{len(problems) + max(0, num_more)} problems in the config:"
    error = ConfigError.together(problems, heading, num_more)
    error.path = None if path is None else os.fspath(path)
    return error.see("config-errors")


def _value_at(raw: Any, loc: tuple[str, ...]) -> Any:
    """Return the value at a key path of nested plain values; None if the config leaves it out."""
    for name in loc:
        if isinstance(raw, list) and name.isdecimal() and int(name) < len(raw):
            raw = raw[int(name)]
        elif isinstance(raw, Mapping):
            raw = raw.get(name)
        else:
            return None
    return raw


def dump_config(config: RunConfig) -> str:
    """Return the complete config as YAML, from which `load_config` makes the same config."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def explain_config(config: RunConfig) -> str:
    """Return the complete config as YAML; a comment shows the transforms that `data.augment: null` means."""
    text = dump_config(config)
    if config.data.augment is not None:
        return text
    lines = [
        "# data.augment: null means this list, made of data.scale, hflip and photometric:",
        "#   augment:",
    ]
    for entry in config.data.transforms:
        ((name, arguments),) = entry.items()
        flow = yaml.safe_dump(arguments, default_flow_style=True, sort_keys=False, width=math.inf)
        lines.append(f"#   - {name}: {flow.strip()}")
    return text + "\n".join(lines) + "\n"


def config_schema() -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def resume_differences(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return the differences between a config and a saved one that keep it from resuming the saved one's run.

    One line per key: "optim.lr: 0.01 -> 0.02". A key that is not in the saved config is assumed to have its default.
    """
    try:
        old_config: Mapping[str, Any] = validate_config(saved).model_dump(mode="json")
    except ConfigError:
        old_config = saved
    return [
        f"{key}: {old!r} -> {new!r}"
        for key, old, new in _changed(old_config, config.model_dump(mode="json"), "")
        if not _may_change(key)
    ]


def kept_on_resume(own: RunConfig, asked: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the config for a resume with a config file, and the keys for which the run's values are kept.

    The keys that may change on a resume keep the run's values, with one line per kept key, "train.epochs: 50 (the file
    has 100)". The other keys have the file's values, which must be equal. Both configs include the overrides of the
    command line.
    """
    raw, kept = asked.model_dump(mode="json"), []
    for key, mine, theirs in _changed(own.model_dump(mode="json"), raw, ""):
        if _may_change(key):
            *sections, name = key.split(".")
            reduce(getitem, sections, raw)[name] = mine
            kept.append(f"{key}: {mine!r} (the file has {theirs!r})")
    return validate_config(raw), kept


def changed_keys(before: RunConfig, after: RunConfig) -> list[str]:
    pairs = _changed(before.model_dump(mode="json"), after.model_dump(mode="json"), "")
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in pairs]


def _may_change(key: str) -> bool:
    """Return True if the field of a dotted key, or a section that contains it, is marked with `OnResume`."""
    model: Any = RunConfig
    for part in key.split("."):
        field = model.model_fields.get(part) if model is not None else None
        if field is None:
            return False
        if field.json_schema_extra == OnResume.json_schema_extra:
            return True
        model = section_of(model, part)
    return False


def _changed(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}, key=str):
            yield from _changed(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif old != new:
        yield key, old, new
