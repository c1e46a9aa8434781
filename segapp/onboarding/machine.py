"""The machine that a config is for: its device, the weights that it can have, and the time of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from segapp.config import RunConfig
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.memory.gpus import visible_gpus
from segapp.memory.plan import GpuSpec
from segapp.run.words import plural, size


@dataclass(frozen=True)
class Machine:
    """The device of a training; `plan_option` names the GPUs of another machine for `segapp plan`."""

    num_gpus: int
    device: str
    plan_option: str = ""

    @property
    def is_here(self) -> bool:
        """True if the training is to run on this machine."""
        return not self.plan_option


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


def time_step(config: RunConfig, scheme: ClassScheme, num_steps: int = 3) -> float:
    """Return the median seconds of a training step of a config on random images, on one device of this machine."""
    import torch

    from segapp.accelerator import CUDA, accelerator_of
    from segapp.assembly.network import build_network
    from segapp.assembly.optimizer import criterion_of

    device = (CUDA.devices() or [torch.device("cpu")])[0]
    num_images, num_bands = int(config.train.batch_size) // max(1, CUDA.count()), len(config.data.bands or "RGB")
    model = build_network(config.model, scheme.num_classes, num_bands=num_bands, with_weights=False).to(device)
    criterion = criterion_of(config, scheme, lambda rule: [1.0] * scheme.num_classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(max(2, num_images), num_bands, *config.data.crop_px, device=device)
    target = torch.randint(scheme.num_classes, (len(images), *config.data.crop_px), device=device)
    seconds = []
    for _ in range(1 + num_steps):
        began = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu"):
            loss = criterion(model(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator_of(device).synchronize(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])  # the first step also allocates
