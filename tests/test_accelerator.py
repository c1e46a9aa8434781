"""The kinds of devices: which files may name CUDA, and random states and memory through a stand-in for torch.cuda."""

from __future__ import annotations

import re
import types

import pytest
import torch

from segapp.accelerator import ACCELERATORS, CUDA, Accelerator, Gpu, gpu_of, wide, wide_sum
from segapp.assembly.devices import choose_devices, plan_devices
from segapp.checkpoint.snapshot import capture_rng, restore_rng
from segapp.config import RunConfig, validate_config
from segapp.errors import ConfigError
from segapp.memory.oom import is_out_of_memory
from segapp.training.step.rollback import capture_torch_rng, restore_torch_rng
from tests.support import ROOT
from tests.support.gpu.fake_cuda import FakeCuda, FakeGpu

NAMES_CUDA = re.compile(r"torch\.cuda\b|[!=]= \"cuda\"|is_cuda|\(\"cuda\"")

ABOUT_CUDA = {
    "segapp/accelerator.py": "the seam",
    "segapp/assembly/devices.py": "`auto` starts ranks where NCCL joins them; TF32 switches of cuBLAS and cuDNN",
    "segapp/training/step/assembler.py": "operators without a deterministic kernel on CUDA",
    "segapp/commands/doctor.py": "what is wrong with a CUDA installation",
    "segapp/commands/sweep.py": "CUDA_VISIBLE_DEVICES of the trials of a sweep",
    "segapp/parallel/distributed.py": "NCCL",
    "segapp/parallel/replica_threads.py": "streams of data-parallel replicas, which run on CUDA and the CPU only",
    "segapp/parallel/sync_batchnorm.py": "torch's kernels for SyncBatchNorm",
}


def test_files_that_name_cuda_are_about_cuda_itself() -> None:
    paths = [path for path in (ROOT / "segapp").rglob("*.py") if "docs" not in path.relative_to(ROOT).parts]
    found = {str(path.relative_to(ROOT)) for path in paths if NAMES_CUDA.search(path.read_text(encoding="utf-8"))}
    assert found == set(ABOUT_CUDA), "ask segapp.accelerator, or say here why the file is about CUDA itself"


@pytest.fixture
def cuda(fake_cuda: FakeCuda) -> FakeCuda:
    fake_cuda.is_begun = True
    fake_cuda.gpus = [FakeGpu(free=free, random_state=state) for free, state in ((50, 10), (950, 20), (960, 30))]
    return fake_cuda


def set_states(cuda: FakeCuda, *states: int) -> None:
    for gpu, state in zip(cuda.gpus, states, strict=True):
        gpu.random_state = state


def test_random_states_of_every_gpu_return_from_a_checkpoint(cuda: FakeCuda) -> None:
    state = capture_rng()
    assert [int(each) for each in state["cuda"]] == [10, 20, 30]
    set_states(cuda, 1, 2, 3)
    restore_rng(state)
    assert cuda.random_states == [10, 20, 30]
    restore_rng({**state, "cuda": [torch.tensor([n], dtype=torch.uint8) for n in (5, 6, 7, 8)]})
    assert cuda.random_states == [5, 6, 7], "the state of a GPU that is gone is skipped"


def test_rollback_returns_the_states_of_its_gpus_alone(cuda: FakeCuda) -> None:
    state = capture_torch_rng([torch.device(name) for name in ("cuda:2", "cpu", "cuda:1")])
    assert [(str(device), int(each)) for device, each in state[1]] == [("cuda:2", 30), ("cuda:1", 20)]
    set_states(cuda, 1, 2, 3)
    restore_torch_rng(state)
    assert cuda.random_states == [1, 20, 30]


@pytest.mark.parametrize(
    ("free", "refusals", "is_short"),
    [([950, 50, 960], [0] * 3, True), ([500, 950, 960], [0] * 3, False), ([500, 950, 960], [0, 2, 0], True)],
    ids=["full", "half-empty", "refused under a budget"],
)
def test_vague_error_counts_as_memory_where_a_gpu_is_full(
    cuda: FakeCuda, free: list[int], refusals: list[int], is_short: bool
) -> None:
    cuda.gpus = [FakeGpu(free=free_of_one, refusals=num) for free_of_one, num in zip(free, refusals, strict=True)]
    assert is_out_of_memory(RuntimeError("unable to find an engine to execute this computation")) is is_short


def test_rocm_gpus_are_known_by_their_pci_address(cuda: FakeCuda) -> None:
    """amd-smi and torch write other uuids for one GPU, and its capability is that of a gfx architecture."""
    place = {"pci_domain_id": 0, "pci_bus_id": 0x63, "pci_device_id": 0, "gcnArchName": "gfx90a:sramecc+:xnack-"}
    uuid = "31663062-3864-3663-6132-636634653231"
    cuda.gpus[1] = FakeGpu(uuid, "MI210", capability=(9, 0), total=2**36, properties=place)
    cuda.version.hip = "7.0"
    device = torch.device("cuda:1")
    assert CUDA.facts(device).uuid == "0000:63:00.0"
    assert (CUDA.has_bf16(device), CUDA.has_tf32(device)) == (True, False)


def test_only_what_a_captured_graph_reads_is_kept(cuda: FakeCuda) -> None:
    """The tables of the loss lie in a cache, which forgets them; a graph reads their memory nevertheless."""
    gpu = Gpu("cuda", "nvidia-smi")
    for cuda.is_capturing in (False, True):
        gpu.keep_with_graph(cuda.is_capturing)
    assert gpu.held_by_graph == [True]


class NoFloat64(Accelerator):
    """The CPU, but without float64."""

    def has_float64(self, device: torch.device) -> bool:
        return False


@pytest.fixture
def no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCELERATORS, "cpu", NoFloat64("cpu"))


def test_counts_are_exact_integers_without_float64(no_float64: None) -> None:
    valid = torch.ones(3, 5, dtype=torch.bool)
    assert wide_sum(valid).dtype == wide(valid.sum()).dtype == torch.int64
    assert int(wide_sum(valid)) == 15
    assert wide(torch.ones(2, dtype=torch.float16)).dtype == torch.float32
    for bad in (torch.inf, torch.nan):
        assert not torch.isfinite(wide_sum(torch.tensor([1.0, bad, 2.0])))


class FakeMps(types.SimpleNamespace):
    """torch.mps of a Mac: memory of the process, and one random state."""

    state = torch.tensor([7], dtype=torch.uint8)

    def device_count(self) -> int:
        return 1

    def recommended_max_memory(self) -> int:
        return 1000

    def driver_allocated_memory(self) -> int:
        return 300

    def current_allocated_memory(self) -> int:
        return 200

    def get_rng_state(self) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch, "mps", FakeMps())
    return torch.device("mps:0")


def test_mps_is_one_device_with_the_memory_of_metal(mps: torch.device) -> None:
    gpu = gpu_of(mps)
    assert gpu is not None
    assert gpu.devices() == [mps]
    assert gpu.free_and_total_bytes(mps) == (700, 1000)
    assert (gpu.allocated_bytes(mps), gpu.reserved_bytes(mps), gpu.pop_peak_bytes(mps)) == (200, 300, 200)
    assert (gpu.can_pin, gpu.has_float64(mps), gpu.is_capturing()) == (False, False, False)
    state = capture_rng()
    torch.mps.set_rng_state(torch.tensor([1], dtype=torch.uint8))
    restore_rng(state)
    assert int(torch.mps.get_rng_state()) == 7


def config_of(devices: list[str], mode: str) -> RunConfig:
    parallel = {"devices": devices, "mode": mode}
    return validate_config({"name": "x", "data": {"format": "camvid", "root": "."}, "parallel": parallel})


@pytest.mark.parametrize("mode", ["single", "auto"])
def test_mps_trains_alone(mps: torch.device, mode: str) -> None:
    plan = plan_devices(config_of(["mps"], mode))
    assert (plan.mode, plan.devices) == ("single", (mps,))


@pytest.mark.parametrize(
    ("devices", "mode"), [(["mps"], "dp"), (["mps"], "ddp"), (["mps", "cpu"], "model"), (["mps", "mps"], "auto")]
)
def test_mps_works_with_no_other_device(mps: torch.device, devices: list[str], mode: str) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.mode = \w+ on mps:0.*: use single, with one device") as caught:
        plan_devices(config_of(devices, mode))
    assert caught.value.key == "parallel.mode"


@pytest.mark.parametrize("device", ["mps", "cuda:0"])
def test_gpu_that_torch_does_not_see_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel.devices: device '{device}': no .* device is visible here"):
        choose_devices(device)


@pytest.mark.usefixtures("mps", "fake_cuda")
def test_auto_names_a_gpu_that_it_does_not_take() -> None:
    devices, reason = choose_devices("auto")
    assert devices == [torch.device("cpu")]
    assert "parallel.devices=mps trains on its GPU, untested" in reason
