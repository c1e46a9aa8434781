"""Figures of training and of evaluation, on one card; with small shapes on a CPU."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from segapp.assembly.devices import numerics, with_precision
from segapp.assembly.pairs import build_scheme
from segapp.config import RunConfig, validate_config
from segapp.datasets.pool import Batch
from segapp.inference.sliding import NormalizedInput
from segapp.parallel import DataParallelModel, SyncBatchNorm
from segapp.parallel.distributed import RankInfo, Ranks
from segapp.planning.trial import blank_batch, build_trial_engine
from segapp.training.step.assembler import StepAssembler, StepLayout
from segapp.training.step.engine import StepEngine
from tests.gpu.cases import Case

Mode = Literal["single", "dp", "ddp"]

LARGE = {"library": "torchvision", "name": "deeplabv3_resnet50"}
SMALL = {"library": "torchvision", "name": "lraspp", "encoder": "mobilenet_v3_large"}
"""A network whose step is limited by the host on a fast card."""
WITH_DROPOUT = {"library": "torchvision", "name": "fcn", "encoder": "mobilenet_v3_small", "aux": False}
TINY = {"library": "smp", "name": "DeepLabV3Plus", "encoder": "tu-test_resnet"}


def figures_config(is_gpu: bool, model: Mapping[str, Any] = LARGE, **train: Any) -> RunConfig:
    """Return the config that is measured: crops of 512 px on a GPU, a tiny network on a CPU."""
    side = 512 if is_gpu else 64
    classes = [f"c{i}" for i in range(19 if is_gpu else 5)]
    data = {"format": "folder", "root": "nowhere", "classes": classes, "crop_px": [side, side]}
    settings = {"batch_size": 12 if is_gpu else 3, "ema": 0.99, **train}
    return validate_config({"name": "f", "data": data, "model": model if is_gpu else TINY, "train": settings})


def step_cases(device: str) -> list[Case]:
    """Return cases: the step of a training over that of a loop that a person writes by hand."""
    place = torch.device(device)
    return [Case(f"DeepLabV3-R50, {precision}", partial(_step_row, place, precision)) for precision in ("fp32", "auto")]


def _step_row(place: torch.device, precision: str) -> dict[str, Any]:
    config = figures_config(place.type == "cuda", precision=precision)
    num_rounds, num_steps = (3, 6) if place.type == "cuda" else (2, 1)
    with engine_of(config, place, "single") as engine:
        batch = batch_of(config, engine, place)
        steps = {"segapp": lambda: engine.step([batch]), "plain": plain_step(config, engine, batch)}
        rounds = [
            {which: _timed(step, place, num_steps)[0] for which, step in steps.items()} for _ in range(num_rounds)
        ]
    median_s = {which: statistics.median(each[which] for each in rounds) for which in steps}
    return {
        "network": "DeepLabV3-R50",
        "precision": precision if precision == engine.precision.name else f"{precision}, {engine.precision.name}",
        "average": config.train.ema,
        **{f"{which}, images/s": len(batch) / seconds for which, seconds in median_s.items()},
        "speed over plain": median_s["plain"] / median_s["segapp"],
    }


def plain_step(config: RunConfig, engine: StepEngine, batch: Batch) -> Callable[[], None]:
    """Return a step of a copy of an engine's network with the loss, optimizer and average of torch, and no checks."""
    network, ema = copy.deepcopy(_normalized(engine)), config.train.ema
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0005)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(ema)) if ema is not None else None
    size = batch.target.shape[-2:]

    def step() -> None:
        target = batch.target.long()
        with engine.precision.autocast():
            outputs = network(batch.images)
            values = [F.interpolate(logits, size, mode="bilinear") for logits in outputs]
        loss = sum(F.cross_entropy(each.float(), target, ignore_index=255) for each in values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(network)

    return step


def _normalized(engine: StepEngine) -> NormalizedInput:
    return next(module for module in engine.network.module.modules() if isinstance(module, NormalizedInput))


def small_cases(device: str) -> list[Case]:
    """Return cases: a step of LR-ASPP with 4 images, whose kernels are short, in each way to launch them."""
    place = torch.device(device)
    return [Case(f"LR-ASPP, 4 images, {way}", partial(_small_row, place, way)) for way in SMALL_WAYS]


SMALL_WAYS: dict[str, bool | str] = {
    "plain": False,
    "eager": False,
    "torch.compile": True,
    "torch.compile, reduce-overhead": "reduce-overhead",
}
"""By name: `train.compile`; plain is a loop that a person writes by hand."""


def _small_row(place: torch.device, way: str) -> dict[str, Any]:
    is_gpu, compile_ = place.type == "cuda", torch.compile

    def compile_eager(call: Callable[..., Any], **_: Any) -> Any:  # a CPU would compile for minutes
        return compile_(call, backend="eager")

    config = figures_config(is_gpu, SMALL, precision="auto", batch_size=4, compile=SMALL_WAYS[way])
    with (
        mock.patch.object(torch, "compile", compile_ if is_gpu else compile_eager),
        engine_of(config, place, "single") as engine,
    ):
        batch = batch_of(config, engine, place)
        step = plain_step(config, engine, batch) if way == "plain" else lambda: engine.step([batch])
        for _ in range(3):
            step()
        seconds, cpu_s = _timed(step, place, num_steps=50 if is_gpu else 1)
        assert (_normalized(engine)._compiled is not None) == (SMALL_WAYS[way] is not False)
    return {"way": way, "precision": "auto", "images/s": 4 / seconds, "ms a step": 1e3 * seconds, "CPU s a step": cpu_s}


# --- engines ---

NUM_PARTS = 3
"""Replicas of dp, and ranks of ddp."""

LAYOUTS: tuple[Mode, ...] = ("single", "dp", "ddp")


@contextmanager
def engine_of(config: RunConfig, place: torch.device, wanted: Mode) -> Iterator[StepEngine]:
    """Build an engine in training mode, inside the numerics of its config.

    Mode dp has three replicas on the device, in threads as on distinct GPUs. Mode ddp is rank 0 of a fake group of
    three, which exchanges nothing: kernels and work of the host are those of a rank, the transport is missing.
    """
    train = config.train
    with numerics(deterministic=train.deterministic, tf32=train.tf32):
        try:
            with _fake_group() if wanted == "ddp" else nullcontext():
                engine = _built(config, place, wanted)
                engine.network.module.train()
                yield engine
                del engine
        finally:
            gc.collect()
            if place.type == "cuda":
                torch.cuda.empty_cache()


def _built(config: RunConfig, place: torch.device, wanted: Mode) -> StepEngine:
    if wanted == "single":
        return build_trial_engine(config, StepLayout("single", (place,)))
    if wanted == "dp":
        engine = build_trial_engine(config, StepLayout("dp", (place,) * NUM_PARTS))
        assert isinstance(engine.network.module, DataParallelModel)
        # Of one device named three times it would be "lockstep", as dropout asks for.
        engine.network.module.mode = "threads"
        return engine
    assembler = StepAssembler(with_precision(config, (place,)), build_scheme(config.data))
    layout = StepLayout("ddp", (place,))
    num_classes = assembler.scheme.num_classes
    parts = assembler.build_parts(layout, lambda _: [1.0] * num_classes, with_weights=False)
    # Backend gloo: the fake group then serves the exchanges of Python values too.
    engine = assembler.assemble(parts, layout, ranks=Ranks(RankInfo(0, NUM_PARTS, 0, place, "gloo")))
    assert isinstance(engine.network.module, DistributedDataParallel)
    # Work of the fake group has no result for the reducer.
    engine.network.module.register_comm_hook(None, _all_reduce_bucket)
    return engine


@contextmanager
def _fake_group() -> Iterator[None]:
    """Be rank 0 of three ranks that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_PARTS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _all_reduce_bucket(_state, bucket):  # no annotations: DDP checks them, and refuses them as text
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def mode_of(engine: StepEngine) -> str:
    """Return how an engine works, read from its modules: what is timed has no other name."""
    network = engine.network.module
    num_synced = sum(isinstance(module, SyncBatchNorm) for module in engine.model.modules())
    batchnorm = "SyncBatchNorm" if num_synced else "BatchNorm"
    if isinstance(network, DataParallelModel) and len(network.devices) > 1:
        num_devices = len(set(network.devices))
        place = "one device" if num_devices == 1 else f"{num_devices} devices"
        return f"dp x{len(network.devices)} on {place}, {network.mode}, {batchnorm}"
    if isinstance(network, DistributedDataParallel):
        num_ranks, backend = dist.get_world_size(), dist.get_backend()
        return f"ddp, a rank of {num_ranks}, {backend} group, {batchnorm if num_ranks > 1 else 'BatchNorm'}"
    return "single"


def batch_of(config: RunConfig, engine: StepEngine, place: torch.device) -> Batch:
    """Return the black images that this process has of a batch: those of rank 0 in ddp, and all in other modes.

    They lie on the device; in dp, which scatters them, in pinned memory of the host.
    """
    num_images, is_scattered = config.train.batch_size, len(engine.network.devices) > 1
    if not is_scattered:
        num_images = engine.network.split_of(num_images)[0]
    where = "cpu" if is_scattered else str(place)
    batch = blank_batch(build_scheme(config.data), num_images, config.data.crop_px, device=where)
    if is_scattered and place.type == "cuda":
        return Batch(batch.images.pin_memory(), batch.target.pin_memory(), batch.indices)
    return batch


def _timed(step: Callable[[], object], place: torch.device, num_steps: int) -> tuple[float, float]:
    """Return seconds and CPU seconds a step, after some that are not counted."""
    for _ in range(3 if place.type == "cuda" else 1):
        step()
    _wait(place)
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    _wait(place)
    return (time.perf_counter() - began) / num_steps, (time.process_time() - cpu_began) / num_steps


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
