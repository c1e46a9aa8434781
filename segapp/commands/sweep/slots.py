"""The places in which a sweep trains at the same time: one after another, or one for each of `--devices`.

A trainer learns its GPUs through CUDA_VISIBLE_DEVICES, not through `parallel.devices`: a process that sees one GPU
makes no context on the others, and the run's config stays free of the number that a GPU has here, so that the run can
be resumed, evaluated and compared anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from segapp.errors import ConfigError


@dataclass(frozen=True)
class Slot:
    """A place for one training at a time.

    Attributes:
        name: the devices, for the user; empty: those of each config.
        environ: variables of its trainers.
    """

    name: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


def parse_slots(text: str | None, environ: Mapping[str, str]) -> list[Slot]:
    """Return the slots of `--devices`: `0,1` one GPU each, `0+1,2+3` two each, `cpu,cpu` two trainings on the CPU.

    Args:
        text: the option; None: one slot with the devices of each config.
        environ: of this process; numbers count within its CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: a word is neither cpu nor the number of a GPU of this machine.
    """
    if text is None:
        return [Slot()]
    words = [word.strip() for word in text.split(",")]
    numbers = {number for word in words if word != "cpu" for number in word.split("+")}
    wrong = sorted(number for number in numbers if not number.strip().isdecimal())
    if wrong:
        raise ConfigError(f"--devices {text}: {wrong[0]!r} is no device: name GPUs as 0,1 or 0+1,2+3, or cpu,cpu")
    visible = _visible_gpus(environ) if numbers else []
    missing = sorted(int(number) for number in numbers if int(number) >= len(visible))
    if missing:
        there = f"there are {len(visible)}, numbered from 0" if visible else "no GPU is visible here"
        raise ConfigError(f"--devices {text}: there is no GPU {missing[0]}: {there}")
    # Without a limit each trainer would use a thread for every core.
    threads = {} if len(words) == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(words)))}
    threads = {name: environ.get(name, value) for name, value in threads.items()}
    return [
        Slot(word, {**threads, "CUDA_VISIBLE_DEVICES": "" if word == "cpu" else _chosen(word, visible)})
        for word in words
    ]


def _chosen(word: str, visible: list[str]) -> str:
    return ",".join(visible[int(number)] for number in word.split("+"))


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES calls each GPU that torch sees; counting them makes no CUDA context."""
    import torch

    count = torch.cuda.device_count()
    named = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
