"""The panes of the devices and of the batch split: memory and load, and the samples of each device."""

import math
from collections.abc import Sequence

from rich.cells import cell_len
from textual.content import Content
from textual.geometry import Size

from segapp.memory.split_check import FULL_FRAC, TIGHT_FRAC
from segapp.run.events import DeviceMemory
from segapp.run.words import dots, duration, gib, percent, printable, share_text
from segapp.tui.header import LinePart, device_kind, etas_s, fit_parts
from segapp.tui.widgets import progress
from segapp.view.source import Status
from segapp.view.view import View, is_gpu
from segapp.view.wording import clip, recomputed, topology

WORD_STYLES = {
    "ok": "$text-success",
    "tight": "$text-warning bold",
    "full": "$text-error bold",
}
PEAK, PREDICTED = "│", "◆"
"""Signs in the bar of a device."""

_MACHINE_CELLS = 12


def headroom_level(used_mib: float | None, total_mib: float | None) -> str:
    if used_mib is None or not total_mib:
        return ""
    frac = used_mib / total_mib
    return "full" if frac > FULL_FRAC else "tight" if frac > TIGHT_FRAC else "ok"


def gpu_content(view: View, predicted_mib: Sequence[float | None], size: Size) -> Content:
    """Return one line per device: memory as a bar and in GiB, samples, load, temperature; a word if memory is scarce.

    Logical devices share one line. The lines of `_notes` come first.
    """
    if not view.devices:
        text = "no memory sample yet" if view.start is None or view.end is None else "no memory sample was written"
        return Content.styled(text, "$text-muted")
    groups = view.device_groups
    lines = _notes(view, size.width)[: max(0, size.height - len(groups))]
    for group in groups:
        predicted = predicted_mib[group[0]] if group[0] < len(predicted_mib) else None
        lines.append(_device_line(view, group, predicted, size.width))
    return Content("\n").join(lines)


def gpu_legend(predicted_mib: Sequence[float | None]) -> Content:
    """Return the meaning of the signs in the bars, which end at the memory of the device."""
    signs = f"━ used  {PEAK} peak" + (f"  {PREDICTED} predicted" if any(predicted_mib) else "")
    return Content.styled(signs, "$text-muted")


def _notes(view: View, width: int) -> list[Content]:
    """Return notes on all devices: one process, other ranks than before, recomputed blocks."""
    notes = []
    if view.has_logical_devices:
        count = f"{len(view.devices)} logical devices share one process"
        notes.append([f"{count} and its memory", "shown once"])
    if view.topologies:
        last = topology(view.topologies[-1], with_reason=False)
        notes.append([printable(last), printable(view.topologies[-1].reason)])
    if view.recomputed is not None and any(view.recomputed.blocks or ()):
        notes.append([recomputed(view.recomputed)])
    fitting = [fit_parts([LinePart(rank, text) for rank, text in enumerate(texts)], width) for texts in notes]
    return [Content.styled(line.plain, "$text-accent") for line in fitting]


def _device_line(view: View, group: list[int], predicted_mib: float | None, width: int) -> Content:
    """Return the line of a device, or of the logical devices of one process."""
    index, device = group[0], view.devices[group[0]]
    used, total, load, celsius = device.used_mib, device.total_mib, device.utilization, device.temperature
    word = headroom_level(used, total)
    # If one device is short of memory, all rows have the column, so that they stay aligned.
    is_scarce = any(headroom_level(each.used_mib, each.total_mib) in ("tight", "full") for each in view.devices)
    style = WORD_STYLES.get(word, "")
    shares = [view.split[i] for i in group if view.split is not None and i < len(view.split)]
    peak = _peak_mib(view, index, device)
    in_unit, unit = (gib, "GiB") if (total or used or 0) >= 1024 else ("{:.0f}".format, "MiB")
    memory = "/".join(in_unit(mib) for mib in (used, total) if mib) or "n/a"
    warmth = f"{celsius:.0f}°" if celsius is not None and math.isfinite(celsius) else ""
    parts = [
        LinePart(0, f"{memory:>9} {unit}", "bold"),
        LinePart(2, f"{dots(shares)} img".rjust(6)) if shares else None,
        LinePart(3, f"{percent(load) if load is not None else '':>4}") if is_gpu(device) or load is not None else None,
        LinePart(4, f"{warmth:>3}") if is_gpu(device) or warmth else None,
        LinePart(5, f"peak {gib(peak):>4}" if peak is not None else " " * 9) if view.peaks_mib or peak else None,
        LinePart(1, f"{word:5}" if word != "ok" else " " * 5, style) if is_scarce else None,
    ]
    machines = [clip(printable(machine or ""), _MACHINE_CELLS) for machine in view.machines]
    widest = max(map(cell_len, machines), default=0)
    where = f"{machines[index].ljust(widest)} " if widest and index < len(machines) else ""
    number = str(index) if len(group) == 1 else f"{index}-{group[-1]}"
    label = f"{where}{device_kind(device.device) if width >= 40 else ''}{number} "
    texts = fit_parts(parts, width - len(label) - 13, gap=1)
    bar_width = min(40, max(4, width - len(label) - texts.cell_length - 1))
    bar = _bar(device, style, (peak, predicted_mib), bar_width) if total else Content("")
    return Content.assemble((label, "bold"), bar, " ", texts)


def _bar(device: DeviceMemory, style: str, marked_mib: tuple[float | None, float | None], width: int) -> Content:
    """Return the memory of a device as a bar with its measured and its predicted peak, in different cells."""
    total_mib = device.total_mib or 1.0
    done, left = progress((device.used_mib or 0.0) / total_mib, width)
    bar, at = Content.assemble((done, style), (left, "$text-muted")), -1
    for sign, mib in zip((PEAK, PREDICTED), marked_mib, strict=True):
        if mib is not None:
            before, at = at, min(int(mib / total_mib * width), width - 1)
            at += (at == before) * (1 if at < width - 1 else -1)
            bar = Content.assemble(bar[:at], (sign, "$foreground bold"), bar[at + 1 :])
    return bar


def _peak_mib(view: View, index: int, device: DeviceMemory) -> float | None:
    """Return the peak of a device with the present split; None if only peaks of other splits are known."""
    if not view.peaks_mib:
        return device.peak_mib
    peaks = view.peaks_mib.get(view.split or (), [])
    return peaks[index] if index < len(peaks) else None


def gpu0_content(view: View, status: Status, width: int, *, can_edit: bool) -> Content:
    lines = _pending_lines(view, status) if view.gpu0.pending is not None else _idle_lines(view, can_edit)
    return Content("\n").join([line.truncate(width, ellipsis=True) for line in lines])


def _idle_lines(view: View, can_edit: bool) -> list[Content]:
    gpu0 = view.gpu0
    batch = f"  batch {view.start.batch_size}" if view.start is not None else ""
    how = "  auto" if view.live.get("gpu0_bsz") == "auto" else ""
    lines = [Content.assemble((share_text(gpu0.value), "bold"), f"{how}  split {dots(view.split)}{batch}")]
    last = gpu0.changes[-1] if gpu0.changes else None
    if last is not None and last.status == "applied":
        peaks = _observed(view, last.predicted_mib, last.observed_mib)
        when = f" at epoch {last.epoch}" if last.epoch is not None else ""
        lines.append(Content.styled(f"applied{when}{peaks}", "$text-success"))
    elif last is not None:
        lines.append(Content.styled(f"{share_text(last.new)} was {last.status}", "$text-warning"))
    elif can_edit:
        lines.append(Content.styled("press b to change it from the next epoch on", "$text-muted"))
    return lines


def _observed(view: View, predicted: list[float | None] | None, observed: list[float | None] | None) -> str:
    """Return the observed peak of device 0, with the predicted one."""
    if view.has_logical_devices:
        return ""
    seen = next(iter(observed or []), None)
    if seen is None and view.split is not None:
        seen = next(iter(view.peaks_mib.get(view.split, [])), None)
    if seen is None:
        return ""
    first = next(iter(predicted or []), None)
    device = view.devices[0].device if view.devices else None
    before = f" (predicted {gib(first)})" if first is not None else ""
    return f", {device_kind(device)}0 peak {gib(seen)}{before}"


def _pending_lines(view: View, status: Status) -> list[Content]:
    pending = view.gpu0.pending
    assert pending is not None
    epoch_eta_s, _ = etas_s(view, status)
    when = f"epoch {pending.epoch}" if pending.epoch is not None else "the next epoch"
    eta = f", in {duration(epoch_eta_s)}" if epoch_eta_s is not None else ""
    split = pending.split or view.split_checker.check(pending.new).split
    return [
        Content.assemble(
            (share_text(view.gpu0.value), "bold"),
            " → ",
            (share_text(pending.new), "$text-warning bold"),
            (f"  PENDING: {when}{eta}", "$text-warning bold"),
        ),
        Content(f"split {dots(view.split)} → {dots(split)}"),
    ]


def why_no_split(view: View) -> str | None:
    """Return why the run's batch cannot be split; None if it can."""
    return (
        "the run has one device, so there is nothing to split"
        if view.num_devices < 2
        else view.split_checker.why_no_split
    )
