"""The only door to GPUtil: what nvidia-smi says of the GPUs, without its ways of hanging, failing and miscounting.

GPUtil starts `nvidia-smi` on every call and waits for ever, raises ValueError on "No devices were found", and numbers
physical devices. Here a call has a timeout, any failure is "nothing known", and devices are matched to torch's by uuid.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_LOAD = 0.5
MAX_MEMORY = 0.5


@dataclass(frozen=True)
class GpuStatus:
    """One GPU as nvidia-smi sees it; None where it does not say.

    Args:
        uuid: without the "GPU-" in front.
        name: product name.
        used_mib: memory in use, all processes together.
        total_mib: memory.
        utilization: 0 to 1.
        temperature: degrees Celsius.
    """

    uuid: str
    name: str
    used_mib: float | None
    total_mib: float | None
    utilization: float | None
    temperature: float | None

    @property
    def is_available(self) -> bool:
        """Whether it is idle enough, by the limits of GPUtil.getAvailable: load and memory at most half used."""
        if self.used_mib is None or not self.total_mib:
            return False
        return (self.utilization or 0.0) <= MAX_LOAD and self.used_mib / self.total_mib <= MAX_MEMORY


def query_gpus(timeout_s: float = 5.0) -> list[GpuStatus]:
    """All GPUs that nvidia-smi lists; empty where there is none, or it fails, or does not answer in time."""
    answers: queue.SimpleQueue[list[GpuStatus]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            import GPUtil

            answers.put([_status(gpu) for gpu in GPUtil.getGPUs()])
        except Exception:  # whatever GPUtil makes of a broken driver, the training does not need its answer
            answers.put([])

    threading.Thread(target=ask, name="nvidia-smi", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return []


def _status(gpu: Any) -> GpuStatus:
    return GpuStatus(
        uuid=bare_uuid(gpu.uuid),
        name=str(gpu.name),
        used_mib=_known(gpu.memoryUsed),
        total_mib=_known(gpu.memoryTotal),
        utilization=_known(gpu.load),
        temperature=_known(gpu.temperature),
    )


def bare_uuid(uuid: object) -> str:
    """A GPU's uuid as torch writes it: nvidia-smi puts "GPU-" in front."""
    return str(uuid).strip().removeprefix("GPU-")


def _known(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def cuda_uuids() -> list[str]:
    """The uuid of each CUDA device that torch sees, by its index."""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [bare_uuid(getattr(each, "uuid", "")) for each in properties]


def order_by_free_memory(uuids: Sequence[str], statuses: Sequence[GpuStatus]) -> tuple[list[int], str]:
    """Which of torch's devices to take, most free memory first, and why.

    Args:
        uuids: of torch's devices, by index.
        statuses: what nvidia-smi says.

    Returns:
        Indices, and a sentence. Devices that others use (more than half of load or memory) are left out, unless all
        are; without an answer from nvidia-smi all are taken, in torch's order.
    """
    by_uuid = {status.uuid: status for status in statuses}
    known = {index: by_uuid[uuid] for index, uuid in enumerate(uuids) if uuid in by_uuid}
    if len(known) < len(uuids):
        return list(range(len(uuids))), "nvidia-smi does not tell their memory: all visible GPUs, in order"

    def free_mib(index: int) -> float:
        status = known[index]
        return (status.total_mib or 0.0) - (status.used_mib or 0.0)

    ordered = sorted(known, key=lambda index: (-free_mib(index), index))
    idle = [index for index in ordered if known[index].is_available]
    chosen = idle or ordered
    left_out = [f"cuda:{index}" for index in ordered if index not in chosen]
    facts = ", ".join(f"cuda:{index} {free_mib(index):.0f} MiB free" for index in chosen)
    if not idle:
        return chosen, f"all are in use by others; most free memory first: {facts}"
    return chosen, f"most free memory first: {facts}" + (
        f"; in use by others: {', '.join(left_out)}" if left_out else ""
    )
