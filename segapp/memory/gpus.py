"""GPU status from nvidia-smi through GPUtil, or from amd-smi, with timeouts; the only module that imports GPUtil.

GPUtil starts `nvidia-smi` on every call and waits without limit, raises ValueError on "No devices were found", and
numbers physical devices. Here, a call has a timeout, any failure gives an empty list, and devices are matched to
torch's by uuid, or by PCI address for AMD, which amd-smi and torch write in the same way.
"""

from __future__ import annotations

import functools
import json
import math
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from segapp.run.events import OtherProcess
from segapp.run.words import printable

T = TypeVar("T")


@dataclass(frozen=True)
class GpuStatus:
    """One GPU as nvidia-smi or amd-smi reports it; None where it reports "N/A"."""

    uuid: str
    """UUID without the prefix "GPU-"; for an AMD GPU its PCI address."""
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
    """Return all GPUs that nvidia-smi or amd-smi lists; empty if there is none, both fail or exceed the timeout."""
    answers: queue.SimpleQueue[list[GpuStatus]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_ask()), name="nvidia-smi", daemon=True).start()
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
        self._statuses = _LatestAnswer("nvidia-smi", _ask)
        self._own = _LatestAnswer("driver memory", own_used_mib)

    def poll(self) -> list[GpuStatus]:
        """Return the last answers, except those that are too old, and start queries for the next call."""
        self._own.ask_again(0.0)
        self._statuses.ask_again(self.period_s if self._statuses.answer else self.retry_s)
        found = {status.uuid: status for status in self._statuses.newer_than(self.timeout_s) or ()}
        for uuid, used_mib in (self._own.newer_than(self.timeout_s) or {}).items():
            unknown = GpuStatus(uuid, "", None, None, None, None)
            found[uuid] = replace(found.get(uuid, unknown), used_mib=used_mib)
        return list(found.values())


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


def _ask() -> list[GpuStatus]:
    return ask_gputil() or ask_amd_smi()


def ask_amd_smi() -> list[GpuStatus]:
    """Return the GPUs that amd-smi lists; empty if it fails."""
    try:
        metrics = _amd_smi("metric", "--mem-usage", "--usage", "--temperature")
        return [_amd_status(each, _amd_cards()[each["gpu"]]) for each in metrics]
    except Exception:  # missing, too slow, or with unknown fields
        return []


@functools.cache
def _amd_cards() -> dict[int, dict[str, Any]]:
    """Return the name and the PCI address of each GPU, which do not change."""
    return {card["gpu"]: card for card in _amd_smi("static", "--asic", "--bus")}


def _amd_smi(*words: str) -> list[dict[str, Any]]:
    """Return amd-smi's JSON answer as a list of GPUs, which later versions wrap in an object."""
    done = subprocess.run(["amd-smi", *words, "--json"], capture_output=True, text=True, timeout=10.0, check=True)
    found = json.loads(done.stdout)
    return found["gpu_data"] if isinstance(found, dict) else found  # type: ignore[no-any-return]


def _amd_status(metric: Mapping[str, Any], card: Mapping[str, Any]) -> GpuStatus:
    def amount(group: str, name: str) -> float | None:
        """Return {"value": 512, "unit": "MB"} as a number; None if this, or the whole group, is "N/A"."""
        found: Any = metric
        for key in (group, name, "value"):
            found = found.get(key) if isinstance(found, dict) else None
        return _known(found)

    percent, edge = amount("usage", "gfx_activity"), amount("temperature", "edge")
    return GpuStatus(
        uuid=str(card["bus"]["bdf"]).lower(),
        name=str(card["asic"]["market_name"]),
        used_mib=amount("mem_usage", "used_vram"),
        total_mib=amount("mem_usage", "total_vram"),
        utilization=None if percent is None else percent / 100,
        temperature=amount("temperature", "hotspot") if edge is None else edge,
    )


def processes_on(uuid: str, timeout_s: float = 5.0, *, own_mib: float = 0.0) -> list[OtherProcess]:
    """Return the other compute processes on a GPU, as nvidia-smi lists them; empty if it fails or times out.

    In a container, the ids may be the host's (driver and container runtime decide). They are the container's if this
    process is listed with at least the `own_mib` that it holds; otherwise the answer is empty.
    """
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) == 4 and fields[1].isdigit() and bare_uuid(fields[0]) == bare_uuid(uuid):
            found.append(OtherProcess(pid=int(fields[1]), name=printable(fields[3]), used_mib=_known(fields[2])))
    own = next((each for each in found if each.pid == os.getpid()), None)
    is_listed = own is not None and (own.used_mib is None or own.used_mib >= own_mib)
    return [each for each in found if each is not own] if is_listed or is_first_pid_namespace() else []


def is_first_pid_namespace() -> bool:
    """Return True if this process is in the first pid namespace (pid_namespaces(7)), which means in no container."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h
    return False


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
    neither nvidia-smi nor amd-smi answers, all devices are returned in torch's order.
    """
    by_uuid = {status.uuid: status for status in statuses}
    known = {index: by_uuid[uuid] for index, uuid in enumerate(uuids) if uuid in by_uuid}
    if len(known) < len(uuids):
        reason = "neither nvidia-smi nor amd-smi reports their memory: all visible GPUs, in order"
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
