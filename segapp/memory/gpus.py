"""GPU status from nvidia-smi through GPUtil, with timeouts; the only module that imports GPUtil.

GPUtil starts `nvidia-smi` on every call and waits without limit, raises ValueError on "No devices were found", and
numbers physical devices. Here, a call has a timeout, any failure gives an empty list, and devices are matched to
torch's by uuid.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class GpuStatus:
    """One GPU as nvidia-smi reports it; None where it reports "N/A"."""

    uuid: str
    """UUID without the prefix "GPU-"."""
    name: str
    used_mib: float | None
    """Memory in use by all processes."""
    total_mib: float | None
    utilization: float | None
    """0 to 1."""
    temperature: float | None
    """Temperature in degrees Celsius."""

    @property
    def is_available(self) -> bool:
        """True if load and used memory are at most one half, the limits of GPUtil.getAvailable."""
        if self.used_mib is None or not self.total_mib:
            return False
        return (self.utilization or 0.0) <= 0.5 and self.used_mib / self.total_mib <= 0.5


def query_gpus(timeout_s: float = 5.0) -> list[GpuStatus]:
    """Return all GPUs that nvidia-smi lists; empty if there is none, or it fails or exceeds the timeout."""
    answers: queue.SimpleQueue[list[GpuStatus]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(ask_gputil()), name="nvidia-smi", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return []


def count_visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that a training would see, by nvidia-smi and CUDA_VISIBLE_DEVICES, without torch."""
    uuids = [gpu.uuid for gpu in query_gpus()]
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not uuids:
        return len(uuids)

    def names_a_gpu(word: str) -> bool:
        return int(word) < len(uuids) if word.isdecimal() else any(word and uuid.startswith(word) for uuid in uuids)

    known = [names_a_gpu(bare_uuid(word)) for word in named.split(",")]
    return [*known, False].index(False)  # CUDA reads the list up to the first word that names no GPU


class GpuPoller:
    """Queries GPUs in background threads, so that a slow nvidia-smi or a busy driver delays nothing.

    Answers older than `timeout_s` are discarded. `retry_s` is the pause after a failure of nvidia-smi, `period_s` the
    minimum time between two starts of it. `own_used_mib` returns uuid -> memory in use on the GPUs of this process,
    MiB, as reported by the CUDA driver; it replaces nvidia-smi's number.
    """

    def __init__(
        self,
        timeout_s: float = 5.0,
        retry_s: float = 30.0,
        *,
        period_s: float = 2.0,
        own_used_mib: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.timeout_s, self.retry_s, self.period_s = timeout_s, retry_s, period_s
        self._statuses = _LatestAnswer("nvidia-smi", ask_gputil)
        self._own_used_mib = _LatestAnswer("driver memory", own_used_mib)

    def poll(self) -> list[GpuStatus]:
        """Return the last answers, except those that are too old, and start queries for the next call."""
        self._own_used_mib.ask_again(0.0)
        self._statuses.ask_again(self.period_s if self._statuses.answer else self.retry_s)
        statuses = {status.uuid: status for status in self._statuses.newer_than(self.timeout_s) or ()}
        for uuid, used_mib in (self._own_used_mib.newer_than(self.timeout_s) or {}).items():
            unknown = GpuStatus(uuid, "", None, None, None, None)
            statuses[uuid] = replace(statuses.get(uuid, unknown), used_mib=used_mib)
        return list(statuses.values())


class _LatestAnswer(Generic[T]):
    """The last answer of a function that may block; it runs in a thread, once at a time."""

    def __init__(self, name: str, ask: Callable[[], T]) -> None:
        self._name, self._ask = name, ask
        self.answer: T | None = None
        self._due_s = self._answered_s = -math.inf
        self._thread: threading.Thread | None = None

    def ask_again(self, period_s: float) -> None:
        """Start the function unless it still runs, or ran within the last `period_s` seconds.

        A caller that calls once per period may call slightly early. So a start may be a tenth of a period early, and
        the next one is due a whole period after the time at which this one was due; on average there is one per period.
        """
        now_s = time.monotonic()
        due_s = self._due_s + period_s
        if now_s >= due_s - 0.1 * period_s and (self._thread is None or not self._thread.is_alive()):
            self._due_s = max(now_s, due_s)
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            self._thread.join(0.2)  # a healthy one answers in a few hundredths of a second

    def newer_than(self, age_s: float) -> T | None:
        """Return the answer; None if it is older than `age_s` seconds."""
        return self.answer if time.monotonic() - self._answered_s <= age_s else None

    def _run(self) -> None:
        self.answer, self._answered_s = self._ask(), time.monotonic()


def ask_gputil() -> list[GpuStatus]:
    """Return GPUtil's answer without a timeout; empty if it fails."""
    try:
        import GPUtil

        return [
            GpuStatus(
                uuid=bare_uuid(gpu.uuid),
                name=str(gpu.name),
                used_mib=_known(gpu.memoryUsed),
                total_mib=_known(gpu.memoryTotal),
                utilization=_known(gpu.load),
                temperature=_known(gpu.temperature),
            )
            for gpu in GPUtil.getGPUs()
        ]
    except Exception:  # the training does not depend on GPUtil, and a broken driver may make it raise anything
        return []


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
    from segapp.accelerator import CUDA

    return [CUDA.facts(device).uuid for device in CUDA.devices()]


def order_by_free_memory(uuids: Sequence[str], statuses: Sequence[GpuStatus]) -> tuple[list[int], str]:
    """Return the indices of torch's devices, most free memory first, and the reason in one sentence.

    Devices that other processes use (more than half of the load or memory) are left out, unless all are in use. If
    nvidia-smi does not answer, all devices are returned in torch's order.
    """
    by_uuid = {status.uuid: status for status in statuses}
    known = {index: by_uuid[uuid] for index, uuid in enumerate(uuids) if uuid in by_uuid}
    if len(known) < len(uuids):
        reason = "nvidia-smi does not report their memory: all visible GPUs, in order"
        return list(range(len(uuids))), reason

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
