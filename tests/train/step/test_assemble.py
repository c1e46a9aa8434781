"""What the assembly of an engine refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segapp.build.data import build_scheme
from segapp.errors import ConfigError
from segapp.parallel.ranks import Ranks
from segapp.train.step.assemble import StepAssembler
from segapp.train.step.layout import StepLayout
from tests.support.runs import merged


@pytest.mark.parametrize(("gpu0_bsz", "is_refused"), [(0, True), (1, False)])
def test_rank_without_samples_needs_synchronised_batchnorm(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, gpu0_bsz: int, is_refused: bool
) -> None:
    ranks = Ranks()
    ranks.world_size = 2
    monkeypatch.setattr(StepAssembler, "_wrapped", lambda _, inner, *__: inner)  # DDP would wait for the other rank
    config = merged(tiny, train={"batch_size": 4}, parallel={"sync_bn": False})
    assembler = StepAssembler(config, build_scheme(config.data))
    layout = StepLayout("ddp", (torch.device("cpu"),), gpu0_bsz=gpu0_bsz)
    parts = assembler.build_parts(layout, lambda _: [1.0] * assembler.scheme.num_classes, with_weights=False)
    if is_refused:
        with pytest.raises(ConfigError, match=r"split \[0, 4\] leaves a rank without samples.* BatchNorm layer"):
            assembler.assemble(parts, layout, ranks=ranks)
    else:
        assert assembler.assemble(parts, layout, ranks=ranks).split_of(4) == [1, 3]
