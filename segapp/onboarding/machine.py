"""The machine that a config is for: its device, and the weights that it can have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from segapp.memory.gpus import visible_gpus
from segapp.memory.plan import GpuSpec
from segapp.run.words import plural, size


@dataclass(frozen=True)
class Machine:
    """The device of a training; `plan_option` names the GPUs of another machine for `segapp plan`."""

    num_gpus: int
    device: str
    plan_option: str = ""


def find_machine(gpus: Sequence[GpuSpec] | None) -> Machine:
    """Return a machine with the given GPUs; None: this one."""
    if gpus is not None:
        sizes = ", ".join(size(gpu.total_mib * 2**20) for gpu in gpus)
        option = " --gpus " + ",".join(f"{gpu.total_mib:.0f}MiB" for gpu in gpus)
        return Machine(len(gpus), f"{plural(len(gpus), 'GPU')} ({sizes}), as --gpus says", option)
    seen = visible_gpus()
    note = f" ({seen.message})" if seen.cure else ""
    if seen.gpus:
        return Machine(len(seen.gpus), f"the {plural(len(seen.gpus), 'GPU')} of this machine{note}")
    return Machine(0, f"the CPU of this machine, which has no GPU{note}; segapp init --gpus 1x24GiB assumes one")


def weights_problem(encoder: str) -> str | None:
    """Return why the ImageNet weights of an encoder of smp cannot be had; None if they are here or can be downloaded.

    It waits at most ten seconds for the hub.
    """
    from segapp.models.by_name import hub_files
    from segapp.models.weights import hub_problem

    problem = hub_problem(*hub_files(encoder)["imagenet"])
    return problem and f"the Hugging Face hub did not answer for them ({problem})"
