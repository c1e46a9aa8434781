"""Program that forks ranks, on the CPU or on GPUs, and compares their training steps with those of one device.

`python -m tests.support.rank_steps FILE [NUM_RANKS [cpu|cuda [gloo|nccl]]]` writes the figures as JSON. Where there are
fewer GPUs than ranks, several ranks share one.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from timm.layers import DropPath
from torch import Tensor, nn

from segapp.assembly.optimizer import build_optimizer
from segapp.chunks import SplitRequest
from segapp.config import OptimConfig
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.pool import Batch
from segapp.datasets.preprocessing import Preprocessing
from segapp.inference.sliding import NormalizedInput
from segapp.losses import AdditiveCriterion, CriterionCE, CriterionDice, CriterionLovasz
from segapp.parallel import SampleMasks, convert_sync_batchnorm, mask_by_sample
from segapp.parallel.distributed import Ranks, init_from_env, shutdown, wrap_ddp
from segapp.parallel.launch import STORE_VARIABLE
from segapp.precision import Precision
from segapp.training.step.divided import RankNetwork, TrainedNetwork
from segapp.training.step.engine import StepEngine
from segapp.training.step.update import WeightUpdate

FULL_BATCH = 8
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def splits_of(num_ranks: int) -> dict[str, dict[str, Any]]:
    """Return splits of a full batch, among them some with ranks that have no samples."""
    if num_ranks == 1:
        return {"even": {}}
    shares = [[5, 1, 2], [0, 8, 0], [3, 0, 5]]
    fitted = [[*each[:1], sum(each[1:])] if num_ranks == 2 else each + [0] * (num_ranks - 3) for each in shares]
    return {
        "even": {},
        **{f"gpu0_bsz={samples}": {"gpu0_bsz": samples} for samples in (1, 0, 8)},
        **{f"shares {shares}": {"shares": shares} for shares in fitted},
    }


CRITERIA: dict[str, Callable[[], AdditiveCriterion]] = {
    "ce": lambda: CriterionCE(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1),
    "dice": CriterionDice,
    "lovasz": CriterionLovasz,
}


class SmallNet(nn.Module):
    """Logits at a quarter of the size, behind two BatchNorm layers, one of them over pooled features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=4, padding=1), nn.BatchNorm2d(6), nn.Tanh())
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6))
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.body(images)
        return (self.head(features + self.pooled(features)),)

    base = None
    frozen_parameters = ()

    def without_base(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def count_update(self) -> None:
        pass

    def suitable_size(self, *size: int) -> tuple[int, ...]:
        return size


class DroppingNet(SmallNet):
    """SmallNet with dropout of values, channels and samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.Dropout(0.3))
        self.pooled.append(nn.Dropout2d(0.2))
        self.head = nn.Sequential(DropPath(0.2), nn.Conv2d(6, 3, 1))  # type: ignore[assignment]


def images_of(num: int, seed: int) -> Batch:
    """Return a whole batch; the ignored pixels fall unevenly on its images."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num, 3, 16, 24), generator=generator, dtype=torch.uint8)
    target = torch.randint(0, 3, (num, 16, 24), generator=generator, dtype=torch.uint8)
    target[torch.rand(target.shape, generator=generator) < torch.linspace(0, 1, num).view(-1, 1, 1)] = 255
    return Batch(images, target, tuple(range(num)))


def part(batch: Batch, sizes: Sequence[int], rank: int) -> Batch:
    at = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return Batch(batch.images[at], batch.target[at], batch.indices[at], batch.epoch, batch.first + at.start)


def engine_of(
    criterion: AdditiveCriterion, ranks: Ranks | None = None, build: Callable[[], nn.Module] = SmallNet, **split: Any
) -> StepEngine:
    """Return an engine in float64: of one device, or of one rank."""
    torch.manual_seed(0)
    device = own_device()
    model = build().double().to(device)
    mask_by_sample(model)
    inner = NormalizedInput(model, Preprocessing(PixelFormat(mean=MEAN, std=STD), torch.float64).to(device))  # type: ignore[arg-type]
    network = TrainedNetwork(model, inner, device)  # type: ignore[arg-type]
    if ranks is not None:
        convert_sync_batchnorm(model)
        wrap = partial(wrap_ddp, inner, device)
        network = RankNetwork(model, wrap, device, ranks, SplitRequest(**split), FULL_BATCH)  # type: ignore[arg-type]
    groups = [{"params": list(model.parameters()), "lr_factor": 1.0, "weight_decay": 0.01}]
    optimizer = build_optimizer(OptimConfig(lr=0.1, momentum=0.9), groups)
    precision = Precision("fp32", device)
    return StepEngine(
        network,
        criterion.double().to(device),
        WeightUpdate(model, optimizer, precision, clip_grad_norm=1.0),  # type: ignore[arg-type]
        masks=SampleMasks(model, 5),
    )


def own_device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def state_of(engine: StepEngine) -> list[Tensor]:
    return [tensor.detach().double() for tensor in engine.model.state_dict().values()]


def errors_of(
    criterion: Callable[[], AdditiveCriterion],
    ranks: Ranks,
    splits: Sequence[dict[str, Any]],
    sizes: Sequence[int] = (FULL_BATCH,),
    build: Callable[[], nn.Module] = SmallNet,
) -> list[float]:
    """Make a step for each split, in micro-batches of these sizes.

    Return the largest errors of losses, gradient norms and state over all ranks.
    """
    ours, alone = engine_of(criterion(), ranks, build, **splits[0]), engine_of(criterion(), None, build)
    errors = [0.0, 0.0]
    for number, split in enumerate(splits):
        ours.network.divide(SplitRequest(**split), FULL_BATCH)
        whole = [images_of(size, 10 * number + i) for i, size in enumerate(sizes)]
        for i, each in enumerate(whole):
            each.epoch, each.first = number, 8 * i
        own = [part(each, ours.network.split_of(len(each)), ranks.rank) for each in whole]
        result = ours.step(own, num_samples=sizes[0])
        with mock.patch("torch.distributed.get_world_size", return_value=1):  # the reference sees no other ranks
            expected = alone.step(whole)
        assert result.split == ours.network.split_of(sizes[0])
        errors[0] = max(errors[0], abs(float(result.loss - expected.loss)))
        errors[1] = max(errors[1], abs(float(result.grad_norm - expected.grad_norm)))
    pairs = zip(state_of(ours), state_of(alone), strict=True)
    errors.append(max(float((a - b).abs().max()) for a, b in pairs))
    row = torch.tensor(errors, dtype=torch.float64, device=own_device())
    dist.all_reduce(row, dist.ReduceOp.MAX)
    return row.tolist()


def figures(ranks: Ranks) -> dict[str, Any]:
    """Return every figure of the tests: the splits change before each step, or hold for 50 steps with dropout."""
    splits = splits_of(ranks.world_size)
    changing = [*splits.values()]
    return {
        "errors": {
            f"{name} in {sizes}": errors_of(criterion, ranks, changing, sizes)
            for name, criterion in CRITERIA.items()
            for sizes in ((8,), (8, 8, 5), (5,), (2,))
        },
        "dropout": {
            f"{title} in {sizes}": errors_of(CRITERIA["ce"], ranks, [split] * 50, sizes, build=DroppingNet)
            for title, split in splits.items()
            for sizes in ((8,), (8, 5))
        },
    }


def let_ranks_share_a_gpu(rank: int) -> None:
    """Set what makes NCCL accept ranks that share a GPU, before its first use in a process.

    NCCL before 2.30 compares host and bus: with hosts of their own the ranks pass for machines that talk by sockets.
    """
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    apart = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ.update(shared if torch.cuda.nccl.version() >= (2, 30) else apart)


def run_rank(rank: int, num_ranks: int, kind: str, store: Path, path: Path, backend: str | None = None) -> None:
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, STORE_VARIABLE: store}
    os.environ.update({name: str(value) for name, value in words.items()})
    torch.set_num_threads(1)
    device = "cpu"
    if kind == "cuda":
        num_gpus = torch.cuda.device_count()
        device = f"cuda:{rank % num_gpus}"
        if backend == "nccl" and num_ranks > num_gpus:
            let_ranks_share_a_gpu(rank)
    ranks = Ranks(init_from_env(device=device, backend=backend, start_timeout_s=120))
    found = figures(ranks)
    if ranks.is_main:
        path.write_text(json.dumps(found))
    shutdown()


def main(path: Path, num_ranks: int = 3, kind: str = "cpu", backend: str | None = None) -> int:
    store, children = path.with_suffix(".store"), []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(rank, num_ranks, kind, store, path, backend)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:5]))
