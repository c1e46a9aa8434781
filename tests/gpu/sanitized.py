"""The kernels of the loss under compute-sanitizer, and the program that it runs: python -m tests.gpu.sanitized CASE.

racecheck is the only proof against a missing barrier; memcheck finds accesses out of range, initcheck reads of memory
that nothing has written. Without a card the program runs in Triton's interpreter, without the sanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.cases import Case
from tests.gpu.schedule import sanitizer_program
from tests.support import ROOT

TOOLS = ("racecheck", "memcheck", "initcheck")
FOUND = 99
"""Exit code of the sanitizer that found something."""

Shape = tuple[int, ...]

SHAPES: dict[str, Shape] = {  # N, C, h, w, H, W
    "19 classes": (2, 19, 16, 32, 128, 256),
    "2 classes": (2, 2, 16, 16, 64, 64),
    "150 classes": (1, 150, 8, 8, 64, 64),
    "odd sizes": (3, 7, 13, 9, 97, 65),
    "no samples": (0, 19, 16, 32, 128, 256),
}


def sanitizer_cases(device: str) -> list[Case]:
    """Return a case for each tool and shape; on a CPU the program alone, for each shape."""
    if device == "cpu":
        return [Case(f"interpreted, {name}", partial(_row, None, name, device)) for name in SHAPES]
    return [Case(f"{tool}, {name}", partial(_row, tool, name, device)) for tool in TOOLS for name in SHAPES]


def _row(tool: str | None, name: str, device: str) -> dict[str, Any]:
    program = [sys.executable, "-W", "ignore", "-m", "tests.gpu.sanitized", name, device]
    command = program if tool is None else sanitized(tool, program, sanitizer_program())
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})}
    # torch's allocator would hide accesses beyond a tensor in its larger blocks.
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    about = [line for line in lines if line.startswith("=========")]
    text = (about or lines or [""])[-1]
    assert done.returncode == 0, f"exit {done.returncode}: {text}"
    assert any(line.startswith("passes:") for line in lines), f"the program did not end: {text}"
    return {"tool": tool or "none", "case": name, "summary": text.strip("= ") if about else "no sanitizer"}


def sanitized(tool: str, program: list[str], sanitizer: Path | None) -> list[str]:
    """Return the command that runs a program under a tool of compute-sanitizer.

    Only the kernels of the loss are watched: those of torch would take most of the time.
    """
    assert sanitizer is not None
    if not os.access(sanitizer, os.X_OK):  # some installers drop the bit
        sanitizer.chmod(sanitizer.stat().st_mode | 0o755)
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    filters = [word for kernel in KERNELS for word in ("--kernel-name", f"kernel_substring={kernel}")]
    if tool == "initcheck":
        filters = []  # it must see the kernels that write what those of the loss read
    return [str(sanitizer), *options, *filters, *program]


KERNELS = ("loss_kernel", "gather_kernel", "bad_ids_kernel")
"""The Triton kernels of `segapp.losses.fused.triton_kernels`."""


def run(name: str, device: str) -> int:
    """Compute the loss of a shape and its gradient in both layouts and two dtypes; return the number of passes."""
    import torch

    from segapp.losses.fused.pixel_sums import PixelOptions
    from segapp.losses.fused.triton_cross_entropy import cross_entropy_by_triton

    N, C, h, w, H, W = SHAPES[name]
    if device == "cpu":  # the interpreter is slow
        h, w, H, W = h // 4, w // 4, H // 4, W // 4
    passes = 0
    for dtype in (torch.float32, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            generator = torch.Generator().manual_seed(passes)
            logits = torch.randn(N, C, h, w, generator=generator).to(device, dtype).contiguous(memory_format=layout)
            target = torch.randint(0, C, (N, H, W), generator=generator).to(device, torch.uint8)
            if N == 0:
                from segapp.losses import upsample_cross_entropy

                upsample_cross_entropy(logits.requires_grad_(), target)[0].backward()
            else:
                settings = PixelOptions(True, 255, label_smoothing=0.1)
                found = cross_entropy_by_triton(logits, target, None, settings, with_gradient=True)
                assert torch.isfinite(found[0])
            passes += 1
    if device != "cpu":
        torch.cuda.synchronize()
    return passes


if __name__ == "__main__":
    print(f"passes: {run(sys.argv[1], sys.argv[2])}")
