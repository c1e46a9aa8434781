"""SyncBatchNorm by torch's kernels equals BatchNorm on the whole batch, with the launches of torch's own layer."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm
from torch.testing._internal.distributed.fake_pg import FakeStore

from segapp.parallel import BalancedDataParallel, convert_sync_batchnorm
from segapp.parallel.replica_threads import ReplicaThreads
from tests.support.gpu.batchnorm_kernels import kernels_on_the_cpu
from tests.support.gpu.launches import LaunchCounter
from tests.support.parallel_cases import BATCHNORM_OPTIONS, grads_of, relative_error, state_error


@pytest.fixture(autouse=True)
def _kernels():
    with kernels_on_the_cpu():
        yield


@pytest.mark.parametrize("options", BATCHNORM_OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (9, 5)), (nn.BatchNorm2d, (9, 5, 3, 4)), (nn.BatchNorm3d, (9, 5, 2, 3, 2))]
)
def test_kernels_match_batchnorm_on_the_whole_batch(kind, shape, options):
    torch.manual_seed(0)
    x, weights = torch.randn(shape, dtype=torch.float64) * 3 + 2, torch.randn(shape, dtype=torch.float64)
    for num_devices, gpu0_bsz, is_last in ((3, 1, False), (4, 0, True), (2, 8, False)):
        truth = kind(5, **options).double()
        layer = convert_sync_batchnorm(copy.deepcopy(truth))
        results = []
        for module, run in ((truth, truth), (layer, BalancedDataParallel(gpu0_bsz, layer, ["cpu"] * num_devices))):
            inputs = x.clone()
            if is_last and x.dim() > 3:
                inputs = inputs.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
            inputs.requires_grad_()
            for _ in range(2):
                y = run(inputs)
                (y * weights).sum().backward()
            results.append([y.detach(), inputs.grad, *grads_of(module), *module.buffers()])
        assert relative_error(results[1], results[0]) <= 1e-11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_take_half_inputs_and_half_weights(dtype):
    x = (torch.randn(6, 5, 4, 4) * 3 + 2).to(dtype)
    truth = nn.BatchNorm2d(5)
    for cast in (truth.float, lambda: copy.deepcopy(truth).to(dtype)):
        layer = convert_sync_batchnorm(copy.deepcopy(cast()))
        inputs = x.clone().requires_grad_()
        output = BalancedDataParallel(1, layer, ["cpu"] * 3)(inputs)
        torch.testing.assert_close(output.float(), truth(x.float()), rtol=0.05, atol=0.05)
        output.sum().backward()
        assert inputs.grad.dtype == output.dtype == dtype
        assert layer.weight.grad.dtype == layer.weight.dtype


def test_second_derivatives_leave_the_kernels():
    x, weights = torch.randn(6, 4, 3, 3, dtype=torch.float64), torch.randn(6, 4, 3, 3, dtype=torch.float64)
    truth = nn.BatchNorm2d(4).double()
    layer = convert_sync_batchnorm(copy.deepcopy(truth))
    for module, run in ((truth, truth), (layer, BalancedDataParallel(1, layer, ["cpu"] * 3))):
        inputs = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((run(inputs).sin() * weights).sum(), inputs, create_graph=True)
        first.square().sum().backward()
        module.second = inputs.grad
    assert relative_error([layer.second, *grads_of(layer)], [truth.second, *grads_of(truth)]) <= 1e-10


@pytest.mark.parametrize("counts", [(4, 0, 3), (0, 0, 5), (0, 6, 0)])
def test_parts_without_samples_have_no_weight(counts):
    x = torch.randn(sum(counts), 3, 2, 2, dtype=torch.float64)
    truth = nn.BatchNorm2d(3).double()
    layer = convert_sync_batchnorm(copy.deepcopy(truth))
    expected = truth(x)
    calls = [partial(layer, part) for part in x.split(list(counts))]
    outputs = ReplicaThreads([torch.device("cpu")] * 3).run(calls)
    assert relative_error([torch.cat(outputs).detach()], [expected.detach()]) <= 1e-12
    assert state_error(layer, truth) <= 1e-12
    weights = torch.randn_like(x)
    (torch.cat(outputs) * weights).sum().backward()
    (expected * weights).sum().backward()
    assert relative_error(grads_of(layer), grads_of(truth)) <= 1e-11


def launches_of(step):
    step()
    with LaunchCounter() as counter:
        step()
    return counter.total


def test_rank_needs_no_more_launches_than_torchs_layer(capsys, monkeypatch):
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    monkeypatch.setattr(dist, name, lambda into, row, *_, **__: into.view(2, -1).copy_(row))  # one launch, as it is
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        x = torch.randn(4, 8, 5, 5, requires_grad=True)
        ours = convert_sync_batchnorm(nn.BatchNorm2d(8))
        theirs = nn.BatchNorm2d(8)

        def torchs_step():
            theirs.num_batches_tracked.add_(1)
            tensors = (x, theirs.weight, theirs.bias, theirs.running_mean, theirs.running_var)
            TorchSyncBatchNorm.apply(*tensors, theirs.eps, theirs.momentum, dist.group.WORLD, 2).sum().backward()

        own, torchs = launches_of(lambda: ours(x).sum().backward()), launches_of(torchs_step)
    finally:
        dist.destroy_process_group()
    with capsys.disabled():
        print(f"\nlaunches of a layer and rank, both passes: {own}, torch's own {torchs}")
    assert own <= 1.3 * torchs
