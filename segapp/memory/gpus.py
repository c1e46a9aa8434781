"""The GPUs of this machine and which of them CUDA shows, from nvidia-smi, with timeouts and without torch.

`visible_gpus` is the only function that reads CUDA_VISIBLE_DEVICES. The samples during a training come from GPUtil,
which only this module imports. GPUtil starts `nvidia-smi` on every call and waits without limit, raises ValueError on
"No devices were found" or any other message, and numbers physical devices. Here, it runs in a thread, any failure gives
an empty list, and devices are matched to torch's by uuid.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Generic, TypeVar

from segapp.run.words import printable

T = TypeVar("T")


@dataclass(frozen=True)
class GpuStatus:
    """One GPU as nvidia-smi reports it; None where it reports "N/A"."""

    uuid: str
    """UUID without the prefix "GPU-" or "MIG-"."""
    name: str
    used_mib: float | None
    """Memory in use by all processes."""
    total_mib: float | None
    utilization: float | None
    """0 to 1."""
    temperature: float | None
    """Temperature in degrees Celsius."""
    full_uuid: str = ""
    """UUID with its prefix."""
    driver: str = ""

    @property
    def is_available(self) -> bool:
        """False if load or used memory are known to be more than one half, the limits of GPUtil.getAvailable."""
        return (self.utilization or 0.0) <= 0.5 and (self.used_mib or 0.0) / (self.total_mib or math.inf) <= 0.5


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that CUDA shows to a process, in its order; why there are no more, and what to do about that."""

    gpus: Sequence[GpuStatus]
    words: Sequence[str]
    """A word for CUDA_VISIBLE_DEVICES for each GPU and each MIG slice, of which a process sees one."""
    listed: Sequence[GpuStatus]
    """All usable GPUs and MIG slices of the machine, in the order of nvidia-smi."""
    problem: str
    cure: str

    @property
    def message(self) -> str:
        return ": ".join(filter(None, (self.problem, self.cure)))


def visible_gpus(environ: Mapping[str, str] = os.environ, timeout_s: float = 5.0) -> VisibleGpus:
    """Return the GPUs that a training would see, by nvidia-smi and CUDA_VISIBLE_DEVICES."""
    cards, problem = _cards(timeout_s)
    cure = next(cure for pattern, cure in _CURES.items() if re.search(pattern, problem, re.IGNORECASE))
    if (setting := environ.get("NVIDIA_VISIBLE_DEVICES")) is not None and re.search("PATH|No devices", problem):
        problem, cure = f"{problem}, and NVIDIA_VISIBLE_DEVICES={setting!r}", "start the container with --gpus all"
    failure = (f"nvidia-smi: {problem}", cure) if problem else ("", "")
    shown, words, *hidden = _shown(cards, environ)
    problem, cure = ("; ".join(filter(None, pair)) for pair in zip(failure, hidden, strict=True))
    # CUDA shows one MIG slice to a process, and then no other GPU (MIG user guide, CUDA device enumeration).
    slices = [gpu for gpu in shown if gpu.full_uuid.startswith("MIG-")]
    return VisibleGpus(slices[:1] or shown, words, [gpu for gpus in cards.values() for gpu in gpus], problem, cure)


_CURES = {
    "version mismatch": "restart the machine, or reload the driver: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset "
    "nvidia && sudo modprobe nvidia",
    "communicate with the NVIDIA driver": "sudo modprobe nvidia; if it fails, install the driver for this kernel again",
    "No devices were found": "lspci shows if the machine has a GPU, and sudo dmesg why the driver does not start it",
    "device handle|is lost|requires reset|Xid": "restart the machine; sudo dmesg | grep Xid says why the GPU failed",
    "Insufficient Permissions": "ls -l /dev/nvidia* shows who may use the GPUs; a container needs --gpus all",
    "no answer": "sudo nvidia-smi -pm 1 if it is only slow; restart the machine if sudo dmesg | grep Xid has a line",
    "not on PATH": "",
    "": "see nvidia-smi -q and dmesg; restart the machine to reset the driver",
}
"""What to do about a problem of nvidia-smi; the first pattern that it matches counts."""

_MIG_CURE = "create slices with sudo nvidia-smi mig -cgi PROFILE -C, or end the mode with sudo nvidia-smi -mig 0"
_COLUMNS = "index,uuid,utilization.gpu,memory.total,memory.used,memory.free,driver_version,name"
_LISTED = re.compile(r"\s*(?:GPU \d+: |MIG )(.+?)(?: +Device +\d+:)? +\(UUID: ([^)]+)\)")
_SLICE = re.compile(r"<mig_device>.*?<fb_memory_usage>.*?<total>([^ <]+).*?<used>([^ <]+)", re.DOTALL)


def _cards(timeout_s: float) -> tuple[dict[str, list[GpuStatus]], str]:
    """Return each GPU, or its MIG slices, by the complete uuid of the GPU, and the problem of nvidia-smi."""
    for columns in (f"{_COLUMNS},mig.mode.current", _COLUMNS):  # drivers before 450 do not know the last one
        lines, problem = _ask_smi(timeout_s, f"--query-gpu={columns}", "--format=csv,noheader,nounits")
        rows = [row for line in lines if len(row := line.split(", ")) >= 8 and row[1].startswith("GPU-")]
        if rows or not lines:
            break
    strange = [printable(line.strip(" ."))[:300] for line in lines if ", GPU-" not in line]
    problem = strange[0] if strange else "" if rows else problem or "it lists no GPU"
    slices = _slices(timeout_s) if any(row[-1] != "Disabled" for row in rows) else {}
    cards: dict[str, list[GpuStatus]] = {}
    for _, uuid, load, total, used, _, driver, name, *mode in rows:
        load_frac = (_known(load) or 0.0) / 100
        whole = GpuStatus(bare_uuid(uuid), name, _known(used), _known(total), load_frac, None, uuid, driver)
        parts = [replace(each, name=f"{name} {each.name}", driver=driver) for each in slices.get(uuid, ())]
        cards[uuid] = parts or [whole] * (mode[-1:] != ["Enabled"])
    return cards, problem


def _slices(timeout_s: float) -> dict[str, list[GpuStatus]]:
    """Return the MIG slices of each GPU by its uuid, with their own memory."""
    listed = [match.groups() for match in map(_LISTED.match, _ask_smi(timeout_s, "-L")[0]) if match]
    has_slices = any(uuid.startswith("MIG-") for _, uuid in listed)
    details = iter(_SLICE.findall("\n".join(_ask_smi(timeout_s, "-q", "-x")[0])) if has_slices else ())
    slices: dict[str, list[GpuStatus]] = {}
    for profile, uuid in listed:
        if not uuid.startswith("MIG-"):
            slices[card := uuid] = []
            continue
        total, used = next(details, ("", ""))
        size_gb = re.search(r"(\d+)gb", profile)  # 1g.10gb; a container may not read the exact memory
        total_mib = _known(total) or (float(size_gb[1]) * 1e9 / 2**20 if size_gb else None)
        slices[card].append(GpuStatus(bare_uuid(uuid), f"MIG {profile}", _known(used), total_mib, None, None, uuid))
    return slices


def _shown(
    cards: Mapping[str, Sequence[GpuStatus]], environ: Mapping[str, str]
) -> tuple[list[GpuStatus], list[str], str, str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows, the words that name them, and a problem with its cure.

    The first word decides if the list has numbers, uuids or MIG slices. It ends at the first word that names no GPU, or
    several; a GPU that is named twice hides all (`_parse_visible_devices` in torch/cuda/__init__.py).
    """
    listed = [gpu for gpus in cards.values() for gpu in gpus]
    unused = next((f"{uuid} is in MIG mode without slices" for uuid, gpus in cards.items() if not gpus), "")
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return listed, [gpu.full_uuid for gpu in listed], unused, _MIG_CURE if unused else ""
    words = text.split(",")
    kind = text[:4] if text.startswith(("GPU-", "MIG-")) else ""
    names = {
        "": [(str(index), gpu) for index, gpus in enumerate(cards.values()) for gpu in gpus[:1]],
        "GPU-": [(uuid, gpu) for uuid, gpus in cards.items() for gpu in gpus[:1]],
        "MIG-": [(gpu.full_uuid, gpu) for gpu in listed],
    }[kind]
    numbers = [re.match(r"\+?(\d+)", word.strip()) for word in words]  # strtoul reads "1gpu" as 1
    keys = words if kind else [str(int(number[1])) if number else "" for number in numbers]
    keys = [*takewhile(lambda key: key and key.startswith(kind), keys)]
    found = [[gpu for name, gpu in names if name == key or (kind and name.startswith(key))] for key in keys]
    shown = [gpus[0] for gpus in takewhile(lambda gpus: len(gpus) == 1, found)]
    known, variable = words[: len(shown)], f"CUDA_VISIBLE_DEVICES={text!r}"
    if len(set(keys)) < len(keys) or len(set(shown)) < len(shown):
        return [], [], f"{variable} names a GPU twice, so CUDA shows none", "name each GPU once"
    if not shown and (cards or not keys):
        what = "names several GPUs by one uuid" if found and len(found[0]) > 1 else "hides every GPU"
        problem = f"{variable} {what}" + (f", and {unused}" if unused else "")
        return [], [], problem, "unset it, name GPUs of nvidia-smi -L, or ask the scheduler for GPUs"
    if cards and len(shown) < len(words):
        problem = f"{variable} ends for CUDA at {words[len(shown)]!r}, which names no GPU"
        return shown, known, problem, "name GPUs of nvidia-smi -L, all by number or all by uuid, without spaces"
    order = environ.get("CUDA_DEVICE_ORDER", "")
    models = {gpu.name.split(" MIG ")[0] for gpu in listed}
    if not kind and not order.startswith("PCI") and len(models) > 1:
        problem = f"{variable}: CUDA may count the fastest GPU first; plan, init and doctor count like nvidia-smi"
        return shown, known, problem, "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    return shown, known, "", ""


def _ask_smi(timeout_s: float, *words: str) -> tuple[list[str], str]:
    """Return the lines that nvidia-smi prints, none if it hangs, and why it failed."""
    try:
        status, output = run_program(["nvidia-smi", *words], timeout_s)
    except OSError as error:
        return [], "not on PATH" if isinstance(error, FileNotFoundError) else f"it does not start: {error.strerror}"
    if status is None:
        return [], f"no answer within {timeout_s:g} s"
    return [line for line in output.splitlines() if line.strip()], f"exit status {status}" if status else ""


def run_program(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Return the exit status of a program and what it printed; None if it is stopped after `timeout_s`."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # a process in a driver call may not end
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(1.0)
        out.seek(0)
        return status, f"\n{out.read().decode(errors='replace')}"


class GpuPoller:
    """Queries GPUs in background threads, so that a slow nvidia-smi or a busy driver delays nothing.

    Answers older than `timeout_s` are discarded. `retry_s` is the pause after a failure of nvidia-smi. `own_used_mib`
    returns uuid -> memory in use on the GPUs of this process, MiB, as reported by the CUDA driver; it replaces
    nvidia-smi's number.
    """

    def __init__(
        self, timeout_s: float = 5.0, retry_s: float = 30.0, *, own_used_mib: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        self.timeout_s, self.retry_s = timeout_s, retry_s
        self._statuses = _LatestAnswer("nvidia-smi", ask_gputil)
        self._own_used_mib = _LatestAnswer("driver memory", own_used_mib)

    def poll(self) -> list[GpuStatus]:
        """Return the last answers, except those that are too old, and start queries for the next call."""
        self._own_used_mib.ask_again(0.0)
        self._statuses.ask_again(0.0 if self._statuses.answer else self.retry_s)
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
        self._answered_s = -math.inf
        self._thread: threading.Thread | None = None

    def ask_again(self, pause_s: float) -> None:
        """Start the function unless it still runs, or answered within the last `pause_s` seconds."""
        is_running = self._thread is not None and self._thread.is_alive()
        if not is_running and time.monotonic() - self._answered_s >= pause_s:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            self._thread.join(0.2)  # a healthy one answers in a few hundredths of a second

    def newer_than(self, age_s: float) -> T | None:
        return self.answer if time.monotonic() - self._answered_s <= age_s else None

    def _run(self) -> None:
        self.answer, self._answered_s = self._ask(), time.monotonic()


def ask_gputil() -> list[GpuStatus]:
    """Return GPUtil's answer without a timeout; empty if it fails."""
    try:
        import GPUtil

        found: list[GpuStatus] = []
        for gpu in GPUtil.getGPUs():
            used, total, load, temperature = map(_known, (gpu.memoryUsed, gpu.memoryTotal, gpu.load, gpu.temperature))
            found.append(GpuStatus(bare_uuid(gpu.uuid), str(gpu.name), used, total, load, temperature))
        return found
    except Exception:  # the training does not depend on GPUtil, and a broken driver may make it raise anything
        return []


def bare_uuid(uuid: object) -> str:
    """Return a uuid as torch writes it, without nvidia-smi's prefix "GPU-" or "MIG-"."""
    return str(uuid).strip().removeprefix("GPU-").removeprefix("MIG-")


def _known(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def order_by_free_memory(uuids: Sequence[str], statuses: Sequence[GpuStatus]) -> tuple[list[int], str]:
    """Return the indices of torch's devices, most free memory first, and the reason in one sentence.

    Devices that other processes use (more than half of the load or memory) are left out, unless all are in use. If
    nvidia-smi does not report the memory of each, all devices are returned in torch's order.
    """
    by_uuid = {each.uuid: each for each in statuses if each.used_mib is not None and each.total_mib}
    known = {index: by_uuid[uuid] for index, uuid in enumerate(uuids) if uuid in by_uuid}
    if len(known) < len(uuids):
        reason = "nvidia-smi does not report their memory: all visible GPUs, in order"
        return list(range(len(uuids))), reason

    def free_mib(index: int) -> float:
        status = known[index]
        return (status.total_mib or 0.0) - (status.used_mib or 0.0)

    # GPUs with equal memory keep their order, so that each start chooses the same.
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
