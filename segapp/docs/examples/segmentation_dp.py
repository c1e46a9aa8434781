"""Segmentation on several devices in one process: the loss on each device, and 1 of 8 images on the first device.

python segmentation_dp.py                        three logical devices on the CPU
python segmentation_dp.py cuda:0 cuda:1 cuda:2   three GPUs
"""

import sys

import torch
from torch import Tensor, nn

from segapp.losses import CriterionCE
from segapp.parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm


def build_network() -> nn.Module:
    """Return a network with logits at a quarter of the resolution."""
    torch.manual_seed(0)
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


def train(network: nn.Module, devices: list[str], num_steps: int) -> list[float]:
    """Train the network in place; return the losses."""
    network = convert_sync_batchnorm(network).to(devices[0])
    model = DataParallelModel(network, device_ids=devices, gpu0_bsz=1)  # instead of nn.DataParallel
    criterion = DataParallelCriterion(CriterionCE(ignore_index=255))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(num_steps):
        images, target = batch(step)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    devices = sys.argv[1:] or ["cpu", "cpu", "cpu"]
    several, one = (train(build_network(), each, 20) for each in (devices, devices[:1]))
    for step in (4, 9, 14, 19):
        print(f"step {step + 1}: {several[step]:.5f} on several devices {one[step]:.5f} on one device")
