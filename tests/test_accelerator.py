"""The kinds of devices: which files may name CUDA, and random states and memory through a stand-in for torch.cuda."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch

from segapp.accelerator import ACCELERATORS, CUDA, accelerator_of, gpu_of
from segapp.checkpoint.snapshot import capture_rng, restore_rng
from segapp.memory.oom import is_out_of_memory
from segapp.training.step.rollback import capture_torch_rng, restore_torch_rng, rng_fields
from tests.support import ROOT

NAMES_CUDA = re.compile(r"torch\.cuda\b|[!=]= \"cuda\"|is_cuda|\(\"cuda\"")

ABOUT_CUDA = {
    "segapp/accelerator.py": "the seam",
    "segapp/build/devices.py": "`auto` starts ranks where NCCL joins them",
    "segapp/build/numerics.py": "TF32 switches of cuBLAS and cuDNN",
    "segapp/build/step.py": "operators without a deterministic kernel on CUDA",
    "segapp/commands/doctor.py": "what is wrong with a CUDA installation",
    "segapp/commands/machine.py": "what is wrong with a CUDA installation",
    "segapp/commands/sweep/runner.py": "CUDA_VISIBLE_DEVICES of the trials of a sweep",
    "segapp/export/runner.py": "CUDAExecutionProvider of onnxruntime",
    "segapp/parallel/distributed.py": "NCCL",
    "segapp/parallel/rendezvous.py": "streams of data-parallel replicas, which run on CUDA and the CPU only",
    "segapp/parallel/sync_batchnorm.py": "torch's kernels for SyncBatchNorm",
}


def test_files_that_name_cuda_are_about_cuda_itself() -> None:
    paths = [path for path in (ROOT / "segapp").rglob("*.py") if "docs" not in path.relative_to(ROOT).parts]
    found = {str(path.relative_to(ROOT)) for path in paths if NAMES_CUDA.search(path.read_text(encoding="utf-8"))}
    assert found == set(ABOUT_CUDA), "ask segapp.accelerator, or say here why the file is about CUDA itself"


class FakeCuda(types.SimpleNamespace):
    """torch.cuda of a machine with two GPUs: random states that count up, and memory."""

    def __init__(self) -> None:
        super().__init__(states={0: 10, 1: 20}, free=[50, 950])

    def device_count(self) -> int:
        return 2

    def is_initialized(self) -> bool:
        return True

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self.states[device.index]], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = int(state)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free[device.index], 1000


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_random_states_of_every_gpu_return_from_a_checkpoint(cuda: FakeCuda) -> None:
    state = capture_rng()
    assert [int(each) for each in state["cuda"]] == [10, 20]
    cuda.states = {0: 1, 1: 2}
    restore_rng(state)
    assert cuda.states == {0: 10, 1: 20}


def test_states_of_gpus_that_are_gone_are_skipped(cuda: FakeCuda) -> None:
    state = {**capture_rng(), "cuda": [torch.tensor([n], dtype=torch.uint8) for n in (5, 6, 7)]}
    restore_rng(state)
    assert cuda.states == {0: 5, 1: 6}


def test_rollback_returns_the_states_of_its_gpus_alone(cuda: FakeCuda) -> None:
    state = capture_torch_rng([torch.device("cuda:1"), torch.device("cpu")])
    assert [int(each) for each in rng_fields(state)["cuda"]] == [20]
    cuda.states = {0: 1, 1: 2}
    restore_torch_rng(state)
    assert cuda.states == {0: 1, 1: 20}


@pytest.mark.parametrize(("free", "is_short"), [([50, 950], True), ([500, 950], False)])
def test_vague_error_counts_as_memory_where_a_gpu_is_full(cuda: FakeCuda, free: list[int], is_short: bool) -> None:
    cuda.free = free
    assert is_out_of_memory(RuntimeError("unable to find an engine to execute this computation")) is is_short


def test_rocm_gpus_are_known_by_their_pci_address(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """amd-smi and torch write other uuids for one GPU, and its capability is that of a gfx architecture."""
    facts = {"name": "MI210", "total_memory": 2**36, "uuid": "31663062-3864-3663-6132-636634653231"}
    place = {"pci_domain_id": 0, "pci_bus_id": 0x63, "pci_device_id": 0, "gcnArchName": "gfx90a:sramecc+:xnack-"}
    cuda.get_device_properties = lambda device: types.SimpleNamespace(**facts, **place)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    device = torch.device("cuda:0")
    assert CUDA.facts(device).uuid == "0000:63:00.0"
    assert (CUDA.has_bf16(device), CUDA.has_tf32(device)) == (True, False)


@pytest.mark.parametrize("kind", ["cpu", "meta", "privateuseone"])
def test_only_kinds_with_memory_of_their_own_are_gpus(kind: str) -> None:
    device: Any = types.SimpleNamespace(type=kind)
    assert gpu_of(device) is None
    assert accelerator_of(device) is ACCELERATORS["cpu"]
    assert gpu_of(torch.device("cuda:3")) is CUDA
