"""What the assembly of an engine refuses and builds, and steps with `train.recompute` that change no bit."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from segapp.assembly.devices import with_precision
from segapp.assembly.pairs import build_pixels, build_scheme
from segapp.chunks import Mode, SplitRequest
from segapp.config import RunConfig
from segapp.datasets.pool import Batch
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import ConfigError
from segapp.parallel.distributed import Ranks
from segapp.parallel.recompute import RecomputedBlock
from segapp.training.step.assembler import RealDevices, StepAssembler, StepLayout, StepParts
from tests.support.runs import FCN, UNET, differing, merged

CPU = torch.device("cpu")
ONE_CPU = StepLayout("single", (CPU,))


def assembler_of(config: RunConfig) -> StepAssembler:
    return StepAssembler(with_precision(config, ONE_CPU.devices), build_scheme(config.data))


def parts_of(assembler: StepAssembler, layout: StepLayout) -> StepParts:
    return assembler.build_parts(layout, lambda _: [1.0] * assembler.scheme.num_classes, with_weights=False)


@pytest.mark.parametrize(("gpu0_bsz", "is_refused"), [(0, True), (1, False)])
def test_rank_without_samples_needs_synchronised_batchnorm(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, gpu0_bsz: int, is_refused: bool
) -> None:
    ranks = Ranks()
    ranks.world_size = 2
    monkeypatch.setattr(RealDevices, "wrap_ddp", lambda _, inner, *__: inner)  # DDP would wait for the other rank
    config = merged(tiny, train={"batch_size": 4}, parallel={"sync_bn": False})
    assembler = assembler_of(config)
    layout = StepLayout("ddp", (CPU,), SplitRequest(gpu0_bsz))
    parts = parts_of(assembler, layout)
    if is_refused:
        with pytest.raises(ConfigError, match=r"split \[0, 4\] leaves a rank without samples.* BatchNorm layer"):
            assembler.assemble(parts, layout, ranks=ranks)
    else:
        assert assembler.assemble(parts, layout, ranks=ranks).network.split_of(4) == [1, 3]


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("split", [(5,), (0, 3, 2)])
def test_loss_of_crops_between_strides_is_that_of_the_frame_cut(
    tiny: dict[str, Any], align_corners: bool, split: tuple[int, ...]
) -> None:
    sections = {"data": {"crop_px": [27, 35]}, "train": {"batch_size": 5}, "loss": {"align_corners": align_corners}}
    config = merged({**tiny, "model": FCN}, **sections)
    assembler = assembler_of(config)
    mode: Mode = "dp" if len(split) > 1 else "single"
    layout = StepLayout(mode, ONE_CPU.devices * len(split), SplitRequest(shares=split))
    parts = parts_of(assembler, layout)
    for module in parts.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model, preprocessing = copy.deepcopy(parts.model).train(), Preprocessing(build_pixels(config.data))
    engine = assembler.assemble(parts, layout)
    images = torch.randint(256, (5, 3, 27, 35), dtype=torch.uint8)
    target = torch.randint(3, (5, 27, 35), dtype=torch.uint8)
    target[2:, 4:9], target[1, :, -2:] = 255, 255
    found = engine.step([Batch(images[:5], target[:5], (0, 1, 2, 3, 4))])

    (logits,) = model(F.pad(preprocessing(images), (0, 48 - 35, 0, 32 - 27)))
    logits = F.interpolate(logits, (32, 48), mode="bilinear", align_corners=align_corners)[..., :27, :35]
    loss = F.cross_entropy(logits, target.long(), ignore_index=255)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(found.loss.float(), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.grad_norm.float(), norm, rtol=1e-4, atol=1e-6)


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
    engine = assembler.assemble(parts_of(assembler, ONE_CPU), ONE_CPU, RealDevices(tag=tag))
    assert engine.update.average is not None
    averages = [*engine.update.average.module.parameters(), *engine.update.average.module.buffers()]
    assert tagged["average"] == [id(tensor) for tensor in averages]
    assert set(tagged["buffers"]) == {id(tensor) for tensor in (*engine.model.buffers(), *engine.guard.kept)}
    held = [value for state in engine.update.optimizer.state.values() for value in state.values()]
    assert set(tagged["optimizer"]) == {id(value) for value in held if isinstance(value, torch.Tensor)} != set()
    assert tagged["masters"] == []  # fp32 has no second copy of the weights


def batch_of(num_images: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num_images, 3, 48, 64), generator=generator, dtype=torch.uint8)
    target = torch.randint(0, 3, (num_images, 48, 64), generator=generator, dtype=torch.uint8)
    return Batch(images, target, tuple(range(num_images)))


def state_after_steps(config: RunConfig, layout: StepLayout, *, num_pieces: int = 1) -> tuple[list[Any], int]:
    """Return losses, norms, the whole state and the next random number after two steps, and the number of blocks."""
    torch.manual_seed(0)
    assembler = assembler_of(config)
    engine = assembler.assemble(parts_of(assembler, layout), layout)
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
        ({}, ONE_CPU, 1),
        ({"precision": "fp16"}, ONE_CPU, 2),
        ({"accumulate": 2, "precision": "amp-bf16"}, StepLayout("dp", (CPU,) * 3, SplitRequest(0)), 1),
        ({"accumulate": 2, "ema": 0.9}, StepLayout("dp", (CPU,) * 2, SplitRequest(shares=(1, 3))), 2),
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
