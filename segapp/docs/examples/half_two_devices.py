"""A model over two devices in fp16: half weights, BatchNorm in float32, loss scaling and clipping.

python half_two_devices.py                 two logical devices on the CPU
python half_two_devices.py cuda:0 cuda:1   two GPUs
"""

import sys

import torch
from torch import Tensor, nn

from segapp.losses import CriterionCE
from segapp.parallel import balance_stages, place_stages
from segapp.precision import Precision


def build_network() -> nn.Module:
    """Return a network with logits at half the resolution."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1),
    )  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return images (4, 3, 16, 16) and a target (4, 16, 16) with ignored pixels."""
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(0, 4, (4, 4, 4), generator=generator).repeat_interleave(4, 1).repeat_interleave(4, 2)
    images = torch.randn(4, 3, 16, 16, generator=generator) + target[:, None]
    target[1, :9] = 255
    return images, target


def train(network: nn.Module, devices: list[str], num_steps: int) -> list[float]:
    """Train the network in place; return the losses."""
    precision = Precision("fp16", devices[0])
    network = precision.prepare(network)
    stages = balance_stages(network, devices, batch(0)[0].half())
    place_stages(network, stages, output_device=devices[0])
    criterion = CriterionCE(ignore_index=255)
    optimizer = torch.optim.SGD(precision.master_weights(network.parameters()), lr=0.1, momentum=0.9)
    losses = []
    for step in range(num_steps):
        images, target = batch(step)
        loss = criterion(network(images.half()), target.to(devices[0]))
        precision.backward(loss)  # of the scaled loss; instead of GradScaler, which refuses half weights
        grad_norm = precision.finish_gradients(optimizer, clip_grad_norm=1.0)
        precision.step(optimizer, is_bad=~grad_norm.isfinite())
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found = train(build_network(), sys.argv[1:] or ["cpu", "cpu"], 20)
    print(f"loss {found[0]:.4f} in the first step, {found[-1]:.4f} in the last")
