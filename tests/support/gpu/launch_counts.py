"""Operators and process time of one step, counted in all replicas: a thin DeepLabV3-ResNet50 in every parallel mode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.segmentation import deeplabv3_resnet50

from segapp.parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm
from segapp.parallel.distributed import wrap_ddp
from segapp.parallel.replica_threads import Mode

CHANNELS = 8
VIEWS = {
    *("alias", "as_strided", "detach", "expand", "permute", "reshape", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view", "lift_fresh"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
"""Operators that start no kernel on a device."""


class ThinDeepLab(nn.Module):
    """torchvision's DeepLabV3-ResNet50 with 8 channels everywhere: the real one's work for the host, little else."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.net = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=num_classes)
        for parent in list(self.net.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Conv2d):
                    setattr(parent, name, _thin(child, num_classes))
                elif isinstance(child, nn.BatchNorm2d):
                    setattr(parent, name, nn.BatchNorm2d(CHANNELS))
                elif isinstance(child, nn.Dropout):
                    setattr(parent, name, nn.Identity())

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)["out"]


def _thin(conv: nn.Conv2d, num_classes: int) -> nn.Conv2d:
    inputs = {3: 3, 5 * 256: 5 * CHANNELS}.get(conv.in_channels, CHANNELS)
    outputs = num_classes if conv.out_channels == num_classes else CHANNELS
    return nn.Conv2d(
        inputs, outputs, conv.kernel_size, conv.stride, conv.padding, conv.dilation, bias=conv.bias is not None
    )


class CrossEntropySums:
    """Cross-entropy as two sums, in three operators."""

    def statistics(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(outputs, target, reduction="sum"), (target != 255).sum().to(outputs.dtype)

    def finalize(self, totals: tuple[Tensor, ...]) -> Tensor:
        return totals[0] / totals[1]


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that reach a device's kernels, by name, in the replicas' threads and in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators[func._opname] += 1
        return func(*args, **(kwargs or {}))

    @property
    def dispatches(self) -> int:
        """All operators."""
        return self.operators.total()

    @property
    def launches(self) -> int:
        """The operators that are not views or allocations."""
        return sum(count for name, count in self.operators.items() if name not in VIEWS)


def build_step(
    replicas: int, samples: int = 8, size: int = 33, mode: Mode = "threads"
) -> tuple[nn.Module, Callable[[], None]]:
    """Return a thin network and one training step of it without the optimizer.

    Args:
        replicas: 1 is one device with plain BatchNorm; more are logical CPU devices with synchronised BatchNorm.
        samples: in a batch.
        size: height and width of the images.
        mode: of `DataParallelModel`.
    """
    torch.manual_seed(0)
    net = ThinDeepLab()
    if replicas > 1:
        convert_sync_batchnorm(net)
    images, target = torch.randn(samples, 3, size, size), torch.randint(0, 3, (samples, size, size))
    model = DataParallelModel(net, ["cpu"] * replicas, mode=mode)
    criterion = DataParallelCriterion(CrossEntropySums())

    def step() -> None:
        criterion(model(images), target).backward()
        net.zero_grad()

    return net, step


def build_ddp_step(samples: int = 2, size: int = 33) -> tuple[nn.Module, Callable[[], None]]:
    """Return a thin network and one step of a rank of `DistributedDataParallel`; needs a process group."""
    torch.manual_seed(0)
    net = convert_sync_batchnorm(ThinDeepLab())
    images, target = torch.randn(samples, 3, size, size), torch.randint(0, 3, (samples, size, size))
    ddp, criterion = wrap_ddp(net), CrossEntropySums()
    ddp.register_comm_hook(None, _all_reduce_bucket)  # the work of a fake process group has no result

    def step() -> None:
        sums = criterion.statistics(ddp(images), target)
        totals = torch.stack([value.detach() for value in sums])
        dist.all_reduce(totals)
        (dist.get_world_size() * sums[0] / totals[1]).backward()
        net.zero_grad(set_to_none=False)

    return net, step


def _all_reduce_bucket(_, bucket):
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def count(step: Callable[[], None]) -> OperatorCounter:
    """Return the operators of one step, after a first one."""
    step()
    with OperatorCounter() as counter:
        step()
    return counter


def least_cpu_s(step: Callable[[], None], repeats: int = 10) -> float:
    """Return the least process time of a step, all threads together, in seconds."""
    step()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return min(times)
