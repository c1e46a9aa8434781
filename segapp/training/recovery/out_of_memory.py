"""Examine a device after an out-of-memory error, and report: an event, a file, lines on the terminal."""

from __future__ import annotations

import gc
import logging
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from segapp.errors import OutOfMemoryError
from segapp.memory.counters import IDLE, PHASES, DeviceMemoryTracker
from segapp.memory.gpus import processes_on
from segapp.memory.oom_report import LiveTensor, OomReport, OomSnapshot, oom_snapshot_of, report_event, report_lines
from segapp.parallel import ReplicaError
from segapp.run.events import Alert
from segapp.run.files import write_atomic
from segapp.training.context import RunContext
from segapp.training.recovery.fallbacks import MemoryFallbacks

MIB = 2**20
_LARGEST = 8
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (KiB|MiB|GiB)")
_UNITS = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}

T = TypeVar("T")

logger = logging.getLogger("segapp")


class OomHandler:
    """Examines out-of-memory errors and reports them.

    Args:
        context: of the run; the main rank reports what all ranks know.
        advise: returns what to change, the best first; it may take seconds.
    """

    def __init__(self, context: RunContext, advise: Callable[[], Sequence[str]]) -> None:
        self._event_log, self._memory = context.event_log, context.device_memory
        self._folder, self._rank, self._advise = context.folder.reports, context.ranks.rank, advise

    def examine(self, error: BaseException, first: int = 0) -> OomSnapshot:
        """Return what the device looked like; to be called before the error's frames are cleared."""
        phase = self._memory.phase if self._memory.phase in (*PHASES, IDLE) else "start"
        snapshot = oom_snapshot_of(error)
        if snapshot is not None:
            return replace(snapshot, device=snapshot.device + first)
        index = error.replica if isinstance(error, ReplicaError) else 0
        devices = self._memory.devices
        name = devices[first].device if devices else "cpu"
        if isinstance(error, ReplicaError):
            name = str(error.device)
        asked = _ASKED.search(str(error))
        requested_mib = float(asked[1]) * _UNITS[asked[2]] if asked else None
        return _with_counters(OomSnapshot(first + index, name, phase, requested_mib=requested_mib), self._memory)

    def release(self, error: BaseException, device: torch.device) -> None:
        """Free what a failed step held."""
        seen: BaseException | None = error
        while seen is not None:
            traceback.clear_frames(seen.__traceback__)  # their local variables are what filled the memory
            seen = seen.__cause__ or seen.__context__
        gc.collect()
        if device.type == "cuda":
            _read("how to empty its cache", torch.cuda.empty_cache)

    def report(
        self, report: OomReport, fallbacks: MemoryFallbacks | None = None, *, is_final: bool = False
    ) -> OomReport:
        """Write a report; return it with its advice.

        Args:
            report: what happened, and what is done about it.
            fallbacks: those adopted, if any.
            is_final: True if the training ends, so that there is time for the planner's advice.
        """
        if self._rank:
            return report
        advice = report.advice
        if is_final:
            try:
                advice = (*self._advise(), *advice)
            except Exception:  # a report without advice is better than none
                logger.exception("advice on an out-of-memory")
        report = replace(report, advice=advice)
        path = self._write(report)
        self._event_log.emit(report_event(report, fallbacks.to_json() if fallbacks else None, path))
        message = f"{report.headline}; {report.problem}" + (f"; see {path}" if path else "")
        self._event_log.emit(Alert(kind="oom", message=message, step=report.step))
        return report

    def report_alone(self, report: OomReport, fallbacks: MemoryFallbacks | None) -> None:
        """Report what only this rank knows, where no collective is possible; a resume adopts the fallbacks."""
        if not self._rank:
            self.report(report, fallbacks)
        else:
            event = report_event(report, fallbacks.to_json() if fallbacks else None)
            text = event.model_dump_json(exclude={"v", "seq", "t", "type", "path"})
            try:
                self._folder.mkdir(exist_ok=True)
                path = self._folder / f"rank_{self._rank}_step_{report.step}.json"
                if path.exists():  # of an earlier start of the ranks: what it adopted stays
                    path = path.with_stem(f"{path.stem}_{1 + len(list(self._folder.glob('rank_*.json')))}")
                write_atomic(path, text + "\n")
            except OSError:
                logger.exception("report of an out-of-memory")
            self._write(report)

    def _write(self, report: OomReport) -> str | None:
        try:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"oom_{1 + len(list(self._folder.glob('oom_*.txt'))):04}.txt"
            write_atomic(path, "\n".join(report_lines(report)) + "\n")
        except OSError:
            logger.exception("report of an out-of-memory")
            return None
        return f"{self._folder.name}/{path.name}"


def final_error(report: OomReport) -> OutOfMemoryError:
    """Return the error that ends a training, with the whole report."""
    move = report.advice[0] if report.advice else "lower train.batch_size or data.crop_px"
    headline = f"out of memory on {report.snapshot.name} in {report.snapshot.phase}: {report.problem}: {move}"
    return OutOfMemoryError("\n".join([headline, *report_lines(report)[1:]]))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def _with_counters(snapshot: OomSnapshot, memory: DeviceMemoryTracker) -> OomSnapshot:
    """Return the snapshot with the device's own counters."""
    if not snapshot.name.startswith("cuda"):
        info = memory.devices[snapshot.device] if snapshot.device < len(memory.devices) else None
        return replace(snapshot, total_mib=None if info is None else info.total_mib)
    device = torch.device(snapshot.name)
    counters = _read("its memory", lambda: _counters_of(device)) or {}
    largest = _read("its largest tensors", lambda: _largest_on(device)) or ()
    own_mib = counters.get("reserved_mib") or 0.0
    others = _read("its processes", lambda: tuple(processes_on(_uuid_of(device), own_mib=own_mib))) or ()
    return replace(snapshot, **counters, largest=largest, others=others)


def _read(what: str, read: Callable[[], T]) -> T | None:
    """Return what `read` returns; None if the device does not answer, so that the report says the rest."""
    try:
        return read()
    except Exception:
        logger.exception("after an out-of-memory error the device does not tell %s", what)
        return None


def _counters_of(device: torch.device) -> dict[str, Any]:
    """Return the amounts of a GPU's memory in MiB, as fields of `OomSnapshot`."""
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return {
        "allocated_mib": allocated / MIB,
        "reserved_mib": reserved / MIB,
        "total_mib": total / MIB,
        "others_mib": max(0.0, (total - free - reserved) / MIB),
    }


def _uuid_of(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def _largest_on(device: torch.device) -> tuple[LiveTensor, ...]:
    """Return the largest blocks of a GPU's allocator, with the shapes of those that Python can see.

    Raises:
        RuntimeError: the allocator, such as cudaMallocAsync, has no snapshot.
    """
    shapes: dict[int, str] = {}
    for item in gc.get_objects():  # its `__class__` is not asked: a proxy may do anything then
        if issubclass(type(item), torch.Tensor) and item.device == device and item.layout is torch.strided:
            words = f"{'x'.join(map(str, item.shape))} {str(item.dtype).removeprefix('torch.')}"
            shapes.setdefault(item.untyped_storage().data_ptr(), words)
    blocks = []
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if segment.get("device") == device.index:
            address = int(segment["address"])
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    blocks.append((block["size"] / MIB, shapes.get(address, "saved for backward, or within a kernel")))
                address += block["size"]
    return tuple(LiveTensor(mib, what) for mib, what in sorted(blocks, key=lambda b: -b[0])[:_LARGEST])
