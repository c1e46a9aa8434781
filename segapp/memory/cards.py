"""`--gpus`: how many GPUs, and how much memory each has. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from segapp.errors import ConfigError

_CARD = re.compile(r"(?:(?P<count>\d+)\s*[x*]\s*)?(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_MIB_OF = {"mib": 1.0, "gib": 1024.0, "mb": 1e6 / 2**20, "gb": 1e9 / 2**20}
_EXAMPLE = "write 3x24220MiB, or 24220MiB,24220MiB,11019MiB, or here for this machine's"
MAX_CARDS = 64


@dataclass(frozen=True)
class Card:
    """One GPU.

    Attributes:
        total_mib: its memory, as nvidia-smi reports it.
        name: what to call it.
    """

    total_mib: float
    name: str = ""


def parse_cards(text: str) -> tuple[Card, ...]:
    """GPUs from text: sizes with a unit (MiB, GiB, MB, GB), separated by commas, each with a count in front if wanted.

    Raises:
        ConfigError: it says something else.

    Example:
        >>> [card.total_mib for card in parse_cards("2x24GiB,11019MiB")]
        [24576.0, 24576.0, 11019.0]
    """
    cards: list[Card] = []
    for word in text.split(","):
        found = _CARD.fullmatch(word.strip())
        if found is None:
            raise ConfigError(f"--gpus {text}: {word.strip()!r} is no number of GPUs and a size: {_EXAMPLE}")
        unit = found["unit"].lower()
        if unit not in _MIB_OF:
            raise ConfigError(f"--gpus {text}: {word.strip()!r} has no unit that is known: use MiB or GiB; {_EXAMPLE}")
        count, size_mib = int(found["count"] or 1), float(found["size"]) * _MIB_OF[unit]
        if not count or not size_mib:
            raise ConfigError(f"--gpus {text}: {word.strip()!r} is nothing: {_EXAMPLE}")
        if len(cards) + count > MAX_CARDS:
            raise ConfigError(f"--gpus {text}: more than {MAX_CARDS} GPUs: plan for one machine")
        cards += [Card(size_mib)] * count
    return tuple(Card(card.total_mib, card.name or f"GPU {i}") for i, card in enumerate(cards))
