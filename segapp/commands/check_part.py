"""`segapp check-part`: test custom components in the same way as a training uses them."""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from segapp.accelerator import GPUS
from segapp.assembly.data import build_transform, image_sizes_of
from segapp.assembly.own_parts import own_criterion, own_optimizer, own_schedule
from segapp.assembly.pairs import build_pixels, build_scheme, own_data, split_names
from segapp.config import DataConfig, LossTerm, OptimConfig, RunConfig, ScheduleConfig
from segapp.config.trust import named_code
from segapp.custom.loading import shown_error
from segapp.custom.trust import NamedCode, accept_code
from segapp.errors import ConfigError, DataError, SegappError, accepted_words
from segapp.losses import PlainCriterion, surrogate
from segapp.models import build_model
from segapp.models.inspection import probabilities_problem
from segapp.run.words import printable

NUM_CLASSES, IGNORED = 3, 255
Checks = Iterator[tuple[str, bool]]
"""A statement about a component, and whether it is true; a check may also raise."""


def _reloaded(state: Any) -> Any:
    torch.save(state, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def _on_gpus(module: nn.Module, run: Callable[[Any, str], Tensor]) -> Checks:
    for kind in (gpu.kind for gpu in GPUS if gpu.is_available()):
        yield f"a copy computes on {kind}", run(copy.deepcopy(module).to(kind), kind).device.type == kind


def _loss_checks(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Checks:
    criterion = own_criterion(LossTerm(name=name, options=dict(options)), NUM_CLASSES, IGNORED, None)
    logits = torch.randn(4, NUM_CLASSES, 8, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.arange(4 * 16 * 24).remainder(NUM_CLASSES).view(4, 16, 24).to(torch.uint8)
    target[0, :9], target[3, :, 5:] = IGNORED, IGNORED

    def whole(of: Tensor = target, times: int = 1) -> list[Tensor]:
        value = criterion((logits.repeat(times, 1, 1, 1),), of.repeat(times, 1, 1))
        return [value.detach(), *torch.autograd.grad(value, logits)]

    loss, gradient = whole()
    yield "loss and gradient are finite", all(bool(each.isfinite().all()) for each in whole())
    yield "it is a mean: images that are given twice do not double it", bool(whole(times=2)[0] < 1.9 * loss.abs())
    yield "it repeats its result", torch.equal(whole()[1], gradient)
    nothing = whole(torch.full_like(target, IGNORED))
    yield "without a valid pixel, loss and gradient are 0", not any(each.any() for each in nothing)
    parts = [criterion.statistics((logits[a:b],), target[a:b]) for a, b in ((0, 1), (1, 4))]
    agrees = not criterion.is_linear or torch.equal(criterion.target_statistics(target[:1])[-1], parts[0][-1])
    yield "num_statistics and target_statistics agree", agrees and len(parts[0]) == criterion.num_statistics
    if not isinstance(criterion, PlainCriterion):  # of which a training says that it is exact for a mean only
        totals = tuple(sum(entries[1:], entries[0]) for entries in zip(*parts, strict=True))
        (divided,) = torch.autograd.grad([surrogate(criterion, part, totals, average=False) for part in parts], logits)
        pairs = ((criterion.finalize(totals).detach(), loss), (divided, gradient))
        gap = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)
        yield f"a divided step gives the same loss and gradient (off by {gap:.0e})", gap < 1e-4
    yield from _on_gpus(criterion, lambda own, device: own((logits.detach().to(device),), target.to(device)))


def _model_checks(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Checks:
    num_bands = len(config.data.bands or "rgb") if config is not None else 3
    model, other = (build_model("python", name, NUM_CLASSES, in_channels=num_bands, options=options) for _ in range(2))
    sizes_px = [model.suitable_size(64, 96), *([config.data.crop_px] if config and config.data.crop_px else [])]
    images = torch.randn(4, num_bands, *sizes_px[0], generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def logits(of: Tensor = images, network: nn.Module = model) -> Tensor:
        found: Tensor = network.eval()(of)[0]
        return found

    for height, width in sizes_px:
        yield f"it takes images of {height}x{width} px", bool(logits(torch.zeros(1, num_bands, height, width)).numel())
    whole = logits()
    yield "logits are finite", bool(whole.isfinite().all())
    yield "it returns logits, not probabilities", probabilities_problem(whole, logits(1000 * images)) is None
    yield "evaluation draws no random numbers", torch.equal(logits(), whole)
    apart = torch.cat([logits(each[None]) for each in images])
    yield "images do not depend on the others in their batch", torch.allclose(apart, whole, rtol=1e-3, atol=1e-4)
    other.load_state_dict(_reloaded(model.state_dict()))
    yield "its state can be saved and loaded (parameters and buffers)", torch.equal(logits(network=other), whole)
    yield from _on_gpus(model, lambda copied, device: logits(images.to(device), copied))


def _data_checks(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Checks:
    if config is None:
        raise ConfigError("data needs the root and the classes of a config: add --config FILE")
    section = config.data.model_copy(update={"format": name, "options": dict(options)})
    train, val = split_names(section)
    data, other = own_data(section, train), own_data(section, val)
    yield "it has images", len(data) > 0
    indices = sorted({0, len(data) // 2, len(data) - 1})
    read = [data.read(index, build_scheme(section), build_pixels(section)) for index in indices]
    yield "images and masks are read as a training reads them", len(read) > 0

    def repeats(source: Any) -> bool:
        pairs = [(data.source.image_and_mask(index), source.image_and_mask(index)) for index in indices]
        return all(np.array_equal(one[part], two[part]) for one, two in pairs for part in (0, 1))

    yield "it repeats its result: no random numbers are drawn", repeats(data.source)
    if train != val:
        is_other = len(other) != len(data) or not repeats(other.source)
        yield f"the argument `split` chooses the images: {val} has others than {train}", is_other


def _optimizer_checks(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Checks:
    def make() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        weights = [nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(2, 3)), nn.Parameter(torch.ones(3))]
        groups = [{"params": [each], "lr_factor": 1.0, "weight_decay": 0.0} for each in weights]
        return weights, own_optimizer(OptimConfig(name=name, lr=0.01, options=dict(options)), groups)

    def stepped(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
        for each in weights:
            each.grad = each.detach().clone()
        optimizer.step()
        return [each.detach().clone() for each in weights]

    (weights, optimizer), (start, resting), (others, resumed) = make(), make(), make()
    after = stepped(weights, optimizer)
    yield "a step changes the parameters of every group", not any(map(torch.equal, start, after))
    for group in resting.param_groups:
        group["lr"] = 0.0
    yield "it follows the schedule, group['lr']", all(map(torch.equal, others, stepped(start, resting)))
    for theirs, own in zip(others, after, strict=True):
        theirs.data.copy_(own)
    resumed.load_state_dict(_reloaded(optimizer.state_dict()))
    is_same = all(map(torch.equal, stepped(weights, optimizer), stepped(others, resumed)))
    yield "a resumed step is the same: `state` and `param_groups` hold everything", is_same


def _schedule_checks(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Checks:
    factor = own_schedule(ScheduleConfig(name=name, options=dict(options)), total_steps=100, steps_per_epoch=10)
    forward, backward = ([factor(step) for step in steps] for steps in (range(1, 101), range(100, 0, -1)))
    yield "it gives numbers from 0 on that depend only on the step", forward == backward[::-1]


def _transform_checks(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Checks:
    """Check the list of the config that names the transform, or one that only crops before it, as a training does."""
    alone = [{"ScaledCrop": {}}, {name: dict(options)}]
    if config is None:
        data = DataConfig(format="folder", root=".", classes=[f"class {index}" for index in range(NUM_CLASSES)])
        data = data.model_copy(update={"augment": alone})
    else:
        is_named = any(code.name == name for code in named_code(config, ["data.augment"]).values())
        data = config.data if is_named else config.data.model_copy(update={"augment": alone})
    sizes_px: list[tuple[int, int]] = []
    if config is not None:
        with contextlib.suppress(DataError, OSError):  # the images are not here
            sizes_px = image_sizes_of(data, split_names(data)[0])
    height, width = data.crop_px
    sizes_px = sizes_px or [(5 * height // 4, 3 * width // 2), (5 * height // 4, 5 * width // 2), (3 * height, width)]
    build_transform(data, build_scheme(data), sizes_px)
    yield f"types, class ids, size, and one result for each seed, in crops of {height}x{width} px", True


CHECKS: Mapping[str, Callable[[str, Mapping[str, Any], RunConfig | None], Checks]] = {
    "model": _model_checks, "loss": _loss_checks, "data": _data_checks, "optim": _optimizer_checks,
    "schedule": _schedule_checks, "transform": _transform_checks,
}  # fmt: skip
"""Kind of a custom component -> its checks, given its name, its options, and the config if there is one."""


def check_part(name: str | None, kind: str | None, config: RunConfig | None) -> int:
    """Check a custom component, or all of a config; return 0, or 2 if a check failed; ConfigError if none is named."""
    if kind is not None and kind not in CHECKS:
        raise ConfigError(f"--as {kind} is not known: {accepted_words(kind, CHECKS)}")
    named = {} if config is None else named_code(config)
    kinds = {key: "transform" if key.startswith("data.augment") else key.partition(".")[0] for key in named}
    chosen = [
        (code.name, kinds[key], code.options)
        for key, code in named.items()
        if name in (None, code.name) and kind in (None, kinds[key])
    ]
    if name is not None and kind is not None and not chosen:
        chosen = [(name, kind, {})]
    if not chosen:
        raise ConfigError(f"give MODULE:FACTORY with its kind, --as {'|'.join(CHECKS)}, or --config FILE that names it")
    # The name on the command line is the consent to run the code.
    if name is not None:
        accept_code([NamedCode(part, options) for part, _, options in chosen])
    return max(_check(*each, config) for each in chosen)


def _check(name: str, kind: str, options: Mapping[str, Any], config: RunConfig | None) -> int:
    """Print the results of a component's checks up to the first that fails."""
    print(f"{printable(name)} as {kind}", flush=True)
    try:
        for what, is_so in CHECKS[kind](name, options, config):
            print(f"  {'ok    ' if is_so else 'FAILED'} {what}", flush=True)
            if not is_so:
                return ConfigError.exit_code
    except Exception as error:
        problem = str(error) if isinstance(error, SegappError) else f"fails with {shown_error(error)}: correct it"
        print("  FAILED", "\n         ".join(printable(line.strip()) for line in problem.splitlines()), flush=True)
        return ConfigError.exit_code
    return 0
