"""Kernel launches that a step would make on CUDA, counted on the CPU; and steps of a thin network to count.

An operator that is no view counts as one launch. A `_foreach_` or `_fused_` operator takes lists: on CUDA it goes over
them in chunks of 65536 elements, with a limited number of tensors and blocks in each launch, if all tensors of a list
have one dtype and device and corresponding tensors equal layouts; else it launches once for each tensor
(ATen/native/cuda/MultiTensorApply.cuh and ForeachFunctors.cuh).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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

CHUNK = 65536
MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
MAX_BLOCKS = 320

NOT_LAUNCHED = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "detach", "alias", "lift_fresh",
    "_local_scalar_dense", "is_same_size", "resize_", "_reshape_alias", "_unsafe_view", "is_pinned", "sym_size",
    "profiler::_record_function_enter_new", "profiler::_record_function_exit", "scalar_tensor",
}  # fmt: skip


def launches_of_lists(lists: Sequence[Sequence[Tensor]]) -> int:
    """Return the launches of one operator over lists of tensors."""
    rows = list(zip(*lists, strict=True))
    kinds = [{(t.dtype, t.device) for t in tensors} for tensors in lists]
    is_fast = all(len(kind) == 1 for kind in kinds) and all(len({_layout(t) for t in row}) == 1 for row in rows)
    if not is_fast:
        return len(rows)
    launches = tensors = blocks = 0
    for row in rows:
        tensors += 1
        num_chunks = -(-row[0].numel() // CHUNK)
        for chunk in range(1, num_chunks + 1):
            blocks += 1
            is_full = tensors == MAX_TENSORS[len(lists)] and chunk == num_chunks
            if is_full or blocks == MAX_BLOCKS:
                launches, blocks = launches + 1, 0
                tensors = 0 if chunk == num_chunks else 1  # the rest of this tensor goes on in the next launch
    return launches + (blocks > 0)


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1)


class LaunchCounter(TorchDispatchMode):
    """Counts launches by operator, and all operators as `dispatches`, of replicas and of backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatches = 0
        self.by_operator: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Launches so far."""
        return self.by_operator.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.dispatches += 1
        if name.startswith(("_foreach_", "_fused_")):
            lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
            self.by_operator[name] += launches_of_lists(lists) if lists else 0
        elif name not in NOT_LAUNCHED and not _is_view(func):
            self.by_operator[name] += 1
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Return True for an operator whose every result is a view of an argument."""
    results = func._schema.returns
    aliases = [result.alias_info for result in results]
    return bool(results) and all(alias is not None and not alias.is_write for alias in aliases)


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
    ddp.register_comm_hook(None, all_reduce_bucket)  # the work of a fake process group has no result

    def step() -> None:
        sums = criterion.statistics(ddp(images), target)
        totals = torch.stack([value.detach() for value in sums])
        dist.all_reduce(totals)
        (dist.get_world_size() * sums[0] / totals[1]).backward()
        net.zero_grad(set_to_none=False)

    return net, step


def all_reduce_bucket(_, bucket):
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def count(step: Callable[[], None]) -> LaunchCounter:
    """Return the operators of one step, after a first one."""
    step()
    with LaunchCounter() as counter:
        step()
    return counter
