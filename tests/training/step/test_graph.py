"""`train.cuda_graph`: steps by a graph are the eager ones bit for bit, and what cannot be captured is refused.

The graph is a tape of operators on the CPU (`tests.support.gpu.taped_graphs`); `tests/gpu/test_steps_gpu.py` has real
ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from segapp.assembly.devices import plan_devices, with_precision
from segapp.assembly.pairs import build_scheme
from segapp.config import RunConfig, validate_config
from segapp.datasets.pool import Batch
from segapp.errors import ConfigError
from segapp.losses import AdditiveCriterion, CriterionCE, CriterionDice
from segapp.planning.trial import blank_batch
from segapp.training.step.assembler import StepAssembler, StepLayout
from segapp.training.step.engine import StepEngine, StepResult
from segapp.training.step.graph import WARM_UP_STEPS, StepGraph
from segapp.training.step.participant import StepParticipant
from tests.support.gpu.taped_graphs import TapedGraphs, graphs_on_the_cpu
from tests.support.runs import events, merged, train
from tests.training.step.test_engine import CPU, batch, engine_of


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> TapedGraphs:
    return graphs_on_the_cpu(monkeypatch)


def full_size_engine(criterion: AdditiveCriterion, *extra: nn.Module, **options: Any) -> StepEngine:
    """Return an engine whose logits have the size of the target: the loss upsamples otherwise while it is captured."""
    layers = (nn.BatchNorm2d(6), nn.Dropout2d(0.3), nn.Upsample(scale_factor=4), *extra)
    engine = engine_of(criterion, *layers, **options)
    engine.model.min_train_batch = 1
    return engine


def with_graph(engine: StepEngine, graphs: TapedGraphs) -> StepEngine:
    engine.graph = StepGraph(graphs, CPU, engine.model, is_linear=engine.criterion.is_linear)  # type: ignore[arg-type]
    return engine


def course(engine: StepEngine, steps: Sequence[list[Batch]], num_pieces: int = 1) -> list[StepResult]:
    """Make steps, each with a learning rate of its own; the random numbers are the same in every call."""
    torch.manual_seed(7)
    results = []
    for number, batches in enumerate(steps):
        engine.set_lr(0.2 / (1 + number))
        results.append(engine.step(batches, num_pieces=num_pieces))
    return results


def assert_equal(ours: StepEngine, theirs: StepEngine, results: Sequence[Sequence[StepResult]]) -> None:
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine.loss, other.loss)
        assert torch.equal(mine.grad_norm, other.grad_norm)
    states = [_tensors(engine.state_dict()) for engine in (ours, theirs)]
    assert states[0]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for each in inner for tensor in _tensors(each)]


def steps_of(accumulate: int, num_steps: int = 9, num_images: int = 3) -> list[list[Batch]]:
    return [
        [batch(num_images, 0.2, seed=10 * number + part) for part in range(accumulate)] for number in range(num_steps)
    ]


@pytest.mark.parametrize(
    ("criterion", "accumulate", "num_pieces"),
    [
        (lambda: CriterionCE(), 1, 1),
        (lambda: CriterionCE(weight=torch.tensor([1.0, 2.0, 0.5])), 2, 1),
        (lambda: CriterionCE(label_smoothing=0.1), 1, 2),
        (lambda: CriterionDice(), 1, 1),
    ],
    ids=["ce", "accumulate", "pieces", "dice"],
)
def test_steps_by_a_graph_are_the_eager_ones_bit_for_bit(
    graphs: TapedGraphs, criterion: Callable[[], AdditiveCriterion], accumulate: int, num_pieces: int
) -> None:
    """With clipping, an average, BatchNorm, dropout and another learning rate in each step."""
    engines = [full_size_engine(criterion(), clip=0.5, average=True) for _ in range(2)]
    with_graph(engines[0], graphs)
    results, states = [], []
    for engine in engines:
        results.append(course(engine, steps_of(accumulate), num_pieces))
        states.append(torch.get_rng_state())
    assert_equal(*engines, results)
    assert torch.equal(*states)
    assert (graphs.num_eager, graphs.num_captured, graphs.num_launched) == (WARM_UP_STEPS, 1, 9 - WARM_UP_STEPS)
    assert len({float(result.loss) for result in results[0]}) == 9


def test_each_launch_has_the_images_of_its_step(graphs: TapedGraphs) -> None:
    engine = with_graph(full_size_engine(CriterionCE()), graphs)
    engine.set_lr(0.0)
    engine.model.body[2].p = 0.0
    target = batch(2).target
    black, white = (Batch(torch.full((2, 3, 16, 24), value, dtype=torch.uint8), target, (0, 1)) for value in (0, 255))
    losses = [float(engine.step([each]).loss) for each in [black] * 4 + [white, black, white]]
    assert graphs.num_launched == 4
    assert losses[3] == losses[5] == losses[0]
    assert losses[4] == losses[6] != losses[3]


def test_results_of_a_launch_stay_as_they_are_after_the_next(graphs: TapedGraphs) -> None:
    engine = with_graph(full_size_engine(CriterionCE()), graphs)
    results = course(engine, steps_of(1, num_steps=8))
    kept = [(float(result.loss), float(result.grad_norm)) for result in results[:-1]]
    engine.step(steps_of(1, num_steps=1)[0])
    assert kept == [(float(result.loss), float(result.grad_norm)) for result in results[:-1]]


def test_bad_step_of_a_graph_changes_nothing(graphs: TapedGraphs) -> None:
    engine = with_graph(full_size_engine(CriterionCE(), average=True), graphs)
    course(engine, steps_of(1, num_steps=6))
    weight = engine.model.body[0].weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = math.inf
    before = [tensor.clone() for tensor in _tensors(engine.state_dict())]
    result = engine.step([batch(3)])
    assert float(result.is_bad) == 1.0
    after = _tensors(engine.state_dict())
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)]
    assert [float(after[i]) for i in changed] == [1.0, 1.0]  # bad_steps, bad_in_row
    with torch.no_grad():
        weight.copy_(kept)
    assert float(engine.step([batch(3)]).is_bad) == 0.0
    assert graphs.num_captured == 1


def test_short_batch_runs_without_the_graph_and_is_said_once(graphs: TapedGraphs) -> None:
    steps = [*steps_of(1, 5), [batch(2)], *steps_of(1, 3), [batch(2)], *steps_of(1, 2)]
    engines = [full_size_engine(CriterionCE()) for _ in range(2)]
    with_graph(engines[0], graphs)
    assert_equal(*engines, [course(engine, steps) for engine in engines])
    assert (graphs.num_captured, graphs.num_launched, graphs.num_eager) == (1, 7, WARM_UP_STEPS + 2)
    notes = engines[0].graph.take_notes()
    assert [note.partition(": ")[2][:30] for note in notes] == [
        "forward and backward pass run ",
        "a step that differs from the c",
    ]
    engines[0].step([batch(2)])
    assert engines[0].graph.take_notes() == []


def test_other_shape_is_captured_after_as_many_steps(graphs: TapedGraphs) -> None:
    steps = [*steps_of(1, 5), *steps_of(1, 6, num_images=2), *steps_of(2, 5)]
    engines = [full_size_engine(CriterionCE()) for _ in range(2)]
    with_graph(engines[0], graphs)
    assert_equal(*engines, [course(engine, steps) for engine in engines])
    assert (graphs.num_captured, graphs.num_launched) == (3, 2 + 3 + 2)


def test_buffers_that_moved_are_captured_again(graphs: TapedGraphs) -> None:
    engines = [full_size_engine(CriterionCE()) for _ in range(2)]
    with_graph(engines[0], graphs)
    for _ in range(2):
        assert_equal(*engines, [course(engine, steps_of(1, 6)) for engine in engines])
        for engine in engines:
            engine.model.body[1].running_mean = engine.model.body[1].running_mean.clone()
    assert graphs.num_captured == 2


class _LeavesOnce(StepParticipant):
    """Raises after the passes of one step."""

    def __init__(self, number: int) -> None:
        self._number, self._count = number, 0

    def backward(self, batches: Sequence[Batch]) -> None:
        self._count += 1
        if self._count == self._number:
            raise torch.OutOfMemoryError("after the passes")


def test_step_that_is_left_gives_the_graph_back(graphs: TapedGraphs) -> None:
    engines = [full_size_engine(CriterionCE()) for _ in range(2)]
    with_graph(engines[0], graphs)
    steps = steps_of(1, 12)
    ours = course(engines[0], steps[:5])
    engines[0].participants = (_LeavesOnce(1),)
    engines[0].set_lr(0.2 / 6)
    with pytest.raises(torch.OutOfMemoryError):
        engines[0].step(steps[5])
    for number, batches in enumerate(steps[5:], start=5):
        engines[0].set_lr(0.2 / (1 + number))
        ours.append(engines[0].step(batches))
    assert_equal(*engines, [ours, course(engines[1], steps)])
    assert graphs.num_captured == 2
    assert graphs.num_eager == 2 * WARM_UP_STEPS


def test_loss_with_two_passes_has_no_graph_in_pieces(graphs: TapedGraphs) -> None:
    engines = [full_size_engine(CriterionDice()) for _ in range(2)]
    with_graph(engines[0], graphs)
    assert_equal(*engines, [course(engine, steps_of(1, 6), num_pieces=2) for engine in engines])
    assert graphs.num_captured == 0
    (note,) = engines[0].graph.take_notes()
    assert "in pieces, this loss needs two passes of each" in note


class _Waits(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * (2.0 if float(values.detach().sum()) > 0 else 1.0)


class _NeedsMemory(nn.Module):
    """Has too little memory from the fourth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, values: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > WARM_UP_STEPS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return values


def test_step_that_waits_for_the_device_is_refused(graphs: TapedGraphs) -> None:
    engine = with_graph(full_size_engine(CriterionCE(), _Waits()), graphs)
    course(engine, steps_of(1, WARM_UP_STEPS))
    with pytest.raises(
        ConfigError,
        match=r"train\.cuda_graph = true: the step cannot be captured: RuntimeError: .* not permitted when stream is "
        r"capturing: set it to false",
    ):
        engine.step([batch(3)])
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_too_little_memory_for_a_capture_is_not_hidden(graphs: TapedGraphs) -> None:
    engine = with_graph(full_size_engine(CriterionCE(), _NeedsMemory()), graphs)
    course(engine, steps_of(1, WARM_UP_STEPS))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        engine.step([batch(3)])


def test_random_numbers_of_the_host_are_refused(graphs: TapedGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU dropout draws from the device's generator, and the host's stays as it is."""
    engine = with_graph(full_size_engine(CriterionCE()), graphs)
    course(engine, steps_of(1, WARM_UP_STEPS))
    capture = graphs.capture
    monkeypatch.setattr(graphs, "capture", lambda work: (capture(work), torch.rand(1))[0])
    with pytest.raises(ConfigError, match="random numbers on the host, which a graph would repeat: set it to false"):
        engine.step([batch(3)])


# --- from the config ---

SMALL = {"library": "smp", "name": "DeepLabV3Plus", "encoder": "tu-test_resnet"}
PLAIN = {
    "name": "r",
    "data": {"format": "folder", "root": "nowhere", "classes": ["a", "b", "c"], "crop_px": [64, 64]},
    "model": SMALL,
}


def config_of(*, cuda_graph: bool = True, **sections: Any) -> RunConfig:
    raw = {key: {**PLAIN.get(key, {}), **value} for key, value in sections.items() if isinstance(value, dict)}
    raw["train"] = {"batch_size": 2, "cuda_graph": cuda_graph, **raw.get("train", {})}
    return validate_config({**PLAIN, **raw})


def assembled(config: RunConfig) -> StepEngine:
    config = with_precision(config, (CPU,))
    layout, assembler = StepLayout("single", (CPU,)), StepAssembler(config, build_scheme(config.data))
    torch.manual_seed(0)
    parts = assembler.build_parts(layout, lambda _: [1.0] * 3, with_weights=False)
    engine = assembler.assemble(parts, layout, has_graph=True)
    engine.network.module.train()
    return engine


def drawn(num_images: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num_images, 3, 64, 64), generator=generator, dtype=torch.uint8)
    return Batch(images, torch.randint(0, 3, (num_images, 64, 64), generator=generator, dtype=torch.uint8), (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("amp-bf16", marks=pytest.mark.slow)])
def test_parameters_that_thaw_are_captured_again(graphs: TapedGraphs, precision: str) -> None:
    sections: Any = {
        "model": {"freeze": ["backbone"], "freeze_epochs": 1},
        "train": {"precision": precision, "ema": 0.9},
    }
    engines = [assembled(config_of(cuda_graph=is_on, **sections)) for is_on in (True, False)]
    assert (engines[0].graph is None, engines[1].graph is None) == (False, True)
    courses = []
    for engine in engines:
        torch.manual_seed(3)
        losses = [float(engine.step([drawn(2, seed)]).loss) for seed in range(5)]
        engine.unfreeze()
        courses.append(losses + [float(engine.step([drawn(2, seed)]).loss) for seed in range(5, 12)])
    assert courses[0] == pytest.approx(courses[1], rel=1e-2 if precision == "amp-bf16" else 1e-4)
    assert (graphs.num_captured, graphs.num_eager) == (2, 2 * WARM_UP_STEPS)


def test_trial_and_profile_have_no_graph(graphs: TapedGraphs) -> None:
    config = config_of()
    config = with_precision(config, (CPU,))
    assembler, layout = StepAssembler(config, build_scheme(config.data)), StepLayout("single", (CPU,))
    parts = assembler.build_parts(layout, lambda _: [1.0] * 3, with_weights=False)
    engine = assembler.assemble(parts, layout)
    assert engine.graph is None
    engine.step([blank_batch(assembler.scheme, 2, (64, 64))])


@pytest.mark.parametrize("mode", ["dp", "ddp", "model"])
def test_graph_of_another_mode_is_refused(mode: str) -> None:
    parallel: Any = {"mode": mode, "devices": ["cpu", "cpu"]}
    words = rf"train\.cuda_graph: true does not support parallel\.mode: {mode}: use single, or set it to false"
    with pytest.raises(ConfigError, match=words):
        config_of(parallel=parallel)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"compile": True}}, "true cannot be combined with train.compile: set one of them to false"),
        ({"distill": {"teacher": "runs/t"}}, "true does not support distill: set it to false, or leave distill out"),
        (
            {
                "model": {"library": "segapp", "name": "eomt", "encoder": "tu-vit_small_patch16_dinov3"},
                "loss": {"name": "mask_classification"},
            },
            "true does not support loss.name: mask_classification, which waits for the GPU: set it to false",
        ),
        (
            {"model": {"library": "python", "name": "mine:network", "encoder": None}},
            "true does not support custom components, which may wait for the GPU (model.name = mine:network): set it "
            "to false",
        ),
        ({"loss": {"name": "mine:loss"}}, "may wait for the GPU (loss.name = mine:loss): set it to false"),
        ({"loss": {"plus": [{"name": "mine:loss"}]}}, "wait for the GPU (loss.plus.0.name = mine:loss): set it"),
    ],
    ids=["compile", "distill", "mask-classification", "network", "loss", "further-loss"],
)
def test_setting_that_no_graph_has_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**sections)
    assert "train.cuda_graph" in str(caught.value)
    assert words in str(caught.value)


def test_own_optimizer_is_outside_the_graph() -> None:
    assert config_of(optim={"name": "torch.optim:RMSprop"}).train.cuda_graph


def test_device_without_graphs_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.cuda_graph = true on cpu: CUDA graphs need a CUDA device: set it to false"
    ):
        plan_devices(config_of(parallel={"devices": "cpu"}))


def test_loss_with_two_passes_is_refused_where_it_accumulates(graphs: TapedGraphs) -> None:
    with pytest.raises(
        ConfigError,
        match=r"train\.cuda_graph = true: with train\.accumulate = 2 the loss \(dice\) needs two passes .*: set it to "
        r"false, or train\.accumulate to 1",
    ):
        assembled(config_of(loss={"name": "dice"}, train={"accumulate": 2}))


def test_training_by_a_graph_takes_the_course_of_the_eager_one(
    graphs: TapedGraphs, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Three epochs, each with a short batch at its end, evaluations and checkpoints in between."""
    model = {"model": SMALL, "train": {"batch_size": 4}, "schedule": {"name": "constant", "warmup_steps": 0}}
    assert train(merged(tiny, **model), tmp_path / "eager") == 0
    assert train(merged(tiny, **{**model, "train": {"batch_size": 4, "cuda_graph": True}}), tmp_path / "graph") == 0
    losses = [[each["loss"] for each in events(tmp_path / name, "step")] for name in ("eager", "graph")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    notes = [each["message"] for each in events(tmp_path / "graph", "alert") if each["kind"] == "cuda_graph"]
    assert (graphs.num_launched > 0) == any("run as one graph" in note for note in notes)
