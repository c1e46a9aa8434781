"""The step: exact means over micro-batches, bad steps without a trace, steps left half way."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from segapp import failpoints
from segapp.assembly.optimizer import build_optimizer
from segapp.checkpoint.snapshot import snapshot
from segapp.chunks import SplitRequest
from segapp.config import OptimConfig
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.pool import Batch
from segapp.datasets.preprocessing import Preprocessing
from segapp.inference.sliding import NormalizedInput
from segapp.losses import AdditiveCriterion, CriterionCE, CriterionDice
from segapp.memory.counters import IDLE
from segapp.optim import WeightAverage
from segapp.parallel import DataParallelModel, SampleMasks, mask_by_sample, set_recompute
from segapp.parallel.distributed import Ranks
from segapp.precision import Precision
from segapp.training.step.divided import RankNetwork, ReplicatedNetwork, TrainedNetwork
from segapp.training.step.engine import StepEngine
from segapp.training.step.update import MAX_BAD_STEPS, WeightUpdate
from tests.support.rank_steps import MEAN, STD, SmallNet
from tests.support.runs import differing

CPU = torch.device("cpu")


class TinyNet(SmallNet):
    """Logits at a quarter of the size; BatchNorm or dropout where a test wants them."""

    def __init__(self, *extra: nn.Module) -> None:
        nn.Module.__init__(self)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=4, padding=1), *extra, nn.Tanh(), nn.Conv2d(6, 3, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.body(images),)


def batch(num: int, ignored: float = 0.0, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num, 3, 13, 22), generator=generator, dtype=torch.uint8)
    target = torch.randint(0, 3, (num, 13, 22), generator=generator, dtype=torch.uint8)
    target[torch.rand(target.shape, generator=generator) < ignored] = 255
    return Batch(images, target, tuple(range(num)))


def engine_of(
    criterion: AdditiveCriterion,
    *extra: nn.Module,
    clip: float | None = None,
    average: bool = False,
    lr: float = 0.1,
    ranks: Ranks | None = None,
    mark: Callable[[str], None] = lambda phase: None,
    precision: str = "fp32",
) -> StepEngine:
    torch.manual_seed(0)
    numbers = Precision(precision, CPU)
    model = numbers.prepare(TinyNet(*extra))
    inner = NormalizedInput(model, Preprocessing(PixelFormat(mean=MEAN, std=STD), numbers.input_dtype))  # type: ignore[arg-type]
    network = TrainedNetwork(model, inner, CPU, ranks)  # type: ignore[arg-type]
    groups = [{"params": numbers.master_weights(model.parameters()), "lr_factor": 1.0, "weight_decay": 0.0}]
    update = WeightUpdate(
        model,  # type: ignore[arg-type]
        build_optimizer(OptimConfig(lr=lr, momentum=0.9), groups),
        numbers,
        average=WeightAverage(model, 0.5) if average else None,  # type: ignore[arg-type]
        clip_grad_norm=clip,
    )
    return StepEngine(network, criterion, update, mark=mark)


def joined(*batches: Batch) -> Batch:
    images, target = (torch.cat([getattr(b, name) for b in batches]) for name in ("images", "target"))
    return Batch(images, target, tuple(range(len(images))))


def parameters(engine: StepEngine) -> list[Tensor]:
    return [p.detach().clone() for p in engine.model.parameters()]


class NotedRanks(Ranks):
    """One of two ranks; the other one has the same statistics. Exchanges are noted among the phases of the step."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.world_size, self._order = 2, order

    def sums(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._order.append("exchange")
        return tuple(2 * tensor for tensor in tensors)


def test_devices_that_share_an_evaluation_are_the_others() -> None:
    model = TinyNet()
    replicas = DataParallelModel(model, ["cpu"] * 4)
    vars(replicas)["devices"] = (
        CPU,
        torch.device("meta"),
        CPU,
        torch.device("meta"),
    )  # stand for two logical devices on each
    assert ReplicatedNetwork(model, replicas, CPU).further_devices == (torch.device("meta"),)  # type: ignore[arg-type]
    assert TrainedNetwork(model, model, CPU).further_devices == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (CriterionCE(), ["exchange", "forward", "loss", "backward", "step", "exchange", IDLE]),
        (CriterionDice(), ["forward", "loss", "backward", "exchange", "step", IDLE]),
    ],
)
def test_linear_loss_lets_no_rank_wait_between_its_passes(
    criterion: AdditiveCriterion, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its denominators follow from the targets; those of Dice need the logits of all ranks."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    order: list[str] = []
    both = engine_of(copy.deepcopy(criterion), ranks=NotedRanks(order), mark=order.append)
    alone = engine_of(copy.deepcopy(criterion))
    own = batch(3, ignored=0.2)
    results = [both.step([own]), alone.step([joined(own, own)])]
    assert order == expected
    assert float(results[0].loss) == pytest.approx(float(results[1].loss), rel=1e-6)
    for mine, theirs in zip(parameters(both), parameters(alone), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_one_step_equals_torchs_own_operators() -> None:
    """The formula of the normalization, of the loss and of the update."""
    engine = engine_of(CriterionCE())
    torch.manual_seed(0)
    model = TinyNet()
    data = batch(3, ignored=0.3)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    logits = model((data.images.float() / 255 - mean) / std)[0]
    full = F.interpolate(logits, (13, 22), mode="bilinear", align_corners=True)
    loss = F.cross_entropy(full, data.target.long(), ignore_index=255)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss.backward()
    optimizer.step()
    result = engine.step([data])
    torch.testing.assert_close(result.loss.float(), loss.detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(engine.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def _uneven() -> list[Batch]:
    """Micro-batches of different sizes and shares of ignored pixels: a mean of means is far off."""
    return [batch(1, 0.95, seed=1), batch(3, 0.0, seed=2), batch(2, 0.5, seed=3)]


def test_dice_over_micro_batches_runs_dropout_and_norm_once() -> None:
    engine = engine_of(CriterionDice(), nn.BatchNorm2d(6), nn.Dropout2d(0.5))
    engine.step(_uneven())
    assert int(engine.model.body[1].num_batches_tracked) == 3
    state = torch.get_rng_state()
    torch.manual_seed(0)
    other = engine_of(CriterionDice(), nn.BatchNorm2d(6), nn.Dropout2d(0.5))
    for part in _uneven():  # three forward passes draw as much as the step did
        other.network.module(part.images)
    assert torch.equal(torch.get_rng_state(), state)


def everything_of(engine: StepEngine) -> Any:
    """A copy of the weights, buffers, average and momentum."""
    assert engine.update.average is not None
    average = engine.update.average.module.state_dict()
    return snapshot([engine.model.state_dict(), average, engine.update.optimizer.state_dict()["state"]])


def test_bad_step_changes_nothing_and_is_counted() -> None:
    engine = engine_of(CriterionCE(), nn.BatchNorm2d(6), average=True)
    engine.step([batch(2)])
    before = everything_of(engine)
    handle = engine.model.body[0].register_forward_hook(lambda _m, _i, output: output * math.inf)
    result = engine.step([batch(2)])
    handle.remove()
    assert float(result.is_bad) == 1.0
    assert (int(engine.update.bad_steps), int(engine.update.bad_in_row)) == (1, 1)
    assert differing(everything_of(engine), before) == []
    engine.step([batch(2)])
    assert (int(engine.update.bad_steps), int(engine.update.bad_in_row)) == (1, 0)
    assert len(differing(everything_of(engine), before)) >= 3 * len(list(engine.model.parameters()))


def test_resumed_run_ends_at_the_same_bad_step() -> None:
    whole, resumed = engine_of(CriterionCE()), engine_of(CriterionCE())
    whole.step([batch(2)])
    failpoints.arm("train.gradient=inf")
    for _ in range(MAX_BAD_STEPS - 2):
        whole.step([batch(2)])
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    ends = []
    for engine in (whole, whole, resumed, resumed):
        engine.step([batch(2)])
        ends.append(engine.divergence())
    assert ends == [None, f"loss or gradient not finite for {MAX_BAD_STEPS} steps in a row"] * 2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_interrupted_step_is_rolled_back(precision: str) -> None:
    """In fp16 the optimizer holds other weights than the network, which have gradients too."""
    engine, untouched = (
        engine_of(CriterionCE(), nn.BatchNorm2d(6), nn.Dropout2d(0.5), precision=precision) for _ in range(2)
    )
    visits = iter([None, KeyError("leave")])

    def check() -> None:
        error = next(visits)
        if error is not None:
            raise error

    torch.manual_seed(5)
    with pytest.raises(KeyError):
        engine.step(_uneven(), check)
    ours = engine.step(_uneven())
    torch.manual_seed(5)
    theirs = untouched.step(_uneven())
    assert float(theirs.is_bad) == 0.0
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.grad_norm, theirs.grad_norm)
    for a, b in zip(engine.model.state_dict().values(), untouched.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def dropping_engine(num_devices: int = 1, mode: Any = "lockstep", criterion: Any = CriterionCE, **split: Any) -> Any:
    """Return an engine in float64 whose network drops values, channels and samples, some in a recomputed block."""
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Conv2d(6, 6, 1), nn.Dropout(0.3), nn.Tanh())
    model: Any = TinyNet(nn.Dropout2d(0.2), inside, DropPath(0.2)).double()
    mask_by_sample(model)
    set_recompute(model, [("body.2",), (), ("body.2",)][:num_devices])
    inner = NormalizedInput(model, Preprocessing(PixelFormat(mean=MEAN, std=STD), torch.float64))
    network = TrainedNetwork(model, inner, CPU)
    if num_devices > 1:
        network = ReplicatedNetwork(model, DataParallelModel(inner, ["cpu"] * num_devices, mode=mode, **split), CPU)
    groups = [{"params": list(model.parameters()), "lr_factor": 1.0, "weight_decay": 0.0}]
    update = WeightUpdate(model, build_optimizer(OptimConfig(lr=0.1, momentum=0.9), groups), Precision("fp32", CPU))
    model.min_train_batch = 1
    engine = StepEngine(network, criterion().double(), update, masks=SampleMasks(model, 3))
    engine.network.module.train()
    return engine


def course(engine: StepEngine, micro: int = 8, num_pieces: int = 1) -> list[float]:
    """Return the losses of four steps of eight samples, in micro-batches of so many."""
    losses = []
    for step in range(4):
        whole = batch(8, 0.2, seed=step)
        parts = zip(whole.images.split(micro), whole.target.split(micro), strict=True)
        batches = [
            Batch(images, target, tuple(range(len(images))), 1, 8 * step + micro * i)
            for i, (images, target) in enumerate(parts)
        ]
        losses.append(float(engine.step(batches, num_pieces=num_pieces).loss))
    return losses


@pytest.mark.parametrize(
    ("division", "options"),
    [
        ({}, {"num_pieces": 3}),
        ({}, {"micro": 3, "num_pieces": 2}),
        ({"num_devices": 3, "shares": [5, 0, 3]}, {}),
        ({"num_devices": 3, "mode": "threads"}, {"num_pieces": 2}),
    ],
    ids=["pieces", "pieces of micro-batches", "three uneven devices", "threads, pieces"],
)
@pytest.mark.parametrize("criterion", [CriterionCE, CriterionDice])
def test_losses_with_dropout_are_those_of_one_device(
    criterion: Any, division: dict[str, Any], options: dict[str, int]
) -> None:
    """The generator decides nothing, and is left as it is."""
    expected = course(dropping_engine(criterion=criterion))
    assert len(set(expected)) == 4
    engine = dropping_engine(criterion=criterion, **division)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert course(engine, **options) == pytest.approx(expected, rel=0, abs=1e-12)
    assert torch.equal(torch.get_rng_state(), state)


def test_retried_step_has_the_masks_of_the_first_try() -> None:
    engine, other = dropping_engine(), dropping_engine()
    parts = [batch(4, seed=1), batch(4, seed=2)]

    def leave() -> None:
        raise KeyError("leave")

    with pytest.raises(KeyError):
        engine.step(parts, leave)
    assert torch.equal(engine.step(parts).loss, other.step(parts).loss)


@pytest.mark.parametrize(
    ("shares", "smallest_chunk", "needs_samples", "most"),
    [((6, 4, 2), 1, None, 6), ((6, 4, 2), 2, None, 1), ((6, 4, 2), 1, "why", 2), ((8, 4, 0), 2, None, 2)],
)
def test_pieces_of_every_rank_hold_enough_samples(
    shares: tuple[int, ...], smallest_chunk: int, needs_samples: str | None, most: int
) -> None:
    """A rank without samples is not counted."""
    model: Any = types.SimpleNamespace(min_train_batch=1)
    ranks = Ranks()
    ranks.world_size = 3
    network = RankNetwork(model, nn.Identity, CPU, ranks, SplitRequest(shares=shares), 12)
    network.smallest_chunk, network.needs_samples = smallest_chunk, needs_samples
    assert max(pieces for pieces in (1, 2, 3, 4, 6, 12) if network.can_train_on(12 // pieces, pieces)) == most


def test_clipping_bounds_the_whole_gradient() -> None:
    free, clipped = engine_of(CriterionCE(), lr=1.0), engine_of(CriterionCE(), clip=1e-3, lr=1.0)
    start = parameters(clipped)
    norm = float(free.step([batch(2)]).grad_norm)
    assert float(clipped.step([batch(2)]).grad_norm) == pytest.approx(norm)
    moved = torch.cat([(a - b).flatten() for a, b in zip(start, parameters(clipped), strict=True)])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-2)


def test_step_without_valid_pixels_has_loss_0_and_no_update() -> None:
    engine = engine_of(CriterionCE())
    before = parameters(engine)
    result = engine.step([batch(2, ignored=1.1)])
    assert (float(result.loss), float(result.grad_norm), float(result.is_bad)) == (0.0, 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(engine), strict=True))


def test_micro_batches_have_one_split_and_their_own_phases() -> None:
    marks: list[str] = []
    engine = engine_of(CriterionCE(), mark=marks.append)
    engine.model.min_train_batch = 2
    assert engine.step([batch(7), batch(2), batch(1)], num_pieces=4).split == [7]
    assert marks == ["forward", "loss", "backward"] * (3 + 1 + 1) + ["step", "data"]
    assert engine.step([batch(4), batch(2)], num_samples=9).split == [9]


@pytest.mark.parametrize(("scale", "is_diverged"), [(2.0, False), (1.0, False), (0.5, True)])
def test_loss_scale_below_1_is_divergence(scale: float, is_diverged: bool) -> None:
    engine = engine_of(CriterionCE())
    engine.precision.scaler = types.SimpleNamespace(scale=torch.tensor(scale))  # type: ignore[assignment]
    expected = "the loss scale fell below 1" if is_diverged else None
    assert engine.divergence() == expected
