"""What the assembly of an engine refuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from segapp.assembly.devices import with_precision
from segapp.assembly.pairs import build_scheme
from segapp.config import RunConfig
from segapp.errors import ConfigError
from segapp.parallel.distributed import Ranks
from segapp.training.step.assembler import RealDevices, StepAssembler, StepLayout
from tests.support.runs import merged

ONE_CPU = StepLayout("single", (torch.device("cpu"),))


def assembler_of(config: RunConfig) -> StepAssembler:
    return StepAssembler(with_precision(config, ONE_CPU.devices), build_scheme(config.data))


@pytest.mark.parametrize(("gpu0_bsz", "is_refused"), [(0, True), (1, False)])
def test_rank_without_samples_needs_synchronised_batchnorm(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, gpu0_bsz: int, is_refused: bool
) -> None:
    ranks = Ranks()
    ranks.world_size = 2
    monkeypatch.setattr(RealDevices, "wrap_ddp", lambda _, inner, *__: inner)  # DDP would wait for the other rank
    config = merged(tiny, train={"batch_size": 4}, parallel={"sync_bn": False})
    assembler = assembler_of(config)
    layout = StepLayout("ddp", (torch.device("cpu"),), gpu0_bsz=gpu0_bsz)
    parts = assembler.build_parts(layout, lambda _: [1.0] * assembler.scheme.num_classes, with_weights=False)
    if is_refused:
        with pytest.raises(ConfigError, match=r"split \[0, 4\] leaves a rank without samples.* BatchNorm layer"):
            assembler.assemble(parts, layout, ranks=ranks)
    else:
        assert assembler.assemble(parts, layout, ranks=ranks).network.split_of(4) == [1, 3]


def test_batchnorm_that_cannot_be_synchronised_names_the_key(tiny: dict[str, Any]) -> None:
    assembler = assembler_of(merged(tiny))
    model = assembler.build_model(with_weights=False)
    model.norm = torch.nn.LazyBatchNorm2d()
    with pytest.raises(ConfigError, match=r"norm \(LazyBatchNorm2d\) has .* before, or set parallel\.sync_bn=false$"):
        assembler.prepare(model, StepLayout("dp", ONE_CPU.devices * 2))
    assembler.prepare(model, ONE_CPU)


def test_channels_last_weights_where_they_are_faster(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for is_asked in (True, False):
        monkeypatch.setattr("segapp.training.step.assembler.uses_channels_last", lambda *_, is_asked=is_asked: is_asked)
        assembler = assembler_of(merged(tiny))
        model = assembler.prepare(assembler.build_model(with_weights=False), ONE_CPU)
        kernels = [p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1]
        assert kernels
        assert all(p.is_contiguous(memory_format=torch.channels_last) == is_asked for p in kernels)


def test_state_between_steps_is_tagged_by_its_use(tiny: dict[str, Any]) -> None:
    tagged: dict[str, list[int]] = {}

    def tag(tensors: Iterable[torch.Tensor], kind: str) -> None:
        tagged.setdefault(kind, []).extend(map(id, tensors))

    assembler = assembler_of(merged(tiny, train={"ema": 0.9}))
    parts = assembler.build_parts(ONE_CPU, lambda _: [1.0] * assembler.scheme.num_classes, with_weights=False)
    engine = assembler.assemble(parts, ONE_CPU, RealDevices(tag=tag))
    assert engine.update.average is not None
    averages = [*engine.update.average.module.parameters(), *engine.update.average.module.buffers()]
    assert tagged["average"] == [id(tensor) for tensor in averages]
    assert set(tagged["buffers"]) == {id(tensor) for tensor in (*engine.model.buffers(), *engine.guard.kept)}
    held = [value for state in engine.update.optimizer.state.values() for value in state.values()]
    assert set(tagged["optimizer"]) == {id(value) for value in held if isinstance(value, torch.Tensor)} != set()
    assert tagged["masters"] == []  # fp32 has no second copy of the weights
