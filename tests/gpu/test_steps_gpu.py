"""Whole steps of the engine on a card: none waits for the device, and every mode lowers the loss.

`SEGAPP_GPU_TESTS_ON=cpu` tries the bodies, where nothing watches the waits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.figures_training import (
    LAYOUTS,
    Mode,
    batch_of,
    engine_of,
    figures_config,
    mode_of,
)

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
