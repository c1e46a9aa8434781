"""Simulations of many kinds of training, in a process of their own; prints one JSON object."""

import json
import sys
import warnings

from segapp.config import validate_config
from segapp.memory.affine import fit_model, splits_to_simulate
from segapp.memory.simulation.jobs import SimulationJob
from segapp.train.planning.simulate import build_simulator

LRASPP = {"library": "torchvision", "name": "lraspp", "encoder": "mobilenet_v3_small"}
LINKNET = {"library": "smp", "name": "Linknet", "encoder": "resnet18"}


def simulator(crop=(256, 320), **sections):
    raw = {
        "name": "paper",
        "data": {"format": "folder", "root": "nowhere", "classes": [f"c{i}" for i in range(19)], "crop_px": crop},
        "model": LRASPP,
        **sections,
    }
    return build_simulator(validate_config(raw))


def seen(result):
    return [{phase: [peak.mib, peak.by_kind] for phase, peak in phases.items()} for phases in result.devices]


def run(job, **sections):
    return seen(simulator(**sections).run(job))


SINGLE = SimulationJob("single", (4,))


def roads():
    """Every precision, criterion, mode and optimizer, once."""
    found = {"plain": run(SINGLE)}
    for name in ("amp-fp16", "amp-bf16", "fp16"):
        found[name] = run(SINGLE, train={"precision": name})
    for name in ("ohem", "dice", "focal", "lovasz"):
        found[name] = run(SINGLE, loss={"name": name})
    evaluated = SimulationJob("single", (4,), eval_px=(512, 1024))
    found["eval"] = run(evaluated)
    found["slide"] = run(evaluated, eval={"slide": True})
    found["tta"] = run(evaluated, eval={"tta": True}, train={"precision": "fp16", "ema": 0.99})
    found["adamw"] = run(SINGLE, optim={"name": "adamw"})
    found["ema"] = run(SINGLE, train={"ema": 0.99})
    found["accumulate"] = run(SimulationJob("single", (4,), accumulate=2))
    found["ohem accumulate"] = run(SimulationJob("single", (4,), accumulate=2), loss={"name": "ohem"})
    for style in ("full", "upsampled"):
        found[style] = run(SimulationJob("single", (4,), loss=style))
    found["dp"] = run(SimulationJob("dp", (3, 2, 4)))
    found["dp plain batchnorm"] = run(SimulationJob("dp", (3, 2, 4)), parallel={"sync_bn": False})
    found["dp without gpu 0"] = run(SimulationJob("dp", (0, 4)))
    found["gathered"] = run(SimulationJob("dp", (2, 2), loss="gathered"))
    found["ddp"] = run(SimulationJob("ddp", (4,), num_ranks=3), model=LINKNET)
    found["ddp without views"] = run(
        SimulationJob("ddp", (4,), num_ranks=3), model=LINKNET, parallel={"gradient_as_bucket_view": False}
    )
    found["linknet"] = run(SINGLE, model=LINKNET)
    found["model"] = run(SimulationJob("model", (4, 0)), model=LINKNET)
    return found


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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({"roads": roads, "affine": affine}[sys.argv[1]]()))
