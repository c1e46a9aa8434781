"""What segapp repeats of torch and CUDA, beside the headers and classes of the installed versions."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import dropout, normalization
from torch.nn.parallel import DistributedDataParallel

from segapp.compat.torch import BatchNorm, BatchOrInstanceNorm, takes_found_inf
from segapp.memory.ledger import StorageLedger
from segapp.memory.oom import is_out_of_memory
from segapp.memory.simulated_devices import Buckets
from segapp.optim import adam, adamw, norm_and_bias, sgd
from segapp.parallel.dropout import _KINDS

SITE = Path(torch.__file__).parents[1]
MIB = 2**20


def file_of_nvidia(pattern):
    found = next((SITE / "nvidia").rglob(pattern), None)
    if found is None:
        pytest.skip(f"no {pattern}: this build of torch is without CUDA")
    return found


def subclasses(kind):
    return {kind, *(each for child in kind.__subclasses__() for each in subclasses(child))}


def cuda_errors():
    """Return name -> (text that torch quotes, comment of the header)."""
    text = file_of_nvidia("driver_types.h").read_text(errors="replace")
    text = text[text.index("enum __device_builtin__ cudaError") :]
    runtime = ctypes.CDLL(str(file_of_nvidia("libcudart.so*")))
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    found = re.findall(r"/\*\*(.*?)\*/\s*(cudaError\w+)\s*=\s*(\d+)", text[: text.index("};")], re.DOTALL)
    return {name: (runtime.cudaGetErrorString(int(code)).decode(), comment) for comment, name, code in found}


def test_no_error_that_breaks_the_process_is_one_of_memory():
    """The header says which errors no call survives; an error of memory that one of them caused is not tried again."""
    broken = {
        name: text
        for name, (text, comment) in cuda_errors().items()
        if "must be terminated" in " ".join(re.findall(r"\w+", comment))
    }
    assert {"cudaErrorIllegalAddress", "cudaErrorAssert", "cudaErrorInvalidAddressSpace"} <= broken.keys()
    assert len(broken) >= 10
    for name, text in broken.items():
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        error.__cause__ = RuntimeError(f"CUDA error: {text}")
        assert not is_out_of_memory(error), f"{name}: {text}"


def test_the_one_error_of_memory_is_recognized():
    errors = {name: text for name, (text, _) in cuda_errors().items()}
    assert {name for name, text in errors.items() if is_out_of_memory(RuntimeError(f"CUDA error: {text}"))} == {
        "cudaErrorMemoryAllocation"
    }


@pytest.mark.parametrize("header", ["cudnn_graph_v9.h", "cublas_api.h", "cusolver_common.h"])
def test_states_of_libraries_that_lack_memory(header):
    text = file_of_nvidia(header).read_text(errors="replace")
    states = set(re.findall(r"^\s*(CU\w+_STATUS_\w+)(?: CUDNN_DEPRECATED_ENUM)?\s*=", text, re.MULTILINE))
    memory = {state for state in states if "ALLOC" in state}
    assert memory
    assert {state for state in states if is_out_of_memory(RuntimeError(f"error: {state}"))} == memory


def bytes_of_buckets(sizes, dtypes=(torch.float32,)):
    """Return the bytes of each bucket of parameters that the backward pass reaches in this order."""
    parameters = [nn.Parameter(torch.empty(size, dtype=dtypes[i % len(dtypes)])) for i, size in enumerate(sizes)]
    ledger = StorageLedger(alloc_unit_bytes=1)
    with ledger:
        Buckets(parameters[::-1], as_views=True, is_lazy=False, ledger=ledger)
    return [each.num_bytes for each in ledger.allocations]


def test_default_sizes_of_buckets_are_those_of_ddp(tmp_path):
    """One parameter more than fills a bucket, one less does not: 1 MiB for the first bucket, 25 MiB for the others."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(nn.Linear(1, 1))
    finally:
        torch.distributed.destroy_process_group()
    assert ddp.bucket_bytes_cap == 25 * MIB
    assert bytes_of_buckets([MIB // 4 - 1, 1, 25 * MIB // 4 - 1, 1, 7]) == [MIB, 25 * MIB, 28]
    # Float32 weights of BatchNorm between half weights do not end a bucket.
    mixed = bytes_of_buckets([300_000, 11, 200_000, 13], (torch.float16, torch.float32))
    assert sorted(mixed) == [4 * 24, 2 * 500_000]


def test_norm_layers_of_torch_are_known():
    """The optimizer exempts the parameters of each from decay, and fp16 keeps those with statistics in float32."""
    named = {name: getattr(nn, name) for name in dir(nn) if re.search(r"Norm(\d+d)?$", name)}
    assert len(named) > 15
    statistics = {name for name in named if "Batch" in name or "Instance" in name}
    assert {name for name, kind in named.items() if issubclass(kind, BatchOrInstanceNorm)} == statistics
    assert {name for name, kind in named.items() if issubclass(kind, BatchNorm)} == {
        name for name in statistics if "Batch" in name
    }
    arguments = {"GroupNorm": (2, 4)}
    for name, kind in named.items():
        layer = kind() if name.startswith("Lazy") else kind(*arguments.get(name, (4,)))
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        assert own <= norm_and_bias(nn.Sequential(layer)), name
    assert {"RMSNorm", "LayerNorm", "GroupNorm"} == {
        name for name in vars(normalization) if name in named and name not in ("LocalResponseNorm",)
    }


def test_dropouts_of_torch_are_known():
    """Each has a mask that does not depend on the batch split, except alpha dropout, of SELU networks."""
    kinds = subclasses(dropout._DropoutNd) - {dropout._DropoutNd}
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__.startswith("torch.nn")}
    unknown = {name.rpartition(".")[2] for name in names - _KINDS.keys()}
    assert unknown == {"AlphaDropout", "FeatureAlphaDropout"}
    own = {name for name in _KINDS if name.startswith("torch.")}
    assert own <= names


@pytest.mark.parametrize("make", [adam, adamw, sgd])
def test_optimizers_skip_steps_and_keep_the_state_of_torch(make):
    """The state that is allocated ahead is what torch's first step makes: names, shapes and types."""
    parameter, other = (nn.Parameter(torch.ones(3, 5)) for _ in range(2))
    options = {"momentum": 0.9, "nesterov": False} if make is sgd else {"betas": (0.9, 0.99)}
    ahead = make([{"params": [parameter], "lr_factor": 1.0, "weight_decay": 0.0}], 0.1, **options)
    assert takes_found_inf(ahead)
    kind = {adam: torch.optim.Adam, adamw: torch.optim.AdamW, sgd: torch.optim.SGD}[make]
    plain = kind([other], lr=0.1, fused=True, **options)
    other.grad = torch.ones(3, 5)
    plain.step()
    states = [
        {name: (value.shape, value.dtype) for name, value in each.state[p].items()}
        for each, p in ((ahead, parameter), (plain, other))
    ]
    assert states[0] == states[1]
    assert states[0]


@pytest.mark.skipif(sys.platform != "linux", reason="torch reads the variables on its own there")
def test_names_of_the_allocator_s_variables_are_those_of_torch():
    from segapp.memory.split_check import ALLOCATOR_VARIABLES

    libraries = [SITE / "torch" / "lib" / name for name in ("libc10.so", "libc10_cuda.so")]
    found = set()
    for library in filter(Path.exists, libraries):
        done = subprocess.run(["grep", "-aoE", r"PYTORCH(_CUDA)?_ALLOC_CONF", library], capture_output=True, text=True)
        found.update(done.stdout.split())
    assert found == set(ALLOCATOR_VARIABLES)
