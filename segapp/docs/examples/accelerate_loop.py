"""Segmentation in Accelerate, with two micro-batches per step: the gradient and the mIoU of one process, on any number.

python accelerate_loop.py                                               one process
python -m torch.distributed.run --nproc-per-node 2 accelerate_loop.py   two processes

A second run continues from the state that the first one saves in the folder `accelerate_state`.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from segapp.losses import CriterionCE, surrogate, upsample_argmax
from segapp.metrics import ConfusionMatrix
from segapp.parallel import allreduce


def build_network() -> nn.Module:
    """Return a network with logits at half the resolution."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 4, 1))


def draw(num_images: int) -> TensorDataset:
    """Return images (N, 3, 32, 32) and a target (N, 32, 32) with unevenly distributed ignored pixels."""
    generator = torch.Generator().manual_seed(num_images)
    target = torch.randint(4, (num_images, 8, 8), generator=generator).repeat_interleave(4, 1).repeat_interleave(4, 2)
    images = torch.randn(num_images, 3, 32, 32, generator=generator) + target[:, None]
    for image in range(num_images):
        target[image, : image % 32] = 255
    return TensorDataset(images, target)


def train(network: nn.Module, folder: str, num_epochs: int) -> ConfusionMatrix:
    """Train the network in place and save the state; return the confusion matrix of the last epoch."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),  # no image twice in a step
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False),
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(draw(79), 8))
    accelerator.even_batches = True  # gather_for_metrics removes the images that fill the last batch
    val_loader = accelerator.prepare(DataLoader(draw(27), 8))
    criterion, confusion = CriterionCE(ignore_index=255), ConfusionMatrix(4, device=accelerator.device)
    accelerator.register_for_checkpointing(confusion)
    if os.path.isdir(folder):
        accelerator.load_state(folder)
    for _ in range(num_epochs):
        for images, target in loader:
            totals = allreduce(*criterion.target_statistics(target))  # 0, and the valid pixels of the whole step
            for part in zip(images.tensor_split(2), target.tensor_split(2), strict=True):
                with accelerator.accumulate(model):
                    loss = surrogate(criterion, criterion.statistics(model(part[0]), part[1]), totals)
                    accelerator.backward(2 * loss)  # it divides by the number of micro-batches
                    optimizer.step()
                    optimizer.zero_grad()
        confusion.reset()
        for images, target in val_loader:
            with torch.inference_mode():
                prediction = upsample_argmax(model(images), target.shape[-2:])
            confusion.update(*accelerator.gather_for_metrics((prediction, target)))
    accelerator.save_state(folder)
    accelerator.print(f"mIoU {confusion.compute()['miou']:.4f}")
    accelerator.end_training()
    return confusion


if __name__ == "__main__":
    train(build_network(), "accelerate_state", num_epochs=2)
