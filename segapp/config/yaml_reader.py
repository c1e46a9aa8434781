"""YAML as configs use it: the 1.2 core schema, no tags, no aliases, no key twice, every key with its line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from segapp.errors import ConfigError

_RESOLVED_HERE = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema: only true/false are booleans, 1e-3 is a number, a key stands once."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [pair for pair in pairs if pair[0] not in _RESOLVED_HERE]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _loader, node: int(str(node.value)))  # no octal, no 60s


def _walk(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise ConfigError(
                    f"key {'.'.join((*path, name))} stands twice (line {key.start_mark.line + 1}): keep one"
                )
            seen.add(name)
            lines[(*path, name)] = key.start_mark.line + 1
            _walk(value, (*path, name), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, str(index))] = value.start_mark.line + 1
            _walk(value, (*path, str(index)), lines)


def parse_yaml(text: str, what: str = "config") -> tuple[Any, dict[tuple[str, ...], int]]:
    """Parses YAML without tags, aliases or double keys.

    Args:
        text: the YAML source.
        what: its name in errors.

    Returns:
        The value, and the line (from 1) of every key path.

    Raises:
        ConfigError: the text is not such YAML.
    """
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise ConfigError(f"{what}:{line}: YAML aliases (*{event.anchor}) are not read: write the value out")
        node = yaml.compose(text, Loader=_Loader)
        lines: dict[tuple[str, ...], int] = {}
        if node is not None:
            _walk(node, (), lines)
        return yaml.load(text, Loader=_Loader), lines
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{what}:{mark.line + 1}" if mark else what
        problem = getattr(error, "problem", None) or (str(error).splitlines() or ["nested too deeply"])[0]
        raise ConfigError(f"{place}: not valid YAML: {problem}") from None
