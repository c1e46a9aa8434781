"""Build the custom components that a config names, and check all of them before a training."""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segapp.checkpoint.training_state import LoadedCheckpoint
from segapp.config import LossTerm, OptimConfig, RunConfig, ScheduleConfig, component_names
from segapp.config.trust import named_code
from segapp.custom.loading import ARGUMENTS, Loss, Schedule, build_part, load_part, option_problems, takes
from segapp.custom.names import is_component, split_name
from segapp.custom.sources import Sources, kept_sources
from segapp.custom.trust import accepted_sources
from segapp.errors import ConfigError, SegappError
from segapp.losses import AdditiveCriterion, PlainCriterion
from segapp.run.folder import run_of_file


def check_parts(config: RunConfig) -> None:
    """Import the custom components of a config and check their options; raise one ConfigError for all problems."""
    problems: list[SegappError] = []
    for key, code in named_code(config).items():
        section = key.partition(".")[0]
        try:
            factory = load_part(code.name, key)
        except ConfigError as error:
            problems.append(error)
            continue
        if key.startswith("data.augment"):  # a transform, whose options are checked where it is made
            continue
        where = f"{key.rpartition('.')[0]}.options"
        wrong = option_problems(code.name, factory, where, code.options, *ARGUMENTS[section])
        problems += [ConfigError(problem, key=where, value=dict(code.options)) for problem in wrong]
    if problems:
        raise ConfigError.together(problems, f"{len(problems)} problems in custom components:")


def fp32_part(config: RunConfig) -> str | None:
    """Return the custom model or loss whose factory has the attribute `precision = "fp32"`; None if none has."""
    computing = {key: name for key, name in component_names(config).items() if key.startswith(("model.", "loss."))}
    wanted = (name for key, name in computing.items() if getattr(load_part(name, key), "precision", None) == "fp32")
    return next(wanted, None)


def part_hashes(config: RunConfig) -> dict[str, str]:
    """Return name -> SHA-256 of the sources of each custom component that is not of an installed package."""
    sources = {name: accepted_sources(name) for name in component_names(config).values()}
    return {name: each.sha256 for name, each in sources.items() if each is not None}


def changed_parts(saved: Any, config: RunConfig) -> list[str]:
    """Return a sentence for each custom component whose source has changed since the checkpoint was saved."""
    known = saved if isinstance(saved, Mapping) else {}
    return [
        f"{name}: its source has changed since the checkpoint was saved; RUN/parts keeps the former one"
        for name, value in part_hashes(config).items()
        if known.get(name, value) != value
    ]


def copied_parts(
    checkpoint: LoadedCheckpoint, config: RunConfig, uses: Sequence[str]
) -> tuple[dict[str, Sources], list[str]]:
    """Return the copies of components, by name, with which the run of a checkpoint trained, and notes.

    A note says that the user's file differs from the copy, or that it is used because the run has no intact copy.

    Raises:
        ConfigError: there is neither a copy nor the user's file.
    """
    known, run = checkpoint.state.get("parts"), run_of_file(checkpoint.path)
    copies, notes = dict[str, Sources](), list[str]()
    for key, code in named_code(config, uses).items():
        sha256 = known.get(code.name) if isinstance(known, Mapping) else None
        if sha256 is None:  # installed code
            continue
        kept = {} if run is None else kept_sources(code.name, run.parts)
        if sha256 in kept:
            copies[code.name] = kept[sha256]
        is_changed = code.source is not None and (code.sources is None or code.sources.sha256 != sha256)
        if is_changed and code.name in copies:
            notes.append(f"{code.name}: the run's copy is used, and {code.source} has changed since the training")
        elif is_changed:
            notes.append(f"{code.name}: its source has changed since the training, and the run has no intact copy")
        elif code.source is None and code.name not in copies:
            where = split_name(code.name)[0]
            raise ConfigError(
                f"{key} = {code.name}: {where} is not here, and the run has no intact copy of it: copy the file to the "
                "current folder",
                key=key,
                value=code.name,
            )
    return copies, notes


def _wrong_kind(key: str, name: str, component: object, wanted: str) -> ConfigError:
    return ConfigError(f"{key} = {name} made a {type(component).__name__}: return {wanted}", key=key, value=name)


def own_criterion(
    term: LossTerm, num_classes: int, ignore_index: int, weight: Tensor | None, **upsampling: Any
) -> AdditiveCriterion:
    """Return the criterion of a custom loss; a loss that is no `AdditiveCriterion` is wrapped as a plain one.

    `upsampling` has `align_corners` and `aux_weight`, if they are not the defaults.

    Raises:
        ConfigError: the loss cannot be made, is no loss, or takes no class weights although the config has some.
    """
    upsampling = {"align_corners": True, "aux_weight": 0.4, **upsampling}
    offered: dict[str, Any] = {"num_classes": num_classes, "ignore_index": ignore_index, **upsampling}
    if weight is not None:
        if not takes(load_part(term.name, "loss.name"), "weight"):
            raise ConfigError(
                f"loss.class_weights: {term.name} takes no argument `weight`: leave them out", key="loss.class_weights"
            )
        offered["weight"] = weight
    loss: Loss | AdditiveCriterion = build_part(term.name, "loss.name", term.options, offered=offered)
    if isinstance(loss, AdditiveCriterion):
        return loss
    if not callable(loss):
        wanted = "a function of (logits, target), or an AdditiveCriterion"
        raise _wrong_kind("loss.name", term.name, loss, wanted)
    if isinstance(loss, torch.nn.Module):  # no optimizer updates its parameters, and others may use the module too
        loss = copy.deepcopy(loss).requires_grad_(False)
    return PlainCriterion(loss, ignore_index=ignore_index, **upsampling)


def plain_loss_note(config: RunConfig, criterion: AdditiveCriterion) -> str | None:
    """Return a note on how exact the plain losses of a criterion are; None if it has none."""
    if not any(isinstance(part, PlainCriterion) for part in criterion.modules()):
        return None
    names = ", ".join(term.name for term in (config.loss, *config.loss.plus) if is_component(term.name))
    return (
        f"{names}: a plain loss, computed at full resolution; it is exact on one device without train.accumulate. "
        "Divided over devices or micro-batches, the step takes the mean of the parts weighted by valid pixels, which "
        "equals the whole only for a mean over valid pixels (segapp check-part tells)"
    )


def own_optimizer(section: OptimConfig, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimizer that a custom factory makes from parameter groups and, if it has that parameter, `lr`.

    Raises:
        ConfigError: the factory fails, returns no optimizer, or returns one that needs a closure.
    """
    own = [dict(group) for group in groups]
    optimizer = build_part(section.name, "optim.name", section.options, own, offered={"lr": section.lr})
    if not isinstance(optimizer, torch.optim.Optimizer):
        wanted = "a torch.optim.Optimizer over the parameter groups that it is given"
        raise _wrong_kind("optim.name", section.name, optimizer, wanted)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"optim.name = {section.name}: step() needs a closure, which segapp does not pass: use another optimizer",
            key="optim.name",
            value=section.name,
        )
    return optimizer


def own_schedule(section: ScheduleConfig, *, total_steps: int, steps_per_epoch: int) -> Schedule:
    """Return the learning-rate factor of a custom schedule at each step, from 1.

    Its factory gets the two numbers if it has parameters with these names.

    Raises:
        ConfigError: the factory fails, or the schedule returns something else than a nonnegative number.
    """
    offered = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    schedule: Schedule = build_part(section.name, "schedule.name", section.options, offered=offered)
    if not callable(schedule):
        wanted = "a function of the step, from 1, that gives a factor on optim.lr"
        raise _wrong_kind("schedule.name", section.name, schedule, wanted)

    def factor(step: int, /) -> float:
        value = schedule(step)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError(
                f"schedule.name = {section.name} gave {value!r} at step {step}: give a number from 0 on",
                key="schedule.name",
                value=section.name,
            )
        return float(value)

    factor(1)
    return factor
