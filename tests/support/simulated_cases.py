"""Simulations of many kinds of training, in a process of their own; prints one JSON object."""

import json
import sys
import warnings

from segapp.config import validate_config
from segapp.memory.peaks import SimulationJob, fit_model, splits_to_simulate
from segapp.planning.simulate import build_simulator

LRASPP = {"library": "torchvision", "name": "lraspp", "encoder": "mobilenet_v3_small"}
LINKNET = {"library": "smp", "name": "Linknet", "encoder": "resnet18"}


def simulator(crop=(256, 320), **sections):
    raw = {
        "name": "paper",
        "data": {"format": "folder", "root": "nowhere", "classes": [f"c{i}" for i in range(19)], "crop_px": crop},
        "model": LRASPP,
        **sections,
        "train": {"precision": "fp32", **sections.get("train", {})},
    }
    return build_simulator(validate_config(raw))


def seen(result):
    return [{phase: [peak.mib, peak.by_kind] for phase, peak in phases.items()} for phases in result.devices]


def run(job, **sections):
    return seen(simulator(**sections).run(job))


SINGLE = SimulationJob("single", (4,))


EVALUATED = SimulationJob("single", (4,), eval_px=(512, 1024))
LOSS_NAMES = ("ohem", "bce", "dice", "tversky", "focal", "lovasz")
DDP = SimulationJob("ddp", (4,))
HALF_AND_AVERAGE = {"precision": "fp16", "ema": 0.99}

TRAININGS = {
    "linknet": (SINGLE, {"model": LINKNET}),
    "ddp": (DDP, {"model": LINKNET}),
    "ddp without views": (DDP, {"model": LINKNET, "parallel": {"gradient_as_bucket_view": False}}),
    "model": (SimulationJob("model", (4, 0)), {"model": LINKNET}),
    "eval": (EVALUATED, {}),
    "slide": (EVALUATED, {"eval": {"slide": True}}),
    "tta": (EVALUATED, {"eval": {"tta": True}, "train": HALF_AND_AVERAGE}),
}
"""Name -> job and config sections: those of the default suite."""

MORE_TRAININGS = {
    "plain": (SINGLE, {}),
    **{name: (SINGLE, {"train": {"precision": name}}) for name in ("amp-fp16", "amp-bf16", "fp16")},
    **{name: (SINGLE, {"loss": {"name": name}}) for name in LOSS_NAMES},
    "adamw": (SINGLE, {"optim": {"name": "adamw"}}),
    "ema": (SINGLE, {"train": {"ema": 0.99}}),
    "accumulate": (SimulationJob("single", (4,), accumulate=2), {}),
    "ohem accumulate": (SimulationJob("single", (4,), accumulate=2), {"loss": {"name": "ohem"}}),
    "dp": (SimulationJob("dp", (3, 2, 4)), {}),
    "dp plain batchnorm": (SimulationJob("dp", (3, 2, 4)), {"parallel": {"sync_bn": False}}),
    "dp without gpu 0": (SimulationJob("dp", (0, 4)), {}),
}
"""Every precision, criterion, mode and optimizer once: those of the slow tests."""


def default_trainings():
    return {name: run(job, **sections) for name, (job, sections) in TRAININGS.items()}


def more_trainings():
    return {name: run(job, **sections) for name, (job, sections) in MORE_TRAININGS.items()}


def affine():
    """Predicted and simulated peaks of splits that the fit has not seen."""
    rows = []
    for model in (LRASPP, LINKNET):
        own = simulator(crop=(512, 512), model=model)
        for mode, num, unseen in (("dp", 3, [(3, 3, 3), (5, 1, 2), (0, 3, 6), (7, 1, 0)]), ("single", 1, [(1,), (9,)])):
            jobs = [SimulationJob(mode, split, eval_px=(512, 640)) for split in splits_to_simulate(mode, num)]
            fitted = fit_model(mode, [own.run(job) for job in jobs])
            for split in unseen:
                truth = own.run(SimulationJob(mode, split, eval_px=(512, 640))).peak_mib()
                rows.append([model["name"], split, fitted.peak_mib(split), truth])
    return rows


CASES = {"default": default_trainings, "more": more_trainings, "affine": affine}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(CASES[sys.argv[1]]()))
