"""The figures of tests/gpu: their modes are what they are called, gaps are counted right; small shapes on the CPU."""

from __future__ import annotations

import inspect
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

CPU = torch.device("cpu")
CONFIG = figures_config(False, precision="fp32")


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


def test_peaks_compared_with_plans_are_without_timed_algorithms() -> None:
    config = figures_plan.network_config("demo", "fp32", 4, is_small=True)
    seen, step = [], StepEngine.step

    def note(engine: StepEngine, *args: object) -> object:
        seen.append(torch.backends.cudnn.benchmark)
        return step(engine, *args)  # type: ignore[arg-type]

    with mock.patch.object(StepEngine, "step", note):
        figures_plan._peaks(config, CPU)
    assert seen == [False] * 2 + [True] * 4
