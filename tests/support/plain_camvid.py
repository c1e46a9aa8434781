"""A training of CamVid without segapp, to compare with at equal time.

    python -m tests.support.plain_camvid CAMVID OUT --epochs 20

It has the model, the crops, the batch, the loss, the optimizer and the schedule of configs/camvid.yaml in a loop
written by hand. It writes OUT/labels/NAME.png, the class ids of each validation image at full size, after the training
time has been taken. OUT/training.json has the numbers of steps and images, and the seconds of wall time and CPU time.

Shapes: N images, C classes, H, W height and width in pixels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import cv2
import numpy as np
import psutil
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support import ROOT

NUM_CLASSES = 11
UNLABELLED = 11

Pixels = NDArray[Any]


class CamVid(Dataset[tuple[Pixels, Pixels]]):
    """Images (3, H, W), uint8, and their masks (H, W); `change` maps an image (H, W, 3) and its mask."""

    def __init__(self, root: Path, split: str, change: Callable[..., Any]) -> None:
        ids = np.arange(256, dtype=np.uint8)
        ids[UNLABELLED] = 255
        self.change = change
        self.pixels = [
            (cv2.cvtColor(cv2.imread(str(image)), cv2.COLOR_BGR2RGB), ids[cv2.imread(str(mask), cv2.IMREAD_GRAYSCALE)])
            for image, mask in zip(
                sorted((root / split).iterdir()), sorted((root / f"{split}annot").iterdir()), strict=True
            )
        ]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> tuple[Pixels, Pixels]:
        image, mask = self.pixels[i]
        changed = self.change(image=image, mask=mask)
        return np.ascontiguousarray(changed["image"].transpose(2, 0, 1)), changed["mask"]


def cpu_s_of(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of all its descendants, ended or not."""
    total_s = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total_s += sum(each.cpu_times()[:4])  # user and system, then user and system of descendants that ended
    return total_s


class Clock:
    """The CPU seconds of this process and its descendants at the end of each step."""

    def __init__(self) -> None:
        self.began = psutil.Process().create_time()
        self.ends: list[float] = []

    def step(self) -> None:
        self.ends.append(cpu_s_of(psutil.Process()))

    def wall_s(self) -> float:
        return time.time() - self.began

    def step_s(self) -> float:
        """Return the median CPU seconds per step, from the third step on."""
        return statistics.median(b - a for a, b in zip(self.ends[1:], self.ends[2:], strict=False))


def train_plain(chosen: argparse.Namespace, clock: Clock) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Train the shipped config; return the number of images and the function from images to logits (N, C, H, W)."""
    import torchvision
    from torch.optim.swa_utils import AveragedModel

    config = yaml.safe_load((ROOT / "configs" / "camvid.yaml").read_text())
    data, optim, training = config["data"], config["optim"], config["train"]
    crop = dict(zip(("height", "width"), data["crop_px"], strict=True))
    strength = data["photometric"]
    augment = A.Compose(
        [
            A.RandomScale(scale_limit=tuple(factor - 1 for factor in data["scale"]), p=1),
            A.PadIfNeeded(*data["crop_px"], fill=(124, 116, 104), fill_mask=255),
            A.RandomCrop(**crop),
            A.HorizontalFlip(p=0.5),
            A.ColorJitter(
                brightness=32 / 255 * strength, contrast=strength / 2, saturation=strength / 2, hue=strength / 20, p=0.8
            ),
        ],
        seed=chosen.seed,
    )
    torch.manual_seed(chosen.seed)
    train_set = CamVid(chosen.camvid, "train", augment)
    val_set = CamVid(chosen.camvid, "val", A.NoOp())
    batch = training["batch_size"]
    loader = DataLoader(train_set, batch, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True)
    val_loader = DataLoader(val_set, batch_size=1, num_workers=1)

    shares = np.bincount(np.concatenate([mask.ravel() for _, mask in train_set.pixels]), minlength=256)[:11]
    weights = torch.tensor(1 / np.log(1.02 + shares / shares.sum()), dtype=torch.float32)  # ENet's rule
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(num_classes=NUM_CLASSES, weights_backbone=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = training["bn_momentum"]
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optim["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=float(optim["lr"]),
        fused=True,
    )
    num_steps, warm_up = chosen.epochs * len(loader), config["schedule"]["warmup_steps"]
    power = config["schedule"]["power"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * max(0.0, 1 - step / num_steps) ** power
    )

    def average(
        averages: tuple[Tensor, ...] | list[Tensor], current: tuple[Tensor, ...] | list[Tensor], n: Any
    ) -> None:
        """Average with the smaller decay of the first updates that segapp has; torch's own average begins slowly."""
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, current, 1 - min(training["ema"], (1 + int(n)) / (10 + int(n))))

    averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1) * 255
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1) * 255
    num_images = 0

    def logits_of(images_NCHW: Tensor) -> Tensor:
        logits_NCHW: Tensor = averaged((images_NCHW - mean) / std)["out"]
        return logits_NCHW

    averaged.eval()
    for epoch in range(chosen.epochs):
        model.train()
        for images_NCHW, target_NHW in loader:
            logits_NCHW = model((images_NCHW - mean) / std)["out"]
            loss = nn.functional.cross_entropy(logits_NCHW, target_NHW.long(), weights, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            averaged.update_parameters(model)
            num_images += len(images_NCHW)
            clock.step()
            if len(clock.ends) == chosen.steps or clock.ends[-1] >= chosen.seconds:
                return num_images, logits_of
        if (epoch + 1) % config["eval"]["every_epochs"] == 0 or epoch + 1 == chosen.epochs:
            counts = torch.zeros(NUM_CLASSES, 256, dtype=torch.long)
            with torch.inference_mode():
                for images_NCHW, target_NHW in val_loader:
                    pairs = logits_of(images_NCHW).argmax(1) * 256 + target_NHW
                    counts += torch.bincount(pairs.ravel(), minlength=counts.numel()).view_as(counts)
            print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {_accuracy(counts):.4f}", flush=True)
            torch.save({"model": averaged.state_dict(), "optimizer": optimizer.state_dict()}, chosen.out / "last.pt")
    return num_images, logits_of


def _accuracy(counts: Tensor) -> float:
    valid = counts[:, :NUM_CLASSES]
    return float(valid.diagonal().sum() / valid.sum())


def write_labels(camvid: Path, out: Path, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Write the class ids of each validation image at full size as PNG."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted((camvid / "val").iterdir()):
        image = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
        with torch.inference_mode():
            logits_NCHW = logits_of(torch.from_numpy(image).permute(2, 0, 1)[None].float())
        cv2.imwrite(str(out / f"{path.stem}.png"), logits_NCHW[0].argmax(0).numpy().astype(np.uint8))


def main() -> None:
    """Train as the command line says, and write OUT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("camvid", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=-1, help="end after so many steps, and predict nothing")
    parser.add_argument("--seconds", type=float, default=1e6, help="end after so many CPU seconds")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    clock = Clock()
    num_images, logits_of = train_plain(chosen, clock)
    wall_s, cpu_s = clock.wall_s(), cpu_s_of(psutil.Process())
    numbers = {
        "steps": len(clock.ends),
        "images": num_images,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
    }
    if chosen.steps > 0:
        numbers["step_s"] = clock.step_s()
    else:
        write_labels(chosen.camvid, chosen.out / "labels", logits_of)
    (chosen.out / "training.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
