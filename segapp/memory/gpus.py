"""GPU status from nvidia-smi through GPUtil, with timeouts; the only module that imports GPUtil.

GPUtil starts `nvidia-smi` on every call and waits without limit, raises ValueError on "No devices were found", and
numbers physical devices. Here a call has a timeout, any failure gives an empty list, and devices are matched to torch's
by uuid.
"""

from __future__ import annotations

import math
import os
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segapp.memory.oom_report import OtherProcess
from segapp.run.text import printable

MAX_LOAD = 0.5
MAX_MEMORY = 0.5


@dataclass(frozen=True)
class GpuStatus:
    """One GPU as nvidia-smi reports it; None where it reports "N/A".

    Args:
        uuid: without the prefix "GPU-".
        name: product name.
        used_mib: memory in use by all processes.
        total_mib: memory of the GPU.
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
        """True if load and used memory are at most one half, the limits of GPUtil.getAvailable."""
        if self.used_mib is None or not self.total_mib:
            return False
        return (self.utilization or 0.0) <= MAX_LOAD and self.used_mib / self.total_mib <= MAX_MEMORY


def query_gpus(timeout_s: float = 5.0) -> list[GpuStatus]:
    """Return all GPUs that nvidia-smi lists; empty if there is none, it fails or it exceeds the timeout."""
    answers: queue.SimpleQueue[list[GpuStatus]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(ask_gputil()), name="nvidia-smi", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return []


class GpuPoller:
    """Queries nvidia-smi in a background thread, one query at a time.

    Args:
        timeout_s: an answer older than this is discarded.
        retry_s: pause after a failed query.
    """

    def __init__(self, timeout_s: float = 5.0, retry_s: float = 30.0) -> None:
        self.timeout_s, self.retry_s = timeout_s, retry_s
        self._answer: list[GpuStatus] = []
        self._answered_s = -math.inf
        self._next_s = -math.inf
        self._thread: threading.Thread | None = None

    def poll(self) -> list[GpuStatus]:
        """Return the last answer, empty if it is too old, and start a query for the next call."""
        now_s = time.monotonic()
        if now_s >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._ask, name="nvidia-smi", daemon=True)
            self._thread.start()
            self._thread.join(0.2)  # a healthy one answers in a few hundredths of a second
        return self._answer if time.monotonic() - self._answered_s <= self.timeout_s else []

    def _ask(self) -> None:
        answer = ask_gputil()
        self._answer, self._answered_s = answer, time.monotonic()
        self._next_s = self._answered_s + (0.0 if answer else self.retry_s)


def ask_gputil() -> list[GpuStatus]:
    """Return GPUtil's answer without a timeout; empty if it fails."""
    try:
        import GPUtil

        return [_status(gpu) for gpu in GPUtil.getGPUs()]
    except Exception:  # the training does not depend on GPUtil, whatever a broken driver makes it raise
        return []


def processes_on(uuid: str, timeout_s: float = 5.0) -> list[OtherProcess]:
    """Return the other compute processes on a GPU, as nvidia-smi lists them; empty if it fails or is late."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) == 4 and bare_uuid(fields[0]) == bare_uuid(uuid) and fields[1] != str(os.getpid()):
            found.append(OtherProcess(int(fields[1]), printable(fields[3]), _known(fields[2])))
    return found


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
    """Return a GPU's uuid as torch writes it, without nvidia-smi's prefix "GPU-"."""
    return str(uuid).strip().removeprefix("GPU-")


def _known(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def cuda_uuids() -> list[str]:
    """Return the uuid of each CUDA device visible to torch, by index."""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [bare_uuid(getattr(each, "uuid", "")) for each in properties]


def order_by_free_memory(uuids: Sequence[str], statuses: Sequence[GpuStatus]) -> tuple[list[int], str]:
    """Choose among torch's devices, most free memory first.

    Returns:
        The indices, and the reason in one sentence. Devices that other processes use (more than half of load or
        memory) are left out, unless all are in use; without an answer from nvidia-smi all devices in torch's order.
    """
    by_uuid = {status.uuid: status for status in statuses}
    known = {index: by_uuid[uuid] for index, uuid in enumerate(uuids) if uuid in by_uuid}
    if len(known) < len(uuids):
        return list(range(len(uuids))), "nvidia-smi does not report their memory: all visible GPUs, in order"

    def free_mib(index: int) -> float:
        status = known[index]
        return (status.total_mib or 0.0) - (status.used_mib or 0.0)

    ordered = sorted(known, key=lambda index: (-free_mib(index), index))
    idle = [index for index in ordered if known[index].is_available]
    chosen = idle or ordered
    left_out = [f"cuda:{index}" for index in ordered if index not in chosen]
    facts = ", ".join(f"cuda:{index} {free_mib(index):.0f} MiB free" for index in chosen)
    if not idle:
        return chosen, f"all are in use by other processes; most free memory first: {facts}"
    return chosen, f"most free memory first: {facts}" + (
        f"; in use by other processes: {', '.join(left_out)}" if left_out else ""
    )
