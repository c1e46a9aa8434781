"""Number and memory of GPUs, as `--gpus` gives them. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from segapp.errors import ConfigError

_GPUS = re.compile(r"(?:(?P<count>\d+)\s*[x*]\s*)?(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_MIB_OF = {"mib": 1.0, "gib": 1024.0, "mb": 1e6 / 2**20, "gb": 1e9 / 2**20}
_EXAMPLE = "write 3x24220MiB, or 24220MiB,24220MiB,11019MiB, or here for the GPUs of this machine"
MAX_GPUS = 64


@dataclass(frozen=True)
class GpuSpec:
    """Memory of one GPU, as nvidia-smi reports it, and its name in reports."""

    total_mib: float
    name: str = ""


def parse_gpus(text: str) -> tuple[GpuSpec, ...]:
    """Parse GPU sizes with a unit (MiB, GiB, MB, GB), separated by commas, each with an optional count in front.

    Raises:
        ConfigError: the text has another form.

    Example:
        >>> [gpu.total_mib for gpu in parse_gpus("2x24GiB,11019MiB")]
        [24576.0, 24576.0, 11019.0]
    """
    gpus: list[GpuSpec] = []
    for word in text.split(","):
        found = _GPUS.fullmatch(word.strip())
        if found is None:
            raise ConfigError(f"--gpus {text}: {word.strip()!r} is not a count and a size: {_EXAMPLE}")
        unit = found["unit"].lower()
        if unit not in _MIB_OF:
            raise ConfigError(f"--gpus {text}: {word.strip()!r} has no known unit: use MiB or GiB; {_EXAMPLE}")
        count, size_mib = int(found["count"] or 1), float(found["size"]) * _MIB_OF[unit]
        if not count or not size_mib:
            raise ConfigError(f"--gpus {text}: {word.strip()!r} has a count or size of 0: {_EXAMPLE}")
        if len(gpus) + count > MAX_GPUS:
            raise ConfigError(f"--gpus {text}: more than {MAX_GPUS} GPUs: plan for one machine")
        gpus += [GpuSpec(size_mib)] * count
    return tuple(GpuSpec(gpu.total_mib, gpu.name or f"GPU {i}") for i, gpu in enumerate(gpus))
