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
from tests.gpu.figures_training import batch_of, engine_of, figures_config, mode_of
from tests.support import rank_steps

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


def test_plan_rows_are_the_twelve_shipped_networks() -> None:
    names = {case.name.partition(",")[0] for case in figures_plan.plan_cases("cpu")}
    assert len(names) == 12
    assert len(figures_plan.plan_cases("cuda:0")) == 12 * 2


def test_peaks_compared_with_plans_are_without_timed_algorithms() -> None:
    config = figures_plan.network_config("demo", "fp32", 4, is_small=True)
    seen, step = [], StepEngine.step

    def note(engine: StepEngine, *args: object) -> object:
        seen.append(torch.backends.cudnn.benchmark)
        return step(engine, *args)  # type: ignore[arg-type]

    with mock.patch.object(StepEngine, "step", note):
        figures_plan._peaks(config, CPU)
    assert seen == [False] * 2 + [True] * 4


def test_networks_of_ranks_step_save_and_load() -> None:
    for build in (rank_steps.SmallNet, rank_steps.DroppingNet):
        engine = rank_steps.engine_of(rank_steps.CRITERIA["ce"](), build=build)
        engine.step([rank_steps.images_of(8, 0)])
        again = rank_steps.engine_of(rank_steps.CRITERIA["ce"](), build=build)
        again.load_state_dict(engine.state_dict())
        assert all(torch.equal(*pair) for pair in zip(*map(rank_steps.state_of, (engine, again)), strict=True))


@pytest.mark.parametrize("name", [path.stem for path in figures_plan.CONFIGS])
def test_networks_are_planned_without_weights_and_teacher(name: str) -> None:
    config = figures_plan.network_config(name, "amp-bf16", 4, is_small=False)
    assert config.model.weights_backbone is None
    assert config.distill is None
    assert 2 <= config.train.batch_size <= 4
    assert config.train.precision == "amp-bf16"
