"""The road on CUDA, taken on the CPU: launches, determinism, default devices, graph capture, reports of threads."""

import threading
import time
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from segapp.losses import CriterionLovasz, overlap
from segapp.losses.fused import checks, kernels
from segapp.losses.fused.block_sizes import block_shape, buffers_of
from segapp.losses.fused.checks import raise_reported, report_range
from segapp.losses.fused.grid import products_are_exact
from segapp.losses.fused.pixel_sums import PixelOptions, cross_entropy_sums_of
from tests.support.gpu.as_on_cuda import take_cuda_road
from tests.support.gpu.launches import LaunchCounter
from tests.support.loss_cases import class_weight, criteria, draw, loss_and_gradient, relative_error

NAMES = list(criteria())


class DeterministicOnCuda(TorchDispatchMode):
    """Refuses operators whose result on CUDA depends on the order of atomics, or which raise in deterministic mode.

    From torch.use_deterministic_algorithms' list: those that the losses might meet.
    """

    REFUSED = frozenset(
        {"index_add", "index_add_", "scatter_add", "scatter_add_", "histc", "put_", "median", "kthvalue"}
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        is_bad = (
            name in self.REFUSED
            or (name == "cumsum" and args[0].is_floating_point())
            or (name in ("nll_loss2d_forward", "nll_loss_forward") and args[3] != 0)
            or (name == "bincount" and len(args) > 1 and args[1] is not None)
            or (name == "index_put" and not (len(args) > 3 and args[3]))
        )
        assert not is_bad, f"{name} is not deterministic on CUDA"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("full_bytes", [0, 1 << 60])
@pytest.mark.parametrize("name", NAMES)
def test_losses_on_the_cuda_road_are_deterministic(name, full_bytes, set_full_bytes, monkeypatch):
    """They equal those of the CPU, and take no operator whose result depends on the order of atomics."""
    set_full_bytes(full_bytes)
    logits, target = draw(3, low=(9, 13), high=(33, 41))
    truth = loss_and_gradient(criteria()[name], logits, target)
    take_cuda_road(monkeypatch)
    monkeypatch.setattr(kernels, "_IS_INSTALLED", False)
    with DeterministicOnCuda():
        mine = loss_and_gradient(criteria()[name], logits, target)
    for a, b in zip(mine, truth, strict=True):
        assert relative_error(a, b) < 1e-11


@pytest.mark.parametrize("ignore_index", [255, 2])
def test_sums_leave_out_ids_of_no_class(ignore_index):
    logits, target = draw(ignored=0.2, target_dtype=torch.int64)
    valid = torch.where(target < 4, target, ignore_index)
    target[0, :2], valid[0, :2] = 77, ignore_index
    ids, is_valid = PixelOptions(ignore_index=ignore_index).read(target, 4)
    values = F.interpolate(logits, target.shape[-2:], mode="bilinear", align_corners=True)
    loss_sum, _ = cross_entropy_sums_of(values, ids, is_valid, class_weight(), label_smoothing=0.1)
    truth = F.cross_entropy(
        values, valid, class_weight(), ignore_index=ignore_index, label_smoothing=0.1, reduction="sum"
    )
    assert relative_error(loss_sum, truth) < 1e-12


def test_lovasz_launches_grow_with_sorts_not_with_classes(monkeypatch):
    take_cuda_road(monkeypatch)
    totals = {}
    for classes_at_once in (19, 1):
        logits, target = draw(4, 19, (8, 8), (64, 64), dtype=torch.float32)
        budget = classes_at_once * overlap.BYTES_OF_A_SORTED_PIXEL * target.numel()
        monkeypatch.setattr(overlap, "CPU_SORT_BYTES", budget)
        loss_and_gradient(CriterionLovasz(), logits, target)  # makes the tables of the interpolation
        with LaunchCounter() as counter:
            loss_and_gradient(CriterionLovasz(), logits, target)
        totals[classes_at_once] = counter.total
        assert counter.by_operator["sort"] == 19 // classes_at_once
    assert totals[19] < 200  # one class of one image at a time took 4,549
    assert totals[1] > 4 * totals[19]


def test_reports_are_taken_by_one_thread_each(monkeypatch):
    """Between the question whether a report has arrived and its removal, another thread may run."""
    monkeypatch.setattr(checks, "_reports", deque(maxlen=64))
    good = torch.tensor([5, -5])

    def has_arrived():
        time.sleep(0.0005)
        return True

    for _ in range(60):
        checks._reports.append((good, has_arrived, 4, 255))
    checks._reports.append((torch.tensor([777, 777]), has_arrived, 4, 255))
    raised = []

    def take():
        try:
            while checks._reports:
                raise_reported()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(error)[:24] for error in raised] == ["target holds the ids 777"]


def test_default_device_does_not_change_the_losses():
    """With a default device, tensors without one are made there: `meta` stands for a CUDA device."""
    logits, target = draw(3, low=(6, 7), high=(34, 43))  # sizes whose tables no other test has made
    good, made = torch.tensor([5, -5]), criteria().values()
    with torch.device("meta"):
        for criterion in made:
            loss, gradient = loss_and_gradient(criterion, logits, target)
            assert loss.is_cpu
            assert gradient.is_cpu
        assert report_range(good, 4, 255).is_cpu


def test_matmul_precision_set_per_backend_is_not_taken_as_exact():
    assert products_are_exact()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert not products_are_exact()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert products_are_exact()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_classes", "N", "h", "w", "W"),
    [(1, 2, 5, 1, 9), (10, 2, 128, 256, 2048), (11, 3, 37, 53, 211), (150, 2, 256, 512, 2048), (320, 16, 64, 65, 66)],
)
def test_blocks_hold_every_class_and_source_pixel(N, h, w, W, num_classes, dtype):
    shape = (N, num_classes, h, w)
    block = block_shape(shape, W, dtype)
    assert (block.TILES - 1) * block.LANES < num_classes <= block.TILES * block.LANES
    assert (5 if dtype == torch.float64 else 10) >= block.TILES
    threads = block.SOURCES * block.SPLIT * block.LANES
    assert threads == 32 * block.num_warps <= 128
    assert threads & (threads - 1) == 0 < block.SOURCES
    num_rows, num_blocks = -(-h // block.CELLS), -(-w // block.SOURCES)
    num_programs, num_partials = buffers_of(shape, W, dtype, True)
    assert num_programs == N * num_rows * num_blocks
    assert num_partials == num_programs * (block.CELLS + 1) * num_classes * (block.SOURCES + 1)
    assert buffers_of(shape, W, dtype, False) == (num_programs, 1)
