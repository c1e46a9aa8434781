"""Images per second of a training on the CPU for each way in which threads of OpenMP wait for work.

`python -m tests.benchmarks.openmp [--threads 2] [--steps 12] [--rounds 2]` trains LR-ASPP on drawn images with
OMP_WAIT_POLICY=ACTIVE, PASSIVE and unset, in turns, on a machine that is otherwise idle, with data workers, and next to
programs that keep every core busy. It prints the best images/s of each, and of each row the ratio to the default.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

SIZE_PX = (360, 480)
NUM_IMAGES = 16
POLICIES = (None, "ACTIVE", "PASSIVE")
SITUATIONS = {"idle": (0, 0), "2 data workers": (0, 2), "every core busy": (1, 0), "every core busy twice": (2, 0)}
"""By name: busy programs per core, and data workers."""

TRAINING = """
import sys, time, torch, segapp
torch.set_num_threads(int(sys.argv[2]))
seconds = []
def note(event):
    if event.type == "step":
        seconds.append(time.perf_counter())
data = {"format": "folder", "root": sys.argv[1], "classes": [f"c{i}" for i in range(11)], "crop_px": [240, 320]}
config = {
    "name": "t", "data": {**data, "workers": int(sys.argv[4]), "cache": "ram"},
    "model": {"library": "torchvision", "name": "lraspp_mobilenet_v3_large"},
    "train": {"steps": int(sys.argv[3]), "batch_size": 4}, "log": {"every_steps": 1, "tensorboard": False},
}
segapp.train(config, run=sys.argv[5], on_event=note, progress=False)
half = len(seconds) // 2
print("images/s", 4 * (len(seconds) - 1 - half) / (seconds[-1] - seconds[half]))
"""


def draw_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for kind, high, shape in (("images", 256, (*SIZE_PX, 3)), ("masks", 11, SIZE_PX)):
            (folder / kind / split).mkdir(parents=True)
            for number in range(NUM_IMAGES if split == "train" else 1):
                pixels = rng.integers(0, high, shape, np.uint8)
                Image.fromarray(pixels).save(folder / kind / split / f"{number:02}.png")


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def speed_of(data: Path, policy: str | None, threads: int, steps: int, workers: int) -> float:
    """Return the images per second of the second half of a training."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment |= {"OMP_WAIT_POLICY": policy} if policy is not None else {}
    with tempfile.TemporaryDirectory() as folder:
        words = map(str, (data, threads, steps, workers, Path(folder, "run")))
        command = [sys.executable, "-c", TRAINING, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split("images/s")[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("threads", os.cpu_count() or 1), ("steps", 12), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        draw_images(Path(folder))
        for name, (per_core, workers) in SITUATIONS.items():
            best = dict.fromkeys(POLICIES, 0.0)
            with busy_programs(per_core * (os.cpu_count() or 1)):
                for _ in range(options.rounds):
                    for policy in POLICIES:
                        speed = speed_of(Path(folder), policy, options.threads, options.steps, workers)
                        best[policy] = max(best[policy], speed)
            shown = "  ".join(
                f"{policy or 'default'} {speed:.2f} ({speed / best[None]:.2f})" for policy, speed in best.items()
            )
            print(f"{options.threads} threads, {name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
