"""What the engine costs a step: on one device over the bare module, and per replica. Prints ratios, asserts no time."""

import statistics
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segapp.parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm
from segapp.parallel.replicas import replicate
from tests.support.gpu.launch_counts import ThinDeepLab, build_step

pytestmark = pytest.mark.benchmark


class CrossEntropySums:
    def statistics(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(outputs, target, reduction="sum"), (target != 255).sum().double()

    def finalize(self, totals: tuple[Tensor, ...]) -> Tensor:
        return totals[0] / totals[1].to(totals[0].dtype)


def build(width: int = 16) -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(3 if i == 0 else width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 5, 1))


def interleaved(steps, repeats: int, clock=time.perf_counter) -> list[float]:
    """Each step's seconds, the lower decile; taken in turn, forwards and backwards, as the machine may be busy."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(repeats):
        for i in range(len(steps)) if turn % 2 else reversed(range(len(steps))):
            start = clock()
            steps[i]()
            times[i].append(clock() - start)
    return [statistics.quantiles(own, n=10)[0] for own in times]


def test_time_of_data_parallel_on_one_device(capsys):
    torch.set_num_threads(1)
    net = build()
    images, target = torch.randn(4, 3, 64, 64), torch.randint(0, 5, (4, 64, 64))
    criterion = CrossEntropySums()
    model, parallel = DataParallelModel(net, ["cpu"]), DataParallelCriterion(criterion)

    def bare():
        criterion.finalize(criterion.statistics(net(images), target)).backward()

    def wrapped():
        parallel(model(images), target).backward()

    bare_s, wrapped_s, again_s = interleaved([bare, wrapped, bare], 120, time.process_time)
    with capsys.disabled():
        print(
            f"\none CPU device: bare {bare_s * 1e3:.2f} ms, wrapped {wrapped_s * 1e3:.2f} ms:"
            f" {wrapped_s / bare_s - 1:+.2%} (the bare step against itself {again_s / bare_s - 1:+.2%})"
        )


def test_time_of_replicas_and_sync_batchnorm(capsys):
    torch.set_num_threads(1)
    images, target = torch.randn(4, 3, 64, 64), torch.randint(0, 5, (4, 64, 64))
    plain, synced = build(), convert_sync_batchnorm(build())
    parallel = DataParallelCriterion(CrossEntropySums())

    def step(net, num_devices):
        model = DataParallelModel(net, ["cpu"] * num_devices)
        return lambda: parallel(model(images), target).backward()

    one, plain_s, synced_s = interleaved([step(plain, 1), step(plain, 2), step(synced, 2)], 20)
    devices = [torch.device("cpu")] * 2
    (replicate_s,) = interleaved([lambda: replicate(plain, devices)], 50)
    with capsys.disabled():
        print(
            f"\n2 CPU replicas over 1: plain BatchNorm x{plain_s / one:.2f}, synchronised x{synced_s / one:.2f};"
            f" replicating {len(list(plain.parameters()))} parameters {replicate_s * 1e3:.2f} ms"
        )


def test_process_time_of_replicas_of_a_real_network(capsys):
    """The floor are the network's own passes over the chunks, one after the other, without any exchange."""

    def passes_over(num_chunks):
        torch.manual_seed(0)
        net, criterion = ThinDeepLab(), CrossEntropySums()
        images, target = torch.randn(8, 3, 33, 33), torch.randint(0, 3, (8, 33, 33))
        chunks = list(zip(images.chunk(num_chunks), target.chunk(num_chunks), strict=True))

        def step():
            for chunk, labels in chunks:
                criterion.finalize(criterion.statistics(net(chunk), labels)).backward()
            net.zero_grad()

        return step

    torch.set_num_threads(1)
    steps = {"1": build_step(1)[1]}
    for n in (2, 3, 4, 8):
        steps |= {f"{n}, {mode}": build_step(n, mode=mode)[1] for mode in ("threads", "lockstep")}
    steps |= {f"{n} passes": passes_over(n) for n in (2, 3, 4)}
    for step in steps.values():
        step()
    one, *others = interleaved(list(steps.values()), 10, time.process_time)
    with capsys.disabled():
        print(f"\nprocess time of a step of a thin DeepLabV3: one replica {one * 1e3:.1f} ms")
        for name, seconds in zip(list(steps)[1:], others, strict=True):
            print(f"  {name}: x{seconds / one:.2f}")
