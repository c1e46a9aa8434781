"""Sentences of the product that tell a user what to do: found in the code, and followed as they are written."""

from __future__ import annotations

from collections.abc import Sequence


def followed(words: Sequence[str], way: Sequence[str]) -> list[str]:
    """Return overrides after the user did what a cure says; `-KEY` leaves a key out, others replace its value."""
    names = {word.removeprefix("-").partition("=")[0] for word in way}
    kept = [word for word in words if word.partition("=")[0] not in names]
    return [*kept, *(word for word in way if not word.startswith("-"))]
