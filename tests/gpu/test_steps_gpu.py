"""Whole steps of the engine on a card: none waits for the device, every mode lowers the loss, graphs repeat steps.

`SEGAPP_GPU_TESTS_ON=cpu` tries the bodies, where nothing watches the waits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from segapp.config import RunConfig
from segapp.datasets.pool import Batch
from segapp.losses.fused.kernels import load_kernels
from segapp.training.step.engine import StepEngine
from segapp.training.step.graph import WARM_UP_STEPS
from tests.gpu.figures_training import (
    LAYOUTS,
    SMALL,
    WITH_DROPOUT,
    Mode,
    add_graph,
    batch_of,
    engine_of,
    figures_config,
    mode_of,
)
from tests.support.gpu.taped_graphs import graphs_on_the_cpu

DEVICE = torch.device(os.environ.get("SEGAPP_GPU_TESTS_ON", "cuda:0"))
IS_GPU = DEVICE.type == "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240 if IS_GPU else 800),
    pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="needs a CUDA device and sees none"),
]


@contextlib.contextmanager
def refused_waits() -> Iterator[None]:
    """Let every wait of this process for the device raise."""
    if not IS_GPU:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("wanted", ["single", "ddp"])
def test_step_with_average_and_clipping_waits_for_nothing(wanted: Mode, precision: str) -> None:
    config = figures_config(IS_GPU, precision=precision if IS_GPU else "fp32")
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"clip_grad_norm": 1.0})})
    with engine_of(config, DEVICE, wanted) as engine:
        batch = batch_of(config, engine, DEVICE)
        for _ in range(3):  # the first ones tune and allocate
            engine.step([batch])
        with refused_waits():
            results = [engine.step([batch]) for _ in range(2)]
        assert all(torch.isfinite(result.loss) for result in results)


@pytest.mark.parametrize("wanted", LAYOUTS)
def test_step_lowers_the_loss_of_a_batch_in_every_mode(wanted: Mode) -> None:
    config = figures_config(IS_GPU, precision="fp32", ema=None)
    with engine_of(config, DEVICE, wanted) as engine:
        assert mode_of(engine).startswith(wanted)
        batch = batch_of(config, engine, DEVICE)
        losses = [float(engine.step([batch]).loss) for _ in range(8)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("precision", "accumulate"), [("fp32", 1), ("fp32", 2), ("amp-bf16", 1), ("amp-fp16", 1), ("fp16", 1)]
)
def test_twenty_steps_by_a_graph_are_the_eager_ones(
    precision: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deterministic algorithms, dropout, a short batch in between and tables of the loss that are forgotten."""
    if not IS_GPU:
        graphs_on_the_cpu(monkeypatch)
    changes = {"precision": precision if IS_GPU else "fp32", "deterministic": IS_GPU, "accumulate": accumulate}
    config = figures_config(IS_GPU, WITH_DROPOUT, **changes)
    courses, states = [], []
    for has_graph in (False, True):
        torch.manual_seed(0)
        with engine_of(config, DEVICE, "single") as engine:
            if has_graph:
                add_graph(engine, DEVICE)
            torch.manual_seed(1)
            results = []
            for number in range(20):
                if number == 15 and IS_GPU:
                    _forget_tables()
                engine.set_lr(0.01 / (1 + number))
                results.append(engine.step([_drawn(config, engine, number, part) for part in range(accumulate)]))
            courses.append([float(value) for result in results for value in (result.loss, result.grad_norm)])
            states.append([tensor.cpu().clone() for tensor in engine.model.state_dict().values()])
            if engine.graph is not None:
                assert len(engine.graph.take_notes()) == 2, "a graph was launched, and the short batch without it"
    if not IS_GPU:  # while it is captured, the CPU upsamples in another way
        assert courses[1] == pytest.approx(courses[0], rel=1e-2)
        return
    assert courses[1] == courses[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*states, strict=True))


def _forget_tables() -> None:
    """Empty the cache of the loss's tables, as images of many sizes do, and write over the memory that is free."""
    load_kernels(DEVICE)._tables.cache_clear()
    for num_bytes in (512, 4096, 65536, 2**20):
        _ = [torch.full((num_bytes,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(64)]


def _drawn(config: RunConfig, engine: StepEngine, number: int, part: int) -> Batch:
    """Return random images; step 12 has one fewer."""
    blank = batch_of(config, engine, DEVICE)
    generator = torch.Generator().manual_seed(100 * number + part)
    num_images = len(blank) - (number == 12)
    images = torch.randint(0, 256, blank.images.shape, generator=generator, dtype=torch.uint8)[:num_images]
    target = torch.randint(0, 3, blank.target.shape, generator=generator, dtype=torch.uint8)[:num_images]
    if IS_GPU:
        images, target = images.pin_memory(), target.pin_memory()
    return Batch(images, target, tuple(range(num_images)))


def test_launched_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if not IS_GPU:
        graphs_on_the_cpu(monkeypatch)
    config = figures_config(IS_GPU, SMALL)
    with engine_of(config, DEVICE, "single") as engine:
        add_graph(engine, DEVICE)
        batches = [_drawn(config, engine, number, 0) for number in range(WARM_UP_STEPS + 3)]
        for batch in batches[:-2]:
            engine.step([batch])
        with refused_waits():
            results = [engine.step([batch]) for batch in batches[-2:]]
        assert all(torch.isfinite(result.loss) for result in results)
