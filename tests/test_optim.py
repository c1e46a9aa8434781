"""Learning rates, parameter groups, skipped steps of the fused optimizers, and the weight average."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as lrs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from segapp.assembly.optimizer import build_optimizer, build_plateau, build_schedule
from segapp.config import OptimConfig, ScheduleConfig
from segapp.optim import WeightAverage, set_lr


def rate(step: int, **schedule: object) -> float:
    return build_schedule(ScheduleConfig.model_validate(schedule), 0.1, total_steps=100, steps_per_epoch=10)(step)


@pytest.mark.parametrize(
    ("step", "schedule", "expected"),
    [
        (101, {"name": "poly", "min_lr": 0.02}, 0.02),
        (101, {"name": "cosine", "min_lr": 0.01}, 0.01),
        (100, {"name": "wsd", "min_lr": 0.02}, 0.02 + 0.08 * 0.05),
        (51, {"name": "wsd", "min_lr": 0.02, "options": {"decay_ratio": 1.0}}, 0.06),
        (3, {"name": "constant", "warmup_steps": "4%"}, 0.05005),  # of 100 steps
    ],
)
def test_learning_rates_by_hand(step, schedule, expected):
    assert rate(step, **schedule) == pytest.approx(expected, rel=1e-12)


def rates(scheduler_of: Callable[[Optimizer], LRScheduler], lr: float, num_steps: int) -> list[float]:
    """Return the learning rate of every step of a training with one of torch's schedulers."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, found = scheduler_of(optimizer), []
    for step in range(1, num_steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < num_steps:
            scheduler.step()
    return found


@dataclass(frozen=True)
class Training:
    """A drawn training, and the warm-up of its schedule."""

    lr: float
    num_steps: int
    steps_per_epoch: int
    warmup: dict[str, Any]

    def assert_rates(self, expected: list[float], **schedule: Any) -> None:
        """Compare every step's rate with torch's, times the factor of torch's LinearLR during a warm-up."""
        warmup_steps = self.warmup.get("warmup_steps", 0)
        factor = 0.001 if warmup_steps else 1.0
        factors = rates(lambda o: lrs.LinearLR(o, factor, 1.0, max(warmup_steps, 1)), 1.0, self.num_steps)
        section = ScheduleConfig.model_validate({**schedule, **self.warmup})
        rate_at = build_schedule(section, self.lr, total_steps=self.num_steps, steps_per_epoch=self.steps_per_epoch)
        for step, (rate, of_warmup) in enumerate(zip(expected, factors, strict=True), start=1):
            assert rate_at(step) == pytest.approx(rate * of_warmup, rel=1e-8, abs=1e-10 * self.lr), step


trainings = st.builds(
    Training,
    st.floats(1e-5, 10.0),
    st.integers(1, 200),
    st.integers(1, 50),
    st.just({}) | st.fixed_dictionaries({"warmup_steps": st.integers(1, 220)}),
)
drawn = settings(max_examples=40)


@drawn
@given(trainings, st.floats(0.1, 4.0), st.floats(0.0, 1.0))
def test_poly_equals_torchs_scheduler(training, power, floor):
    """torch's ends at 0: ours is torch's over lr - min_lr, and min_lr."""
    low = floor * training.lr
    theirs = rates(lambda o: lrs.PolynomialLR(o, training.num_steps, power), training.lr - low, training.num_steps)
    training.assert_rates([low + rate for rate in theirs], name="poly", power=power, min_lr=low)


@drawn
@given(trainings, st.floats(0.0, 1.0))
def test_cosine_equals_torchs_scheduler(training, floor):
    low = floor * training.lr
    theirs = rates(lambda o: lrs.CosineAnnealingLR(o, training.num_steps, low), training.lr, training.num_steps)
    training.assert_rates(theirs, name="cosine", min_lr=low)


@drawn
@given(trainings, *[st.lists(st.integers(1, most), max_size=4) for most in (20, 150)], st.floats(0.05, 2.0))
def test_step_equals_torchs_scheduler(training, epochs, steps, gamma):
    milestones = [*(epoch * training.steps_per_epoch for epoch in epochs), *steps]
    theirs = rates(lambda o: lrs.MultiStepLR(o, sorted(milestones), gamma), training.lr, training.num_steps)
    training.assert_rates(theirs, name="step", options={"epochs": epochs, "steps": steps, "gamma": gamma})


@drawn
@given(trainings)
def test_one_cycle_equals_torchs_scheduler(training):
    theirs = rates(
        lambda o: lrs.OneCycleLR(o, training.lr, training.num_steps, cycle_momentum=False),
        training.lr,
        training.num_steps,
    )
    training.assert_rates(theirs, name="onecycle")


@drawn
@given(trainings, st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.sampled_from(["linear", "sqrt", "cosine"]))
def test_wsd_equals_torchs_schedulers_in_sequence(training, decay_ratio, floor, decay_type):
    low, num_decay = floor * training.lr, round(decay_ratio * training.num_steps)

    def in_sequence(optimizer: Optimizer) -> LRScheduler:
        decay: LRScheduler = lrs.LinearLR(optimizer, 1.0, floor, max(num_decay, 1))
        if decay_type == "cosine":
            decay = lrs.CosineAnnealingLR(optimizer, max(num_decay, 1), low)
        if decay_type == "sqrt":
            decay = lrs.LambdaLR(optimizer, lambda n: floor + (1 - floor) * (1 - (n / num_decay) ** 0.5))
        stable = lrs.ConstantLR(optimizer, 1.0)
        return lrs.SequentialLR(optimizer, [stable, decay], [training.num_steps - num_decay])

    theirs = [training.lr] * training.num_steps
    if 0 < num_decay < training.num_steps:
        theirs = rates(in_sequence, training.lr, training.num_steps)
    elif num_decay:
        return  # SequentialLR takes no stage without a step; the table has this case
    options = {"decay_ratio": decay_ratio, "decay_type": decay_type}
    training.assert_rates(theirs, name="wsd", min_lr=low, options=options)


@drawn
@given(
    st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]) | st.floats(-2.0, 2.0), min_size=1, max_size=80),
    st.booleans(),
    st.integers(0, 4),
    st.tuples(st.floats(0.05, 0.95), st.floats(0.0, 1.0)),
)
def test_plateau_equals_torchs_scheduler_and_resumes(values, larger_is_better, patience, numbers):
    """torch leaves out reductions by less than eps; ours has none."""
    gamma, low = numbers[0], 0.1 * numbers[1]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    mode = "max" if larger_is_better else "min"
    scheduler = lrs.ReduceLROnPlateau(optimizer, mode, gamma, patience, min_lr=low, eps=0.0)
    section = ScheduleConfig(name="plateau", options={"gamma": gamma, "patience": patience}, min_lr=low)
    plateau = build_plateau(section, 0.1, larger_is_better=larger_is_better)
    for value in values:
        again = build_plateau(section, 0.1, larger_is_better=larger_is_better)
        assert plateau is not None
        assert again is not None
        again.load_state_dict(plateau.state_dict())
        plateau = again
        before = optimizer.param_groups[0]["lr"]
        scheduler.step(value)
        has_fallen = plateau.observe(value)
        assert 0.1 * plateau.factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        assert has_fallen == (optimizer.param_groups[0]["lr"] < before)


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))


KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
gradients = st.lists(st.sampled_from(["good"] * 4 + ["bad"]), min_size=1, max_size=25)
groups_of = st.lists(st.tuples(st.sampled_from([1.0, 0.1, 10.0]), st.sampled_from([0.0, 0.01])), min_size=1, max_size=3)


@settings(max_examples=40)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from([0.0, 0.9]), st.booleans(), gradients, groups_of)
def test_training_equals_torchs_optimizer_and_schedule(name, beta, nesterov, steps, factors):
    """In float64, with torch's loop over tensors; a step with bad gradients changes nothing, but the rate goes on."""
    generator = torch.Generator().manual_seed(len(steps))
    start = [torch.randn(5, dtype=torch.float64, generator=generator) for _ in factors]
    ours, theirs = ([nn.Parameter(each.clone()) for each in start] for _ in range(2))
    options: dict[str, Any] = {"nesterov": nesterov and beta > 0} if name == "sgd" else {"betas": (beta, 0.99)}
    section = OptimConfig(name=name, lr=0.01, momentum=beta, options=options)
    keys = [{"lr_factor": factor, "weight_decay": decay} for factor, decay in factors]
    optimizer = build_optimizer(section, [{"params": [each], **key} for each, key in zip(ours, keys, strict=True)])
    own = {"momentum": beta, **options} if name == "sgd" else options
    groups = [
        {"params": [each], "lr": 0.01 * factor, "weight_decay": decay}
        for each, (factor, decay) in zip(theirs, factors, strict=True)
    ]
    plain = KINDS[name](groups, **own, foreach=False)
    scheduler = lrs.PolynomialLR(plain, len(steps), 0.9)
    rate_at = build_schedule(ScheduleConfig(name="poly", power=0.9), 0.01, total_steps=len(steps), steps_per_epoch=1)
    for step, kind in enumerate(steps, start=1):
        for mine, other in zip(ours, theirs, strict=True):
            gradient = torch.randn(5, dtype=torch.float64, generator=generator)
            mine.grad, other.grad = (gradient, gradient) if kind == "good" else (gradient * math.nan, None)
        set_lr(optimizer, rate_at(step))
        optimizer.found_inf = torch.tensor(float(kind == "bad"))
        optimizer.step()
        plain.step()
        scheduler.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_average_follows_the_formula_and_ignores_a_bad_step():
    model = small_model()
    average = WeightAverage(model, 0.9)
    by_hand = model[0].weight.detach().clone()
    statistics = model[1].running_mean.clone()
    for update in range(1, 30):
        with torch.no_grad():
            model[0].weight.add_(1.0)
            model[1].running_mean.add_(0.5)
        average.update(torch.tensor(0.0))
        decay = min(0.9, (1 + update) / (10 + update))
        by_hand = decay * by_hand + (1 - decay) * model[0].weight.detach()
        statistics = decay * statistics + (1 - decay) * model[1].running_mean
    torch.testing.assert_close(average.module[0].weight, by_hand)
    torch.testing.assert_close(average.module[1].running_mean, statistics)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    average.update(torch.tensor(1.0))
    torch.testing.assert_close(average.module[0].weight, by_hand)
    other = WeightAverage(small_model(), 0.9)
    other.load_state_dict(average.state_dict())
    assert other.num_updates == average.num_updates
    torch.testing.assert_close(other.module[0].weight, by_hand)
