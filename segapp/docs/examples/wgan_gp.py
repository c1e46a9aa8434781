"""The critic of a WGAN-GP on three devices: a gradient penalty through synchronized BatchNorm, exact for any split.

python wgan_gp.py                        three logical devices on the CPU
python wgan_gp.py cuda:0 cuda:1 cuda:2   three GPUs
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.parallel import DataParallelModel, convert_sync_batchnorm, gradient_penalty


def build_critic() -> nn.Module:
    """Return a critic with one score per image (N, 1)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, stride=2, padding=1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1),
    )  # fmt: skip


def mean_score(outputs: list[Tensor]) -> Tensor:
    """Return the mean over the images of all devices, on the first device."""
    return torch.cat([part.to(outputs[0].device) for part in outputs]).mean()


def main(devices: list[str]) -> None:
    """Train the critic for 20 steps to distinguish two distributions; compare the penalty with one device's."""
    torch.manual_seed(0)
    critic = convert_sync_batchnorm(build_critic()).to(devices[0])
    network = DataParallelModel(critic, device_ids=devices, gpu0_bsz=1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.0, 0.9))
    print("split of 12 images:", *network.plan(12))
    for step in range(20):
        real = F.interpolate(torch.randn(12, 3, 8, 8, device=devices[0]), scale_factor=4)  # blocks
        fake = torch.randn(12, 3, 32, 32, device=devices[0])  # single pixels
        alpha = torch.rand(12, device=devices[0])
        distance = mean_score(network(real)) - mean_score(network(fake))
        penalty = gradient_penalty(network, real, fake, kind="wgan-gp", alpha=alpha)
        if step % 5 == 0:
            alone = gradient_penalty(critic, real, fake, kind="wgan-gp", alpha=alpha)
            values = f"distance {distance.item():.4f}, penalty {penalty.item():.6f}"
            print(f"step {step}: {values}, on one device {alone.item():.6f}")
        optimizer.zero_grad()
        (10 * penalty - distance).backward()
        optimizer.step()
    print(f"final distance {distance.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu", "cpu", "cpu"])
