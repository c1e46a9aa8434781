"""upsample_cross_entropy on bands: as an operator, under autograd and transforms, and in edge cases."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from segapp.losses import CriterionCE, cross_entropy, upsample_cross_entropy
from segapp.losses.cross_entropy import choose_implementation
from segapp.losses.fused.reference import compute_dtype
from segapp.memory.ledger import StorageLedger
from tests.support.loss_cases import class_weight, draw, loss_and_gradient, relative_error

WAYS = ["triton", "sums", "reference"]


@pytest.fixture(autouse=True)
def of_kernels(monkeypatch, set_full_bytes):
    """Let torch's operators compute what the kernels compute on CUDA; list if they computed the gradient."""
    with_gradients, sums = [], cross_entropy._sums

    def compute(logits, target, weight, options, *, with_gradient):
        with_gradients.append(with_gradient)
        x = logits.detach().requires_grad_()
        loss_sum, weight_sum = sums(x, target, weight, options)
        gradient = torch.autograd.grad(loss_sum, x)[0].to(compute_dtype(logits)) if with_gradient else None
        return loss_sum.detach().double(), weight_sum, gradient

    def in_a_thread(*arguments, **options):  # autograd records nothing in the thread of an operator
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(compute, *arguments, **options).result()

    kernels = SimpleNamespace(cross_entropy_by_triton=in_a_thread)
    monkeypatch.setattr(cross_entropy, "load_kernels", lambda _: kernels)
    set_full_bytes(0)  # nothing is computed at once
    return with_gradients


def sum_of(way):
    """Return the sum of the losses, computed in one way, as a function of logits and target."""
    return lambda logits, target: upsample_cross_entropy(logits, target, implementation=way)[0]


def truth_of(logits, target):
    return loss_and_gradient(sum_of("reference"), logits.detach().double(), target)


@pytest.mark.parametrize("way", WAYS)
def test_fused_loss_passes_gradcheck_and_gradgradcheck(way):
    logits, target = draw(2, low=(3, 3), high=(10, 11))
    logits.requires_grad_()

    def loss(x):
        return upsample_cross_entropy(x, target, weight=class_weight(), label_smoothing=0.1, implementation=way)[0]

    assert torch.autograd.gradcheck(loss, (logits,))
    assert torch.autograd.gradgradcheck(loss, (logits,))


def test_compiled_graph_never_holds_upsampled_logits(monkeypatch):
    convolution, images = torch.nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 5, 6)
    _, target = draw(2)
    criterion = CriterionCE(implementation="triton")

    def step(images, target):
        return criterion(convolution(images), target)

    step(images, target).backward()
    expected = convolution.weight.grad.clone()
    convolution.zero_grad()
    monkeypatch.setattr(cross_entropy, "_sums", None)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    compiled(images, target).backward()
    assert torch.allclose(convolution.weight.grad, expected, rtol=1e-6)


def test_backward_allocates_the_gradient_only():
    logits, target = draw(2)
    loss_sum, _ = upsample_cross_entropy(logits.requires_grad_(), target, implementation="triton")
    ledger = StorageLedger(alloc_unit_bytes=1)
    with ledger:
        loss_sum.backward()
    sizes = [allocation.num_bytes for allocation in ledger.allocations]
    assert sum(size for size in sizes if size > 8) == logits.nbytes, "no zeros for outputs without a gradient"


def test_no_gradient_is_computed_when_not_required(of_kernels):
    logits, target = draw()
    expected, _ = upsample_cross_entropy(logits.clone().requires_grad_(), target, implementation="triton")
    with torch.no_grad():
        a, _ = upsample_cross_entropy(logits.clone().requires_grad_(), target, implementation="triton")
    b, _ = upsample_cross_entropy(logits, target, implementation="triton")
    with torch.inference_mode():
        c, _ = upsample_cross_entropy(logits, target, implementation="triton")
    assert of_kernels == [True, False, False, False]
    assert expected.item() == a.item() == b.item() == c.item()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["channels_last", "sliced", "transposed", "expanded"])
def test_inputs_of_any_strides_give_the_same_loss(layout, way):
    logits, target = draw(2, dtype=torch.float32)
    x = {
        "channels_last": lambda: logits.to(memory_format=torch.channels_last),
        "sliced": lambda: torch.randn(2, 8, 5, 12)[:, ::2, :, ::2],
        "transposed": lambda: torch.randn(2, 4, 6, 5).transpose(2, 3),
        "expanded": lambda: logits[:1].expand(2, -1, -1, -1),
    }[layout]()
    x = x.detach().requires_grad_()
    loss_sum, _ = upsample_cross_entropy(x, target.transpose(1, 2).contiguous().transpose(1, 2), implementation=way)
    loss_sum.backward()
    _, truth = truth_of(x, target)
    assert relative_error(x.grad, truth) < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_autocast_leaves_the_sums_in_float32(way):
    logits, target = draw(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        x = logits.clone().requires_grad_()
        loss_sum, _ = upsample_cross_entropy(x, target, implementation=way)
    loss_sum.backward()
    expected, truth = truth_of(logits, target)
    assert loss_sum.dtype == torch.float32
    assert relative_error(loss_sum.detach(), expected) < 1e-6
    assert relative_error(x.grad, truth) < 8e-3


@pytest.mark.parametrize(("sigma", "offset"), [(1000.0, 0.0), (1.0, 1e4), (1.0, -1e4)])
@pytest.mark.parametrize("way", ["triton", "sums"])
def test_extreme_logits_give_finite_loss(way, sigma, offset):
    logits, target = draw(dtype=torch.float32, sigma=sigma)
    logits = logits + offset
    loss_sum, gradient = loss_and_gradient(sum_of(way), logits, target)
    expected, truth = truth_of(logits, target)
    assert relative_error(loss_sum, expected) < 1e-6
    # Where the logits are of order 1000 their own rounding decides the probabilities.
    assert relative_error(gradient, truth) < (2e-5 if sigma > 1 else 1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_nan_logits_give_nan(way):
    logits, target = draw(dtype=torch.float32, ignored=0.0)
    logits[1, 2, 3, 4] = torch.nan
    assert torch.isnan(sum_of(way)(logits, target))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("bad", "dtype", "named"),
    [
        ([4], torch.uint8, "4"),
        ([-3], torch.int16, "-3"),
        (range(20, 30), torch.int32, "20, .*, 29"),
        ([*range(20, 30), 1 << 40], torch.int64, r"20, .*, 29, \.\.\."),
    ],
)
def test_first_ten_ids_out_of_range_are_named(way, bad, dtype, named):
    logits, target = draw(target_dtype=dtype)
    target.view(-1)[500 : 500 + len(bad)] = torch.tensor(bad).to(dtype)
    with pytest.raises(ValueError, match=rf"ids {named}: classes are 0 to 3 and 255 is ignored"):
        upsample_cross_entropy(logits, target, implementation=way)


def test_probability_targets_match_torch():
    logits, _ = draw(2)
    soft = torch.rand(2, 4, 9, 9, dtype=torch.float64).softmax(1)
    values = F.interpolate(logits, (9, 9), mode="bilinear", align_corners=True)
    weight = class_weight()
    truth = F.cross_entropy(values, soft, weight, label_smoothing=0.1)
    criterion = CriterionCE(weight=weight, label_smoothing=0.1)
    assert relative_error(criterion(logits, soft), truth) < 1e-12
    assert float(criterion.target_statistics(soft)[1]) == 162


@pytest.mark.parametrize(
    ("num_classes", "low", "expected"),
    [
        (19, (97, 97), "triton"),
        (19, (600, 769), "triton"),
        (19, (769, 769), "reference"),
        (19, (800, 769), "reference"),
        (320, (97, 97), "triton"),
        (321, (97, 97), "sums"),
    ],
)
def test_simulated_accelerator_is_planned_as_cuda(num_classes, low, expected):
    target = torch.empty(2, 769, 769, device="meta", dtype=torch.uint8)
    assert choose_implementation(torch.empty(2, num_classes, *low, device="meta"), target) == expected
