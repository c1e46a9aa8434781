"""Checks of a data-parallel step on any devices: run on logical CPUs in tests/parallel, on GPUs in tests/gpu."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segapp.parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm, current_replica
from segapp.parallel.replicas import replicate
from tests.support.parallel_cases import PlainCE, SmallNet, grads_of, make_batch, relative_error, state_error

DeviceIds = Sequence[Any]


def one_step(net: nn.Module, device_ids: DeviceIds, gpu0_bsz: int | None, images: Tensor, target: Tensor) -> Tensor:
    """Return the loss of one step with gradients on device 0."""
    outputs = DataParallelModel(net, device_ids, gpu0_bsz=gpu0_bsz)(images)
    loss = DataParallelCriterion(PlainCE())(outputs, target)
    loss.backward()
    return loss.detach()


def check_step(device_ids: DeviceIds, home: str, *, sync_bn: bool, cudnn_benchmark: bool) -> None:
    """A step equals that of one device at every split, and repeats bit for bit with deterministic convolutions."""
    images, target = make_batch(7)
    torch.manual_seed(0)
    truth = SmallNet().double().to(home).train(sync_bn)
    start = copy.deepcopy(truth)
    with torch.backends.cudnn.flags(enabled=True, benchmark=cudnn_benchmark, deterministic=True, allow_tf32=False):
        expected = PlainCE()(truth(images.to(home)), target.to(home))
        expected.backward()
        for gpu0_bsz in (None, 0, 2):
            first: list[Tensor] = []
            for _ in range(3):
                net = copy.deepcopy(start)
                net = convert_sync_batchnorm(net) if sync_bn else net
                loss = one_step(net, device_ids, gpu0_bsz, images, target)
                assert relative_error([loss], [expected.detach()]) <= 1e-10
                assert relative_error(grads_of(net), grads_of(truth)) <= 1e-10
                assert state_error(net, truth) <= 1e-10
                values = [loss, *grads_of(net), *net.buffers()]
                first = first or values
                assert not torch.are_deterministic_algorithms_enabled()
                if home == "cpu":  # on CUDA the bilinear interpolation's backward adds atomically
                    assert all(torch.equal(a, b) for a, b in zip(first, values, strict=True))


class _Threads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.seen: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        replica = current_replica()
        assert replica is not None
        assert x.device == replica.device
        assert x.device.type != "cuda" or torch.cuda.current_device() == x.device.index
        self.seen.append((replica.index, threading.get_ident()))
        return self.layers(x)


def check_threads(device_ids: DeviceIds, home: str) -> None:
    """Every replica runs in the same thread in every step, with its device the current one."""
    net = convert_sync_batchnorm(_Threads()).to(home)
    model = DataParallelModel(net, device_ids)
    for _ in range(5):
        sum(output.sum().to(home) for output in model(torch.randn(9, 3, 8, 8))).backward()
    assert len(net.seen) == 5 * len(device_ids)
    assert len(set(net.seen)) == len(device_ids)


def check_channels_last(device_ids: DeviceIds, home: str) -> None:
    """Weights of the replicas, outputs and gradients keep channels_last."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 1)
    )
    convert_sync_batchnorm(net).to(home, memory_format=torch.channels_last)
    devices = [torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in device_ids]
    for replica in replicate(net, devices):
        for own, original in zip(replica.parameters(), net.parameters(), strict=True):
            assert own.stride() == original.stride()
            assert torch.equal(own.to(home), original)
    images = torch.randn(7, 3, 12, 12).to(memory_format=torch.channels_last)
    outputs = DataParallelModel(net, device_ids)(images)
    sum(output.square().sum().to(home) for output in outputs).backward()
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in outputs)
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in net.parameters())


class Noted(nn.Module):
    """A layer that notes the dtypes of its outputs, in all replicas."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.dtypes.append(y.dtype)
        return y


def check_autocast_dtypes(head: Noted, outputs: Sequence[tuple[Tensor, ...]], dtype: torch.dtype) -> None:
    """CUDA's autocast runs the convolution `head` in its dtype, and the interpolation after it in float32."""
    assert set(head.dtypes) == {dtype}
    assert {logits.dtype for output in outputs for logits in output} == {torch.float32}
