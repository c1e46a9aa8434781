"""Registers, spills and shared memory of the loss's Triton kernels, compiled for several cards without one.

    python -m tests.support.gpu.kernel_usage [--all]

prints a markdown table of them, and one of instructions and traffic (`kernel_sass`). The kernels are specialised by
Triton from the arguments of the loss's own launch.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from segapp.losses.fused.checks import _reports
from segapp.losses.fused.kernels import block_shape
from segapp.losses.fused.reference import CrossEntropySettings
from segapp.losses.fused.triton_cross_entropy import FP_FUSION, cross_entropy_by_triton
from segapp.losses.fused.triton_kernels import loss_kernel
from tests.support.gpu.fake_cuda_driver import Usage, pretend_card
from tests.support.gpu.kernel_sass import cost_table

CLASSES = (2, 19, 60, 150, 300)
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
SWEPT_CAPABILITIES = (75, 80, 90)
"""With every size and layout: one of each generation that Triton compiles in its own way."""
SIZES = {  # N, h, w, H, W
    "many cells": (16, 64, 64, 512, 512),
    "many small cells": (16, 128, 128, 256, 256),
    "divisible by 16": (2, 16, 16, 128, 128),
    "odd": (3, 9, 13, 33, 51),
    "one block": (2, 4, 2, 15, 9),
    "ones": (1, 1, 1, 5, 1),
    "scale 1.5": (1, 6, 64, 9, 96),
}
DTYPES = {
    "fp32": (torch.float32, torch.uint8),
    "fp16": (torch.float16, torch.int16),
    "bf16": (torch.bfloat16, torch.int64),
    "fp64": (torch.float64, torch.int32),
}


@dataclass(frozen=True)
class Case:
    """One launch of the loss."""

    num_classes: int
    capability: int
    size: str = "divisible by 16"
    layout: str = "contiguous"
    has_options: bool = False
    dtype: str = "fp32"


def default_cases() -> list[Case]:
    """Return a case of every number of classes and of every card, with the other choices in turn."""
    cases = []
    sizes = ("many cells", "divisible by 16", "many small cells", "odd", "one block")
    choices = itertools.cycle(itertools.product(sizes, (("contiguous", False), ("channels last", True))))
    for num_classes, capability in zip(itertools.cycle(CLASSES), CAPABILITIES, strict=False):
        size, (layout, has_options) = next(choices)
        cases.append(Case(num_classes, capability, size, layout, has_options))
    return [*cases, Case(19, 90, "ones"), Case(19, 75, "scale 1.5"), Case(3, 80, "odd", dtype="fp64")]


def all_cases() -> list[Case]:
    """Return every combination in float32, and every dtype with 19 classes."""
    layouts = ("contiguous", "channels last", "sliced")
    cases = itertools.product(CLASSES, SWEPT_CAPABILITIES, SIZES, layouts, (False, True))
    return [Case(*case) for case in cases] + [
        Case(19, capability, size, "contiguous", True, dtype)
        for capability, size, dtype in itertools.product(SWEPT_CAPABILITIES, SIZES, ("fp16", "bf16", "fp64"))
    ]


def inputs_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and a target of the case's sizes, strides and dtypes; their values do not matter."""
    N, h, w, H, W = SIZES[case.size]
    dtype, target_dtype = DTYPES[case.dtype]
    if case.layout == "sliced":
        return (
            torch.zeros(N, case.num_classes, h, 2 * w, dtype=dtype)[..., ::2],
            torch.zeros(N, H, 2 * W, dtype=target_dtype)[..., ::2],
        )
    logits = torch.zeros(N, case.num_classes, h, w, dtype=dtype)
    if case.layout == "channels last":
        logits = torch.zeros(N, h, w, case.num_classes, dtype=dtype).permute(0, 3, 1, 2)
    return logits, torch.zeros(N, H, W, dtype=target_dtype)


def usages_of(case: Case) -> list[Usage]:
    """Return what the kernels of a case take on its card; they are compiled, not run."""
    logits, target = inputs_of(case)
    weight = torch.ones(case.num_classes) if case.has_options else None
    options = CrossEntropySettings(True, 255, 0.1 if case.has_options else 0.0)
    with pretend_card(case.capability) as card:
        cross_entropy_by_triton(logits, target, weight, options, with_gradient=True)
    _reports.clear()  # what the kernels did not write is no target
    return list(card.usages)


def amd_assembly(num_classes: int, architecture: str, wave_size: int) -> str:
    """Return the assembly of the loss kernel for an AMD GPU, at a scale of 8 in bfloat16; it is compiled, not run."""
    block = block_shape((16, num_classes, 64, 64), 512, torch.float32)
    constants = {
        **{"C": num_classes, "TILES": block.TILES, "LANES": block.LANES, "SPLIT": block.SPLIT},
        **{"SOURCES": block.SOURCES, "CELLS": block.CELLS, "KEEP": 1.0, "SHARE": 0.0, "ACC": tl.float32},
        **dict.fromkeys(("LONG_IDS", "HAS_WEIGHT", "SMOOTH"), False),
        "WITH_GRADIENT": True,
    }
    pointers = {
        **{"logits_ptr": "*bf16", "target_ptr": "*u8"},
        **dict.fromkeys(("bad_ptr", "row_starts_ptr", "column_starts_ptr"), "*i32"),
        **dict.fromkeys(("weight_ptr", "partial_ptr", "loss_ptr", "count_ptr"), "*fp32"),
        **dict.fromkeys(("row_fraction_ptr", "column_fraction_ptr"), "*fp32"),
    }
    names = loss_kernel.arg_names
    signature = {name: pointers.get(name) or ("constexpr" if name in constants else "i32") for name in names}
    source = ASTSource(loss_kernel, signature, constexprs={(names.index(name),): constants[name] for name in constants})
    target = GPUTarget("hip", architecture, wave_size)
    compiled = triton.compile(source, target=target, options={"num_warps": block.num_warps, **FP_FUSION})
    return str(compiled.asm["amdgcn"])


def header() -> list[str]:
    """Return the first lines of the markdown table."""
    names = ("C", "sm", "sizes", "layout", "weights, smoothing", "dtype", "registers", "spilled bytes", "shared bytes")
    columns = [*names, "gather: registers", "spilled bytes"]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def row(case: Case, usages: list[Usage]) -> str:
    """Return the line of a case."""
    loss, gather, _ = usages
    options = "yes" if case.has_options else "no"
    cells = [case.num_classes, case.capability, case.size, case.layout, options, case.dtype]
    cells += [loss.registers, loss.stack_bytes, loss.shared_bytes, gather.registers, gather.stack_bytes]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    print(f"Triton {triton.__version__}\n")
    print(*header(), sep="\n")
    for case in all_cases() if "--all" in sys.argv[1:] else default_cases():
        print(row(case, usages_of(case)), flush=True)
    print()
    print(*cost_table(), sep="\n")
