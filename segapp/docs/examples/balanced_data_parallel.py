"""BalancedDataParallel in a plain training loop: the first device gets 1 of 8 images, the loss is unchanged.

python balanced_data_parallel.py                        three logical devices on the CPU
python balanced_data_parallel.py cuda:0 cuda:1 cuda:2   three GPUs
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn

from segapp.losses import CriterionCE
from segapp.parallel import BalancedDataParallel, convert_sync_batchnorm


def build_network() -> nn.Module:
    """Return a network with logits at a quarter of the resolution."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1),
    )  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return images (8, 3, 64, 64) and a target (8, 64, 64) with unevenly distributed ignored pixels."""
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(0, 4, (8, 8, 8), generator=generator).repeat_interleave(8, 1).repeat_interleave(8, 2)
    images = torch.randn(8, 3, 64, 64, generator=generator) + target[:, None]
    for image in range(8):
        target[image, : 8 * image] = 255
    return images, target


def main(devices: list[str]) -> None:
    """Train 20 steps on several devices and on one, and print both losses."""
    torch.manual_seed(0)
    net = convert_sync_batchnorm(build_network()).to(devices[0])
    alone = copy.deepcopy(net)
    model = BalancedDataParallel(1, net, device_ids=devices)  # instead of nn.DataParallel
    criterion = CriterionCE(ignore_index=255)
    print("split of 8 images:", *model.plan(8))
    networks = {"several devices": model, "one device": alone}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in networks.values()]
    for step in range(20):
        images, target = (part.to(devices[0]) for part in batch(step))
        losses = [criterion(each(images), target) for each in networks.values()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 5 == 4:
            shown = [f"{loss.item():.5f} on {name}" for loss, name in zip(losses, networks, strict=True)]
            print(f"step {step + 1}:", *shown)


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu", "cpu", "cpu"])
