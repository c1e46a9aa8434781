"""WGAN-GP with generator and critic on several devices: the penalty is differentiated through synchronized BatchNorm.

python wgan_gp.py                        three logical devices on the CPU
python wgan_gp.py cuda:0 cuda:1 cuda:2   three GPUs
"""

import sys

import torch
from torch import Tensor, nn

from segapp.parallel import DataParallelModel, convert_sync_batchnorm, gradient_penalty


def build_networks() -> tuple[nn.Module, nn.Module]:
    """Return a generator of images (N, 3, 16, 16) from noise (N, 8, 1, 1), and a critic with one score per image."""
    torch.manual_seed(0)
    lower, upper = nn.ConvTranspose2d(8, 16, 4, bias=False), nn.ConvTranspose2d(16, 3, 4, stride=4)
    first, second = nn.Conv2d(3, 16, 4, stride=2, padding=1), nn.Conv2d(16, 16, 4, stride=2, padding=1, bias=False)
    critic = [first, nn.LeakyReLU(), second, nn.BatchNorm2d(16), nn.LeakyReLU(), nn.Flatten(), nn.Linear(256, 1)]
    return nn.Sequential(lower, nn.BatchNorm2d(16), nn.ReLU(), upper), nn.Sequential(*critic)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return real images of blocks (12, 3, 16, 16), noise (12, 8, 1, 1) and the places between real and fake (12,)."""
    generator = torch.Generator().manual_seed(step)
    blocks = torch.randn(12, 3, 4, 4, generator=generator).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return blocks, torch.randn(12, 8, 1, 1, generator=generator), torch.rand(12, generator=generator)


def train(generator: nn.Module, critic: nn.Module, devices: list[str], num_steps: int) -> list[float]:
    """Train both networks in place; return the distances between the mean scores of real and fake images."""
    networks = (convert_sync_batchnorm(each).to(devices[0]) for each in (generator, critic))
    G, D = (DataParallelModel(each, device_ids=devices, gpu0_bsz=1) for each in networks)
    g_optimizer, d_optimizer = (torch.optim.Adam(each.parameters(), lr=1e-3, betas=(0.0, 0.9)) for each in (G, D))
    distances = []
    for step in range(num_steps):
        real, noise, alpha = (part.to(devices[0]) for part in batch(step))
        with torch.no_grad():
            fake = G(noise).gather()
        distance = D(real).gather().mean() - D(fake).gather().mean()
        penalty = gradient_penalty(D, real, fake, kind="wgan-gp", alpha=alpha)
        d_optimizer.zero_grad()
        (-distance + 10 * penalty).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        (-D(G(noise)).gather().mean()).backward()  # the fake images stay on their devices
        g_optimizer.step()
        distances.append(distance.item())
    return distances


if __name__ == "__main__":
    found = train(*build_networks(), sys.argv[1:] or ["cpu", "cpu", "cpu"], 20)
    print(f"distance {found[0]:.4f} in the first step, {found[-1]:.4f} in the last")
