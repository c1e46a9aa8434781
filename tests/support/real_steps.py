"""A training step really run on the CPU, its allocations as torch's profiler saw them, beside the simulation of it.

    python tests/support/real_steps.py MODEL SPLIT... [recompute=SHARE]

prints one JSON object a split; with a share, for the fewest first blocks to compute again in that share of the peak.
The backend of the simulation is for the whole process: this has one of its own.
"""

import json
import sys
import warnings

import torch
from torch.profiler import ProfilerActivity, profile

from segapp.assembly.pairs import build_scheme
from segapp.config import validate_config
from segapp.memory.ledger import StorageLedger
from segapp.memory.peaks import SimulationJob
from segapp.parallel import data_parallel
from segapp.planning.simulate import Simulator, build_simulator, run_step
from segapp.training.step.assembler import StepAssembler, StepLayout, StepParts

MODELS = {
    "lraspp": {"library": "torchvision", "name": "lraspp_mobilenet_v3_large"},
    "fcn_resnet18": {"library": "torchvision", "name": "fcn", "encoder": "resnet18"},
    "deeplabv3_resnet50": {"library": "torchvision", "name": "deeplabv3_resnet50"},
    "unet_resnet18": {"library": "smp", "name": "Unet", "encoder": "resnet18"},
    "fpn_mobilenet": {"library": "smp", "name": "FPN", "encoder": "mobilenet_v2"},
    "segformer_b0": {"library": "smp", "name": "Segformer", "encoder": "mit_b0"},
    "linknet_resnet18": {"library": "smp", "name": "Linknet", "encoder": "resnet18"},
    "fcn_mobilenet": {"library": "torchvision", "name": "fcn", "encoder": "mobilenet_v3_large"},
    "pspnet_resnet18": {"library": "smp", "name": "PSPNet", "encoder": "resnet18"},
    "frozen": {"library": "smp", "name": "FPN", "encoder": "resnet18", "freeze": ["backbone"], "freeze_epochs": 1},
}


def config_of(model, crop=(128, 160), **sections):
    sections["train"] = {"precision": "fp32", **sections.get("train", {})}
    return validate_config(
        {
            "name": "real",
            "data": {"format": "folder", "root": "nowhere", "classes": [f"c{i}" for i in range(19)], "crop_px": crop},
            "model": MODELS[model],
            "optim": {"name": "sgd", "momentum": 0.9},
            "parallel": {"sync_bn": False},
            **sections,
        }
    )


def static_bytes(engine):
    tensors = [*engine.model.parameters(), *engine.model.buffers(), *engine.guard.kept]
    tensors += [t for state in engine.update.optimizer.state.values() for t in state.values()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class InThisThread:
    """Runs replicas in turns in this thread, on both sides: the profiler sees the thread that started it and no other.

    One thread for several logical devices has another order in backward than one thread for each: numbers of autograd's
    nodes are per thread.
    """

    def __class_getitem__(cls, _):
        return cls

    def __init__(self, *_):
        pass

    def run(self, calls):
        return [call() for call in calls]


def real_engine(simulator, split, recompute=None):
    """The engine of a training, on logical devices of the CPU."""
    torch.manual_seed(0)
    mode = "dp" if len(split) > 1 else "single"
    devices = (torch.device("cpu"),) * len(split)
    layout = StepLayout(mode, devices, shares=split if mode == "dp" else None, recompute=recompute)
    assembler = simulator.assembler
    model = assembler.prepare(assembler.build_model(with_weights=False), layout).train()
    criterion = assembler.build_criterion(lambda _: [1.0] * 19)
    return assembler.assemble(StepParts(model, criterion), layout)


def measured_mib(engine, batch):
    """Highest sum of what lives before the step and what the profiler sees allocated and freed within it, MiB."""
    run_step(engine, [batch], StorageLedger())
    before = static_bytes(engine) + batch.images.nbytes + batch.target.nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        engine.step([batch])
    changes = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live, highest = 0, 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        live += change.nbytes()
        highest = max(highest, live)
    return (before + highest) / 2**20


def chosen_blocks(simulator, split, share):
    """The fewest first blocks with which a step fits into a share of the peak."""
    blocks, most = simulator.facts("single").blocks, share * simulated_mib(simulator, split)
    sets = ((blocks[:count],) for count in range(1, len(blocks) + 1))
    return next(each for each in sets if simulated_mib(simulator, split, each) <= most)


def simulated_mib(simulator, split, recompute=None):
    job = SimulationJob("dp" if len(split) > 1 else "single", split, recompute=recompute)
    devices = ["simgpu:0"] * len(split)
    return simulator.run(job, devices, alloc_unit_bytes=1, is_host_batch=False).peak_mib()[0]


def at_full_resolution(build):
    """The loss of the CPU's reference on both sides: bands and kernels allocate differently."""

    def build_criterion(*arguments):
        criterion = build(*arguments)
        for part in criterion.modules():
            if hasattr(part, "implementation"):
                part.implementation = "reference"
        return criterion

    return build_criterion


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = config_of(sys.argv[1])
    share = next((float(word.removeprefix("recompute=")) for word in sys.argv[2:] if "=" in word), None)
    splits = [tuple(map(int, word.split("+"))) for word in sys.argv[2:] if "=" not in word]
    # One simulator as `segapp plan` builds it, and before it one of the epochs in which `model.freeze` holds.
    own = Simulator(StepAssembler(config, build_scheme(config.data)))
    simulators = [own, build_simulator(config)] if config.model.freeze else [own]
    StepAssembler.build_criterion = at_full_resolution(StepAssembler.build_criterion)
    data_parallel.ReplicaThreads = InThisThread
    if share is not None:
        for split in splits:
            blocks = chosen_blocks(own, split, share)
            simulated, plain = simulated_mib(own, split, blocks), simulated_mib(own, split)
            measured_ = measured_mib(real_engine(own, split, blocks), own.batch(sum(split)))
            print(json.dumps((split, measured_, simulated, plain, blocks)))
        sys.exit()
    rows = [(split, simulated_mib(simulator, split)) for split in splits for simulator in simulators]
    measured = []
    for split in splits:
        engine, batch = real_engine(own, split), own.batch(sum(split))
        measured.append(measured_mib(engine, batch))
        if engine.model.frozen_parameters:
            engine.unfreeze()
            measured.append(measured_mib(engine, batch))
    for (split, simulated), mib in zip(rows, measured, strict=True):
        print(json.dumps((split, mib, simulated)))
