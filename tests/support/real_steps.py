"""Training steps really run on the CPU beside their plans: peaks and times, each in `own_process`.

Peaks are in MiB. `ledger` is the most that lived at once among the storages that the operators of a real step returned;
`allocator` is torch's profiler's count of the step, which also has what a kernel takes and frees within one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from segapp.assembly.pairs import build_scheme
from segapp.chunks import Mode, SplitRequest
from segapp.config import RunConfig, validate_config
from segapp.memory.ledger import StorageLedger
from segapp.memory.peaks import SimulationJob
from segapp.parallel import data_parallel
from segapp.planning.simulate import Simulator, build_simulator, run_step
from segapp.training.step.assembler import RealDevices, StepAssembler, StepLayout
from segapp.training.step.engine import StepEngine

MIB = 2**20
Blocks = tuple[str, ...]


def torchvision(name: str, **model: Any) -> dict[str, Any]:
    return {"library": "torchvision", "name": name, **model}


def smp(name: str, encoder: str, **model: Any) -> dict[str, Any]:
    return {"library": "smp", "name": name, "encoder": encoder, **model}


def eomt(encoder: str, **model: Any) -> dict[str, Any]:
    return {"library": "segapp", "name": "eomt", "encoder": encoder, **model}


NETWORKS: dict[str, dict[str, Any]] = {
    "LR-ASPP MobileNetV3-L": torchvision("lraspp_mobilenet_v3_large"),
    "FCN ResNet-18": torchvision("fcn", encoder="resnet18"),
    "FCN ResNet-50": torchvision("fcn_resnet50"),
    "DeepLabV3 MobileNetV3-L": torchvision("deeplabv3_mobilenet_v3_large"),
    "DeepLabV3 ResNet-50": torchvision("deeplabv3_resnet50"),
    "Unet ResNet-18": smp("Unet", "resnet18"),
    "Unet EfficientNet-B0": smp("Unet", "efficientnet-b0"),
    "Unet VGG-11-BN": smp("Unet", "vgg11_bn"),
    "Unet++ ResNet-18": smp("UnetPlusPlus", "resnet18"),
    "FPN MobileNetV2": smp("FPN", "mobilenet_v2"),
    "FPN ConvNeXt-Atto": smp("FPN", "tu-convnext_atto"),
    "PSPNet ResNet-18": smp("PSPNet", "resnet18"),
    "PAN ResNet-18": smp("PAN", "resnet18"),
    "Linknet ResNet-34": smp("Linknet", "resnet34"),
    "MAnet ResNet-18": smp("MAnet", "resnet18"),
    "DeepLabV3+ ResNet-34": smp("DeepLabV3Plus", "resnet34"),
    "DeepLabV3+ RegNetY-002": smp("DeepLabV3Plus", "tu-regnety_002"),
    "UPerNet ResNet-50": smp("UPerNet", "resnet50"),
    "UPerNet Swin-T": smp("UPerNet", "tu-swin_tiny_patch4_window7_224", options={"img_size": 160}),
    "UPerNet HRNet-W18-S": smp("UPerNet", "tu-hrnet_w18_small"),
    "Segformer MiT-B0": smp("Segformer", "mit_b0"),
    "Segformer MiT-B2": smp("Segformer", "mit_b2"),
    # Transformers of one resolution get more pixels: of few tokens, attention would take no memory worth a look.
    "DPT ViT-S/16": smp("DPT", "tu-vit_small_patch16_224", options={"dynamic_img_size": True}, crop_px=(224, 224)),
    "EoMT ViT-S/16": eomt("tu-vit_small_patch16_dinov3", crop_px=(224, 224)),
}
"""Networks of the page on accuracy."""

OTHERS = {
    "LR-ASPP MobileNetV3-S": torchvision("lraspp", encoder="mobilenet_v3_small"),
    "EoMT ViT-Ti/16": eomt("tu-vit_tiny_patch16_224", options={"mask_steps": 9, "num_queries": 16}),
    "FPN frozen": smp("FPN", "resnet18", freeze=["backbone"], freeze_epochs=1),
}
BATCH, NUM_CLASSES = 2, 19


def config_of(name: str, crop_px: tuple[int, int] | None = None) -> RunConfig:
    """A config of small crops, whose loss computes the same tensors on every device."""
    model = {**NETWORKS, **OTHERS}[name].copy()
    own_crop_px = model.pop("crop_px", (160, 160))
    is_masks = model["name"] == "eomt"
    classes = [f"c{i}" for i in range(NUM_CLASSES)]
    return validate_config(
        {
            "name": "scored",
            "data": {"format": "folder", "root": "nowhere", "classes": classes, "crop_px": crop_px or own_crop_px},
            "model": model,
            "loss": {"name": "mask_classification"} if is_masks else {"options": {"implementation": "reference"}},
            "optim": {"name": "adamw", "lr": 1e-4} if is_masks else {"name": "sgd", "momentum": 0.9, "lr": 0.01},
            "train": {"batch_size": BATCH, "precision": "fp32"},
            "parallel": {"sync_bn": False},
        }
    )


def simulator_of(config: RunConfig) -> Simulator:
    """The simulator of the first epochs, in which `model.freeze` holds."""
    return Simulator(StepAssembler(config, build_scheme(config.data)))


def simulated(simulator: Simulator, split: Sequence[int], blocks: Blocks = ()) -> Any:
    """A simulation with all logical devices on one, whose sizes are not rounded."""
    job = SimulationJob("dp" if len(split) > 1 else "single", tuple(split), recompute=(blocks,))
    return simulator.run(job, ["simgpu:0"] * len(split), alloc_unit_bytes=1, is_host_batch=False)


def real_engine(
    simulator: Simulator, ledger: StorageLedger, blocks: Blocks = (), split: Sequence[int] = (BATCH,)
) -> StepEngine:
    """The engine of a training on logical devices of the CPU; it tells a ledger of its phases and tensors."""
    torch.manual_seed(0)
    mode: Mode = "dp" if len(split) > 1 else "single"
    layout = StepLayout(mode, (torch.device("cpu"),) * len(split), SplitRequest(shares=split), (blocks,))
    parts = simulator.assembler.build_parts(layout, lambda _: [1.0] * NUM_CLASSES, with_weights=False)
    ledger.tag(parts.model.parameters(), "weights")
    ledger.tag(parts.model.buffers(), "buffers")
    return simulator.assembler.assemble(parts, layout, RealDevices(tag=ledger.tag), mark=ledger.mark)


def ledger_mib(simulator: Simulator, blocks: Blocks = ()) -> float:
    """Peak of the second of two real steps."""
    ledger = StorageLedger(alloc_unit_bytes=1)
    engine, batch = real_engine(simulator, ledger, blocks), simulator.batch(BATCH)
    ledger.tag((batch.images, batch.target), "input")
    with ledger:
        run_step(engine, [batch], ledger)
        ledger.mark("idle")
        first_mark = ledger.num_marks
        run_step(engine, [batch], ledger)
        ledger.mark("idle")
    return max(sum(moment.values()) for moment in ledger.peaks(first_mark)["cpu"].values()) / MIB


class InThisThread:
    """Runs replicas in turns in this thread, on both sides: the profiler sees the thread that started it and no other.

    One thread for several logical devices has another order in backward than one thread for each: numbers of autograd's
    nodes are per thread.
    """

    def __class_getitem__(cls, _: Any) -> type[InThisThread]:
        return cls

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        return [call() for call in calls]


def allocator_mib(engine: StepEngine, batch: Any) -> float:
    """Highest sum of what lives before the second step and what the profiler sees allocated and freed within it."""
    run_step(engine, [batch], StorageLedger())
    tensors = [*engine.model.parameters(), *engine.model.buffers(), *engine.guard.kept, batch.images, batch.target]
    tensors += [t for state in engine.update.optimizer.state.values() for t in state.values()]
    live = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        engine.step([batch])
    highest = 0
    events: Any = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    for change in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += change.nbytes()
        highest = max(highest, live)
    return highest / MIB


def beside_profiler(name: str, *splits: tuple[int, ...], share: float | None = None) -> list[tuple[Any, ...]]:
    """Return (allocator, simulated, blocks) of each split; with frozen parameters a second time without.

    Args:
        name: of the network.
        splits: of the batch.
        share: of the peak, in which the fewest first blocks are computed again.
    """
    config, rows = config_of(name, (128, 160)), []
    own, thawed = simulator_of(config), build_simulator(config)
    with mock.patch.object(data_parallel, "ReplicaThreads", InThisThread):
        for split in splits:
            blocks = () if share is None else first_blocks(own, split, share)
            engine, batch = real_engine(own, StorageLedger(), blocks, split), own.batch(sum(split))
            rows.append((allocator_mib(engine, batch), simulated(own, split, blocks).peak_mib()[0], blocks))
            if engine.model.frozen_parameters:
                engine.unfreeze()
                rows.append((allocator_mib(engine, batch), simulated(thawed, split).peak_mib()[0], ()))
    return rows


def first_blocks(simulator: Simulator, split: Sequence[int], share: float) -> Blocks:
    """The fewest first blocks with which a step fits into a share of its peak."""
    blocks, most = tuple(simulator.facts("single").blocks), share * simulated(simulator, split).peak_mib()[0]
    sets = (blocks[:count] for count in range(1, len(blocks) + 1))
    return next(each for each in sets if simulated(simulator, split, each).peak_mib()[0] <= most)


def plan_row(name: str, *, has_allocator: bool) -> dict[str, Any]:
    """A network's plan beside its real step."""
    simulator = simulator_of(config_of(name))
    allocated = (
        allocator_mib(real_engine(simulator, StorageLedger()), simulator.batch(BATCH)) if has_allocator else None
    )
    planned = simulated(simulator, (BATCH,)).peak_mib()[0]
    return {"network": name, "planned": planned, "ledger": ledger_mib(simulator), "allocator": allocated}
