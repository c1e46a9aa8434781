"""Instructions of the loss's Triton kernels, counted in their machine code (SASS), and their traffic, for four sizes.

Printed by `python -m tests.support.gpu.kernel_usage`. The loss is bound by instructions, not by memory.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from segapp.losses.fused.checks import _reports
from segapp.losses.fused.grid import Axis
from segapp.losses.fused.kernels import block_shape, buffers_of
from segapp.losses.fused.reference import CrossEntropySettings
from segapp.losses.fused.triton_cross_entropy import cross_entropy_by_triton
from tests.support.gpu.fake_cuda_driver import pretend_card

SIZES = {  # N, C, h, w, H, W
    "2 x 19, 1024 x 2048, scale 8": (2, 19, 128, 256, 1024, 2048),
    "2 x 19, 1024 x 2048, scale 4": (2, 19, 256, 512, 1024, 2048),
    "16 x 150, 512 x 512, scale 8": (16, 150, 64, 64, 512, 512),
    "16 x 150, 512 x 512, scale 4": (16, 150, 128, 128, 512, 512),
}
BEFORE = {  # of the loop over rows, of the whole kernel, traffic in MB
    "2 x 19, 1024 x 2048, scale 8": {86: (34.6, 56.2, 44), 90: (34.2, 55.6, 44)},
    "2 x 19, 1024 x 2048, scale 4": {86: (34.6, 96.1, 154), 90: (34.2, 95.3, 154)},
    "16 x 150, 512 x 512, scale 8": {86: (69.2, 91.2, 437), 90: (69.2, 91.4, 437)},
    "16 x 150, 512 x 512, scale 4": {86: (48.0, 88.1, 1420), 90: (48.0, 88.7, 1420)},
}
"""Of the kernels that held all classes in one block, padded to a power of two."""


@dataclass(frozen=True)
class Cost:
    """What the kernels take for one size.

    Attributes:
        row: instructions of a thread in the loop over rows, for each class and pixel.
        whole: instructions of a thread in the whole loss kernel, for each class and pixel.
        traffic_mb: bytes read and written by both kernels, if the logits are bfloat16 and the target is uint8.
    """

    row: float
    whole: float
    traffic_mb: float


def cost_of(size: tuple[int, int, int, int, int, int], capability: int) -> Cost:
    """Return the cost of a loss with gradient, logits (N, C, h, w) in channels_last; it is compiled, not run."""
    N, C, h, w, H, W = size
    logits = torch.zeros(N, C, h, w, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    target = torch.zeros(N, H, W, dtype=torch.uint8)
    with pretend_card(capability) as card:
        cross_entropy_by_triton(logits, target, None, CrossEntropySettings(True, 255, 0.0), with_gradient=True)
    _reports.clear()  # what the kernels did not write is no target
    block = block_shape((N, C, h, w), W, torch.float32)
    starts = Axis(w, W, True).starts
    widths = [end - start for start, end in itertools.pairwise(starts)]
    blocks = [widths[first : first + block.SOURCES] for first in range(0, w, block.SOURCES)]
    steps = sum(-(-max(each) // block.SPLIT) for each in blocks) / len(blocks)
    in_row, in_program = _instructions(card.usages[0].cubin, (H / h, steps, block.CELLS))
    num_programs, num_partials = buffers_of((N, C, h, w), W, torch.float32, True)
    threads = 32 * block.num_warps * num_programs
    values = N * C * H * W
    num_logits = N * C * h * w
    traffic = 2 * num_logits + N * H * W + 2 * 4 * num_partials + (4 + 4 + 2) * num_logits
    row = in_row * (H / h) * steps * block.CELLS * threads / values
    return Cost(row, in_program * threads / values, traffic / 1e6)


def _instructions(cubin: bytes, repeats: tuple[float, ...]) -> tuple[int, float]:
    """Return the instructions of the innermost loop, and those that a thread issues in all.

    Args:
        cubin: the compiled kernel.
        repeats: how often each of the nested loops is repeated, from the innermost loop on.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = [(int(found[1], 16), found[2]) for found in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", text)]
    places = {address: place for place, (address, _) in enumerate(lines)}
    loops = []
    for end, (address, instruction) in enumerate(lines):
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", instruction)
        if branch and int(branch[1], 16) < address:
            loops.append((places[int(branch[1], 16)], end + 1))
    (row,) = [loop for loop in loops if not any(_is_inside(other, loop) for other in loops)]
    sizes = sorted(end - start for start, end in loops if start <= row[0] and row[1] <= end)
    total = float(sizes[0]) * repeats[0]
    for inner, outer, repeat in zip(sizes, sizes[1:], repeats[1:], strict=False):
        total = (total + outer - inner) * repeat
    return sizes[0], total + len(lines) - sizes[-1]


def _is_inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def cost_table(capabilities: tuple[int, ...] = (86, 90)) -> list[str]:
    """Return the lines of a markdown table: each cost before the present kernels, and now."""
    lines = ["| sizes | sm | SASS in the loop over rows | SASS in all | traffic, MB |", "|---|---|---|---|---|"]
    for name, size in SIZES.items():
        for capability in capabilities:
            now, before = cost_of(size, capability), BEFORE[name][capability]
            cells = [f"{before[0]} -> {now.row:.1f}", f"{before[1]} -> {now.whole:.1f}"]
            cells.append(f"{before[2]} -> {now.traffic_mb:.0f}")
            lines.append(f"| {name} | {capability} | {' | '.join(cells)} |")
    return lines
