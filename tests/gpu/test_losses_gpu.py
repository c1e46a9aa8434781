"""The losses on a GPU against interpolate + cross_entropy in float64; `SEGAPP_GPU_TESTS_ON=cpu` tries the bodies."""

import os

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import (
    CriterionBCE,
    CriterionCE,
    CriterionDice,
    CriterionFocal,
    CriterionLovasz,
    CriterionOHEM,
    CriterionTversky,
    cross_entropy,
    upsample_cross_entropy,
)
from segapp.losses.fused import checks, kernels
from segapp.losses.fused.block_sizes import buffers_of

DEVICE = os.environ.get("SEGAPP_GPU_TESTS_ON", "cuda:0")
IS_GPU = DEVICE.startswith("cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="needs a CUDA device and sees none"),
]
on_a_gpu_only = pytest.mark.skipif(not IS_GPU, reason="is about the card itself")

SHAPES = [  # N, h, w, H, W
    (2, 32, 64, 256, 512),
    (2, 97, 97, 769, 769),
    (3, 8, 8, 64, 64),
    (2, 48, 80, 96, 120),
]
if not IS_GPU:
    SHAPES = [(2, 4, 8, 32, 64), (2, 7, 7, 49, 49), (3, 8, 8, 64, 64), (2, 6, 10, 12, 15)]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(scope="module", autouse=True)
def _kernels_run():
    """Without this, a card on which Triton fails would pass by the fallback."""
    yield
    assert not IS_GPU or kernels._results.get(torch.device(DEVICE), None) is None


def draw(shape, C, dtype=torch.float32, channels_last=False, seed=0):
    N, h, w, H, W = shape
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(N, C, h, w, dtype=torch.float64, generator=generator)).to(DEVICE, dtype)
    if channels_last:
        logits = logits.contiguous(memory_format=torch.channels_last)
    target = torch.randint(0, C, (N, H, W), generator=generator)
    target[torch.rand(N, H, W, generator=generator) < 0.2] = 255
    target[:, : H // 8] = 255
    return logits, target.to(DEVICE)


def truth_of(logits, target, weight, smoothing, align_corners):
    """Loss sum and gradient in float64 on the CPU."""
    x = logits.detach().cpu().double().requires_grad_()
    values = F.interpolate(x, target.shape[-2:], mode="bilinear", align_corners=align_corners)
    weight = None if weight is None else weight.cpu().double()
    loss = F.cross_entropy(
        values, target.cpu().long(), weight, ignore_index=255, reduction="sum", label_smoothing=smoothing
    )
    loss.backward()
    return loss.detach(), x.grad


def relative_error(value, truth):
    difference = (value.detach().cpu().double() - truth.cpu().double()).abs().max()
    return float(difference / truth.abs().max())


def compute(logits, target, **options):
    x = logits.detach().requires_grad_()
    loss_sum, weight_sum = upsample_cross_entropy(x, target, **options)
    loss_sum.backward()
    return loss_sum.detach(), weight_sum, x.grad


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("has_options", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("C", [2, 19, 150])
def test_loss_and_gradient_match_float64(C, shape, channels_last, has_options, align_corners):
    logits, target = draw(shape, C, channels_last=channels_last)
    weight = torch.linspace(0.25, 2.0, C, device=DEVICE) if has_options else None
    smoothing = 0.1 if has_options else 0.0
    if IS_GPU:
        assert cross_entropy.choose_implementation(logits, target) == "triton"
    loss_sum, weight_sum, gradient = compute(
        logits, target.byte(), weight=weight, label_smoothing=smoothing, align_corners=align_corners
    )
    truth, slope = truth_of(logits, target, weight, smoothing, align_corners)
    valid = target[target != 255]
    count = valid.numel() if weight is None else float(weight.double()[valid].sum())
    assert relative_error(loss_sum, truth) <= 2e-6
    assert relative_error(gradient, slope) <= 2e-6
    assert float(weight_sum) == pytest.approx(count, rel=1e-5)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("C", [2, 19, 150])
def test_every_dtype_matches_float64(C, dtype, channels_last):
    logits, target = draw(SHAPES[0], C, dtype, channels_last)
    loss_sum, _, gradient = compute(logits, target, label_smoothing=0.1)
    truth, slope = truth_of(logits, target, None, 0.1, True)
    assert gradient.dtype == dtype
    assert relative_error(loss_sum, truth) <= min(TOLERANCE[dtype], 2e-6)
    assert relative_error(gradient, slope) <= TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", ["reference", "sums"])
@pytest.mark.parametrize("shape", [*SHAPES[:1], (2, 32, 32, 32, 32)])
def test_torch_operators_match_float64(shape, implementation):
    logits, target = draw(shape, 19)
    loss_sum, _, gradient = compute(logits, target, implementation=implementation)
    truth, slope = truth_of(logits, target, None, 0.0, True)
    assert relative_error(loss_sum, truth) <= 2e-5
    assert relative_error(gradient, slope) <= 2e-5


def criteria():
    return [
        CriterionCE(label_smoothing=0.1),
        CriterionOHEM(threshold=0.5, min_kept=1000),
        CriterionDice(),
        CriterionFocal(),
        CriterionLovasz(),
        CriterionBCE(),
        CriterionTversky(gamma=0.75),
        CriterionFocal(multilabel=True),
        CriterionDice(multilabel=True),
    ]


@pytest.mark.parametrize("criterion", criteria(), ids=lambda criterion: type(criterion).__name__)
def test_criteria_match_the_cpu_and_repeat_bit_for_bit(criterion):
    logits, target = draw(SHAPES[0], 19)
    results = []
    for _ in range(3):
        x = logits.clone().requires_grad_()
        loss = criterion.to(DEVICE)(x, target)
        loss.backward()
        results.append((loss.detach(), x.grad))
    for loss, gradient in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(gradient, results[0][1])
    y = logits.cpu().double().requires_grad_()
    truth = criterion.cpu()(y, target.cpu())
    truth.backward()
    assert relative_error(results[0][0], truth.detach()) <= 2e-5
    assert relative_error(results[0][1], y.grad) <= 1e-4


@pytest.mark.parametrize("criterion", criteria(), ids=lambda criterion: type(criterion).__name__)
def test_criteria_run_with_deterministic_algorithms(criterion, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it before a matrix product
    logits, target = draw(SHAPES[2], 19)
    torch.use_deterministic_algorithms(True)
    try:
        criterion.to(DEVICE)(logits.requires_grad_(), target).backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_loss_repeats_bit_for_bit_at_every_size():
    for shape in SHAPES:
        logits, target = draw(shape, 19)
        results = [compute(logits, target) for _ in range(5)]
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_without_samples_keeps_the_kernels(channels_last):
    logits, target = draw((0, *SHAPES[0][1:]), 19, channels_last=channels_last)
    loss_sum, weight_sum, gradient = compute(logits, target)
    assert float(loss_sum) == float(weight_sum) == 0.0
    assert gradient.shape == logits.shape
    if IS_GPU:
        logits, target = draw(SHAPES[0], 19)
        compute(logits, target)
        assert cross_entropy.choose_implementation(logits, target) == "triton"


def test_ids_out_of_range_are_named_by_a_later_call():
    logits, target = draw(SHAPES[0], 19)
    bad = target.clone()
    bad[0, -1, -1] = 33
    checks._reports.clear()
    if IS_GPU:
        assert torch.isnan(upsample_cross_entropy(logits, bad)[0])
        torch.cuda.synchronize()
    with pytest.raises(ValueError, match="ids 33: classes are 0 to 18"):
        upsample_cross_entropy(logits, bad)
    checks._reports.clear()
    assert torch.isfinite(compute(logits, target)[0])


def test_default_device_and_side_stream_give_the_same():
    logits, target = draw(SHAPES[0], 19)
    truth = compute(logits, target)
    with torch.device(DEVICE):
        results = [compute(logits, target)]
    if IS_GPU:
        stream = torch.cuda.Stream(DEVICE)
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(stream):
            results.append(compute(logits, target))
        torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, truth, strict=True))


@on_a_gpu_only
def test_loss_in_a_cuda_graph_replays():
    logits, target = draw(SHAPES[0], 19)
    x = logits.clone().requires_grad_()
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        for _ in range(2):
            upsample_cross_entropy(x, target)[0].backward()
            x.grad = None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_sum, _ = upsample_cross_entropy(x, target)
        loss_sum.backward()
    other, _ = draw(SHAPES[0], 19, seed=1)
    with torch.no_grad():
        x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    truth, _, gradient = compute(other, target)
    assert torch.equal(loss_sum.detach(), truth)
    assert torch.equal(x.grad, gradient)


@on_a_gpu_only
def test_loss_waits_for_nothing():
    logits, target = draw(SHAPES[0], 19)
    compute(logits, target)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [compute(logits, target) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(results[-1][0])


@on_a_gpu_only
def test_loss_allocates_what_the_plan_counts():
    for shape, C in [(SHAPES[0], 19), (SHAPES[1], 19), (SHAPES[0], 150)]:
        logits, target = draw(shape, C)
        compute(logits, target)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        x = logits.detach().requires_grad_()
        upsample_cross_entropy(x, target)
        taken = torch.cuda.max_memory_allocated(DEVICE) - before
        del x  # it holds the logits, which would be freed after the next `before`
        num_programs, num_partials = buffers_of(tuple(logits.shape), target.shape[2], torch.float32, True)
        planned = 4 * (logits.numel() + num_partials + 3 * num_programs)
        assert taken == pytest.approx(planned, rel=0.02, abs=1 << 20)
