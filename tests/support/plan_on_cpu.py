"""Peaks of real training steps on the CPU beside their plans, for many networks.

    python -m tests.support.plan_on_cpu [--ledger] [NAME...]

prints one JSON object a network. Three numbers, in MiB: `planned`, of `segapp plan`'s simulation; `ledger`, the most
that lived at once among the storages that the real step's operators returned; and `allocator`, torch's profiler's count
of the same step, which also has what a kernel takes and frees within one call. With `--ledger` it leaves out the third,
which is slow. The backend of the simulation is for the whole process, so this has one of its own.
"""

import json
import sys
import warnings

import torch

from segapp.assembly.pairs import build_scheme
from segapp.config import RunConfig, validate_config
from segapp.memory.ledger import StorageLedger
from segapp.memory.peaks import SimulationJob
from segapp.planning.simulate import Simulator, run_step
from segapp.training.step.assembler import RealDevices, StepAssembler, StepLayout
from tests.support.real_steps import measured_mib

MIB = 2**20


def torchvision(name: str, **model) -> dict:
    return {"library": "torchvision", "name": name, **model}


def smp(name: str, encoder: str, **model) -> dict:
    return {"library": "smp", "name": name, "encoder": encoder, **model}


def eomt(encoder: str, **model) -> dict:
    return {"library": "segapp", "name": "eomt", "encoder": encoder, **model}


NETWORKS: dict[str, dict] = {
    "LR-ASPP MobileNetV3-L": torchvision("lraspp_mobilenet_v3_large"),
    "FCN ResNet-18": torchvision("fcn", encoder="resnet18"),
    "FCN ResNet-50": torchvision("fcn_resnet50"),
    "FCN MobileNetV3-L": torchvision("fcn", encoder="mobilenet_v3_large"),
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
    "DPT ViT-S/16": smp("DPT", "tu-vit_small_patch16_224", options={"dynamic_img_size": True}),
    "EoMT ViT-S/16": eomt("tu-vit_small_patch16_dinov3"),
}
QUICK = {
    "LR-ASPP MobileNetV3-S": torchvision("lraspp", encoder="mobilenet_v3_small"),
    "EoMT ViT-Ti/16": eomt("tu-vit_tiny_patch16_224", options={"mask_steps": 9, "num_queries": 16}, crop_px=(160, 160)),
}
"""Networks of the default suite."""

BATCH, NUM_CLASSES = 2, 19
CROP_PX, TRANSFORMER_CROP_PX = (160, 160), (224, 224)
"""Transformers of one resolution get more pixels: of few tokens, attention would take no memory worth a look."""


def config_of(model: dict, **sections) -> RunConfig:
    """A config of small crops, whose loss computes the same tensors on every device."""
    is_masks = model["name"] == "eomt"
    is_transformer = is_masks or model["name"] == "DPT"
    crop_px = model.pop("crop_px", TRANSFORMER_CROP_PX if is_transformer else CROP_PX)
    loss = {"name": "mask_classification"} if is_masks else {"options": {"implementation": "reference"}}
    return validate_config(
        {
            "name": "scored",
            "data": {
                "format": "folder",
                "root": "nowhere",
                "classes": [f"c{i}" for i in range(NUM_CLASSES)],
                "crop_px": crop_px,
            },
            "model": model,
            "loss": loss,
            "optim": {"name": "adamw", "lr": 1e-4} if is_masks else {"name": "sgd", "momentum": 0.9, "lr": 0.01},
            "train": {"batch_size": BATCH, "precision": "fp32"},
            "parallel": {"sync_bn": False},
            **sections,
        }
    )


def real_engine(simulator: Simulator, ledger: StorageLedger, blocks: tuple[str, ...] = ()):
    """The engine of a training on the CPU, whose phases and tensors a ledger is told of; it computes blocks again."""
    layout = StepLayout("single", (torch.device("cpu"),), recompute=(blocks,))
    parts = simulator.assembler.build_parts(layout, lambda _: [1.0] * NUM_CLASSES, with_weights=False)
    ledger.tag(parts.model.parameters(), "weights")
    ledger.tag(parts.model.buffers(), "buffers")
    return simulator.assembler.assemble(parts, layout, RealDevices(tag=ledger.tag), mark=ledger.mark)


def ledger_mib(simulator: Simulator, blocks: tuple[str, ...] = ()) -> tuple[float, dict[str, float]]:
    """Peak of the second of two real steps, MiB, and that of each phase: what the operators returned."""
    torch.manual_seed(0)
    ledger = StorageLedger(alloc_unit_bytes=1)
    engine, batch = real_engine(simulator, ledger, blocks), simulator.batch(BATCH)
    ledger.tag((batch.images, batch.target), "input")
    with ledger:
        run_step(engine, [batch], ledger)
        ledger.mark("idle")
        first_mark = ledger.num_marks
        run_step(engine, [batch], ledger)
        ledger.mark("idle")
    phases = {phase: sum(moment.values()) / MIB for phase, moment in ledger.peaks(first_mark)["cpu"].items()}
    return max(phases.values()), phases


def allocator_mib(simulator: Simulator) -> float:
    """Peak of a step as torch's profiler counts what the CPU's allocator gives and takes."""
    torch.manual_seed(0)
    engine = real_engine(simulator, StorageLedger(alloc_unit_bytes=1))
    return measured_mib(engine, simulator.batch(BATCH))


def row(name: str, *, has_allocator: bool) -> dict:
    config = config_of({**NETWORKS, **QUICK}[name].copy())
    simulator = Simulator(StepAssembler(config, build_scheme(config.data)))
    result = simulator.run(SimulationJob("single", (BATCH,)), alloc_unit_bytes=1, is_host_batch=False)
    real, phases = ledger_mib(simulator)
    return {
        "network": name,
        "planned": result.peak_mib()[0],
        "ledger": real,
        "allocator": allocator_mib(simulator) if has_allocator else None,
        "planned phases": {phase: peak.mib for phase, peak in result.devices[0].items()},
        "ledger phases": phases,
    }


def main(words: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [word for word in words if word != "--ledger"]
    for name in names or NETWORKS:
        print(json.dumps(row(name, has_allocator="--ledger" not in words)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
