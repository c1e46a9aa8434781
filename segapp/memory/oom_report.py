"""State of a device at an out-of-memory error, and the report of it. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from segapp.run import events


@dataclass(frozen=True)
class LiveTensor:
    """A tensor alive at the time of the error."""

    mib: float
    what: str


@dataclass(frozen=True)
class OtherProcess:
    """Another process on the GPU."""

    pid: int
    name: str
    used_mib: float | None


@dataclass(frozen=True)
class OomSnapshot:
    """Memory of one device at the time of the error; None where unknown.

    Attributes:
        device: index among the training's devices.
        name: name in torch.
        phase: forward, loss, backward, step or eval.
        requested_mib: size of the failed allocation.
        allocated_mib: memory of live tensors.
        reserved_mib: memory the allocator held: live tensors, cache and fragments.
        total_mib: memory of the device, or its budget.
        largest: the largest live tensors, largest first.
        others: other processes on the GPU.
        others_mib: memory of the other processes and the driver.
    """

    device: int
    name: str
    phase: str
    requested_mib: float | None = None
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    total_mib: float | None = None
    largest: tuple[LiveTensor, ...] = ()
    others: tuple[OtherProcess, ...] = ()
    others_mib: float | None = None

    @property
    def fragmentation(self) -> float | None:
        """Share of the allocator's memory that no tensor used, 0 to 1; None where unknown."""
        if not self.reserved_mib or self.allocated_mib is None:
            return None
        return max(0.0, 1 - self.allocated_mib / self.reserved_mib)


@dataclass(frozen=True)
class OomReport:
    """An out-of-memory error as the user reads it.

    Attributes:
        snapshot: memory of the device.
        epoch: the current epoch.
        step: optimizer updates before the error.
        problem: first line of the error.
        action: the training's reaction.
        split: samples on each device.
        predicted_mib: predicted peak of each device.
        advice: changes that reduce memory, best first.
        judge: what decides about a split after it, as JSON.
    """

    snapshot: OomSnapshot
    epoch: int
    step: int
    problem: str
    action: str
    split: tuple[int, ...] = ()
    predicted_mib: tuple[float | None, ...] = ()
    advice: tuple[str, ...] = ()
    judge: dict[str, Any] | None = None

    @property
    def headline(self) -> str:
        """One line with the device, the phase and the action."""
        where = f"{self.snapshot.name} (device {self.snapshot.device}) in {self.snapshot.phase}"
        return f"out of memory on {where}: {self.action}"


def oom_snapshot_of(error: BaseException | None) -> OomSnapshot | None:
    """Return the attribute `snapshot` of an exception or of one of its causes; None if there is none."""
    while error is not None:
        snapshot = getattr(error, "snapshot", None)
        if isinstance(snapshot, OomSnapshot):
            return snapshot
        error = error.__cause__
    return None


def report_lines(report: OomReport) -> list[str]:
    """Return the report as lines of text."""
    snapshot = report.snapshot
    lines = [
        report.headline,
        f"  when       epoch {report.epoch}, after step {report.step}",
        f"  error      {report.problem}",
        f"  memory     {_amounts(snapshot)}",
    ]
    if report.split:
        lines.append(f"  split      {'·'.join(map(str, report.split))}")
    known = [mib for mib in report.predicted_mib if mib is not None]
    if known:
        shown = ", ".join("-" if mib is None else f"{mib:.0f}" for mib in report.predicted_mib)
        lines.append(f"  predicted  {shown} MiB per device")
    else:
        lines.append("  predicted  unknown: there is no plan and no measured step yet")
    lines.append(f"  others     {_others(snapshot)}")
    lines += _block("largest", [f"{tensor.mib:9.1f} MiB  {tensor.what}" for tensor in snapshot.largest])
    lines += _block("next move", [f"{i}. {text}" for i, text in enumerate(report.advice, start=1)])
    return lines


def report_event(report: OomReport, fallbacks: dict[str, Any] | None = None, path: str | None = None) -> events.Oom:
    """Return the report as an `oom` event."""
    snapshot = report.snapshot
    return events.Oom(
        device=snapshot.name,
        index=snapshot.device,
        phase=snapshot.phase,
        epoch=report.epoch,
        step=report.step,
        problem=report.problem,
        action=report.action,
        split=list(report.split) or None,
        requested_mib=snapshot.requested_mib,
        allocated_mib=snapshot.allocated_mib,
        reserved_mib=snapshot.reserved_mib,
        total_mib=snapshot.total_mib,
        fragmentation=snapshot.fragmentation,
        largest=[events.LargeTensor(mib=round(tensor.mib, 2), what=tensor.what) for tensor in snapshot.largest],
        others=[events.OtherProcess(pid=o.pid, name=o.name, used_mib=o.used_mib) for o in snapshot.others],
        others_mib=snapshot.others_mib,
        predicted_mib=list(report.predicted_mib) or None,
        advice=list(report.advice),
        fallbacks=fallbacks,
        path=path,
        judge=report.judge,
    )


def _amounts(snapshot: OomSnapshot) -> str:
    words = [
        f"{label} {mib:.1f} MiB"
        for label, mib in (
            ("requested", snapshot.requested_mib),
            ("tensors", snapshot.allocated_mib),
            ("allocator", snapshot.reserved_mib),
            ("of", snapshot.total_mib),
        )
        if mib is not None
    ]
    if snapshot.fragmentation is not None:
        words.append(f"{100 * snapshot.fragmentation:.0f} % of the allocator's is cache or fragments")
    return ", ".join(words) or "unknown"


def _others(snapshot: OomSnapshot) -> str:
    if snapshot.others:
        return "; ".join(
            f"{other.name} (process {other.pid})" + (f" {other.used_mib:.0f} MiB" if other.used_mib else "")
            for other in snapshot.others
        )
    if snapshot.others_mib:
        return f"{snapshot.others_mib:.0f} MiB of the GPU are held by the driver and other processes"
    return "none known"


def _block(title: str, rows: Sequence[str]) -> list[str]:
    if not rows:
        return []
    first, *rest = rows
    return [f"  {title:9s}  {first}", *(f"  {'':9s}  {row}" for row in rest)]
