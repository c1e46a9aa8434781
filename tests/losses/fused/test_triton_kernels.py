"""The CUDA kernels without a GPU: interpreted against float64, and compiled ahead of time without spills."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ROOT

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch on Linux")


def interpret(every):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.kernel_cases", str(every)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sampled_interpreted_kernels_match_reference():
    assert "cases" in interpret(41)


@pytest.mark.slow
def test_all_interpreted_kernels_match_reference():
    assert interpret(1).strip() == "160 cases"


def resource_usage(num_classes, dtype, target_type, capability, tmp_path):
    """Return (registers, stack bytes) of the compiled loss kernel with every option on."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from segapp.losses.fused import triton_cross_entropy as kernels
    from segapp.losses.fused.bands_cross_entropy import CrossEntropyOptions

    shape = kernels.shape_of(num_classes, dtype)
    exact = dtype == torch.float64
    constants = {
        **kernels.loss_constants(CrossEntropyOptions(True, 255, 0.1), num_classes, True, True, dtype),
        "LONG_IDS": target_type == "i64",
        "C": num_classes,
        "BC": shape.BC,
        "BX": shape.BX,
        "BJ": 16,
        "ACC": kernels.tl.float64 if exact else kernels.tl.float32,
    }
    short = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    pointers = {"logits_ptr": short[dtype], "target_ptr": target_type}
    integers = ("bad_ptr", "starts_ptr", "lower_ptr", "first_column_ptr")
    signature = {}
    for name in kernels.loss_kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + pointers.get(name, "i32" if name in integers else "fp64" if exact else "fp32")
        else:
            signature[name] = "i32"
    places = {(kernels.loss_kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernels.loss_kernel, signature, constexprs=places)
    program = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": shape.num_warps})
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(program.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout + report.stderr)
    assert found, report
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("num_classes", "dtype", "target_type", "capability"),
    [
        (19, torch.float32, "u8", 90),
        (256, torch.bfloat16, "i64", 80),
        *(
            pytest.param(*case, capability, marks=pytest.mark.slow)
            for capability in (80, 90)
            for case in [
                (2, torch.float32, "u8"),
                (19, torch.float32, "i64"),
                (19, torch.bfloat16, "u8"),
                (60, torch.float16, "i16"),
                (150, torch.float32, "i64"),
                (256, torch.float32, "u8"),
                (19, torch.float64, "i64"),
            ]
        ),
    ],
)
def test_kernels_compile_ahead_of_time_without_spills(num_classes, dtype, target_type, capability, tmp_path):
    registers, stack_bytes = resource_usage(num_classes, dtype, target_type, capability, tmp_path)
    assert registers <= 255
    assert stack_bytes == 0
