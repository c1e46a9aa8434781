"""The figures of tests/gpu: their modes are what they are called, gaps are counted right; small shapes on the CPU."""

from __future__ import annotations

import contextlib
import inspect
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

from segapp.parallel import SyncBatchNorm
from segapp.planning.trial import build_trial_engine
from segapp.training.step.assembler import StepLayout
from segapp.training.step.engine import StepEngine
from tests.gpu import figures_plan, figures_training
from tests.gpu.figures_epochs import border_figures, epoch_figures
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


def test_epochs_are_timed_with_what_lies_between_them() -> None:
    """Three steps of 10 s an epoch, then 40 s: 4 images a step; the first two epochs are slower and not counted."""
    starts, found = {1: 0, 2: 500, 3: 1000, 4: 1060, 5: 1120}, [{"type": "checkpoint", "save_s": 7.0}]
    found += [
        {"type": "step", "epoch": epoch, "t": start + step * (10 if epoch > 2 else 50)}
        for epoch, start in starts.items()
        for step in range(3)
    ]
    figures = epoch_figures([*found, {"type": "val", "t": 1e9}], 4)
    assert figures["images/s, within epochs"] == pytest.approx(4 / 10)
    assert figures["images/s, whole epochs"] == pytest.approx(12 / 60)
    assert figures["whole over within"] == pytest.approx(0.5)
    assert figures["s a save"] == 7.0


def test_border_with_the_change_is_told_from_the_others() -> None:
    ends = {1: (0, 10), 2: (40, 50), 3: (53, 60), 4: (69, 80), 5: (85, 90)}
    found = [{"type": "step", "epoch": epoch, "t": t} for epoch, times in ends.items() for t in times]
    assert border_figures(found, 4) == {"border with the change, s": 9, "other borders, s": 4}


@pytest.mark.parametrize("ema", [None, 0.5])
def test_plain_loop_trains_a_copy_of_the_network(ema: float | None) -> None:
    with engine_of(figures_config(False, ema=ema), CPU, "single") as engine:
        batch = batch_of(CONFIG, engine, CPU)
        before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        step = figures_training.plain_step(figures_config(False, ema=ema), engine, batch)
        with mock.patch.object(AveragedModel, "update_parameters", autospec=True) as updated:
            step()
        network = inspect.getclosurevars(step).nonlocals["network"]
    assert updated.call_count == (ema is not None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in network.model.state_dict().items())


def test_compilers_are_figures_of_a_small_network() -> None:
    names = [case.name.rpartition("images, ")[2] for case in figures_training.small_cases("cuda:0")]
    assert names == ["eager", "torch.compile", "torch.compile, reduce-overhead"]
    assert figures_training.SMALL_WAYS[names[2]] == {"mode": "reduce-overhead"}
    names = {case.name for case in figures_training.step_cases("cuda:0")}
    assert {"DeepLabV3-R50, fp32, no average", "LR-ASPP, auto, average"} < names
    assert len(names) == 8


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
