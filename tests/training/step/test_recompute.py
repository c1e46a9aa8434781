"""Steps with `train.recompute` equal those without, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segapp.assembly.devices import with_precision
from segapp.assembly.pairs import build_scheme
from segapp.config import RunConfig
from segapp.datasets.pool import Batch
from segapp.errors import ConfigError
from segapp.parallel.recompute import RecomputedBlock
from segapp.training.step.assembler import StepAssembler, StepLayout
from segapp.training.step.engine import StepEngine
from tests.support.runs import differing, merged

CPU = torch.device("cpu")
OPTIONS = {"encoder_depth": 3, "decoder_channels": [16, 8, 8]}
UNET = {"library": "smp", "name": "Unet", "encoder": "tu-test_resnet", "options": OPTIONS}


def engine_of(config: RunConfig, layout: StepLayout) -> StepEngine:
    torch.manual_seed(0)
    assembler = StepAssembler(with_precision(config, layout.devices), build_scheme(config.data))
    parts = assembler.build_parts(layout, lambda _: [1.0] * assembler.scheme.num_classes, with_weights=False)
    return assembler.assemble(parts, layout)


def batch_of(num_images: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num_images, 3, 48, 64), generator=generator, dtype=torch.uint8)
    target = torch.randint(0, 3, (num_images, 48, 64), generator=generator, dtype=torch.uint8)
    return Batch(images, target, tuple(range(num_images)))


def state_after_steps(config: RunConfig, layout: StepLayout, *, num_pieces: int = 1) -> tuple[list[Any], int]:
    """Return losses, norms, the whole state and the next random number after two steps, and the number of blocks."""
    engine = engine_of(config, layout)
    engine.network.module.train()
    torch.manual_seed(5)
    found: list[Any] = []
    for number in range(2):
        batches = [batch_of(4, 10 * number + i) for i in range(config.train.accumulate)]
        result = engine.step(batches, num_pieces=num_pieces)
        found += [result.loss, result.grad_norm]
    num_blocks = sum(isinstance(part, RecomputedBlock) for part in engine.model.modules())
    return [found, engine.state_dict(), torch.rand(2)], num_blocks


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("train_section", "layout", "num_pieces"),
    [
        ({}, StepLayout("single", (CPU,)), 1),
        ({"precision": "fp16"}, StepLayout("single", (CPU,)), 2),
        ({"accumulate": 2, "precision": "amp-bf16"}, StepLayout("dp", (CPU,) * 3, gpu0_bsz=0), 1),
        ({"accumulate": 2, "ema": 0.9}, StepLayout("dp", (CPU,) * 2, shares=(1, 3)), 2),
    ],
    ids=["single", "fp16 in pieces", "amp, dp with an empty device", "accumulated, dp in pieces"],
)
def test_steps_with_recomputation_change_no_bit(
    tiny: dict[str, Any], train_section: dict[str, Any], layout: StepLayout, num_pieces: int
) -> None:
    found = []
    for recompute in ("off", "all"):
        section = {"batch_size": 4, "recompute": recompute, **train_section}
        config = merged(tiny, model=UNET, train=section, data={"crop_px": [48, 64]})
        found.append(state_after_steps(config, layout, num_pieces=num_pieces))
    (kept, none), (again, num_blocks) = found
    assert differing(kept, again) == []
    assert (none, num_blocks) == (0, 5)


def test_names_and_devices_of_a_layout_choose_the_blocks(tiny: dict[str, Any]) -> None:
    tiny["train"]["precision"] = "fp32"
    config = merged(tiny, model=UNET, train={"recompute": ["encoder.*", "decoder.blocks.1"]})
    assembler = StepAssembler(config, build_scheme(config.data))

    def chosen(layout: StepLayout) -> dict[str, list[int]]:
        model = assembler.prepare(assembler.build_model(with_weights=False), layout)
        parts = model.named_modules()
        return {name: sorted(part.recompute_plan.devices) for name, part in parts if isinstance(part, RecomputedBlock)}

    pair = (CPU, CPU)
    layout = StepLayout("dp", pair)
    encoder = [f"encoder.model.layer{stage}.0" for stage in (1, 2)]
    assert chosen(layout) == {name: [0, 1] for name in (*encoder, "decoder.blocks.1")}
    given = StepLayout("dp", pair, recompute=(("decoder.blocks.0",), (encoder[0], "decoder.blocks.0")))
    assert chosen(given) == {"decoder.blocks.0": [0, 1], encoder[0]: [1]}
    wrong = merged(tiny, model=UNET, train={"recompute": ["encoder.model.layer9.*"]})
    with pytest.raises(ConfigError, match=r"train\.recompute: 'encoder\.model\.layer9"):
        StepAssembler(wrong, build_scheme(wrong.data)).prepare(assembler.build_model(with_weights=False), layout)


def test_recomputation_is_refused_beside_compiled_steps(tiny: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"train\.recompute.*cannot be combined with train\.compile"):
        merged(tiny, train={"compile": True, "recompute": "all"}, parallel={"mode": "single"})
