"""The report of an out-of-memory error, on devices that answer no question."""

from __future__ import annotations

import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker
from segapp.memory.oom import examine, release
from segapp.parallel import DataParallelModel, current_replica
from segapp.parallel.distributed import Ranks
from segapp.run.events import EventLog, EventReader, EventWriter
from segapp.run.folder import RunFolder
from segapp.training.context import RunContext
from segapp.training.recovery import OomPolicy


class Dead(types.ModuleType):
    """`torch.cuda` after which nothing works."""

    def __getattr__(self, name: str) -> Any:
        def call(*_args: Any, **_kwargs: Any) -> Any:
            raise torch.AcceleratorError(f"CUDA error in {name}")

        return call


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    folder = RunFolder.create("tiny", path=tmp_path / "run")
    log = EventLog(EventWriter(folder.events))
    memory = DeviceMemoryTracker([DeviceInfo("cpu"), DeviceInfo("cpu")])
    return RunContext(folder, log, Ranks(), None, memory)  # type: ignore[arg-type]


def of_replica(position: int, message: str) -> RuntimeError:
    """An error with the mark of `ReplicaThreads`, which cannot run on a GPU that does not exist."""
    error = RuntimeError(message)
    error.__dict__["_replica"] = position, torch.device(f"cuda:{position}")
    return error


def test_report_has_the_device_of_the_replica_that_failed() -> None:
    class Full(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            replica = current_replica()
            if replica is not None and replica.index == 1:  # the second that runs, on device 2
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return images

    memory = DeviceMemoryTracker([DeviceInfo("cpu", total_mib=mib) for mib in (100.0, 200.0, 300.0)])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        DataParallelModel(Full(), ["cpu"] * 3, gpu0_bsz=0)(torch.zeros(7, 2))
    report = examine(caught.value, memory)
    assert (report.device, report.index, report.total_mib) == ("cpu", 2, 300.0)
    assert report.problem == "CUDA out of memory. Tried to allocate 20.00 MiB"


def reported(context: RunContext, error: Exception) -> dict[str, Any]:
    sizes: Any = {"accumulate": 1, "eval_batch_size": 1, "crop_px": (32, 32)}
    controller: Any = types.SimpleNamespace(batch_split=types.SimpleNamespace(batch_size=1))
    policy = OomPolicy(context, None, controller, None, **sizes)  # type: ignore[arg-type]
    report = examine(error, context.device_memory)
    release(error, torch.device("cuda"))
    policy._give_up(report.model_copy(update={"epoch": 1, "step": 2}), "nothing")
    found = [raw for raw in EventReader(context.folder.events).read_raw() if raw["type"] == "oom"]
    assert len(found) == 1
    return found[0]


def test_report_is_whole_where_cuda_calls_raise(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    error = of_replica(1, "CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setattr(torch, "cuda", Dead("cuda"))
    event = reported(context, error)
    assert (event["device"], event["index"], event["requested_mib"]) == ("cuda:1", 1, 2048.0)
    assert event.get("total_mib") is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("free_gib", "others_mib"), [(1, 3072.0), (4, 0.0), (6, 0.0)])
def test_report_has_the_counters_of_the_gpu(
    context: RunContext,
    monkeypatch: pytest.MonkeyPatch,
    free_gib: int,
    others_mib: float,
) -> None:
    fake = types.SimpleNamespace(
        mem_get_info=lambda _: (free_gib << 30, 24 << 30),
        memory_reserved=lambda _: 20 << 30,
        memory_allocated=lambda _: 18 << 30,
        get_device_properties=lambda _: types.SimpleNamespace(uuid="1234"),
        empty_cache=lambda: None,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    event = reported(context, of_replica(0, "CUDA error: out of memory"))
    assert (event["total_mib"], event["reserved_mib"], event["allocated_mib"]) == (24576.0, 20480.0, 18432.0)
    assert event["others_mib"] == others_mib


def on_cuda(monkeypatch: pytest.MonkeyPatch, **amounts: Any) -> None:
    """Let CUDA answer with these amounts."""
    fake = types.SimpleNamespace(
        mem_get_info=lambda _: (1 << 30, 24 << 30),
        memory_reserved=lambda _: amounts["reserved"],
        memory_allocated=lambda _: amounts["allocated"],
        get_device_properties=lambda _: types.SimpleNamespace(uuid="1234"),
    )
    monkeypatch.setattr(torch, "cuda", fake)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("allocated", "reserved", "expected"), [(750, 1000, 0.25), (1001, 1000, 0.0), (0, 10, 1.0), (1, 0, None)]
)
def test_report_has_the_unused_share_of_the_allocator(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, allocated: int, reserved: int, expected: float | None
) -> None:
    on_cuda(monkeypatch, allocated=allocated, reserved=reserved)
    report = examine(of_replica(0, "CUDA error: out of memory"), context.device_memory)
    assert report.fragmentation == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_cause", [True, False])
def test_release_frees_what_a_failed_step_held(context: RunContext, has_cause: bool) -> None:
    """The frames of an error, and of the one that it was raised from or after, hold the activations."""
    held: list[weakref.ref[torch.Tensor]] = []

    def deeper() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise RuntimeError("no memory")

    def step() -> None:
        inputs = torch.zeros(3)
        held.append(weakref.ref(inputs))
        try:
            deeper()
        except RuntimeError as inner:
            raise LookupError("no memory") from (inner if has_cause else None)

    with pytest.raises(LookupError) as caught:
        step()
    assert [ref() is None for ref in held] == [False, False]
    release(caught.value, torch.device("cpu"))
    assert [ref() is None for ref in held] == [True, True]


@pytest.mark.parametrize(
    ("amount", "mib"), [("512.00 KiB", 0.5), ("20.00 MiB", 20.0), ("1.50 GiB", 1536.0), ("many bytes", None)]
)
def test_requested_memory_is_read_in_any_unit(context: RunContext, amount: str, mib: float | None) -> None:
    error = RuntimeError(f"CUDA out of memory. Tried to allocate {amount}. GPU 0 has a total capacity of 23.68 GiB")
    assert examine(error, context.device_memory).requested_mib == mib
