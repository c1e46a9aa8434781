"""Segmentation in Lightning: the loss and the mIoU over all valid pixels, on any number of processes.

python lightning_module.py     one process on the CPU
python lightning_module.py 2   two processes with DDP
"""

import sys

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from segapp.losses import CriterionCE, upsample_argmax
from segapp.metrics import ConfusionMatrix
from segapp.parallel import allreduce, convert_sync_batchnorm


def build_network() -> nn.Module:
    """Return a network with logits at half the resolution."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))


def draw(num_images: int) -> TensorDataset:
    """Return images (N, 3, 32, 32) and a target (N, 32, 32) with unevenly distributed ignored pixels."""
    generator = torch.Generator().manual_seed(num_images)
    target = torch.randint(4, (num_images, 8, 8), generator=generator).repeat_interleave(4, 1).repeat_interleave(4, 2)
    images = torch.randn(num_images, 3, 32, 32, generator=generator) + target[:, None]
    for image in range(num_images):
        target[image, : image % 32] = 255
    return TensorDataset(images, target)


class Segmenter(LightningModule):
    """A network with its loss and its metric."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_sync_batchnorm(network)
        self.criterion = CriterionCE(ignore_index=255)
        self.confusion = ConfusionMatrix(4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, target = batch
        statistics = self.criterion.statistics(self.network(images), target)
        return self.criterion.finalize(allreduce(*statistics))  # a mean of the processes' means is not the mean

    def on_validation_epoch_start(self) -> None:
        self.confusion.to(self.device).reset()

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, target = batch
        self.confusion.update(upsample_argmax(self.network(images), target.shape[-2:]), target)

    def on_validation_epoch_end(self) -> None:
        self.confusion.counts.copy_(allreduce(self.confusion.counts)[0])
        self.log("miou", self.confusion.compute()["miou"], sync_dist=True)


def train(network: nn.Module, num_processes: int) -> ConfusionMatrix:
    """Train the network in place for two epochs; return the confusion matrix of the last one."""
    trainer = Trainer(
        accelerator="cpu", devices=num_processes, strategy="ddp" if num_processes > 1 else "auto", max_epochs=2,
        logger=False, enable_checkpointing=False,
        use_distributed_sampler=False,  # Lightning's repeats images, so that each process has as many
    )  # fmt: skip
    own = slice(trainer.global_rank, None, num_processes)  # in a batch of 8 images
    loader, val_loader = (DataLoader(d, 8 // num_processes, sampler=range(len(d))[own]) for d in (draw(79), draw(27)))
    segmenter = Segmenter(network)
    trainer.fit(segmenter, loader, val_loader)
    trainer.print(f"mIoU {trainer.callback_metrics['miou']:.4f}")
    return segmenter.confusion


if __name__ == "__main__":
    train(build_network(), int(sys.argv[1]) if len(sys.argv) > 1 else 1)
