"""Precision modes: dtypes, loss scaling and master weights."""

import copy
import math

import pytest
import torch
from torch import nn

from segapp.parallel import convert_sync_batchnorm, place_stages
from segapp.precision import LossScaler, Precision, half_except_batchnorm

CPU = torch.device("cpu")


def test_only_batchnorm_stays_in_fp32() -> None:
    model = half_except_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)))
    assert {n: p.dtype for n, p in model.named_parameters()} == {
        "0.weight": torch.float16, "0.bias": torch.float16,
        "1.weight": torch.float32, "1.bias": torch.float32,
        "2.weight": torch.float16, "2.bias": torch.float16,
    }  # fmt: skip
    assert model[1].running_var.dtype == torch.float32
    assert model(torch.randn(2, 3, 8, 8).half()).dtype == torch.float16


def test_scaler_halves_on_overflow_and_doubles_at_interval() -> None:
    scaler = LossScaler(CPU, init_scale=8.0, growth_interval=3)
    scales = []
    for is_bad in (1.0, 0.0, 0.0, 0.0, 0.0):
        scaler.update(torch.tensor(is_bad))
        scales.append(float(scaler.scale))
    assert scales == [4.0, 4.0, 4.0, 8.0, 8.0]
    assert int(scaler.growth_tracker) == 1
    precision = Precision("amp-fp16", CPU)
    precision.step(torch.optim.SGD([nn.Parameter(torch.ones(1))]), torch.tensor(False), is_skipped=torch.tensor(True))
    assert precision.state_dict()["scaler"]["scale"] == 2.0**16, "skipped for another reason than its gradients"


def test_micro_batch_gradients_are_added_in_fp32() -> None:
    precision = Precision("fp16", CPU)
    model = precision.prepare(nn.Linear(1, 1, bias=False))
    (master,) = precision.master_weights(model.parameters())
    for value in (2048.0, 1.0, 1.0):
        model.weight.grad = torch.full((1, 1), value, dtype=torch.float16)
        precision.gradients_to_master()
    assert float(master.grad) == 2050.0  # in half, 2048 + 1 is 2048


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("amp-bf16", torch.bfloat16), ("amp-fp16", torch.float16), ("fp16", torch.float16)],
)
def test_scaled_gradients_are_unscaled_before_the_step(name: str, dtype: torch.dtype) -> None:
    precision = Precision(name, CPU)
    model = precision.prepare(nn.Linear(4, 1, bias=False))
    masters = precision.master_weights(model.parameters())
    optimizer = torch.optim.SGD(masters, lr=0.1)
    images = torch.full((2, 4), 2.0**-6, dtype=precision.input_dtype)
    with precision.autocast():
        output = model(images)
    assert output.dtype == dtype
    # A gradient of 1 at the output would be 2**16 after scaling and overflow; a mean over pixels has smaller ones.
    precision.backward(output.float().sum() / 16)
    assert float(precision.finish_gradients(optimizer)) == 2.0**-8
    assert masters[0].grad.dtype == torch.float32
    torch.testing.assert_close(masters[0].grad, torch.full((1, 4), 2.0**-9))


def test_own_half_loop_with_clipping_follows_float64() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 1))
    truth = copy.deepcopy(net).double()
    start = [p.detach().clone() for p in truth.parameters()]
    precision = Precision("fp16", "cpu")
    model = precision.prepare(convert_sync_batchnorm(net))
    place_stages(model, {"1": "cpu"}, output_device="cpu")
    masters = precision.master_weights(model.parameters())
    optimizers = [torch.optim.SGD(each, lr=0.5, momentum=0.9) for each in (masters, truth.parameters())]
    scales, num_clipped = [], 0
    for step in range(5):
        for images in torch.randn(2, 4, 3, 9, 7):  # two micro-batches
            factor = 2.0**20 if step == 2 else 1.0  # overflows in half, and float64 skips the step
            precision.backward(model(images.half()).float().square().mean() * factor)
            (truth(images.double()).square().mean() * factor).backward()
        grad_norm = precision.finish_gradients(optimizers[0], clip_grad_norm=0.1)
        expected = nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        precision.step(optimizers[0], is_bad=~grad_norm.isfinite())
        if step != 2:
            assert float(grad_norm) == pytest.approx(float(expected), rel=0.01)
            num_clipped += bool(expected > 0.2)
            optimizers[1].step()
        optimizers[1].zero_grad()
        scales.append(float(precision.scaler.scale))
    assert num_clipped >= 2
    assert scales == [2.0**16] * 2 + [2.0**15] * 3
    assert [p.dtype for p in model.parameters()] == [torch.float16] + [torch.float32] * 2 + [torch.float16] * 2
    for half, master, wide, first in zip(model.parameters(), masters, truth.parameters(), start, strict=True):
        moved = (wide - first).abs().max()
        assert (master - wide).abs().max() < 0.02 * moved
        torch.testing.assert_close(half.float(), master, rtol=1e-3, atol=1e-4)


def test_scaler_state_round_trip_is_exact() -> None:
    precision = Precision("fp16", CPU)
    model = precision.prepare(nn.Linear(2, 2))
    precision.master_weights(model.parameters())
    for is_bad in (1.0, 0.0):
        precision.scaler.update(torch.tensor(is_bad))
    state = precision.state_dict()
    other = Precision("fp16", CPU)
    masters = other.master_weights(other.prepare(nn.Linear(2, 2)).parameters())
    other.load_state_dict(state)
    assert (float(other.scaler.scale), int(other.scaler.growth_tracker)) == (2.0**15, 1)
    assert all(torch.equal(a, b) for a, b in zip(masters, state["masters"], strict=True))


def test_unknown_precision_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="fp32, fp16"):
        Precision("fp8", CPU)
    assert math.isfinite(float(LossScaler(CPU).scale))
