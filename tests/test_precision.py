"""Precision modes: dtypes, loss scaling, master weights and the order of calls."""

import copy
import math
import pickle
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from segapp.parallel import convert_sync_batchnorm, place_stages
from segapp.precision import LossScaler, Precision, PrecisionName, half_except_batchnorm
from tests.parallel.test_sync_batchnorm import Reads

CPU = torch.device("cpu")
SGD = torch.optim.SGD
KINDS: Any = (SGD, lambda p, lr: torch.optim.Adam(p, lr, fused=True), torch.optim.AdamW)
BOOLS = (bool, int, np.bool_, np.array, torch.tensor, lambda value: torch.tensor([2.0 * value]))
PRECISIONS = get_args(PrecisionName)
DTYPES = dict(zip(PRECISIONS, (torch.float32, torch.float16, torch.float16, torch.bfloat16), strict=True))


def loss_of(weight: Tensor, factor: float = 1.0) -> Tensor:
    """Return a loss whose gradients, (1, 2, 3, ...) / 512, are exact in half with the first loss scale."""
    return (weight.float() * torch.arange(1, weight.numel() + 1) * factor / 512).sum()


class Loop:
    """Three weights in a precision mode, each with an optimizer."""

    def __init__(self, mode: str, *sizes: int) -> None:
        self.precision = Precision(mode, CPU)
        self.weights = [self.precision.prepare(nn.Linear(n, 1, bias=False)).weight for n in sizes or (3, 1, 4)]
        self.masters = self.precision.master_weights(self.weights)
        self.optimizers = [kind([each], lr=0.5) for kind, each in zip(KINDS, self.masters, strict=False)]

    def backward(self, which: int, factor: float = 1.0) -> None:
        self.precision.backward(loss_of(self.weights[which], factor))

    def finish(self, which: int) -> Tensor:
        return ~self.precision.finish_gradients(self.optimizers[which]).isfinite()

    def values(self) -> list[Any]:
        return [master.tolist() for master in self.masters]


class BesideGradScaler(RuleBasedStateMachine):
    """Three optimizers with one `Precision`, in any order of calls, and each with a GradScaler of its own."""

    @initialize(mode=st.sampled_from(PRECISIONS))
    def begin(self, mode: str) -> None:
        self.ours, self.num_bad = Loop(mode), 0
        inputs = torch.ones(2, 3, dtype=self.ours.precision.input_dtype)
        assert inputs.dtype == (torch.float16 if mode == "fp16" else torch.float32)
        with self.ours.precision.autocast():
            assert nn.functional.linear(inputs, self.ours.weights[0]).dtype == DTYPES[mode]
        self.weights = [nn.Parameter(master.detach().clone()) for master in self.ours.masters]
        self.optimizers = [kind([each], lr=0.5) for kind, each in zip(KINDS, self.weights, strict=True)]
        self.scalers = [torch.amp.GradScaler("cpu") for _ in KINDS]
        self.is_bad: list[Tensor | bool | None] = [None] * 3  # known after finish_gradients

    @rule(i=st.integers(0, 2), factor=st.sampled_from([1.0, -3.0, math.inf, math.nan]))
    def backward(self, i: int, factor: float) -> None:
        if self.is_bad[i] is not None:  # GradScaler adds scaled to unscaled gradients
            with pytest.raises(RuntimeError, match="added to finished gradients"):
                self.ours.backward(i, factor)
            for each in range(3):
                assert self.ours.masters[each].grad is None
                self.zero_grad(each)
        elif math.isnan(factor):  # the pass fails
            handle = self.ours.weights[i].register_post_accumulate_grad_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                self.ours.backward(i)
            handle.remove()
            assert [p.grad for p in self.ours.weights if p.dtype == torch.float16] in ([], [None] * 3)
            self.zero_grad(i)
        else:
            self.ours.backward(i, factor)
            self.scalers[i].scale(loss_of(self.weights[i], factor)).backward()

    @rule(i=st.integers(0, 2))
    def finish(self, i: int) -> None:
        if self.is_bad[i] is not None:
            with pytest.raises(RuntimeError, match="was called before"):
                self.ours.finish(i)
        elif self.weights[i].grad is not None:
            self.is_bad[i] = self.ours.finish(i)
            self.scalers[i].unscale_(self.optimizers[i])

    @rule(i=st.integers(0, 2))
    def change_the_gradient(self, i: int) -> None:
        self.ours.precision.master_weights(self.ours.weights)
        for weight in (self.ours.masters[i], self.weights[i]):
            if weight.grad is not None:
                weight.grad = weight.grad.mul_(2) if self.ours.precision.scaler is None else weight.grad * 2

    @rule(i=st.integers(0, 2), kind=st.sampled_from(BOOLS), flags=st.sampled_from(["", "", "bad", "skipped"]))
    def step(self, i: int, kind: Any, flags: str) -> None:
        is_bad, is_skipped = flags == "bad", flags == "skipped"
        if self.weights[i].grad is not None:
            is_bad |= bool(self.is_bad[i])
            self.ours.precision.step(self.ours.optimizers[i], kind(is_bad), is_skipped=kind(is_skipped))
            self.num_bad += is_bad or not self.weights[i].grad.isfinite().all()
            if not (is_bad or is_skipped):
                self.scalers[i].step(self.optimizers[i])
            self.zero_grad(i)

    @rule(i=st.integers(0, 2), set_to_none=st.booleans())
    def zero_grad(self, i: int, set_to_none: bool = True) -> None:
        self.ours.optimizers[i].zero_grad(set_to_none=set_to_none)
        self.optimizers[i].zero_grad()
        self.scalers[i] = torch.amp.GradScaler("cpu")
        self.is_bad[i] = None

    @invariant()
    def has_the_same_weights(self) -> None:
        assert self.ours.values() == [weight.tolist() for weight in self.weights]
        if self.ours.precision.scaler is not None:
            assert float(self.ours.precision.scaler.scale) == 2.0 ** (16 - self.num_bad)


TestBesideGradScaler = BesideGradScaler.TestCase
TestBesideGradScaler.settings = settings(max_examples=80)


def loading(state: Any) -> Any:
    return lambda loop: loop.precision.load_state_dict(state)


def loading_scaler(scale: float = 2.0, growth_tracker: int = 0) -> Any:
    """The state's other masters may not be loaded either."""
    scaler = {"scale": torch.tensor(scale), "growth_tracker": torch.tensor(growth_tracker)}
    return loading({"scaler": scaler, "masters": [torch.full((1, n), 7.0) for n in (3, 1, 4)]})


def by_hand(loop: Loop) -> Loop:
    loss_of(loop.weights[2]).backward()
    return loop


WRONG: list[tuple[str, Any, str]] = [
    ("fp32", lambda _: Precision("bf16", CPU), "known: use one of fp32, fp16, amp-fp16, amp-bf16"),
    ("fp32", lambda loop: loop.precision.step(loop.optimizers[0], torch.tensor([True, False])), r"\(2,\): .*any"),
    (
        "fp32",
        lambda loop: loop.precision.finish_gradients(loop.optimizers[0], clip_grad_norm=-1),
        "norm=-1: give a num",
    ),
    ("fp32", lambda _: LossScaler("cpu", init_scale=0), "init_scale=0: give a number above 0"),
    ("fp32", lambda _: LossScaler("cpu", init_scale=math.inf), "init_scale=inf: give a number above 0"),
    *(("fp32", lambda _, n=n: LossScaler("cpu", growth_interval=n), f"{n} is not a whole number") for n in (True, 0.5)),
    ("fp32", lambda _: LossScaler("cpu", growth_interval=0), "growth_interval=0 is too small: use 1 or more"),
    *(("fp16", lambda loop, p=p: loop.precision.master_weights(p), f"parameters given as {name}: give a list, such")
      for p, name in [(nn.Linear(2, 1), "Linear"), (nn.Sequential(nn.ReLU()), "Sequential"), (None, "NoneType"),
                      ([{"params": []}], "dict"), (torch.ones(3), "Tensor")]),
    *(("fp32", lambda loop, call=call: call(loop.precision, loop.masters), "optimizer given as list: give the opt")
      for call in (Precision.finish_gradients, lambda precision, masters: precision.step(masters, False))),
    ("amp-fp16", lambda loop: loop.precision.step(SGD([*loop.masters, *map(nn.Parameter, torch.ones(2, 3))]), False),
     "are no master weights"),
    *(("fp16", lambda loop, call=call: call(by_hand(loop)), r"half .* without a scale: call precision.backward\(loss\)")
      for call in (lambda loop: loop.finish(2), lambda loop: loop.backward(2),
                   lambda loop: loop.precision.step(loop.optimizers[2], False))),
    ("fp32", lambda _: LossScaler("gpu"), "device 'gpu' is not known: use 'cpu'"),
    (
        "fp16",
        lambda loop: loop.precision.step(
            SGD([{"params": p} for p in (loop.weights[1:], loop.masters[:1], nn.Parameter(torch.ones(2)))]), False
        ),
        r"float16 parameters: .*master_weights\(",
    ),
    ("fp32", loading([]), "state given as list: give the result of state_dict"),
    *(("fp16", loading_scaler(scale), f"scale={scale}: give a number above 0")
      for scale in (math.nan, math.inf, -1.0, 0.0)),
    ("fp16", loading_scaler(growth_tracker=-1), "growth_tracker=-1 is too small: use 0"),
    ("amp-fp16", loading({}), r"\['scaler'\]\['scale'\] is missing, but a tensor \(\) in precision amp-fp16"),
    ("amp-fp16", loading({"scale": 3}), r"\['scaler'\]\['scale'\] is missing"),
    ("amp-fp16", loading(torch.amp.GradScaler("cpu").state_dict()), r"\['scaler'\]\['scale'\] is missing"),
    ("amp-bf16", loading(Loop("amp-fp16").precision.state_dict()), r"\['scale'\] is a tensor \(\), but missing"),
    ("amp-fp16", loading(Loop("fp16").precision.state_dict()), r"\['masters'\]\[0\] is a tensor \(1, 3\), but missing"),
    (
        "fp16",
        loading(Loop("fp16", 3, 2, 4).precision.state_dict()),
        r"\[1\] is a tensor \(1, 2\), but a tensor \(1, 1\)",
    ),
    (
        "fp16",
        loading(Loop("fp16", 3, 1).precision.state_dict()),
        r"\['masters'\]\[2\] is missing, .*after master_weights",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "call", "words"), WRONG)
def test_wrong_arguments_are_refused_and_change_nothing(mode: str, call: Any, words: str) -> None:
    loop = Loop(mode)
    loop.backward(0)
    before = repr((loop.values(), loop.precision.state_dict()))
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        call(loop)
    assert repr((loop.values(), loop.precision.state_dict())) == before


@pytest.mark.parametrize("mode", PRECISIONS)
def test_gradients_after_zero_grad_are_of_a_new_step(mode: str) -> None:
    """DDP uses the same tensor again, a view of its bucket. Without a scale, a plain pass makes a new one."""
    loop = Loop(mode)
    weight, master = loop.weights[0], loop.masters[0]
    loop.optimizers[0].add_param_group({"params": loop.masters[1:2]})
    for which in (1, 0, 0):
        loop.backward(which)
        loop.finish(0)
        assert loop.masters[1].grad is not None
        if which == 0:
            assert (master.grad * 512).tolist() == [[1.0, 2.0, 3.0]]
        loop.optimizers[0].zero_grad(set_to_none=False)
    loop.optimizers[0].zero_grad()
    loop.backward(0)
    loop.finish(0)
    view = master.grad
    loop.optimizers[0].zero_grad()
    (gradient,) = torch.autograd.grad(loop.precision.scale(loss_of(weight)), weight)
    master.grad = view.copy_(gradient)
    loop.finish(0)
    assert (master.grad * 512).tolist() == [[1.0, 2.0, 3.0]]
    loop.precision.step(loop.optimizers[0], False)
    master.grad = gradient.float()
    if loop.precision.scaler is not None:
        with pytest.raises(RuntimeError, match="gradients have no scale: call pre"):
            loop.finish(0)
        assert loop.precision.scale(torch.tensor(1.0)) == 2.0**16
    loop.finish(0)
    assert (master.grad * 512).tolist() == [[1.0, 2.0, 3.0]]
    loop.optimizers[0].zero_grad()
    if loop.precision.scaler is None:
        loss_of(weight).backward()
        loop.finish(0)


@pytest.mark.parametrize("mode", ["fp16", "amp-fp16"])
@pytest.mark.parametrize("num_later", [0, 1, 2])
def test_scale_of_another_optimizers_step_is_followed(mode: str, num_later: int) -> None:
    loop = Loop(mode, 3, 1, 4, 2)
    loop.optimizers[0].add_param_group({"params": loop.masters[3:]})
    loop.backward(0)
    loop.backward(3)
    loop.backward(1, math.inf)
    loop.precision.step(loop.optimizers[1], loop.finish(1))
    loop.backward(2)
    loop.finish(2)  # and its gradients stay
    for _ in range(num_later):
        loop.backward(0)
    loop.finish(0)
    assert loop.precision.scaler.scale == 2.0**15
    assert (loop.masters[0].grad * 512).tolist() == [[n * (1.0 + num_later) for n in (1, 2, 3)]]
    assert (loop.masters[3].grad * 512).tolist() == [[1, 2]], "which the later passes do not reach"
    assert (loop.masters[2].grad * 512).tolist() == [[1, 2, 3, 4]]
    loop.masters[2].grad[0, 0] = 0
    with pytest.raises(RuntimeError, match="added to finished gradients"):  # also to the last of several
        loop.backward(2)


@pytest.mark.parametrize("mode", PRECISIONS)
def test_step_without_gradients_keeps_the_scale(mode: str) -> None:
    loop = Loop(mode)
    for which in (1, 0, 2):
        if loop.precision.scaler is not None:
            loop.precision.scaler.growth_interval = 2
        loop.precision.step(loop.optimizers[which], loop.finish(which))
        loop.precision.step(loop.optimizers[which], False)
    if loop.precision.scaler is not None:
        assert (float(loop.precision.scaler.scale), int(loop.precision.scaler.growth_tracker)) == (2.0**16, 0)


def pickled(item: Any) -> Any:
    return pickle.loads(pickle.dumps(item))


@pytest.mark.parametrize("copied", [lambda loop: loop, copy.deepcopy, pickled])
def test_weights_loaded_into_the_model_are_trained(copied: Any) -> None:
    """Weights that were not loaded keep the bits that the model has not; a copy is made between finish and step."""
    loop = Loop("fp16")
    loop.masters[2].data.add_(2.0**-20)
    loop.precision.masters_to_model()
    kept = loop.masters[2].tolist()
    loop.backward(0)
    loop.finish(0)
    loop.optimizers = loop.optimizers[:1]
    loop = copied(loop)
    with torch.no_grad():
        for _ in range(2):
            loop.weights[1].copy_(torch.tensor([[3.0]]))
        loop.weights[0].copy_(torch.tensor([[2.0, 4.0, 6.0]]))
        loop.weights[2].add_(0)
    assert loop.precision.state_dict()["masters"][1].tolist() == [[3.0]]
    loop.optimizers[0].zero_grad()
    loop.backward(0)
    loop.precision.step(loop.optimizers[0], loop.finish(0))
    expected = [[2.0 - 0.5 / 512, 4.0 - 1 / 512, 6.0 - 1.5 / 512]]
    assert loop.values() == [expected, [[3.0]], kept]
    assert loop.weights[0].tolist() == torch.tensor(expected).half().tolist()
    assert kept != loop.weights[2].tolist()


def test_step_reads_no_value_from_the_device() -> None:
    """The optimizer is fused. Simulated tensors have no value to read, whatever the optimizer."""
    loop = Loop("amp-fp16")
    with Reads() as reads:
        loop.backward(1)
        loop.precision.step(loop.optimizers[1], loop.finish(1))
    assert reads.num_reads == 0
    assert not hasattr(loop.optimizers[1], "found_inf"), "a step of the caller's own would be skipped"
    with FakeTensorMode():
        loop = Loop("fp16")
        loop.backward(2)
        loop.precision.step(loop.optimizers[2], torch.tensor(True))


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
    scaler = LossScaler("cpu", init_scale=8.0, growth_interval=3)
    scales = []
    for is_bad in (1.0, 0.0, 0.0, 0.0, 0.0):
        scaler.update(torch.tensor(is_bad))
        scales.append(float(scaler.scale))
    assert scales == [4.0, 4.0, 4.0, 8.0, 8.0]
    assert int(scaler.growth_tracker) == 1


def test_micro_batch_gradients_are_added_in_fp32() -> None:
    precision = Precision("fp16", CPU)
    model = precision.prepare(nn.ParameterList(torch.ones(1) for _ in range(130)))
    masters = precision.master_weights(model.parameters())
    for value in (2048.0, 1.0, 1.0):
        for weight in model:
            weight.grad = torch.full((1,), value, dtype=torch.float16)
        precision.gradients_to_master()
    assert {float(master.grad) for master in masters} == {2050.0}  # in half, 2048 + 1 is 2048


def test_own_half_loop_with_clipping_follows_float64() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 1))
    truth = copy.deepcopy(net).double()
    start = [p.detach().clone() for p in truth.parameters()]
    precision = Precision("fp16", "cpu")
    model = precision.prepare(convert_sync_batchnorm(net))
    place_stages(model, {"1": "cpu"}, output_device="cpu")
    masters = precision.master_weights(model.parameters())
    groups = [{"params": masters[:2]}, {"params": masters[2:]}]
    optimizers = [torch.optim.SGD(each, lr=0.5, momentum=0.9) for each in (groups, truth.parameters())]
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
    loop, other = Loop("fp16"), Loop("fp16")
    for is_bad in (True, torch.tensor(0.0)):
        loop.precision.scaler.update(is_bad)
    state = loop.precision.state_dict()
    other.precision.load_state_dict(state)
    assert (float(other.precision.scaler.scale), int(other.precision.scaler.growth_tracker)) == (2.0**15, 1)
    assert other.values() == loop.values() == [master.tolist() for master in state["masters"]]
    again = loop.precision.master_weights([*reversed(loop.weights), loop.weights[1]])
    assert list(map(id, again)) == list(map(id, [*reversed(loop.masters), loop.masters[1]]))
    assert len(loop.precision.state_dict()["masters"]) == 3, "one of each half parameter"
