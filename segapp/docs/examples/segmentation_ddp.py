"""Segmentation with DistributedDataParallel and two micro-batches per step: the gradient of one device, on any ranks.

torchrun --nproc-per-node 2 segmentation_ddp.py   on the CPU, or with a GPU for each rank
"""

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from segapp.losses import CriterionCE, surrogate
from segapp.parallel import allreduce, convert_sync_batchnorm


def build_network() -> nn.Module:
    """Return a network with logits at half the resolution."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return images (7, 3, 32, 32) and a target (7, 32, 32) with unevenly distributed ignored pixels."""
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(0, 4, (7, 8, 8), generator=generator).repeat_interleave(4, 1).repeat_interleave(4, 2)
    images = torch.randn(7, 3, 32, 32, generator=generator) + target[:, None]
    for image in range(7):
        target[image, : 4 * image] = 255
    return images, target


def train(network: nn.Module, device: torch.device, num_steps: int) -> list[float]:
    """Train the network of this rank in place; return the losses of the steps, the same on every rank."""
    model = DistributedDataParallel(convert_sync_batchnorm(network).to(device))
    criterion = CriterionCE(ignore_index=255)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(num_steps):
        images, target = (part.tensor_split(dist.get_world_size())[dist.get_rank()].to(device) for part in batch(step))
        loss_sum, count = allreduce(*criterion.target_statistics(target))  # 0, and the valid pixels of the whole step
        optimizer.zero_grad()
        for number, own in enumerate(zip(images.tensor_split(2), target.tensor_split(2), strict=True)):
            with model.no_sync() if number == 0 else nullcontext():
                statistics = criterion.statistics(model(own[0]), own[1])
                surrogate(criterion, statistics, (loss_sum, count)).backward()  # type: ignore[no-untyped-call]
            loss_sum = loss_sum + allreduce(statistics[0].detach())[0]
        optimizer.step()
        losses.append(criterion.finalize((loss_sum, count)).item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank_device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    found = train(build_network(), rank_device, 20)
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.5f} in the first step, {found[-1]:.5f} in the last")
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads must end before the interpreter does
