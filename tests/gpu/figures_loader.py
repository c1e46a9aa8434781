"""Figures of the loader: images per second of a worker, against what a training step on the device takes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.datasets.loader import Batch, LoadOptions, TrainLoader
from segapp.datasets.resources import usable_cores
from segapp.datasets.workers import most_workers, plan_workers, sample_seconds
from tests.support.large_pngs import NUM_CLASSES, draw_pngs, large_dataset

Step = Callable[[Tensor, Tensor], None]


def loader_figures(device: str) -> list[dict[str, Any]]:
    """Return rows: one worker with each cache, the device alone, and both together; small shapes on a CPU."""
    place = torch.device(device)
    is_gpu = place.type == "cuda"
    size_px, crop_px, batch_size = ((1024, 2048), (768, 768), 8) if is_gpu else ((64, 128), (32, 32), 2)
    num_images, num_steps = (32, 24) if is_gpu else (6, 2)
    step = _training_step(place)
    rows: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp())
    try:
        pairs = draw_pngs(folder, num_images, size_px)
        datasets = {kind: large_dataset(kind, pairs, folder / "cache", crop_px) for kind in ("none", "ram", "disk")}
        for kind, dataset in datasets.items():
            loader = TrainLoader(dataset, batch_size, options=LoadOptions(1, pin_memory=is_gpu))
            found = _loaded_per_s(loader, num_passes=1 if kind == "none" else 3)
            rows.append({"what": f"loader, 1 worker, cache {kind}", "images/s": found})
        rows.append({"what": "training step alone", "images/s": _device_per_s(step, place, crop_px, batch_size)})
        for kind, dataset in datasets.items():
            seconds = sample_seconds(dataset)
            workers = plan_workers(seconds, crop_px, most_workers(usable_cores()), place.type)
            loader = TrainLoader(dataset, batch_size, options=LoadOptions(workers, pin_memory=is_gpu))
            speed, wait_frac = _trained_per_s(loader, step, place, num_steps)
            row = {"what": f"training, cache {kind}", "images/s": speed, "workers (auto)": workers}
            rows.append({**row, "ms a sample": 1000 * (seconds or 0.0), "waits for data": wait_frac})
    finally:
        shutil.rmtree(folder)
    return rows


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
    return chain.from_iterable(loader.epoch(epoch) for epoch in count())


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
