"""Peak and time of real steps on the CPU beside their prediction: nothing, some and all blocks computed again.

    python -m tests.support.recompute_scores [NAME...]

prints one JSON object a network. "chosen": the blocks that the memory plan chooses for a device with half the memory.
Times are of the processor, the least of several steps; the three ways take turns.
"""

import gc
import json
import sys
import time
import warnings
from unittest import mock

import torch
import torch.nn.functional as F

from segapp.assembly.pairs import build_scheme
from segapp.config import RunConfig
from segapp.memory.ledger import StorageLedger
from segapp.memory.peaks import SimulationJob
from segapp.memory.plan import GpuSpec, OverheadEstimate
from segapp.planning import simulate
from segapp.planning.plan import plan_memory
from segapp.planning.simulate import Simulator
from segapp.training.step.assembler import StepAssembler
from tests.support.plan_on_cpu import BATCH, config_of, eomt, ledger_mib, real_engine, smp, torchvision

NETWORKS = {
    "LR-ASPP MobileNetV3-L": torchvision("lraspp_mobilenet_v3_large", crop_px=(384, 384)),
    "Segformer MiT-B2": smp("Segformer", "mit_b2", crop_px=(384, 384)),
    "EoMT ViT-S/16": eomt("tu-vit_small_patch16_dinov3", crop_px=(384, 384)),
}
NUM_STEPS = 7


def seconds_of(compute, times=5) -> float:
    """Least processor time of a call."""
    found = []
    for _ in range(times):
        began = time.process_time()
        compute()
        found.append(time.process_time() - began)
    return min(found)


def this_cpu() -> dict[str, float]:
    """Speeds of one thread of this processor: of a large convolution, of a copy, and of a small operator."""
    images, weight, small = torch.randn(4, 128, 56, 56), torch.randn(128, 128, 3, 3), torch.zeros(1)
    flops = 2 * images.numel() * weight.numel() / 128
    copied = torch.zeros(2**24)
    launch_s = seconds_of(lambda: [small.add_(1) for _ in range(1000)]) / 1000
    return {
        "LAUNCH_S": launch_s,
        "FLOPS_PER_S": flops / seconds_of(lambda: F.conv2d(images, weight, padding=1)),
        "HALF_FLOPS_PER_S": 1e9,
        "BYTES_PER_S": 2 * copied.nbytes / seconds_of(copied.clone),
    }


def chosen_blocks(config: RunConfig, budget_mib: float) -> tuple[str, ...]:
    """The blocks that a memory plan chooses for one device of so much memory, all of it for tensors."""
    train = config.train.model_copy(update={"recompute": "auto"})
    config = config.model_copy(update={"train": train})
    all_for_tensors = OverheadEstimate((0.0,), tensor_frac=1.0)
    plan = plan_memory(config, (GpuSpec(budget_mib, "half"),), mode="single", overhead=all_for_tensors)
    assert plan.chosen is not None
    return plan.chosen.blocks_per_device[0]


def step_seconds(simulator: Simulator, ways: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """Least processor time of a step of each way."""
    engines = {way: real_engine(simulator, StorageLedger(), blocks) for way, blocks in ways.items()}
    batch, found = simulator.batch(BATCH), dict.fromkeys(ways, float("inf"))
    for number in range(NUM_STEPS):
        for way, engine in engines.items():
            engine.network.module.train()
            began = time.process_time()
            engine.step([batch])
            if number:  # the first allocates
                found[way] = min(found[way], time.process_time() - began)
    return found


def rows(name: str) -> list[dict]:
    config = config_of(NETWORKS[name].copy())
    simulator = Simulator(StepAssembler(config, build_scheme(config.data)))
    every = tuple(simulator.facts("single").blocks)

    def simulated(blocks):
        job = SimulationJob("single", (BATCH,), recompute=(blocks,))
        return simulator.run(job, alloc_unit_bytes=1, is_host_batch=False)

    whole = simulated(())
    peak_mib = whole.peak_mib()[0]
    ways = {"nothing": (), "chosen": chosen_blocks(config, peak_mib / 2), "all": every}
    gpu = {way: simulated(blocks).step_s(1) for way, blocks in ways.items()}
    with mock.patch.multiple(simulate, **this_cpu()):
        cpu = {way: simulated(blocks).step_s(1) for way, blocks in ways.items()}
    measured_s = step_seconds(simulator, ways)
    gc.collect()
    return [
        {
            "network": name,
            "again": way,
            "blocks": f"{len(blocks)} of {len(every)}",
            "planned": simulated(blocks).peak_mib()[0],
            "ledger": ledger_mib(simulator, blocks)[0],
            "step s": measured_s[way],
            "time": measured_s[way] / measured_s["nothing"],
            "predicted time": cpu[way] / cpu["nothing"],
            "predicted time on a GPU": gpu[way] / gpu["nothing"],
        }
        for way, blocks in ways.items()
    ]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for each in sys.argv[1:] or NETWORKS:
        for row in rows(each):
            print(json.dumps(row), flush=True)
