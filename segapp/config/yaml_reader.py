"""Parse the YAML 1.2 core schema without tags, aliases and duplicate keys, with the line of every key.

The nesting and the number of values are limited during parsing, so any text is parsed in about a second.
"""

import re
import shlex
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.composer import Composer

from segapp.bounds import MAX_DEPTH
from segapp.errors import ConfigError

MAX_CHARS = 1 << 20
MAX_NODES = 20_000
"""Maximum number of values; shipped configs have up to two hundred, a palette of a thousand classes four thousand."""

_RESOLVED_HERE = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp")}


class _Limits(Composer):
    """The limits of a text and of the language."""

    peek_event: Any
    _depth = _num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node; raise YAMLError at an alias, a tag, or beyond a limit."""
        event = cast(yaml.Event, self.peek_event())
        if isinstance(event, yaml.AliasEvent):
            raise _refused(event, f"YAML aliases (*{event.anchor}) are not supported: write the value itself")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _refused(event, f"YAML tags ({tag}) are not supported: write the plain value")
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _refused(event, f"more than {MAX_NODES} values: is it a config?")
        if self._depth == MAX_DEPTH:
            raise _refused(event, f"nested more than {MAX_DEPTH} deep: is it a config?")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Loader(_Limits, yaml.SafeLoader):
    """YAML 1.2 core schema: only true and false are booleans, 1e-3 is a number, duplicate keys are errors."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [pair for pair in pairs if pair[0] not in _RESOLVED_HERE]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _refused(event: yaml.Event, problem: str) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast(yaml.Mark, event.start_mark))


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


def _walk(
    node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int], tight: dict[yaml.Node, str]
) -> None:
    """Note the line of each key, and the keys that hold their values because a space is missing, as `{name:dice}`."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem="merge keys (<<) are not supported: write the keys themselves", problem_mark=key.start_mark
                )
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {'.'.join((*path, name))} is defined twice: keep one", problem_mark=key.start_mark
                )
            seen.add(name)
            lines[(*path, name)] = key.start_mark.line + 1
            first, colon, rest = name.partition(":")
            is_left_out = value.start_mark.index == value.end_mark.index
            if node.flow_style and colon and is_left_out and not {".", "/"} & set(first):  # no custom component
                tight[key] = f"{first}: {rest}"
            _walk(value, (*path, name), lines, tight)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, str(index))] = value.start_mark.line + 1
            _walk(value, (*path, str(index)), lines, tight)


def parse_yaml(
    text: str, what: str = "config", *, key: str | None = None, path: Path | None = None
) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Return the value of YAML without tags, aliases and duplicate keys, and the line, from 1, of every key path.

    `what`, `key` and `path` name the text in errors.

    Raises:
        ConfigError: the text is not valid YAML of this kind.
    """
    try:
        if len(text) > MAX_CHARS:
            raise ValueError(f"more than {MAX_CHARS} characters: is it a config?")
        return _parse(text, key)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
        number = mark.line + 1 if mark else None if position is None else text.count("\n", 0, position) + 1
        place = what if number is None else f"{what}:{number}"
        problem = getattr(error, "problem", None) or (str(error).splitlines() or ["nested too deeply"])[0]
        raise ConfigError(f"{place}: not valid YAML: {problem}", key=key, path=path) from None


def _parse(text: str, key: str | None) -> tuple[Any, dict[tuple[str, ...], int]]:
    loader, lines = _Loader(text), dict[tuple[str, ...], int]()
    node = loader.get_single_node()
    if node is None:
        return None, lines
    tight: dict[yaml.Node, str] = {}
    _walk(node, (), lines, tight)
    for wrong, meant in reversed(tight.items()):
        text = f"{text[: wrong.start_mark.index]}{meant}{text[wrong.end_mark.index :]}"
    for wrong in tight:
        written = text.splitlines()[wrong.start_mark.line].strip()
        written = written if key is None else shlex.quote(f"{key}={written}")
        raise yaml.MarkedYAMLError(
            problem=f"{wrong.value} lacks a space after its colon: write {written}", problem_mark=wrong.start_mark
        )
    return loader.construct_document(node), lines
