"""What a training does when a device runs out of memory: finds out why, takes a lesson, says so in three places.

A lesson is a way of working that needs less memory and stays for the rest of the run, resumes included: micro-batches
cut into pieces, evaluation image by image, in windows, in smaller windows.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from segapp.errors import OutOfMemoryError
from segapp.inference.sliding import Inference
from segapp.memory.gpus import processes_on
from segapp.memory.oom_report import LiveTensor, OomReport, OomSnapshot, oom_snapshot_of, report_event, report_lines
from segapp.parallel import ReplicaError
from segapp.run.events import Alert, EventReader
from segapp.run.files import write_atomic
from segapp.run.folder import RunFolder
from segapp.train.telemetry.device_memory import IDLE, PHASES, DeviceMemoryTracker
from segapp.train.telemetry.event_log import EventLog

MIB = 2**20
MAX_PIECES = 1024
SMALLEST_WINDOW_PX = 64
_LARGEST = 8
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (KiB|MiB|GiB)")
_UNITS = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}

logger = logging.getLogger("segapp")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or this machine, had no more memory to give."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):  # a replica's is one of torch's
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


@dataclass(frozen=True)
class MemoryFallbacks:
    """What a run has learned from running out of memory.

    Attributes:
        num_pieces: a micro-batch is cut into so many.
        is_eval_single: evaluate image by image, whatever `eval.batch_size` says.
        window_px: evaluate in windows of this height and width; None: as the config says.
        num_bn_pieces: `train.precise_bn` cuts its batches into so many.
    """

    num_pieces: int = 1
    is_eval_single: bool = False
    window_px: tuple[int, int] | None = None
    num_bn_pieces: int = 1

    def to_json(self) -> dict[str, Any]:
        """Plain values, those that were learned."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value != getattr(MemoryFallbacks, name)
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MemoryFallbacks:
        """The inverse of `to_json`; what is unknown is left out."""
        known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        window = known.get("window_px")
        return cls(**{**known, "window_px": None if window is None else (int(window[0]), int(window[1]))})

    def joined(self, other: MemoryFallbacks) -> MemoryFallbacks:
        """What holds after both were learned."""
        windows = [window for window in (self.window_px, other.window_px) if window is not None]
        return MemoryFallbacks(
            max(self.num_pieces, other.num_pieces),
            self.is_eval_single or other.is_eval_single,
            min(windows, key=lambda window: window[0] * window[1], default=None),
            max(self.num_bn_pieces, other.num_bn_pieces),
        )

    def adapted(self, inference: Inference) -> Inference:
        """How whole images are evaluated under these lessons."""
        if self.window_px is None:
            return inference
        own = inference.window_px or self.window_px
        return replace(inference, window_px=(min(own[0], self.window_px[0]), min(own[1], self.window_px[1])))


def next_eval_fallback(
    lessons: MemoryFallbacks, inference: Inference, batch_size: int, crop_px: tuple[int, int], *, is_fixed: bool
) -> tuple[MemoryFallbacks, str] | None:
    """A way to evaluate that needs less memory than the present one, in words too; None where there is none.

    Args:
        lessons: so far.
        inference: as it is under them.
        batch_size: images of an evaluation batch.
        crop_px: height and width of a training crop, the first window.
        is_fixed: whether the network takes windows of one size only.
    """
    if batch_size > 1 and not lessons.is_eval_single:
        return replace(lessons, is_eval_single=True), "evaluation goes on image by image, with the same result"
    if is_fixed:
        return None
    if inference.window_px is None:
        window = crop_px
        text = f"evaluation goes on in sliding windows of {window[0]}x{window[1]} instead of whole images"
    else:
        height, width = (max(SMALLEST_WINDOW_PX, side // 2) for side in inference.window_px)
        window = (min(height, inference.window_px[0]), min(width, inference.window_px[1]))
        if window == inference.window_px:
            return None
        text = f"evaluation goes on in smaller windows, {window[0]}x{window[1]}"
    return replace(lessons, window_px=window), f"{text}: its scores differ slightly from those before"


def fallbacks_after(folder: RunFolder, step: int) -> list[tuple[int, MemoryFallbacks]]:
    """Lessons that were learned after `step` updates or later, by any rank, for a training that goes back there."""
    events = EventReader(folder.events).read_skimmed()
    learned = [raw for raw in events if isinstance(raw, dict) and raw["type"] == "oom"]
    for path in sorted(folder.reports.glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError):
            learned.append(json.loads(path.read_text()))
    found = [
        (int(raw.get("step") or 0), MemoryFallbacks.from_json(raw["lessons"])) for raw in learned if raw.get("lessons")
    ]
    return sorted(((at, lessons) for at, lessons in found if at >= step), key=lambda item: item[0])


class OomHandler:
    """Examines out-of-memory errors and reports them: an event, a file, lines on the terminal.

    Args:
        event_log: takes `oom` and `alert` events.
        watch: the devices.
        folder: for the reports; None: none are written.
        advise: gives what to change, the best first; it may take seconds.
        rank: of this process; the first one reports what all ranks know.
    """

    def __init__(
        self,
        event_log: EventLog,
        watch: DeviceMemoryTracker,
        folder: Path | None,
        advise: Callable[[], Sequence[str]],
        *,
        rank: int = 0,
    ) -> None:
        self.event_log, self.watch, self.folder, self._advise, self._rank = event_log, watch, folder, advise, rank

    def examine(self, error: BaseException, first: int = 0) -> OomSnapshot:
        """What the device looked like; to be called before the error's frames are cleared.

        Args:
            error: an out-of-memory.
            first: this process's first device among all of them.
        """
        phase = self.watch.phase if self.watch.phase in (*PHASES, IDLE) else "start"
        snapshot = oom_snapshot_of(error)
        if snapshot is not None:
            return replace(snapshot, device=snapshot.device + first)
        index = error.replica if isinstance(error, ReplicaError) else 0
        devices = self.watch.devices
        name = (
            str(error.device) if isinstance(error, ReplicaError) else str(devices[first].device if devices else "cpu")
        )
        asked = _ASKED.search(str(error))
        snapshot = OomSnapshot(
            first + index, name, phase, requested_mib=float(asked[1]) * _UNITS[asked[2]] if asked else None
        )
        return _with_counters(snapshot, self.watch)

    def release(self, error: BaseException, device: torch.device) -> None:
        """Lets go of what a failed step held."""
        seen: BaseException | None = error
        while seen is not None:
            traceback.clear_frames(seen.__traceback__)  # their local variables are what filled the memory
            seen = seen.__cause__ or seen.__context__
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def report(self, report: OomReport, lessons: MemoryFallbacks | None = None, *, is_final: bool = False) -> OomReport:
        """Writes a report; gives it with its advice.

        Args:
            report: what happened, and what is done about it.
            lessons: what was learned, if anything.
            is_final: the training ends, so that there is time for the planner's advice.
        """
        if self.folder is None or self._rank:
            return report
        advice = report.advice
        if is_final:
            try:
                advice = (*self._advise(), *advice)
            except Exception:  # a report without advice is better than none
                logger.exception("advice on an out-of-memory")
        report = replace(report, advice=advice)
        path = self._write(report)
        self.event_log.emit(report_event(report, lessons.to_json() if lessons else None, path))
        message = f"{report.headline}; {report.problem}" + (f"; see {path}" if path else "")
        self.event_log.emit(Alert(kind="oom", message=message, step=report.step))
        return report

    def report_alone(self, report: OomReport, lessons: MemoryFallbacks | None) -> None:
        """Reports what only this rank knows, where it can meet the others no more; a resume takes the lesson up."""
        if not self._rank:
            self.report(report, lessons)
        elif self.folder is not None:
            event = report_event(report, lessons.to_json() if lessons else None)
            text = event.model_dump_json(exclude={"v", "seq", "t", "type", "path"})
            try:
                self.folder.mkdir(exist_ok=True)
                write_atomic(self.folder / f"rank_{self._rank}_step_{report.step}.json", text + "\n")
            except OSError:
                logger.exception("report of an out-of-memory")
            self._write(report)

    def _write(self, report: OomReport) -> str | None:
        assert self.folder is not None
        try:
            self.folder.mkdir(exist_ok=True)
            path = self.folder / f"oom_{1 + len(list(self.folder.glob('oom_*.txt'))):04}.txt"
            write_atomic(path, "\n".join(report_lines(report)) + "\n")
        except OSError:
            logger.exception("report of an out-of-memory")
            return None
        return f"{self.folder.name}/{path.name}"


def final_error(report: OomReport) -> OutOfMemoryError:
    """The error that ends a training, with the whole report."""
    move = report.advice[0] if report.advice else "lower train.batch_size or data.crop_px"
    headline = f"out of memory on {report.snapshot.name} in {report.snapshot.phase}: {report.problem}: {move}"
    return OutOfMemoryError("\n".join([headline, *report_lines(report)[1:]]))


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return str(error).strip().partition("\n")[0]


def _with_counters(snapshot: OomSnapshot, watch: DeviceMemoryTracker) -> OomSnapshot:
    """With what the device's own counters say."""
    if not snapshot.name.startswith("cuda"):
        info = watch.devices[snapshot.device] if snapshot.device < len(watch.devices) else None
        return replace(snapshot, total_mib=None if info is None else info.total_mib)
    device = torch.device(snapshot.name)
    try:
        free, total = torch.cuda.mem_get_info(device)
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    except RuntimeError:
        return snapshot
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return replace(
        snapshot,
        allocated_mib=allocated / MIB,
        reserved_mib=reserved / MIB,
        total_mib=total / MIB,
        largest=_largest_on(device),
        others=tuple(processes_on(uuid)),
        others_mib=max(0.0, (total - free - reserved) / MIB),
    )


def _largest_on(device: torch.device) -> tuple[LiveTensor, ...]:
    """The largest blocks of a card's allocator, with the shapes of those that Python can see."""
    shapes: dict[int, str] = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.device == device and item.layout is torch.strided:
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
