"""Figures of the loss: time and extra memory of a forward and backward pass, against other ways to the same loss."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.losses import upsample_cross_entropy
from tests.gpu.cases import Case, NotPossible

SHAPES = (  # N, C, h, w, H, W
    (2, 19, 128, 256, 1024, 2048),
    (8, 19, 96, 96, 768, 768),
    (16, 150, 64, 64, 512, 512),
)
TINY_SHAPES = ((2, 19, 8, 16, 64, 128), (2, 150, 4, 4, 32, 32))
ROUNDS, TINY_ROUNDS = 30, 3

Pass = Callable[[Tensor, Tensor], Tensor]


def loss_cases(device: str) -> list[Case]:
    """Return a case for each shape and way to the loss, of the first shape in bfloat16 too; small ones on a CPU."""
    place = torch.device(device)
    shapes = SHAPES if place.type == "cuda" else TINY_SHAPES
    return [
        Case(f"{_words(shape)}, {_name(dtype)}, {way}", partial(_loss_row, place, shape, dtype, way))
        for shape in shapes
        for dtype in ((torch.float32, torch.bfloat16) if shape == shapes[0] else (torch.float32,))
        for way in WAYS
    ]


def _loss_row(place: torch.device, shape: tuple[int, ...], dtype: torch.dtype, way: str) -> dict[str, Any]:
    inputs, target = make(shape, dtype, place)
    found = measured(WAYS[way](place), inputs, target, has_graph=way != LIGER)
    return {"shape": _words(shape), "logits": _name(dtype), "way": way, **found}


def measured(way: Pass, inputs: Tensor, target: Tensor, *, has_graph: bool = True) -> dict[str, Any]:
    """Return the median time and extra memory of a way, and whether a second pass has the same loss and gradient.

    A capture that fails leaves the allocator in disorder: `has_graph` is False for a way that waits for the device.
    """
    rounds = ROUNDS if inputs.is_cuda else TINY_ROUNDS
    passes = []
    for _ in range(2):
        loss = way(inputs, target)
        assert inputs.grad is not None
        passes.append((loss, inputs.grad))
        inputs.grad = None
    repeats = all(torch.equal(one, two) for one, two in zip(*passes, strict=True))
    value = float(passes[0][0])
    del passes
    seconds = statistics.median(seconds_of(way, inputs, target) for _ in range(rounds))
    extra = extra_mib(way, inputs, target)
    return {
        "ms": 1e3 * seconds,
        "ms, graph": graph_ms(way, inputs, target) if has_graph else None,
        "extra MiB": extra,
        "repeats bitwise": repeats,
        "loss": value,
    }


def _words(shape: tuple[int, ...]) -> str:
    return "{}x{}x{}x{} to {}x{}".format(*shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random logits (N, C, h, w) that require a gradient and a uint8 target (N, H, W), a tenth ignored."""
    N, C, h, w, H, W = shape
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(N, C, h, w, generator=generator)).to(device, dtype)
    target = torch.randint(0, C, (N, H, W), generator=generator)
    target[torch.rand(N, H, W, generator=generator) < 0.1] = 255
    return logits.requires_grad_(), target.to(device, torch.uint8)


# --- ways to the loss of low-resolution logits: they return the loss and leave the gradient in `grad` ---


def naive(logits: Tensor, target: Tensor) -> Tensor:
    """Take the usual way: upsampled logits in float32."""
    return _backward(_interpolated_loss(logits, target))


def _interpolated_loss(logits: Tensor, target: Tensor) -> Tensor:
    values = F.interpolate(logits.float(), target.shape[-2:], mode="bilinear", align_corners=True)
    return F.cross_entropy(values, target.long(), ignore_index=255)


def ours(logits: Tensor, target: Tensor) -> Tensor:
    """Take this library's way."""
    loss_sum, weight_sum = upsample_cross_entropy(logits, target)
    return _backward(loss_sum / weight_sum)


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def _compiled(place: torch.device) -> Pass:
    compiled = _compiled_loss()
    return lambda logits, target: _backward(compiled(logits, target))


@functools.cache
def _compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_interpolated_loss, dynamic=False)


def _liger(place: torch.device) -> Pass:
    """Take Liger's fused cross-entropy on upsampled logits, of which it wants (pixels, classes)."""
    if place.type != "cuda":
        raise NotPossible("the kernels of Liger need a card")
    try:
        from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
    except ImportError as error:
        raise NotPossible(f"liger_kernel cannot be imported: {error}") from None
    criterion = LigerCrossEntropyLoss(ignore_index=255)

    def way(logits: Tensor, target: Tensor) -> Tensor:
        values = F.interpolate(logits.float(), target.shape[-2:], mode="bilinear", align_corners=True)
        rows = values.permute(0, 2, 3, 1).reshape(-1, logits.shape[1])
        return _backward(criterion(rows, target.long().reshape(-1)))

    return way


LIGER = "Liger on interpolated logits"

WAYS: dict[str, Callable[[torch.device], Pass]] = {
    "ours": lambda place: ours,
    "interpolate + cross_entropy": lambda place: naive,
    "the same under torch.compile": _compiled,
    LIGER: _liger,
}


# --- measurements ---


def seconds_of(way: Pass, logits: Tensor, target: Tensor) -> float:
    """Return the seconds of one pass: between CUDA events on a card, of the clock on a CPU."""
    logits.grad = None  # else the pass would add to it
    if logits.is_cuda:
        return _event_seconds(logits.device, lambda: way(logits, target))
    start = time.perf_counter()
    way(logits, target)
    return time.perf_counter() - start


def _event_seconds(device: torch.device, work: Callable[[], object]) -> float:
    with torch.cuda.device(device):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before.record()
        work()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3


def graph_ms(way: Pass, logits: Tensor, target: Tensor) -> float | None:
    """Return the median milliseconds of one pass as a CUDA graph: of its kernels, without the host that launches them.

    None on a CPU, and for a way that waits for the device, which no graph can hold.
    """
    if not logits.is_cuda:
        return None
    device = logits.device
    own = logits.detach().clone().requires_grad_()  # autograd accumulates on the stream that a leaf was first used on
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):  # compilers and tables are ready then
            own.grad = None
            way(own, target)
    torch.cuda.synchronize(device)
    own.grad = None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
            way(own, target)
    except RuntimeError:
        return None
    return 1e3 * statistics.median(_event_seconds(device, graph.replay) for _ in range(ROUNDS))


def extra_mib(way: Pass, logits: Tensor, target: Tensor) -> float:
    """Return the peak of one pass above the memory before it: the allocator's on a card, recorded tensors on a CPU."""
    logits.grad = None
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
    return max(sum(peak.values()) for peak in ledger.peaks()[str(logits.device)].values()) / 2**20
