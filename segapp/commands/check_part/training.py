"""Checks of own optimizers and schedules."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from segapp.build.own_parts import own_optimizer, own_schedule
from segapp.commands.check_part.checks import Check, tried
from segapp.config import OptimConfig, ScheduleConfig
from segapp.custom.contracts import Schedule

_STEPS = 100


def make_optimizer(name: str, options: Mapping[str, Any]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Return two parameters, and the optimizer over them."""
    weights = [nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(2, 3)), nn.Parameter(torch.ones(3))]
    groups = [{"params": [w], "lr_factor": 1.0, "weight_decay": 0.0} for w in weights]
    return weights, own_optimizer(OptimConfig(name=name, lr=0.01, options=dict(options)), groups)


def checks_of_optimizer(
    made: tuple[list[nn.Parameter], torch.optim.Optimizer], make: Callable[[], Any]
) -> Iterator[Check]:
    """Yield the checks of an optimizer, which `make` makes again."""

    def step(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for weight in weights:
            weight.grad = weight.detach().clone()
        optimizer.step()

    def moves() -> str | None:
        weights, optimizer = made
        before = [weight.detach().clone() for weight in weights]
        step(weights, optimizer)
        changed = all(not torch.equal(a, b) and b.isfinite().all() for a, b in zip(before, weights, strict=True))
        return None if changed else "a step leaves weights as they are: update the parameters of every group"

    def rate() -> str | None:
        weights, optimizer = make()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = [weight.detach().clone() for weight in weights]
        step(weights, optimizer)
        still = all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
        return None if still else "weights move at lr = 0: read group['lr'] in step(), where the schedule sets it"

    def resumes() -> str | None:
        weights, optimizer = made
        other, resumed = make()
        for theirs, own in zip(other, weights, strict=True):
            theirs.data.copy_(own.data)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        step(weights, optimizer)
        step(other, resumed)
        same = all(torch.equal(a, b) for a, b in zip(weights, other, strict=True))
        return None if same else "another step after loading its state: keep all of it in `state` and `param_groups`"

    yield tried("a step changes the weights", moves)
    yield tried("it follows the schedule", rate)
    yield tried("a resumed step is the same", resumes)
    if not getattr(made[1], "_step_supports_amp_scaling", False):
        yield Check("speed", "it waits for the device once a step; fused=True, if it has that, does not", "note")


def make_schedule(name: str, options: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a short run."""
    section = ScheduleConfig(name=name, options=dict(options))
    return own_schedule(section, total_steps=_STEPS, steps_per_epoch=10)


def checks_of_schedule(factor: Schedule) -> Iterator[Check]:
    """Yield the checks of a schedule."""
    steps = range(1, _STEPS + 1)

    def pure() -> str | None:
        forward = [factor(step) for step in steps]
        backward = [factor(step) for step in reversed(steps)][::-1]
        if forward == backward:
            return None
        return "the factor depends on earlier calls: make it a function of the step, or a resumed run differs"

    def numbers() -> str | None:
        for step in steps:
            factor(step)  # raises for anything else
        return None

    yield tried(f"it gives numbers from 0 on at steps 1 to {_STEPS}", numbers)
    yield tried("it is a function of the step alone", pure)
