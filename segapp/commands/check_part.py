"""`segapp check-part`: try own parts as a training uses them, before one does."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from segapp.build.own_parts import own_criterion, own_optimizer, own_schedule
from segapp.build.pairs import own_data, split_names
from segapp.config import DataConfig, LossTerm, OptimConfig, RunConfig, ScheduleConfig, part_names
from segapp.config.parts import part_sections
from segapp.datasets.augment import TrainTransform
from segapp.datasets.augment.probe import check_transform
from segapp.datasets.own_data import OwnData, Pixels
from segapp.errors import ConfigError, SegappError, accepted_words
from segapp.losses import AdditiveCriterion, PlainCriterion, surrogate
from segapp.models import SegmentationModel, build_model
from segapp.parts import is_part
from segapp.parts.contracts import DataSource, Schedule
from segapp.parts.trust import remember_parts
from segapp.run.text import printable

Kind = Literal["model", "loss", "data", "optim", "schedule", "transform"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EXIT_FAILED = 2

NUM_CLASSES, IGNORED = 3, 255
_STEPS = 100


@dataclass(frozen=True)
class Check:
    """Result of one check of a part; `problem` is empty where it holds, and a note says what it costs."""

    what: str
    problem: str = ""
    is_note: bool = False


def check_part(name: str | None, kind: str | None, config: RunConfig | None) -> int:
    """Check one part, or all parts of a config, and print what was found.

    Args:
        name: `package.module:factory`; None: every part of the config.
        kind: what it is; None: as the config says.
        config: gives options, classes and data; None: none.

    Returns:
        0, or 2 if a check failed.

    Raises:
        ConfigError: nothing is named, or it is not known what the part is.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--as {kind} is not known: {accepted_words(kind, KINDS)}")
    is_failed = False
    for part, part_kind, options in _chosen(name, kind, config):
        remember_parts([part])
        print(f"{printable(part)} as {part_kind}")
        for check in _checks(part, part_kind, options, config):
            mark = "note  " if check.is_note else "FAILED" if check.problem else "ok    "
            is_failed = is_failed or mark == "FAILED"
            print(f"  {mark} {check.what}" + (f": {printable(check.problem)}" if check.problem else ""), flush=True)
    return EXIT_FAILED if is_failed else 0


def _chosen(name: str | None, kind: str | None, config: RunConfig | None) -> list[tuple[str, Kind, Mapping[str, Any]]]:
    """Return the parts to check, each with what it is and its options."""
    found: list[tuple[str, Kind, Mapping[str, Any]]] = []
    for key, part in (part_names(config) if config is not None else {}).items():
        section = key.partition(".")[0]
        each: Any = "transform" if key.startswith("data.augment") else section
        if (name is None or name == part) and kind in (None, each):
            found.append((part, each, part_sections(config).get(key, {}) if config is not None else {}))
    if found:
        return found
    if name is None:
        raise ConfigError("no own part is named: give package.module:factory, or --config FILE of a config with some")
    if not is_part(name):
        raise ConfigError(f"{name!r} names no own part: write package.module:factory or file.py:factory")
    if kind is None:
        raise ConfigError(f"{name}: say what it is with --as {'|'.join(KINDS)}, or give the --config that names it")
    return [(name, kind, {})]  # type: ignore[list-item]


def _checks(name: str, kind: Kind, options: Mapping[str, Any], config: RunConfig | None) -> Iterator[Check]:
    made: list[Any] = []
    makers: dict[Kind, Callable[[], Any]] = {
        "model": lambda: build_model("python", name, NUM_CLASSES, options=options),
        "loss": lambda: own_criterion(LossTerm(name=name, options=dict(options)), NUM_CLASSES, IGNORED, None),
        "data": lambda: own_data(_data(name, options, config), split_names(_data(name, options, config))[0]),
        "optim": lambda: _optimizer(name, options),
        "schedule": lambda: _schedule(name, options),
        "transform": lambda: TrainTransform((64, 64), _entries(name, config), ignore_index=IGNORED),
    }
    yield _tried("it is imported and made", lambda: made.append(makers[kind]()))
    if not made:
        return
    checks: dict[Kind, Callable[[Any], Iterator[Check]]] = {
        "model": lambda model: _of_model(model, lambda: makers["model"]()),
        "loss": _of_loss,
        "data": _of_data,
        "optim": lambda made: _of_optimizer(made, lambda: makers["optim"]()),
        "schedule": _of_schedule,
        "transform": _of_transform,
    }
    yield from checks[kind](made[0])


def _tried(what: str, check: Callable[[], str | None]) -> Check:
    """Return the result of a check that returns its problem, or raises it."""
    try:
        return Check(what, check() or "")
    except SegappError as error:
        return Check(what, str(error))
    except Exception as error:
        return Check(what, f"fails with {type(error).__name__}: {str(error).partition(chr(10))[0]}: correct it")


# --- models ------------------------------------------------------------------------------------------------------


def _of_model(model: SegmentationModel, make: Callable[[], SegmentationModel]) -> Iterator[Check]:
    height, width = model.suitable_size(64, 96)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, height, width, generator=generator)

    @torch.no_grad()
    def logits(network: nn.Module = model, of: Tensor = images) -> Tensor:
        found: Tensor = network.eval()(of)[0]
        return found

    def gradients() -> str | None:
        model.train().zero_grad()
        total = torch.stack([head.square().mean() for head in model(images)]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        wrong = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        return f"that of {wrong[0]} is not finite: check its layer" if wrong else None

    def alone() -> str | None:
        apart = torch.cat([logits(of=images[i : i + 1]) for i in range(len(images))])
        if torch.allclose(apart, logits(), rtol=1e-3, atol=1e-4):
            return None
        return "an image's logits depend on the others in its batch: remove what mixes images, or splits do not agree"

    def round_trip() -> str | None:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        fresh = make()
        fresh.load_state_dict(torch.load(file, weights_only=True))
        if torch.equal(logits(fresh), logits()):
            return None
        return "other logits after loading: register what is learned as nn.Parameter or with register_buffer"

    def moved() -> str | None:
        elsewhere = copy.deepcopy(model).to("meta")
        return None if logits(elsewhere, images.to("meta")).device.type == "meta" else "the logits stay behind"

    yield _tried("logits are finite", lambda: None if logits().isfinite().all() else "check the initial weights")
    same = "draws numbers in evaluation: use torch's dropout, which train() and eval() switch"
    yield _tried("evaluation repeats its result", lambda: None if torch.equal(logits(), logits()) else same)
    yield _tried("gradients are finite", gradients)
    yield _tried("images do not depend on each other", alone)
    yield _tried("its state can be saved and loaded", round_trip)
    yield _tried("it can be copied and moved to another device", moved)


# --- losses ------------------------------------------------------------------------------------------------------


def _of_loss(criterion: AdditiveCriterion) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4, NUM_CLASSES, 8, 12, generator=generator, dtype=torch.float64)
    logits = wide.float()
    target = torch.randint(NUM_CLASSES, (4, 16, 24), generator=generator, dtype=torch.uint8)
    target[0, :9], target[3, :, 5:] = IGNORED, IGNORED

    def whole(of: Tensor = target) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = criterion((leaf,), of)
        if loss.dim() or not loss.is_floating_point():
            raise ConfigError(f"the loss is {loss.dtype} of shape {tuple(loss.shape)}: return a floating-point scalar")
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    def finite() -> str | None:
        loss, gradient = whole()
        wrong = "loss" if not loss.isfinite() else "gradient" if not gradient.isfinite().all() else ""
        return f"the {wrong} is not: guard logarithms and divisions" if wrong else None

    def nothing_valid() -> str | None:
        loss, gradient = whole(torch.full_like(target, IGNORED))
        if loss == 0 and not gradient.any():
            return None
        return f"the loss is {float(loss):g}: sum over target != ignore_index, and divide by at least 1"

    def statistics() -> str | None:
        found = criterion.statistics((logits,), target)
        if len(found) != criterion.num_statistics:
            return f"statistics gives {len(found)} tensors: set num_statistics to {len(found)}"
        if criterion.is_linear and not torch.equal(criterion.target_statistics(target)[-1], found[-1]):
            return "target_statistics gives another denominator than statistics: compute both from the target alone"
        return None

    def moved() -> str | None:
        copied = copy.deepcopy(criterion).to("meta")
        loss = copied((logits.to("meta"),), target.to("meta"))
        return None if loss.device.type == "meta" else "the loss stays behind: make tensors on the logits' device"

    yield _tried("loss and gradient are finite", finite)
    repeats = "draws random numbers: make it a function of logits and target"
    yield _tried("it repeats its result", lambda: None if torch.equal(whole()[1], whole()[1]) else repeats)
    yield _tried("without a valid pixel it is 0", nothing_valid)
    yield _tried("statistics and declarations agree", statistics)
    yield from _of_split(criterion, wide, target)
    yield _tried("it can be copied and moved to another device", moved)


def _of_split(criterion: AdditiveCriterion, logits: Tensor, target: Tensor) -> Iterator[Check]:
    """Yield whether a divided step equals the whole one in float32, and in float64 where the loss computes in it.

    Args:
        criterion: of the loss.
        logits: (N, C, h, w) float64, of values that float32 does not hold.
        target: (N, H, W).
    """
    what = "a divided step gives the same loss and gradient in"
    narrow = logits.float()
    found = [_tried(f"{what} float32", lambda: _gap_problem(criterion, _split_gap(criterion, narrow, target), 1e-4))]
    precise = copy.deepcopy(criterion).double()
    try:
        in_float64 = not torch.equal(*(precise((each,), target) for each in (logits, narrow.double())))
        reason = "it rounds float64 logits"
    except Exception as error:
        in_float64, reason = False, f"with float64 logits it fails ({str(error).partition(chr(10))[0]})"
    if in_float64:
        found.append(
            _tried(f"{what} float64", lambda: _gap_problem(precise, _split_gap(precise, logits, target), 1e-9))
        )
    for check in found:
        yield Check(check.what, check.problem, is_note=bool(check.problem) and isinstance(criterion, PlainCriterion))
    if not in_float64:
        yield Check(f"{what} float64", f"not tried, {reason}; float32 shows no error below 0.01 %", is_note=True)


def _split_gap(criterion: AdditiveCriterion, logits: Tensor, target: Tensor) -> float:
    """Return the largest relative difference in loss and gradient of a step of two chunks from the whole step."""
    leaf = logits.clone().requires_grad_()
    expected = criterion((leaf,), target)
    (gradient,) = torch.autograd.grad(expected, leaf)
    parts = [criterion.statistics((leaf[a:b],), target[a:b]) for a, b in ((0, 1), (1, len(logits)))]
    totals = tuple(sum(entries[1:], entries[0]) for entries in zip(*parts, strict=True))
    for part in parts:
        surrogate(criterion, part, totals).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    loss_gap = float((criterion.finalize(totals) - expected).abs() / expected.abs().clamp(min=1e-6))
    return max(loss_gap, float((leaf.grad - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12)))


def _gap_problem(criterion: AdditiveCriterion, gap: float, tolerance: float) -> str | None:
    if gap <= tolerance:
        return None
    if isinstance(criterion, PlainCriterion):
        return (
            f"no mean over valid pixels (off by {gap:.2g} of its size): it is exact on one device without "
            "train.accumulate; elsewhere write it as an AdditiveCriterion"
        )
    return f"off by {gap:.2g} of its size: return sums in statistics, and divide in finalize alone"


# --- data --------------------------------------------------------------------------------------------------------


def _data(name: str, options: Mapping[str, Any], config: RunConfig | None) -> DataConfig:
    if config is None:
        raise ConfigError("data needs the root and the classes of a config: add --config FILE")
    return config.data.model_copy(update={"format": name, "options": dict(options)})


def _of_data(data: OwnData) -> Iterator[Check]:
    indices = sorted({0, len(data) // 2, max(len(data) - 1, 0)})

    def sample(source: DataSource, index: int) -> tuple[Pixels, Pixels]:
        image, mask = source.image_and_mask(index)
        return np.asarray(image), np.asarray(mask)

    def typed() -> str | None:
        for index in indices:
            image, mask = sample(data.source, index)
            is_image = image.dtype == np.uint8 and image.ndim == 3
            if not is_image or mask.shape != image.shape[:2] or mask.dtype.kind not in "iu":
                return (
                    f"image_and_mask({index}) gives {image.dtype} {image.shape} and {mask.dtype} {mask.shape}: return "
                    "uint8 RGB (H, W, 3) and class ids, integers (H, W)"
                )
        return None

    def repeats(source: DataSource) -> str | None:
        for index in indices:
            for one, two in zip(sample(data.source, index), sample(source, index), strict=True):
                if not np.array_equal(one, two):
                    return f"image {index} differs: draw no random numbers here, data.augment does"
        return None

    yield Check("it has images", "" if len(data) else "its length is 0: check data.root and the split")
    if len(data):
        yield _tried("images and masks have the right types", typed)
        yield _tried("it repeats its result", lambda: repeats(data.source))
        copied = ForkingPickler  # what hands objects to spawned data workers
        spawned = _tried("it can be pickled for data workers", lambda: repeats(copied.loads(copied.dumps(data.source))))
        yield spawned


# --- optimizers, schedules, transforms -------------------------------------------------------------------------------


def _optimizer(name: str, options: Mapping[str, Any]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    weights = [nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(2, 3)), nn.Parameter(torch.ones(3))]
    groups = [{"params": [w], "lr_factor": 1.0, "weight_decay": 0.0} for w in weights]
    return weights, own_optimizer(OptimConfig(name=name, lr=0.01, options=dict(options)), groups)


def _of_optimizer(made: tuple[list[nn.Parameter], torch.optim.Optimizer], make: Callable[[], Any]) -> Iterator[Check]:
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

    yield _tried("a step changes the weights", moves)
    yield _tried("it follows the schedule", rate)
    yield _tried("a resumed step is the same", resumes)
    if not getattr(made[1], "_step_supports_amp_scaling", False):
        yield Check("speed", "it waits for the device once a step; fused=True, if it has that, does not", is_note=True)


def _schedule(name: str, options: Mapping[str, Any]) -> Schedule:
    section = ScheduleConfig(name=name, options=dict(options))
    return own_schedule(section, total_steps=_STEPS, steps_per_epoch=10)


def _of_schedule(factor: Schedule) -> Iterator[Check]:
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

    yield _tried(f"it gives numbers from 0 on at steps 1 to {_STEPS}", numbers)
    yield _tried("it is a function of the step alone", pure)


def _entries(name: str, config: RunConfig | None) -> list[dict[str, dict[str, Any]]]:
    entries = config.data.augment if config is not None else None
    own = [entry for entry in entries or () if name in entry]
    return [{"ScaledCrop": {}}, *(own[:1] or [{name: {}}])]


def _of_transform(transform: TrainTransform) -> Iterator[Check]:
    sizes = list(itertools.product((80, 200), (96, 160)))
    what = "types, class ids, size, and one result for each seed"
    yield _tried(what, lambda: check_transform(transform, sizes, (3, np.uint8), np.dtype(np.uint8)))

    def pickled() -> str | None:
        ForkingPickler.dumps(transform)
        return None

    yield _tried("it can be pickled for data workers", pickled)
