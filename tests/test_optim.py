"""Learning rates, parameter groups, skipped steps of the fused optimizers, and the weight average."""

import math

import pytest
import torch
from torch import nn

from segapp.build.optimizer import build_optimizer, build_plateau, build_schedule
from segapp.config import OptimConfig, ScheduleConfig
from segapp.optim import WeightAverage, lr_at


def rate(step: int, **schedule: object) -> float:
    curve = build_schedule(ScheduleConfig.model_validate(schedule))
    return lr_at(step, curve, lr=0.1, total_steps=100, steps_per_epoch=10)


@pytest.mark.parametrize(
    ("step", "schedule", "expected"),
    [
        (1, {"name": "constant"}, 0.1),
        (1, {"name": "poly", "power": 0.9}, 0.1),
        (51, {"name": "poly", "power": 0.9}, 0.1 * 0.5**0.9),
        (51, {"name": "poly", "power": 1.0, "min_lr": 0.02}, 0.06),
        (101, {"name": "poly", "min_lr": 0.02}, 0.02),
        (51, {"name": "cosine"}, 0.05),
        (101, {"name": "cosine", "min_lr": 0.01}, 0.01),
        (20, {"name": "step", "step_epochs": [2, 5]}, 0.1),
        (21, {"name": "step", "step_epochs": [2, 5]}, 0.01),
        (51, {"name": "step", "step_epochs": [2, 5]}, 0.001),
        (30, {"name": "step", "step_steps": [30, 60]}, 0.1),
        (61, {"name": "step", "step_steps": [30, 60]}, 0.001),
        (1, {"name": "constant", "warmup_steps": 4, "warmup_factor": 0.2}, 0.02),
        (3, {"name": "constant", "warmup_steps": 4, "warmup_factor": 0.2}, 0.06),
        (5, {"name": "constant", "warmup_steps": 4, "warmup_factor": 0.2}, 0.1),
    ],
)
def test_learning_rates_by_hand(step: int, schedule: dict[str, object], expected: float) -> None:
    assert rate(step, **schedule) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("warmup_steps", [1, 2, 7])
def test_warmup_equals_torchs_linear_lr(warmup_steps: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, warmup_steps)
    for step in range(1, warmup_steps + 4):
        ours = rate(step, name="constant", warmup_steps=warmup_steps, warmup_factor=0.05)
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        theirs.step()


def test_poly_lr_equals_torchs_scheduler() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=100, power=0.9)
    for step in range(1, 101):
        assert rate(step, name="poly", power=0.9) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_cosine_lr_equals_torchs_scheduler() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=0.01)
    for step in range(1, 101):
        assert rate(step, name="cosine", min_lr=0.01) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("total", [1, 3, 7, 100])
@pytest.mark.parametrize("pct_start", [0.3, 0.05])
def test_one_cycle_lr_equals_torchs_scheduler(total: int, pct_start: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    options = {"pct_start": pct_start, "div_factor": 10.0, "final_div_factor": 100.0}
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total, cycle_momentum=False, **options)
    curve = build_schedule(ScheduleConfig(name="onecycle", **options))
    for step in range(1, total + 1):
        ours = lr_at(step, curve, lr=0.1, total_steps=total, steps_per_epoch=10)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        if step < total:
            scheduler.step()


@pytest.mark.parametrize("larger_is_better", [True, False])
def test_plateau_equals_torchs_scheduler_and_resumes(larger_is_better: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "max" if larger_is_better else "min", factor=0.3, patience=2, min_lr=0.002
    )
    section = ScheduleConfig(name="plateau", gamma=0.3, patience=2, min_lr=0.002)
    values = torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64).abs() + 0.5
    plateau = build_plateau(section, 0.1, larger_is_better=larger_is_better)
    for value in [*values.tolist(), math.nan, math.nan, math.nan]:
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
    assert plateau is not None
    assert plateau.factor == pytest.approx(0.02)


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))


@pytest.mark.parametrize(
    "section",
    [
        OptimConfig(lr=0.1),
        OptimConfig(lr=0.1, nesterov=True),
        OptimConfig(name="adamw", lr=0.1),
        OptimConfig(name="adam", lr=0.1),
    ],
)
def test_optimizer_equals_torch_and_bad_step_changes_nothing(section: OptimConfig) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(7)), nn.Parameter(torch.zeros(7))
    theirs.data.copy_(ours.data)
    optimizer = build_optimizer(section, [{"params": [ours], "lr_factor": 1.0, "weight_decay": 0.01}])
    if section.name == "sgd":
        plain: torch.optim.Optimizer = torch.optim.SGD(
            [theirs], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=section.nesterov, foreach=False
        )
    else:
        kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
        plain = kind([theirs], lr=0.1, weight_decay=0.01, foreach=False)
    for step in range(6):
        gradient = torch.randn(7)
        is_bad = step in (0, 3)
        ours.grad = gradient * math.nan if is_bad else gradient.clone()
        optimizer.found_inf = torch.tensor(float(is_bad))  # type: ignore[attr-defined]
        optimizer.step()
        if not is_bad:
            theirs.grad = gradient
            plain.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_average_follows_the_formula_and_ignores_a_bad_step() -> None:
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


def test_average_without_warmup_equals_torchs_averaged_model() -> None:
    torch.manual_seed(0)
    model = small_model().double()
    average = WeightAverage(model, 0.9, has_warmup=False)
    theirs = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    theirs.update_parameters(model)  # the first call copies
    for _ in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update(torch.tensor(0.0))
        theirs.update_parameters(model)
    for ours, wanted in zip(average.module.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-6, atol=1e-7)


def test_average_state_survives_a_checkpoint() -> None:
    model = small_model()
    average = WeightAverage(model, 0.9)
    average.update(torch.tensor(0.0))
    other = WeightAverage(small_model(), 0.9)
    other.load_state_dict(average.state_dict())
    assert other.num_updates == 1
    for a, b in zip(average.module.state_dict().values(), other.module.state_dict().values(), strict=True):
        assert torch.equal(a, b)
