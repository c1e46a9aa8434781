"""Figures of the loss: time and extra memory of one forward and backward pass, against interpolate + cross_entropy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.losses import upsample_cross_entropy

SHAPES = (  # N, C, h, w, H, W
    (2, 19, 128, 256, 1024, 2048),
    (8, 19, 96, 96, 768, 768),
    (16, 150, 64, 64, 512, 512),
    (8, 2, 96, 96, 768, 768),
)
TINY_SHAPES = ((2, 19, 8, 16, 64, 128), (2, 150, 4, 4, 32, 32))
ROUNDS, TINY_ROUNDS = 100, 3

Pass = Callable[[Tensor, Tensor], None]


def loss_figures(device: str) -> list[dict[str, Any]]:
    """Return a row for each shape and dtype of logits: medians of both ways in turn; small shapes on a CPU."""
    place = torch.device(device)
    is_gpu = place.type == "cuda"
    rows = []
    for shape in SHAPES if is_gpu else TINY_SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            logits, target = make(shape, dtype, place)
            ways: tuple[Pass, Pass] = naive, ours
            for way in ways:
                way(logits, target)
            seconds = [
                [seconds_of(way, logits, target) for way in ways] for _ in range(ROUNDS if is_gpu else TINY_ROUNDS)
            ]
            naive_s, ours_s = (statistics.median(times) for times in zip(*seconds, strict=True))
            extra = [extra_mib(way, logits, target) for way in ways]
            rows.append(
                {
                    "shape": "{}x{}x{}x{} to {}x{}".format(*shape),
                    "logits": str(dtype).removeprefix("torch."),
                    "naive ms": 1e3 * naive_s,
                    "ours ms": 1e3 * ours_s,
                    "ratio": ours_s / naive_s,
                    "naive extra MiB": extra[0],
                    "ours extra MiB": extra[1],
                }
            )
    return rows


def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random logits (N, C, h, w) that require a gradient and a uint8 target (N, H, W), a tenth ignored."""
    N, C, h, w, H, W = shape
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(N, C, h, w, generator=generator)).to(device, dtype)
    target = torch.randint(0, C, (N, H, W), generator=generator)
    target[torch.rand(N, H, W, generator=generator) < 0.1] = 255
    return logits.requires_grad_(), target.to(device, torch.uint8)


def naive(logits: Tensor, target: Tensor) -> None:
    """Run the usual way: upsampled logits in float32."""
    values = F.interpolate(logits.float(), target.shape[-2:], mode="bilinear", align_corners=True)
    F.cross_entropy(values, target.long(), ignore_index=255).backward()
    logits.grad = None


def ours(logits: Tensor, target: Tensor) -> None:
    """Run this library's way."""
    loss_sum, weight_sum = upsample_cross_entropy(logits, target)
    (loss_sum / weight_sum).backward()
    logits.grad = None


def seconds_of(way: Pass, logits: Tensor, target: Tensor) -> float:
    """Return the seconds of one pass: between CUDA events on a card, of the clock on a CPU."""
    if not logits.is_cuda:
        start = time.perf_counter()
        way(logits, target)
        return time.perf_counter() - start
    with torch.cuda.device(logits.device):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before.record()
        way(logits, target)
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3


def extra_mib(way: Pass, logits: Tensor, target: Tensor) -> float:
    """Return the peak of one pass above the memory before it: the allocator's on a card, recorded tensors on a CPU."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
        torch.cuda.reset_peak_memory_stats(logits.device)
        before = torch.cuda.memory_allocated(logits.device)
        way(logits, target)
        return (torch.cuda.max_memory_allocated(logits.device) - before) / 2**20
    from segapp.memory.ledger import StorageLedger  # here: a card needs the losses alone

    ledger = StorageLedger()
    with ledger:
        way(logits, target)
    return max(peak.num_bytes for peak in ledger.peaks()[str(logits.device)].values()) / 2**20
