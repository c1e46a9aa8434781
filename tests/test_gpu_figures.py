"""The figures of tests/gpu: their modes are what they are called, gaps are counted right; small shapes on the CPU."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from segapp.build.step import StepLayout
from segapp.parallel import SyncBatchNorm
from segapp.training.planning.trial import build_trial_engine
from segapp.training.step.engine import StepEngine
from tests.gpu import figures_plan, figures_training
from tests.gpu.cases import rows_of
from tests.gpu.figures_profile import busy_time
from tests.gpu.figures_training import batch_of, engine_of, figures_config, mode_of

CPU = torch.device("cpu")
CONFIG = figures_config(False, precision="fp32")


def replicas_at_once(engine: StepEngine) -> int:
    """Count the replicas that are in a convolution at the same time: each waits there for the others."""
    together = threading.Barrier(figures_training.NUM_PARTS)
    forward, met = torch.nn.Conv2d.forward, []

    def meet(layer: torch.nn.Conv2d, inputs: torch.Tensor) -> torch.Tensor:
        if len(met) < figures_training.NUM_PARTS:
            with contextlib.suppress(threading.BrokenBarrierError):
                met.append(together.wait(timeout=20))
        return forward(layer, inputs)

    with mock.patch.object(torch.nn.Conv2d, "forward", meet):
        engine.step([batch_of(CONFIG, engine, CPU)])
    return len(set(met))


@pytest.mark.slow
def test_dp_is_timed_in_threads_which_work_at_the_same_time() -> None:
    with engine_of(CONFIG, CPU, "dp") as engine:
        assert mode_of(engine) == "dp x3 on one device, threads, SyncBatchNorm"
        assert replicas_at_once(engine) == 3


def test_replicas_one_after_the_other_are_called_lockstep() -> None:
    engine = build_trial_engine(CONFIG, StepLayout("dp", (CPU,) * 3))
    assert mode_of(engine) == "dp x3 on one device, lockstep, SyncBatchNorm"


def test_ddp_is_timed_with_batchnorm_that_exchanges() -> None:
    with engine_of(CONFIG, CPU, "ddp") as engine:
        assert mode_of(engine) == "ddp, a rank of 3, fake group, SyncBatchNorm"
        batch = batch_of(CONFIG, engine, CPU)
        assert len(batch.indices) == 1  # a third of the batch
        engine.step([batch])
        num_layers = sum(isinstance(module, SyncBatchNorm) for module in engine.model.modules())
        with (
            mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gathered,
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
        ):
            engine.step([batch])
    assert gathered.call_count + reduced.call_count >= 2 * num_layers > 0
    assert not dist.is_initialized()


def test_ddp_of_one_rank_does_not_pass_for_synchronised() -> None:
    with engine_of(CONFIG, CPU, "ddp") as engine, mock.patch.object(dist, "get_world_size", return_value=1):
        assert mode_of(engine) == "ddp, a rank of 1, fake group, BatchNorm"


@pytest.mark.slow
def test_single_device_is_called_single() -> None:
    with engine_of(CONFIG, CPU, "single") as engine:
        assert mode_of(engine) == "single"


@pytest.mark.slow
def test_training_figures_have_a_row_for_each_mode() -> None:
    rows = rows_of(figures_training.training_cases("cpu"))
    assert [row["mode"] for row in rows] == [
        "single",
        "dp x3 on one device, threads, SyncBatchNorm",
        "ddp, a rank of 3, fake group, SyncBatchNorm",
    ]
    assert [row["images"] for row in rows] == [3, 3, 1]
    assert all(row["images/s"] > 0 and row["CPU s a step"] > 0 for row in rows)


def test_plan_rows_are_the_twelve_shipped_networks() -> None:
    names = {case.name.partition(",")[0] for case in figures_plan.plan_cases("cpu")}
    assert len(names) == 12
    assert len(figures_plan.plan_cases("cuda:0")) == 12 * 2 * 2


@pytest.mark.parametrize("name", [path.stem for path in figures_plan.CONFIGS])
def test_networks_are_planned_without_weights_and_teacher(name: str) -> None:
    config = figures_plan.network_config(name, "amp-bf16", 4, is_small=False)
    assert config.model.weights_backbone is None
    assert config.distill is None
    assert 2 <= config.train.batch_size <= 4
    assert config.train.precision == "amp-bf16"


def event(category: str, name: str, start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


def test_gaps_of_a_trace_are_those_counted_by_hand() -> None:
    events = [
        event("kernel", "conv", 0, 10),
        event("kernel", "relu on another stream", 5, 15),  # overlaps: busy until 20
        event("gpu_memcpy", "copy", 25, 5),
        event("kernel", "conv", 80, 20),
        event("cpu_op", "aten::whole_step", 0, 100),
        event("cpu_op", "aten::item", 32, 45),
        event("cuda_runtime", "cudaLaunchKernel", 78, 1),
        {"ph": "M", "name": "process_name"},
    ]
    busy = busy_time(events)
    assert (busy.num_launches, busy.total_us, busy.longest_gap_us) == (4, 100, 50)
    assert busy.idle_share == pytest.approx(0.55)
    assert busy.cause == "aten::item"


def test_trace_of_the_host_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="no operation of the device"):
        busy_time([event("cpu_op", "aten::add", 0, 1)])
