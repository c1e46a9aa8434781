"""The grid of a sweep: `KEY=VALUES` words as axes, and their combinations. Pure.

Values are separated by commas, or are a range of whole numbers `a..b` with both ends included. A comma within brackets,
braces or quotes is part of a value: `data.crop_px=[96,192],[128,256]` has two values.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import yaml

from segapp.errors import ConfigError, SegappError

MAX_RUNS = 10_000
"""Maximum number of runs of a sweep."""
_RANGE = re.compile(r"([-+]?\d+)\.\.([-+]?\d+)")
_OTHER_RANGE = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?\.\.[-+]?[\d.]+(?:[eE][-+]?\d+)?")


def parse_axes(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key as YAML texts, in the order given.

    Raises:
        ConfigError: lists every word that is not KEY=VALUES.

    >>> parse_axes(["optim.lr=0.001,0.003", "seed=0..2"])
    {'optim.lr': ['0.001', '0.003'], 'seed': ['0', '1', '2']}
    """
    axes: dict[str, list[str]] = {}
    problems: list[SegappError] = []
    for word in words:
        key, equals, text = word.partition("=")
        key = ".".join(part.strip() for part in key.split("."))
        try:
            if not equals or not all(key.split(".")):
                raise ConfigError(f"{word!r} is not KEY=VALUES, e.g. optim.lr=0.001,0.003 or seed=0..4")
            if key == "name":
                raise ConfigError(f"{word!r}: the runs of a sweep are named by their settings: leave it out")
            if key in axes:
                raise ConfigError(f"{key} is given twice: write all of its values into one word, {key}=A,B")
            axes[key] = parse_values(text, key)
        except ConfigError as error:
            error.key, error.value = key, text
            problems.append(error)
    if problems:
        raise ConfigError.together(problems, f"{len(problems)} words of the grid cannot be used:")
    return axes


def parse_values(text: str, key: str) -> list[str]:
    """Return the values of one key as YAML texts, without repetitions.

    Raises:
        ConfigError: a value is missing, a bracket or quote is not closed, or the ends of a range are not whole numbers.

    >>> parse_values("[96, 192],[128, 256]", "data.crop_px")
    ['[96, 192]', '[128, 256]']
    """
    values: list[str] = []
    for piece in _split(text, key):
        if (found := _RANGE.fullmatch(piece)) is not None:
            first, last = int(found[1]), int(found[2])
            if not 0 <= last - first < MAX_RUNS:
                raise ConfigError(f"{key}={piece}: a range must go up from a to b, with at most {MAX_RUNS} values")
            values += [str(value) for value in range(first, last + 1)]
        elif _OTHER_RANGE.fullmatch(piece):
            raise ConfigError(
                f"{key}={piece}: a range needs whole numbers, such as 0..4: list other values with commas"
            )
        else:
            values.append(piece)
    return list(dict.fromkeys(values))


def _split(text: str, key: str) -> list[str]:
    """Return the texts of the entries of a YAML list written without brackets."""
    source = f"[{text}]"
    try:
        node = yaml.compose(source, yaml.SafeLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", error)
        raise ConfigError(
            f"{key}={text}: not values between commas ({problem}): close brackets and quotes; write null for none, '' "
            "for an empty text"
        ) from None
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise ConfigError(f"{key}={text}: a value is missing; write null for none, '' for an empty text")
    return [source[entry.start_mark.index : entry.end_mark.index] for entry in node.value]


def combinations(axes: Mapping[str, Sequence[str]], num_configs: int = 1) -> list[dict[str, str]]:
    """Return the combinations of the values; the last key changes fastest; ConfigError if there are too many."""
    num_runs = num_configs * math.prod(len(values) for values in axes.values())
    if num_runs > MAX_RUNS:
        raise ConfigError(f"the grid has {num_runs} runs, and at most {MAX_RUNS} are possible: name fewer values")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
