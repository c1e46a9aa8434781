"""Figures of the loader: images per second of a worker, against what a training step on the device takes."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import Batch, LoadOptions
from segapp.datasets.resources import usable_cores
from segapp.datasets.workers import most_workers, plan_workers, sample_seconds
from tests.gpu.cases import Case
from tests.support.large_pngs import NUM_CLASSES, draw_pngs, large_dataset

Step = Callable[[Tensor, Tensor], None]


CACHES = ("none", "ram", "disk")


def loader_cases(device: str) -> list[Case]:
    """Return cases: one worker with each cache, the device alone, and both together; small shapes on a CPU."""
    place = torch.device(device)
    shared = Shared(place)
    return [
        *(Case(f"loader, cache {kind}", partial(_loader_row, shared, kind)) for kind in CACHES),
        Case("device", partial(_device_row, shared)),
        *(Case(f"training, cache {kind}", partial(_trained_row, shared, kind)) for kind in CACHES),
    ]


class Shared:
    """What the cases of a process share: drawn images and a training step, made at the first use."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.is_gpu = place.type == "cuda"
        large, small = ((1024, 2048), (768, 768), 8), ((64, 128), (32, 32), 2)
        self.size_px, self.crop_px, self.batch_size = large if self.is_gpu else small

    @cached_property
    def datasets(self) -> dict[str, Any]:
        """A data set for each cache."""
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        pairs = draw_pngs(folder, 32 if self.is_gpu else 6, self.size_px)
        return {kind: large_dataset(kind, pairs, folder / "cache", self.crop_px) for kind in CACHES}

    @cached_property
    def step(self) -> Step:
        """The step of a training."""
        return _training_step(self.place)


def _loader_row(shared: Shared, kind: str) -> dict[str, Any]:
    loader = TrainLoader(shared.datasets[kind], shared.batch_size, options=LoadOptions(1, pin_memory=shared.is_gpu))
    found = _loaded_per_s(loader, num_passes=1 if kind == "none" else 3)
    return {"what": f"loader, 1 worker, cache {kind}", "images/s": found}


def _device_row(shared: Shared) -> dict[str, Any]:
    found = _device_per_s(shared.step, shared.place, shared.crop_px, shared.batch_size)
    return {"what": "training step alone", "images/s": found}


def _trained_row(shared: Shared, kind: str) -> dict[str, Any]:
    dataset = shared.datasets[kind]
    seconds = sample_seconds(dataset)
    workers = plan_workers(seconds, shared.crop_px, most_workers(usable_cores()), shared.place.type)
    loader = TrainLoader(dataset, shared.batch_size, options=LoadOptions(workers, pin_memory=shared.is_gpu))
    speed, wait_frac = _trained_per_s(loader, shared.step, shared.place, 24 if shared.is_gpu else 2)
    row = {"what": f"training, cache {kind}", "images/s": speed, "workers (auto)": workers}
    return {**row, "ms a sample": 1000 * (seconds or 0.0), "waits for data": wait_frac}


def _training_step(device: torch.device) -> Step:
    """Return a step of DeepLabV3-ResNet50 in bf16 and channels_last; of two convolutions on a CPU."""
    net: nn.Module
    if device.type == "cuda":
        from torchvision.models.segmentation import deeplabv3_resnet50

        net = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=NUM_CLASSES)
    else:
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, NUM_CLASSES, 1))
    net = net.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)

    def step(images: Tensor, target: Tensor) -> None:
        inputs = images.float().div_(255).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            outputs = net(inputs)
        logits = outputs["out"] if isinstance(outputs, dict) else outputs
        F.cross_entropy(logits.float(), target.long(), ignore_index=255).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _endless(loader: TrainLoader) -> Iterator[Batch]:
    return chain.from_iterable(loader.epoch(epoch, last_epoch=sys.maxsize) for epoch in count(1))


def _loaded_per_s(loader: TrainLoader, num_passes: int) -> float:
    """Return the images per second of a pass, after the worker started and passes that fill the cache."""
    batches = _endless(loader)
    for _ in islice(batches, (num_passes - 1) * len(loader) + 1):
        pass
    began_s = time.perf_counter()
    num_images = sum(len(batch) for batch in islice(batches, len(loader)))
    seconds = time.perf_counter() - began_s
    loader.close()
    return num_images / seconds


def _device_per_s(step: Step, device: torch.device, crop_px: tuple[int, int], batch_size: int) -> float:
    images = torch.randint(0, 256, (batch_size, 3, *crop_px), dtype=torch.uint8, device=device)
    target = torch.randint(0, NUM_CLASSES, (batch_size, *crop_px), dtype=torch.uint8, device=device)
    num_steps = 10
    for number in range(3 + num_steps):
        if number == 3:
            _synchronize(device)
            began_s = time.perf_counter()
        step(images, target)
    _synchronize(device)
    return num_steps * batch_size / (time.perf_counter() - began_s)


def _trained_per_s(loader: TrainLoader, step: Step, device: torch.device, num_steps: int) -> tuple[float, float]:
    """Return the images per second of a training, and the share of its time spent waiting for batches."""
    batches = _endless(loader)
    wait_s = 0.0
    num_before = 3 * len(loader)  # enough to fill the cache
    for number in range(num_before + num_steps):
        if number == num_before:
            _synchronize(device)
            began_s, wait_s = time.perf_counter(), 0.0
        waits_s = time.perf_counter()
        batch = next(batches)
        wait_s += time.perf_counter() - waits_s
        step(batch.images.to(device, non_blocking=True), batch.target.to(device, non_blocking=True))
        _synchronize(device)
    seconds = time.perf_counter() - began_s
    loader.close()
    return num_steps * loader.batch_size / seconds, wait_s / seconds
