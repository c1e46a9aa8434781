"""Figures of training, of the memory plan and of evaluation, on one card; with small shapes on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from segapp.build.network import build_inference
from segapp.build.numerics import numerics
from segapp.build.pairs import build_scheme
from segapp.build.step import StepLayout
from segapp.config import RunConfig, validate_config
from segapp.datasets.pool import Batch
from segapp.inference.evaluate import EvaluationSettings, evaluate
from segapp.training.planning.trial import blank_batch, build_trial_engine
from segapp.training.step.engine import StepEngine
from tests.support import ROOT

Mode = Literal["single", "dp", "ddp"]

MIB = 2**20
LARGE = {"library": "torchvision", "name": "deeplabv3_resnet50"}
TINY = {"library": "smp", "name": "DeepLabV3Plus", "encoder": "tu-test_resnet"}


def figures_config(is_gpu: bool, **train: Any) -> RunConfig:
    """Return the config that is measured: DeepLabV3-R50 on crops of 512 px on a GPU, a tiny network on a CPU."""
    side = 512 if is_gpu else 64
    classes = [f"c{i}" for i in range(19 if is_gpu else 5)]
    data = {"format": "folder", "root": "nowhere", "classes": classes, "crop_px": [side, side]}
    settings = {"batch_size": 12 if is_gpu else 3, "ema": 0.99, **train}
    return validate_config({"name": "f", "data": data, "model": LARGE if is_gpu else TINY, "train": settings})


def training_figures(device: str) -> list[dict[str, Any]]:
    """Return a row for each mode and precision: images per second, and CPU seconds of the process per step."""
    place = torch.device(device)
    rows = []
    is_gpu = place.type == "cuda"
    for precision in ("fp32", "amp-bf16") if is_gpu else ("fp32",):
        for mode, num_replicas in (("single", 1), ("dp", 3), ("ddp", 1)):
            config = figures_config(is_gpu, precision=precision)
            with _switches(config), _one_rank(place, mode):
                engine, batch = _engine(config, place, mode, num_replicas)
                seconds, cpu_s = _timed(engine, batch, place, num_steps=20 if is_gpu else 1)
            row = {"mode": mode if num_replicas == 1 else f"{mode} x{num_replicas} on one card", "precision": precision}
            rows.append({**row, "images/s": len(batch.indices) / seconds, "CPU s a step": cpu_s})
            del engine
            _free(place)
    return rows


def plan_figures(device: str) -> list[dict[str, Any]]:
    """Return planned against measured peaks of the tensors of a step, in MiB; on a CPU the plan alone."""
    place = torch.device(device)
    rows = []
    for precision in ("fp32", "amp-bf16", "fp16") if place.type == "cuda" else ("fp32",):
        config = figures_config(place.type == "cuda", precision=precision)
        planned = _planned_mib(config)
        measured = None
        if place.type == "cuda":
            with _switches(config):
                engine, batch = _engine(config, place, "single", 1)
                engine.step([batch])
                torch.cuda.reset_peak_memory_stats(place)
                engine.step([batch])
                measured = torch.cuda.max_memory_allocated(place) / MIB
            del engine
            _free(place)
        error = None if measured is None else 100 * (planned / measured - 1)
        rows.append({"precision": precision, "planned MiB": planned, "measured MiB": measured, "error %": error})
    return rows


def evaluation_figures(device: str) -> list[dict[str, Any]]:
    """Return images per second of an evaluation of images of one size and of many sizes."""
    place = torch.device(device)
    is_gpu = place.type == "cuda"
    config = figures_config(is_gpu)
    scheme, side, count = build_scheme(config.data), 512 if is_gpu else 64, 40 if is_gpu else 3
    sizes = {"one size": [(side, 2 * side)] * count, "many sizes": [(side + 8 * i, 2 * side) for i in range(count)]}
    rows = []
    with _switches(config):
        engine, _ = _engine(config, place, "single", 1)
        inference = build_inference(config.data, config.eval, engine.model, engine.precision, config.loss.align_corners)
        settings = EvaluationSettings(inference, scheme.num_classes, scheme.ignore_index, place, engine.criterion.task)
        for name, shapes in sizes.items():
            evaluate(engine.model, [blank_batch(scheme, 1, shapes[0])], settings)
            began = time.perf_counter()
            evaluate(engine.model, (blank_batch(scheme, 1, shape) for shape in shapes), settings)
            rows.append({"images": name, "images/s": count / (time.perf_counter() - began)})
    return rows


def _switches(config: RunConfig) -> Any:
    train = config.train
    return numerics(deterministic=train.deterministic, tf32=train.tf32, cudnn_benchmark=train.cudnn_benchmark)


@contextmanager
def _one_rank(place: torch.device, mode: str) -> Iterator[None]:
    """Join a group of this process alone, for ddp."""
    if mode != "ddp":
        yield
        return
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _engine(config: RunConfig, place: torch.device, mode: Mode, num_replicas: int) -> tuple[StepEngine, Batch]:
    engine = build_trial_engine(config, StepLayout(mode, (place,) * num_replicas))
    engine.network.train()
    return engine, blank_batch(build_scheme(config.data), config.train.batch_size, config.data.crop_px)


def _timed(engine: StepEngine, batch: Batch, place: torch.device, num_steps: int) -> tuple[float, float]:
    """Return seconds and CPU seconds a step, after some that are not counted."""
    for _ in range(3 if place.type == "cuda" else 1):
        engine.step([batch])
    _wait(place)
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        engine.step([batch])
    _wait(place)
    return (time.perf_counter() - began) / num_steps, (time.process_time() - cpu_began) / num_steps


def _planned_mib(config: RunConfig) -> float:
    """Return the planned peak of the tensors, from `segapp.training.planning.simulate` in a process of its own."""
    code = (
        "import sys, json; from segapp.config import validate_config; "
        "from segapp.memory.peaks import SimulationJob; "
        "from segapp.training.planning.simulate import build_simulator; "
        "config = validate_config(json.load(sys.stdin)); "
        "job = SimulationJob('single', (config.train.batch_size,)); "
        "print(build_simulator(config).run(job).peak_mib()[0])"
    )
    text = json.dumps(config.model_dump(mode="json"))
    done = subprocess.run(
        [sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True, cwd=ROOT
    )
    return float(done.stdout.split()[-1])


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _free(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.empty_cache()
