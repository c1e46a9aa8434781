"""Program of a rank in test_ranks.py: each check compares with one device; rank 0 writes the results as JSON."""

from __future__ import annotations

import copy
import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from segapp.checkpoint import training_state
from segapp.checkpoint.training_state import save_checkpoint
from segapp.errors import SegappError
from segapp.losses import AdditiveCriterion, CriterionCE, CriterionDice, surrogate
from segapp.parallel import (
    SyncBatchNorm,
    all_reduce_gradients,
    allreduce,
    convert_sync_batchnorm,
    gradient_penalty,
    set_recompute,
)
from segapp.parallel.distributed import Ranks, init_from_env, shutdown, wrap_ddp
from segapp.parallel.reductions import use_layers_group
from segapp.run.checkpoints import CheckpointFacts
from segapp.run.folder import RunFolder
from segapp.session.ranks import exchanged_classes
from tests.support.parallel_cases import (
    IGNORE,
    Critic,
    PlainCE,
    SmallNet,
    grads_of,
    make_batch,
    relative_error,
    state_error,
)

SPLITS = {2: [[3, 4], [1, 6], [6, 1], [7, 0]], 3: [[2, 2, 3], [1, 5, 1], [1, 1, 5], [3, 4, 0]]}


def worst(*values: float) -> list[float]:
    """Return the largest of each value over all ranks; NaN counts as infinite."""
    row = torch.tensor([float("inf") if value != value else value for value in values], dtype=torch.float64)
    dist.all_reduce(row, dist.ReduceOp.MAX)
    return row.tolist()


def part_of(tensor: torch.Tensor, split: list[int]) -> torch.Tensor:
    return tensor.split(split)[dist.get_rank()]


def exact_step(split: list[int], is_training: bool, num_ignored: int = 0) -> list[float]:
    """finalize(allreduce(statistics)) through DDP: errors of loss, gradients and running statistics.

    Of the last `num_ignored` samples all pixels are ignored.
    """
    images, target = make_batch(7)
    target[7 - num_ignored :] = IGNORE
    torch.manual_seed(0)
    truth = SmallNet().double().train(is_training)
    net = convert_sync_batchnorm(copy.deepcopy(truth))
    criterion = PlainCE(weight=torch.tensor([0.5, 1.0, 2.0, 0.1]), label_smoothing=0.1)
    expected = criterion(truth(images), target)
    expected.backward()
    ddp = wrap_ddp(net)  # kept until after backward, because it owns the reducer
    outputs = ddp(part_of(images, split))
    loss = criterion.finalize(allreduce(*criterion.statistics(outputs, part_of(target, split))))
    loss.backward()
    errors = (
        relative_error([loss.detach()], [expected.detach()]),
        relative_error(grads_of(net), grads_of(truth)),
        state_error(net, truth),
    )
    return worst(*errors)


def recomputed_step(split: list[int]) -> list[bool]:
    """Compare ranks that compute different blocks again with ranks that keep all: equal bits, as many exchanges."""
    images, target = make_batch(7)
    criterion, states, exchanges = PlainCE(), [], []
    for names in ([], [["stem", "residual"], ["dilated"], []][dist.get_rank()]):
        torch.manual_seed(0)
        net = convert_sync_batchnorm(SmallNet().double())
        set_recompute(net, [names])
        ddp = wrap_ddp(net)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            outputs = ddp(part_of(images, split))
            loss = criterion.finalize(allreduce(*criterion.statistics(outputs, part_of(target, split))))
            loss.backward()
        states.append([loss.detach(), *grads_of(net), *net.buffers()])
        exchanges.append(all_reduce.call_count)
    return [all(map(torch.equal, *states)), exchanges[0] == exchanges[1] > 0]


def accumulated_step(split: list[int], criterion: AdditiveCriterion, way: str) -> list[float]:
    """Check `surrogate` over three micro-batches of each rank; one of the ranks may have none of the samples.

    The ways: "ddp" is torch's plain DDP, "mean" and "sum" are the bare module with `all_reduce_gradients`.
    """
    images, target = make_batch(7)
    torch.manual_seed(0)
    truth = SmallNet().double().eval()
    net = copy.deepcopy(truth)
    criterion(truth(images), target).backward()
    micro = list(zip(*(part_of(each, split).tensor_split(3) for each in (images, target)), strict=True))
    with torch.no_grad():
        rows = [criterion.statistics(net(image), labels) for image, labels in micro]
        totals = allreduce(*(torch.stack(entry).sum(0) for entry in zip(*rows, strict=True)))
    model = DistributedDataParallel(net) if way == "ddp" else net
    for i, (image, labels) in enumerate(micro):
        with model.no_sync() if way == "ddp" and i < 2 else nullcontext():
            statistics = criterion.statistics(model(image), labels)
            surrogate(criterion, statistics, totals, **({"average": False} if way == "sum" else {})).backward()
    if way != "ddp":
        all_reduce_gradients(net.parameters(), average=way == "mean")
    return worst(relative_error(grads_of(net), grads_of(truth)))


def penalty_step(kind: str, split: list[int]) -> list[float]:
    """Check a critic's penalty with `all_reduce_gradients`; DDP, which reduces only some gradients, is refused."""
    torch.manual_seed(2)
    shape = (7, 3, 16, 16)
    real, fake, noise = (torch.randn(shape).double() for _ in range(3))
    alpha = torch.rand(7).double()
    truth = Critic().double()
    critic = convert_sync_batchnorm(copy.deepcopy(truth))
    dist_calls = {"noise": noise} if kind == "dragan" else {"alpha": alpha}
    with mock.patch("segapp.parallel.penalties.has_other_ranks", return_value=False):
        expected = gradient_penalty(truth, real, fake, kind, **dist_calls)  # type: ignore[arg-type]
        expected.backward()
    own = {key: part_of(value, split) for key, value in {"real": real, "fake": fake, **dist_calls}.items()}
    with pytest.raises(TypeError, match=r"DistributedDataParallel, .*: pass its module, and call all_reduce_gradients"):
        gradient_penalty(wrap_ddp(copy.deepcopy(critic)), kind=kind, **own)  # type: ignore[arg-type]
    penalty = gradient_penalty(critic, kind=kind, **own)  # type: ignore[arg-type]
    penalty.backward()
    all_reduce_gradients(critic.parameters())
    return worst(
        relative_error([penalty.detach()], [expected.detach()]), relative_error(grads_of(critic), grads_of(truth))
    )


def reduced_gradients() -> list[float]:
    """Check a parameter used on rank 0 only, an unused one, a frozen one, and half ones in their own bucket."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everywhere, first, nowhere, half = (torch.nn.Parameter(torch.zeros(3)) for _ in range(4))
    half.data = half.data.half()
    everywhere.grad = torch.full((3,), float(rank + 1))
    half.grad = torch.full((3,), float(rank), dtype=torch.float16)
    if rank == 0:
        first.grad = torch.ones(3)
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    all_reduce_gradients([everywhere, first, nowhere, frozen, half])
    assert nowhere.grad is None
    assert frozen.grad is None
    assert first.grad is not None
    mean = (size + 1) / 2
    errors = [(everywhere.grad - mean).abs().max(), (first.grad - 1 / size).abs().max()]
    errors.append((half.grad.float() - (size - 1) / 2).abs().max())
    return worst(*(float(error) for error in errors))


def differentiated_twice() -> list[float]:
    x = torch.linspace(0.3, 1.4, 4, dtype=torch.float64, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return allreduce(x.pow(3))[0].sin()

    layer = SyncBatchNorm(2, affine=False, track_running_stats=False).double()
    y = torch.randn(3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    checks = [torch.autograd.gradcheck(f, x), torch.autograd.gradgradcheck(f, x)]
    checks += [torch.autograd.gradcheck(layer, y), torch.autograd.gradgradcheck(layer, y)]
    return [float(all(checks))]


def shared_checkpoints(ranks: Ranks, folder: Path) -> dict[str, list[Any]]:
    """Ranks on one machine or each on its own, which see rank 0's file, one that ends in other bytes, or none.

    Returns what each rank gets: the error, or what it has mapped and the largest difference of a tensor.
    """
    torch.manual_seed(0)
    model = {"a": torch.randn(37, 53), "b": torch.randn(7).double()}
    if ranks.is_main:
        save_checkpoint(folder, {"model": model, "rng": [torch.arange(5)]}, CheckpointFacts(step=3, epoch=1))
    found: dict[str, list[Any]] = {}
    real = training_state.open_if_intact
    for case, is_elsewhere, sees in (
        ("one machine", False, b""),
        ("two machines", True, b""),
        ("other bytes there", True, b"?"),
        ("other bytes on the same machine", False, b"?"),
        ("no file there", True, None),
        ("no file on one machine", False, None),
    ):

        def opened(path: Path, *facts: Any, sees: bytes | None = sees) -> Any:
            if sees == b"" or ranks.is_main:
                return real(path, *facts)
            own = folder / f"seen by {ranks.rank}"
            own.unlink(missing_ok=True)
            if sees is not None:
                own.write_bytes(path.read_bytes()[: -len(sees)] + sees)
            return real(own, *facts)

        machine = f"machine-{ranks.rank if is_elsewhere else 0}"
        with mock.patch.multiple(training_state, machine_id=lambda name=machine: name, open_if_intact=opened):
            try:
                loaded = training_state.load_to_resume(ranks, RunFolder(folder.parent), is_resumed=True)
            except SegappError as error:
                own: list[Any] = [type(error).__name__, str(error).replace(str(folder), "")]
            else:
                assert loaded is not None
                mapped = "checkpoint" if str(folder) in Path("/proc/self/maps").read_text() else ""
                own = [mapped, max(float((loaded.state["model"][k] - model[k]).abs().max()) for k in model)]
        found[case] = ranks.gather(own)
    return found


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    info = init_from_env(device="cpu", start_timeout_s=120)
    Ranks(info, step_timeout_s=60).tighten_timeout()
    splits = SPLITS[info.world_size]
    results = {
        "exact, training": [exact_step(split, True) for split in splits],
        "exact, evaluation": [exact_step(split, False) for split in splits[:-1]],
        "exact, ignored": [exact_step(splits[0], True, num_ignored) for num_ignored in (4, 7)],
        "recomputed": [recomputed_step(split) for split in splits],
        "surrogate": {
            f"{type(criterion).__name__} {way} {split}": accumulated_step(split, criterion, way)
            for criterion in (CriterionCE(weight=[0.5, 1.0, 2.0, 0.1], ignore_index=IGNORE), CriterionDice())
            for way in ("ddp", "mean", "sum")
            for split in (splits[0], splits[-1])
        },
        "penalties": {
            kind: [penalty_step(kind, split) for split in (splits if kind == "wgan-gp" else splits[:1])]
            for kind in ("wgan-gp", "wgan-lp", "dragan")
        },
        "gradients": reduced_gradients(),
        "differentiated twice": differentiated_twice(),
        "any rank": Ranks(info).any_of(info.rank == 1, False),
        "checkpoints": shared_checkpoints(Ranks(info, classes=exchanged_classes()), Path(path).parent / "checkpoints"),
        "info": [info.rank, info.world_size, info.local_rank, str(info.device), info.backend, info.rank == 0],
    }
    groups = dist.group.WORLD, dist.new_group()
    use_layers_group(groups[1])
    Ranks(info, step_timeout_s=70).tighten_timeout()
    options = [group._get_backend(torch.device("cpu")).options for group in groups]  # type: ignore[union-attr]
    results["timeouts"] = [each._timeout.total_seconds() for each in options]
    results["exact, own group"] = [exact_step(splits[0], True)]
    if info.rank == 0:
        Path(path).write_text(json.dumps(results))
    shutdown()
