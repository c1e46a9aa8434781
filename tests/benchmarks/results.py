"""What three commands give: `segapp init` and `segapp train` with `train.steps=200` as the only override.

`python -m tests.benchmarks.results OUT [--search] [--seeds 0 1 2] [--steps 200] [NAME=FOLDER ...]` runs both for each
data set and each seed, and prints mIoU, Dice by class and CPU seconds. Without names: the three drawn sets, and CamVid
and photos of two classes from it, if `CAMVID` names its folder. `--search` also runs every row of `TRIALS` once, and
the best of them with the seeds. `--steps init` keeps the length of the config. Complete runs are not repeated.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from PIL import Image

from segapp.onboarding.init import InitRequest, propose_config
from tests.benchmarks.drawn_sets import DRAWN, draw_set

UNET = ["model.library=smp", "model.name=Unet"]
SMALL = ["model.encoder=tu-mobilenetv3_small_100", "model.options={decoder_channels: [128, 64, 32, 16, 16]}"]
LARGE = ["model.encoder=tu-mobilenetv3_large_100", "model.options={decoder_channels: [96, 64, 48, 32, 16]}"]
LITE = ["model.encoder=tu-tf_efficientnet_lite0", "model.options={decoder_channels: [96, 64, 48, 32, 16]}"]
DLV3 = ["model.library=smp", "model.name=DeepLabV3Plus", "model.options={}"]
LRASPP = ["model.library=torchvision", "model.name=lraspp_mobilenet_v3_large", "model.encoder=null", "model.options={}"]
TRIALS: dict[str, list[str]] = {
    "unet small": [*UNET, *SMALL],
    "unet large": [*UNET, *LARGE],
    "unet lite0": [*UNET, *LITE],
    "deeplabv3+ small": [*DLV3, SMALL[0]],
    "deeplabv3+ large": [*DLV3, LARGE[0]],
    "lr-aspp": LRASPP,
    "lr x 0.5": ["optim.lr=1e-3"],
    "lr x 2": ["optim.lr=4e-3"],
    "ce": ["loss.plus=[]"],
    "ce, enet weights": ["loss.plus=[]", "loss.class_weights=enet"],
    "scale 0.75 to 1.33": ["data.augment=null", "data.scale=[0.75, 1.33]"],
    "no color changes": ["data.augment=null", "data.photometric=false"],
    "crops of 352": ["data.crop_px=[352, 352]"],
    "average of weights": ["train.ema=0.98"],
}
"""What was tried by hand, relative to the config of `init`."""


def draw_photos(camvid: Path, folder: Path) -> None:
    """Write every fourth training image of CamVid, with road as 255 and everything else as 0."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for image in sorted((camvid / "train").glob("*.png"))[::4]:
        shutil.copy(image, folder / "images" / image.name)
        mask = np.asarray(Image.open(camvid / "trainannot" / image.name))
        Image.fromarray(np.where(mask == 3, 255, 0).astype(np.uint8)).save(folder / "masks" / image.name)


def find_sets(out: Path, named: Sequence[str]) -> dict[str, Path]:
    """Return the data sets by name; the drawn ones are drawn once."""
    sets = {name: Path(folder).absolute() for name, _, folder in (each.partition("=") for each in named)}
    if not named:
        camvid = os.environ.get("CAMVID")
        sets = {name: out / "data" / name for name in DRAWN}
        if camvid is not None and Path(camvid).is_dir():
            sets |= {"photos": out / "data" / "photos", "camvid": Path(camvid).absolute()}
        for name, folder in sets.items():
            if name == "photos" and camvid and not folder.exists():
                draw_photos(Path(camvid), folder)
            elif name in DRAWN and not folder.exists():
                draw_set(name, folder)
    for name in [name for name, folder in sets.items() if not folder.is_dir()]:
        print(f"{name}: skipped, there is no folder {sets.pop(name)}")
    if not named and "camvid" not in sets:
        print("camvid, photos: skipped, CAMVID names no folder")
    return sets


def train(config: Path, run: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train in a process of its own; return the last evaluation and the CPU seconds."""
    result = run / "result.json"
    if not result.exists():
        shutil.rmtree(run, ignore_errors=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "segapp", "train", "--config", config, "--run", run, "--plain", *overrides],
            env={"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        last = [event for event in events if event["type"] == "val"][-1]
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        result.write_text(json.dumps({"miou": last["miou"], "iou": last["iou"], "cpu_s": cpu_s}))
        shutil.rmtree(run / "checkpoints")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def row(name: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return the means of some runs as a line."""
    ious = np.array([[np.nan if value is None else value for value in each["iou"]] for each in runs]).mean(0)
    dice = " ".join("-" if np.isnan(value) else f"{2 * value / (1 + value):.3f}" for value in ious)
    mious = [each["miou"] for each in runs]
    spread = f"{fmean(mious):.4f} ({min(mious):.4f} to {max(mious):.4f})" if len(runs) > 1 else f"{mious[0]:.4f}"
    return f"{name:24} mIoU {spread}  Dice {dice}  {fmean(each['cpu_s'] for each in runs):.0f} CPU s"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", default="200")
    parser.add_argument("sets", nargs="*")
    options = parser.parse_args()
    out = options.out.absolute()
    length = [] if options.steps == "init" else [f"train.steps={options.steps}"]
    for name, folder in find_sets(out, options.sets).items():
        config = out / f"{name}.yaml"
        made = propose_config(InitRequest(folder, config, force=True, is_tried=True))
        print(f"\n{name}: {', '.join(line for line in made.lines if line.startswith('splits'))}", flush=True)

        def results(tag: str, overrides: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
            place = out / f"{name}-{options.steps}"  # noqa: B023
            return [train(config, place / f"{tag}-{seed}", [*length, *overrides, f"seed={seed}"]) for seed in seeds]  # noqa: B023

        print(row("init", results("init", [], options.seeds)), flush=True)
        if options.search:
            tried = {trial: results(trial, overrides, [7]) for trial, overrides in TRIALS.items()}
            for trial, runs in tried.items():
                print(row(trial, runs), flush=True)
            best = max(tried, key=lambda trial: float(tried[trial][0]["miou"]))
            print(row(f"best: {best}", results(best, TRIALS[best], options.seeds)), flush=True)


if __name__ == "__main__":
    main()
