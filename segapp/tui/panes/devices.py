"""The device pane: memory and load of each device."""

import math
from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Size

from segapp.memory.judge import FULL_FRAC, TIGHT_FRAC
from segapp.run.events import DeviceMemory
from segapp.run.words import dots, memory_text, percent, printable
from segapp.tui.glyphs import Glyphs, progress
from segapp.tui.panes.header import LinePart, device_kind, fit_parts
from segapp.tui.widgets import LiteralText
from segapp.view.plot import CurveColumns, Scale, draw_columns, pack_dots
from segapp.view.view import View
from segapp.view.wording import clip, recomputed, topology

WORD_STYLES = {
    "ok": "$text-success",
    "tight": "$text-warning bold",
    "may not fit": "$text-warning bold",
    "won't fit": "$text-error bold",
    "full": "$text-error bold",
    "refused": "$text-error bold",
    "no change": "$text-muted",
}


_MACHINE_CELLS = 12
"""Maximum number of cells for the name of a machine."""


class DevicesPane(VerticalScroll, can_focus=True):
    """The device pane; it scrolls if the devices need more rows."""

    def __init__(self) -> None:
        self._lines = LiteralText(classes="lines")
        super().__init__(self._lines, id="gpu", classes="pane -scroll")

    def show(self, view: View, predicted_mib: Sequence[float | None], num_rows: int, glyphs: Glyphs) -> None:
        """Show the devices of a run in a number of rows; see `gpu_content`."""
        size = Size(max(1, self.scrollable_content_region.width), num_rows)
        self._lines.show(gpu_content(view, predicted_mib, size, glyphs))


def headroom_level(used_mib: float | None, total_mib: float | None) -> str:
    """Return the memory headroom of a device: `ok`, `tight` or `full`; empty if unknown."""
    if used_mib is None or not total_mib:
        return ""
    frac = used_mib / total_mib
    return "full" if frac > FULL_FRAC else "tight" if frac > TIGHT_FRAC else "ok"


def gpu_content(view: View, predicted_mib: Sequence[float | None], size: Size, glyphs: Glyphs) -> Content:
    """Return one line per device: memory as a bar and in GiB, peak, load, temperature, samples, headroom.

    Logical devices share one line. If there is room, each line is followed by the allocator's numbers, the plan's
    predicted peak, and a graph of the memory. The lines of `_notes` come first.
    """
    if not view.devices:
        text = "no memory sample yet" if view.start is None or view.end is None else "no memory sample was written"
        return Content.styled(text, "$text-muted")
    groups = view.device_groups
    lines = _notes(view, size.width)[: max(0, size.height - len(groups))]
    num_more = (size.height - len(lines)) // len(groups) - 1
    for group in groups:
        i, device = group[0], view.devices[group[0]]
        lines.append(_device_line(view, group, device, size.width, glyphs))
        if num_more >= 1:
            predicted = predicted_mib[i] if i < len(predicted_mib) else None
            lines.append(_numbers(view, i, device, predicted, size.width))
        if num_more >= 3:
            lines += memory_graph(view, i, device.total_mib, Size(size.width, min(num_more - 1, 6)), glyphs)
    return Content("\n").join(lines)


def _notes(view: View, width: int) -> list[Content]:
    """Return notes on all devices: one process, other ranks than before, recomputed blocks."""
    notes = []
    if view.has_logical_devices:
        count = f"{len(view.devices)} logical devices share one process"
        notes.append([f"{count} and its memory", "shown once"])
    if view.topologies:
        last = topology(view.topologies[-1], with_reason=False)
        notes.append([printable(last), printable(view.topologies[-1].reason)])
    if view.recompute is not None and any(view.recompute.blocks):
        notes.append([recomputed(view.recompute), *view.cost_changes()])
    fitting = [fit_parts([LinePart(rank, text) for rank, text in enumerate(texts)], width) for texts in notes]
    return [Content.styled(line.plain, "$text-accent") for line in fitting]


def _numbers(view: View, index: int, device: DeviceMemory, predicted_mib: float | None, width: int) -> Content:
    """Return the allocator's memory, the measured peak and the predicted one."""
    peak = _peak_mib(view, index, device)
    known = (
        ("allocated", device.allocated_mib), ("reserved", device.reserved_mib),
        ("peak", peak), ("predicted", predicted_mib),
    )  # fmt: skip
    parts = [LinePart(i, f"{word} {memory_text(mib)}") for i, (word, mib) in enumerate(known) if mib is not None]
    if device.phase and peak is not None:
        parts.append(LinePart(9, f"in {printable(device.phase)}"))
    return Content.styled("  " + fit_parts(parts, width - 2).plain, "$text-muted")


def memory_graph(view: View, index: int, total_mib: float | None, size: Size, glyphs: Glyphs) -> list[Content]:
    """Return a graph of a device's used memory in dots, from 0 to its total or its highest value."""
    rows, columns = glyphs.dots_per_cell
    num = (size.width - 2) * columns
    samples = [sample[index][0] if index < len(sample) else np.nan for sample in list(view.memory)[-num:]]
    values = np.array(samples)
    known = values[np.isfinite(values)]
    if len(known) < 2 or num < 8:
        return []
    scale = Scale(0.0, max(total_mib or 0.0, float(known.max()), 1.0))
    curve = np.full(num, np.nan)
    curve[num - len(values) :] = values
    filled = CurveColumns(np.where(np.isfinite(curve), 0.0, np.nan), curve, np.zeros(num, dtype=bool))
    packed = pack_dots(draw_columns(filled, scale, size.height * rows), glyphs.dot_weights)
    table = glyphs.dot_cells
    return [Content.styled("  " + "".join(table[int(cell)] for cell in row), "$secondary") for row in packed]


def _device_line(view: View, group: list[int], device: DeviceMemory, width: int, glyphs: Glyphs) -> Content:
    """Return the line of a device, or of the logical devices of one process."""
    index, used, total = group[0], device.used_mib, device.total_mib
    of = memory_text(total).removesuffix(".0").ljust(4 if total is not None and total % 1024 > 51 else 2)
    word = headroom_level(used, total)
    style = WORD_STYLES.get(word, "")
    shares = [view.split[i] for i in group if view.split is not None and i < len(view.split)]
    peak = _peak_mib(view, index, device)
    is_cpu = device.device is not None and device.device.startswith("cpu")
    celsius = device.temperature
    warmth = f"{celsius:.0f}{glyphs.degree}" if celsius is not None and math.isfinite(celsius) else "-"
    parts = [
        LinePart(0, Content.assemble((f"{memory_text(used):>5}/{of}", "bold"))),
        LinePart(2, "-".rjust(5) if peak is None else f"{memory_text(peak):>5}"),
        LinePart(4, f"{percent(device.utilization):>4}"),
        LinePart(5, f"{warmth:>4}") if not is_cpu else None,
        LinePart(1, f"{dots(shares)} img".ljust(6)) if shares else None,
        LinePart(3, Content.assemble((word.ljust(5), style))),
    ]
    machines = [clip(printable(machine or ""), _MACHINE_CELLS) for machine in view.machines]
    widest = max(map(cell_len, machines), default=0)
    where = f"{machines[index].ljust(widest)} " if widest and index < len(machines) else ""
    number = str(index) if len(group) == 1 else f"{index}-{group[-1]}"
    label = f"{where}{device_kind(device.device) if width >= 60 else ''}{number} "
    texts = fit_parts(parts, width - len(label) - 8, gap=1)
    bar_width = min(40, max(4, width - len(label) - texts.cell_length - 1))
    done, left = progress(used / total if used is not None and total else None, bar_width, glyphs)
    return Content.assemble((label, "bold"), (done, style or "$text-muted"), (left, "$text-muted"), " ", texts)


def _peak_mib(view: View, index: int, device: DeviceMemory) -> float | None:
    """Return the peak of a device with the present split; None if only peaks of other splits are known."""
    if not view.peaks_mib:
        return device.peak_mib
    peaks = view.peaks_mib.get(view.split or (), [])
    return peaks[index] if index < len(peaks) else None
