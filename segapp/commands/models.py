"""`segapp models`: the networks that a config can name, their size, cost and memory, and whether weights are here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from segapp.commands.model_names import ModelName, matching_names
from segapp.errors import ConfigError

if TYPE_CHECKING:
    from segapp.commands.measure import ModelFacts


MAX_ROWS = 20
"""Networks that are built for one table; of more matches the names are listed."""


def print_models(pattern: str | None, size: str, *, with_memory: bool, as_json: bool) -> None:
    """Print the names that a pattern matches, and, if they are few, what a run of each network shows.

    Args:
        pattern: a part of a name, or a glob; None: all.
        size: of the images, as HEIGHTxWIDTH.
        with_memory: simulate training steps, too.
        as_json: print JSON.

    Raises:
        ConfigError: no name matches, or the size is none.
    """
    size_px = _parse_size(size)
    names = matching_names(pattern)
    if len(names) > MAX_ROWS:
        _print_names(names, as_json=as_json)
        return
    from segapp.commands.measure import measure_model

    facts = [measure_model(name, size_px, with_memory=with_memory) for name in names]
    print(json.dumps([asdict(each) for each in facts], indent=2) if as_json else "\n".join(table(facts)))


def _parse_size(text: str) -> tuple[int, int]:
    height, _, width = text.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ConfigError(f"--size {text}: HEIGHTxWIDTH in pixels is expected, e.g. 512x512")
    return int(height), int(width)


def _print_names(names: list[ModelName], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(name) for name in names], indent=2))
        return
    families: dict[str, list[ModelName]] = {}
    for name in names:
        families.setdefault(f"{name.library}/{name.name}" if name.encoder else name.library, []).append(name)
    for family, members in families.items():
        shown = ", ".join(each.encoder or each.name for each in members[:4])
        print(f"{family}: {len(members)}, such as {shown}" if len(members) > 4 else f"{family}: {shown}")
    print(f"{len(names)} networks match; more is shown of {MAX_ROWS} or fewer: give a pattern, e.g. smp/Unet/resnet34")


def table(facts: list[ModelFacts]) -> list[str]:
    """Return the facts as lines of aligned columns."""
    from segapp.commands.runs import aligned

    rows = [("NETWORK", "PARAMETERS", "GFLOPS", "SIZE", "STRIDE", "MIB/IMAGE", "WEIGHTS")]
    for each in facts:
        if each.problem is not None:
            rows.append((each.label, "-", "-", "-", "-", "-", each.problem.partition(";")[0]))
            continue
        memory = "-" if each.image_mib is None else f"{each.image_mib:.0f}"
        height, width = each.size_px or (0, 0)
        rows.append(
            (
                each.label,
                f"{each.num_params / 1e6:.1f} M",
                f"{each.gflops:.1f}",
                f"{height}x{width}",
                str(each.stride),
                memory,
                ", ".join(each.weights_here) or "-",
            )
        )
    return aligned(rows)
