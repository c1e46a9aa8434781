"""`segapp check-part`: test custom components in the same way as a training uses them."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from segapp.accelerator import GPUS
from segapp.build.own_parts import own_criterion, own_optimizer, own_schedule
from segapp.build.pairs import build_pixels, build_scheme, own_data, split_names
from segapp.compat.torch import TorchDispatchMode, operator_name, tree_leaves
from segapp.config import LossTerm, OptimConfig, RunConfig, ScheduleConfig
from segapp.config.parts import named_code
from segapp.custom.contracts import DataSource
from segapp.custom.loading import shown_error
from segapp.custom.names import is_part
from segapp.custom.trust import NamedCode, accept_code
from segapp.errors import ConfigError, SegappError, accepted_words
from segapp.losses import AdditiveCriterion, PlainCriterion, surrogate
from segapp.models import SegmentationModel, build_model
from segapp.models.inspection import probabilities_problem
from segapp.run.words import printable

NUM_CLASSES, IGNORED = 3, 255
"""Defaults of a trial without a config."""


class Check(NamedTuple):
    """Result of one check of a custom component."""

    mark: Literal["ok", "FAILED", "note", "not tried"]
    what: str
    """The statement that is checked."""
    problem: str = ""
    """The problem, the cost that a note names, or the reason why the check was not tried."""


class NotTriedError(Exception):
    """A check that could not be carried out; its message gives the reason."""


def tried(what: str, check: Callable[[], str | None]) -> Check:
    """Return the result of a check that returns or raises its problem."""
    try:
        problem = check()
    except NotTriedError as reason:
        return Check("not tried", what, str(reason))
    except SegappError as error:
        problem = str(error)
    except Exception as error:
        problem = f"fails with {shown_error(error)}: correct it"
    return Check("FAILED", what, problem) if problem else Check("ok", what)


def holds(what: str, is_so: Callable[[], bool], problem: str) -> Check:
    """Return the result of a check whose only possible problem, apart from an exception, is the given one."""
    return tried(what, lambda: None if is_so() else problem)


class _OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises if an operator gets tensors of two devices, which many operators of the meta device would accept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the outputs of an operator; a scalar may be on the CPU, as torch allows."""
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        name = operator_name(func)
        if name not in _TAKE_BOTH and len({each.device for each in tensors if each.dim()}) > 1:
            raise ConfigError(
                f"{name} has inputs on two devices: make tensors on the device of the input, and register tensors of a "
                "module with register_buffer"
            )
        return func(*args, **kwargs)


_TAKE_BOTH = ("_to_copy", "copy_", "index", "index_put", "index_put_")
"""Operators that accept tensors of two devices: copies, and indices on the CPU."""


def follows(module: nn.Module, run: Callable[[Any, str], Tensor]) -> str | None:
    """Return the problem of a copy of a module on another device; None if it computes there.

    The other device is a GPU if there is one, else the meta device, whose tensors have no values.

    Raises:
        NotTriedError: there is no GPU, and code that reads values cannot be tried without one.
    """
    gpu = next((gpu.kind for gpu in GPUS if gpu.is_available()), None)
    device = gpu or "meta"
    copied = copy.deepcopy(module).to(device)
    try:
        with _OneDevice() if gpu is None else contextlib.nullcontext():  # type: ignore[no-untyped-call]
            result = run(copied, device)
    except Exception as error:
        if gpu is not None or isinstance(error, SegappError):
            raise
        raise NotTriedError(f"this machine has no GPU, and on the CPU it fails with {shown_error(error)}") from error
    return None if result.device.type == device else "the result stays on the CPU: compute it on the inputs' device"


def _reloaded(state: Any) -> Any:
    """Return a state as it is after it was saved in a checkpoint and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def checks_of_loss(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Iterator[Check]:
    """Yield the checks of a custom loss."""
    term = LossTerm(name=name, options=dict(options))
    criterion = own_criterion(term, NUM_CLASSES, IGNORED, None)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4, NUM_CLASSES, 8, 12, generator=generator, dtype=torch.float64)
    logits = wide.float()
    target = torch.randint(NUM_CLASSES, (4, 16, 24), generator=generator, dtype=torch.uint8)
    target[0, :9], target[3, :, 5:] = IGNORED, IGNORED

    def whole(of: Tensor = target) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = criterion((leaf,), of)
        if loss.dim() or not loss.is_floating_point():
            raise ConfigError(
                f"the loss is {loss.dtype} of shape {tuple(loss.shape)}: return a floating-point scalar, the mean over "
                "valid pixels"
            )
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
            return "target_statistics gives another denominator than statistics: compute both only from the target"
        return None

    def doubled() -> str | None:
        once = float(whole()[0])
        twice = float(criterion((logits.repeat(2, 1, 1, 1),), target.repeat(2, 1, 1)).detach())
        if once == 0 or abs(twice / once - 2) > 1e-3:
            return None
        return (
            f"it is {twice / once:.3g} times as large for each image given twice: it is a sum, and the learning rate "
            'would depend on batch, crop and split: divide by the valid pixels (reduction="mean")'
        )

    values = tried("loss and gradient are finite", finite)
    yield values
    if values.problem:
        return
    random = "draws random numbers: make it a function of logits and target"
    yield tried("it does not grow with the number of images", doubled)
    yield holds("it repeats its result", lambda: torch.equal(whole()[1], whole()[1]), random)
    yield tried("without a valid pixel it is 0", nothing_valid)
    yield tried("statistics and declarations agree", statistics)
    yield _split_check(criterion, wide, target)
    yield tried(
        "it can be copied and moved to another device",
        lambda: follows(criterion, lambda copied, device: copied((logits.to(device),), target.to(device))),
    )


def _split_check(criterion: AdditiveCriterion, logits: Tensor, target: Tensor) -> Check:
    """Return the check that a divided step equals the whole one, in float64 if the loss supports it."""
    precise = copy.deepcopy(criterion).double()
    try:
        is_precise = not torch.equal(*(precise((each,), target) for each in (logits, logits.float().double())))
    except Exception:  # some losses accept only float32
        is_precise = False

    def problem() -> str | None:
        gap = _split_gap(precise, logits, target) if is_precise else _split_gap(criterion, logits.float(), target)
        if gap <= (1e-9 if is_precise else 1e-4):
            return None
        if isinstance(criterion, PlainCriterion):
            return (
                f"no mean over valid pixels (off by {gap:.2g} of its size): it is exact on one device without "
                "train.accumulate; elsewhere write it as an AdditiveCriterion"
            )
        return f"off by {gap:.2g} of its size: return sums in statistics, and divide only in finalize"

    found = tried(f"a divided step gives the same loss and gradient in float{64 if is_precise else 32}", problem)
    return found._replace(mark="note") if found.problem and isinstance(criterion, PlainCriterion) else found


def _split_gap(criterion: AdditiveCriterion, logits: Tensor, target: Tensor) -> float:
    """Return the largest relative difference in loss and gradient between a step of two chunks and the whole step."""
    leaf = logits.clone().requires_grad_()
    expected = criterion((leaf,), target)
    (gradient,) = torch.autograd.grad(expected, leaf)
    parts = [criterion.statistics((leaf[a:b],), target[a:b]) for a, b in ((0, 1), (1, len(logits)))]
    totals = tuple(sum(entries[1:], entries[0]) for entries in zip(*parts, strict=True))
    for part in parts:
        surrogate(criterion, part, totals).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    difference = (criterion.finalize(totals) - expected).detach().abs()
    loss_gap = float(difference / expected.detach().abs().clamp(min=1e-6))
    return max(loss_gap, float((leaf.grad - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12)))


def checks_of_model(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Iterator[Check]:
    """Yield the checks of a network."""
    bands = config.data.bands if config is not None else None

    def make() -> SegmentationModel:
        in_channels = 3 if bands is None else len(bands)
        return build_model("python", name, NUM_CLASSES, in_channels=in_channels, options=options)

    model = make()
    height, width = size_px = model.suitable_size(64, 96)
    sizes_px = [size_px, *([config.data.crop_px] if config is not None and config.data.crop_px else [])]
    images = torch.randn(4, model.in_channels, height, width, generator=torch.Generator().manual_seed(0))

    def sizes() -> str | None:
        for height, width in sizes_px:
            try:
                logits(of=torch.zeros(1, model.in_channels, height, width))
            except Exception as error:
                return (
                    f"{height}x{width} px fail with {shown_error(error)}: compute sizes from the input; or set "
                    "size_divisor, min_size_px or fixed_size_px = (H, W) on the model, and data.crop_px to a size "
                    "that it takes"
                )
        return None

    @torch.no_grad()
    def logits(network: nn.Module = model, of: Tensor = images) -> Tensor:
        found: Tensor = network.eval()(of)[0]
        return found

    def is_independent() -> bool:
        apart = torch.cat([logits(of=images[i : i + 1]) for i in range(len(images))])
        return torch.allclose(apart, logits(), rtol=1e-3, atol=1e-4)

    def is_restored() -> bool:
        fresh = make()
        fresh.load_state_dict(_reloaded(model.state_dict()))
        return torch.equal(logits(fresh), logits())

    random = "draws numbers in evaluation: use torch's dropout, which train() and eval() switch"
    mixed = "an image's logits depend on the others in its batch: remove what mixes images, or splits do not agree"
    lost = "other logits after loading: register what is learned as nn.Parameter or with register_buffer"
    yield tried("it takes images of other sizes", sizes)
    yield holds("logits are finite", lambda: bool(logits().isfinite().all()), "check the initial weights")
    yield tried(
        "it returns logits, not probabilities", lambda: probabilities_problem(logits(), logits(of=1000 * images))
    )
    yield holds("evaluation repeats its result", lambda: torch.equal(logits(), logits()), random)
    yield holds("images do not depend on each other", is_independent, mixed)
    yield holds("its state can be saved and loaded", is_restored, lost)
    yield tried(
        "it can be copied and moved to another device",
        lambda: follows(model, lambda copied, device: logits(copied, images.to(device))),
    )


def _same(one: Any, two: Any) -> bool:
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(one, two, strict=True))


def checks_of_data(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Iterator[Check]:
    """Yield the checks of the training split of a data set."""
    if config is None:
        raise ConfigError("data needs the root and the classes of a config: add --config FILE")
    section = config.data.model_copy(update={"format": name, "options": dict(options)})
    train, val = split_names(section)
    data = own_data(section, train)
    sample = data.source.image_and_mask
    indices = sorted({0, len(data) // 2, max(len(data) - 1, 0)})
    pixels, scheme = build_pixels(section), build_scheme(section)

    def readable() -> None:
        for index in indices:
            data.read(index, scheme, pixels)

    def repeats(source: DataSource) -> str | None:
        for index in indices:
            if not _same(sample(index), source.image_and_mask(index)):
                return (
                    f"image {index} differs from the first call: draw no random numbers here, because evaluations and "
                    "resumed runs would not repeat; data.augment does"
                )
        return None

    def has_other_images() -> bool:
        other = own_data(section, val)
        is_equal = len(other) == len(data) and all(
            _same(sample(i), other.source.image_and_mask(i)) for i in {0, len(data) - 1}
        )
        return train == val or section.allow_overlap or not is_equal

    yield holds("it has images", lambda: len(data) > 0, "its length is 0: check data.root and the split")
    if not len(data):
        return
    yield tried("images and masks are read as a training reads them", readable)
    yield tried("it repeats its result", lambda: repeats(data.source))
    copied = ForkingPickler  # pickles objects for spawned data workers
    yield tried("it can be pickled for data workers", lambda: repeats(copied.loads(copied.dumps(data.source))))
    leak = f"{val} gives the images of {train}: use the argument `split` to choose the images"
    yield holds("validation has other images", has_other_images, leak)


_STEPS = 100


def checks_of_optimizer(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Iterator[Check]:
    """Yield the checks of an optimizer over two parameters."""

    def make() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        weights = [nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(2, 3)), nn.Parameter(torch.ones(3))]
        groups = [{"params": [w], "lr_factor": 1.0, "weight_decay": 0.0} for w in weights]
        return weights, own_optimizer(OptimConfig(name=name, lr=0.01, options=dict(options)), groups)

    made = make()

    def is_moved(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[bool]:
        """Make a step, and return for each weight whether it has changed to finite values."""
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.grad = weight.detach().clone()
        optimizer.step()
        return [not torch.equal(a, b) and bool(b.isfinite().all()) for a, b in zip(before, weights, strict=True)]

    def follows_schedule() -> bool:
        weights, optimizer = make()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return not any(is_moved(weights, optimizer))

    def resumes() -> bool:
        weights, optimizer = made
        other, resumed = make()
        for theirs, own in zip(other, weights, strict=True):
            theirs.data.copy_(own.data)
        resumed.load_state_dict(_reloaded(optimizer.state_dict()))
        is_moved(weights, optimizer)
        is_moved(other, resumed)
        return all(torch.equal(a, b) for a, b in zip(weights, other, strict=True))

    still = "a step leaves weights as they are: update the parameters of every group"
    fixed = "weights move at lr = 0: read group['lr'] in step(), where the schedule sets it"
    lost = "another step after loading its state: keep all of it in `state` and `param_groups`"
    yield holds("a step changes the weights", lambda: all(is_moved(*made)), still)
    yield holds("it follows the schedule", follows_schedule, fixed)
    yield holds("a resumed step is the same", resumes, lost)
    if not getattr(made[1], "_step_supports_amp_scaling", False):
        yield Check("note", "speed", "it waits for the device once a step; fused=True, if it has that, does not")


def checks_of_schedule(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Iterator[Check]:
    """Yield the checks of a schedule, in a short run."""
    section = ScheduleConfig(name=name, options=dict(options))
    factor = own_schedule(section, total_steps=_STEPS, steps_per_epoch=10)

    def is_pure() -> bool:
        steps = range(1, _STEPS + 1)
        forward = [factor(step) for step in steps]  # raises for anything but a nonnegative number
        return forward == [factor(step) for step in reversed(steps)][::-1]

    what = f"it gives numbers from 0 on at steps 1 to {_STEPS}, and depends only on the step"
    impure = "the factor depends on earlier calls: make it a function of the step, or a resumed run differs"
    yield holds(what, is_pure, impure)


def checks_of_transform(name: str, options: Mapping[str, Any], config: RunConfig | None) -> Iterator[Check]:
    """Yield the checks of a list of a crop and the custom transform, with the options from the config."""
    from segapp.datasets.augment import TrainTransform
    from segapp.datasets.augment.probe import check_transform

    own = [entry for entry in (config.data.augment if config is not None else None) or () if name in entry]

    def make() -> TrainTransform:
        with warnings.catch_warnings():  # albumentations only warns about an argument that a transform does not have
            warnings.filterwarnings("error", r"Argument\(s\) .* not valid", UserWarning)
            return TrainTransform((64, 64), [{"ScaledCrop": {}}, *(own[:1] or [{name: {}}])], ignore_index=IGNORED)

    transform = make()
    sizes = list(itertools.product((80, 200), (96, 160)))
    what = "types, class ids, size, and one result for each seed"
    yield tried(what, lambda: check_transform(transform, sizes, (3, np.uint8), np.dtype(np.uint8)))

    def pickled() -> None:
        ForkingPickler.dumps(transform)

    yield tried("it can be pickled for data workers", pickled)


Kind = Literal["model", "loss", "data", "optim", "schedule", "transform"]

CHECKS: Mapping[Kind, Callable[[str, Mapping[str, Any], RunConfig | None], Iterator[Check]]] = {
    "model": checks_of_model,
    "loss": checks_of_loss,
    "data": checks_of_data,
    "optim": checks_of_optimizer,
    "schedule": checks_of_schedule,
    "transform": checks_of_transform,
}
"""Kind of a custom component -> its checks, given its name, its options, and the config if there is one."""


def check_part(name: str | None, kind: str | None, config: RunConfig | None) -> int:
    """Check a custom component, or without a name all custom components of a config, and print the results.

    Returns:
        0, or 2 if a check failed; a check that could not be tried counts as passed.

    Raises:
        ConfigError: no component is named, or its kind is unknown.
    """
    if kind is not None and kind not in CHECKS:
        raise ConfigError(f"--as {kind} is not known: {accepted_words(kind, CHECKS)}")
    is_failed = False
    for part, part_kind, options in _chosen(name, kind, config):
        if name is not None:
            accept_code([NamedCode(part, options)])
        print(f"{printable(part)} as {part_kind}", flush=True)
        for check in _with_making(CHECKS[part_kind](part, options, config)):
            is_failed = is_failed or check.mark == "FAILED"
            problem = f": {printable(check.problem)}" if check.problem else ""
            print(f"  {check.mark:6} {check.what}{problem}", flush=True)
    return ConfigError.exit_code if is_failed else 0


def _with_making(checks: Iterator[Check]) -> Iterator[Check]:
    """Yield the check that a component is made as a training makes it, and then its other checks."""
    first: list[Check] = []
    yield tried("it is imported and made", lambda: first.extend(itertools.islice(checks, 1)))
    yield from first
    yield from checks


def sorted_words(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the component and the KEY=VALUE words of a command line; ConfigError if there are two components."""
    parts = [word for word in words if "=" not in word]
    if len(parts) > 1:
        raise ConfigError(f"{', '.join(parts)}: name one component, or check all of a config with --config FILE")
    return (parts[0] if parts else None), [word for word in words if "=" in word]


def _chosen(name: str | None, kind: str | None, config: RunConfig | None) -> list[tuple[str, Kind, Mapping[str, Any]]]:
    """Return the components to check, each with its kind and its options."""
    found: list[tuple[str, Kind, Mapping[str, Any]]] = []
    for key, code in ({} if config is None else named_code(config)).items():
        section = key.partition(".")[0]
        each: Any = "transform" if key.startswith("data.augment") else section
        if name in (None, code.name) and kind in (None, each):
            found.append((code.name, each, code.options))
    if found:
        return found
    if name is None:
        raise ConfigError(
            "no custom component is named: give package.module:factory, or --config FILE of a config with some"
        )
    if not is_part(name):
        raise ConfigError(f"{name!r} is not a custom component: write package.module:factory or file.py:factory")
    if kind is None:
        kinds = "|".join(CHECKS)
        raise ConfigError(f"{name}: give its kind with --as {kinds}, or with --config a config that uses it")
    return [(name, kind, {})]  # type: ignore[list-item]
