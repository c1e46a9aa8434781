"""Models in replicas of other models: exchanges are among all replicas, and a failure frees all of them."""

import copy
import time

import pytest
import torch
from torch import nn

from segapp.losses import CriterionCE
from segapp.parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    allreduce,
    convert_sync_batchnorm,
    current_replica,
)
from tests.support.parallel_cases import SmallNet, grads_of, make_batch, relative_error, state_error


def nest(net, levels, mode="threads"):
    """Wrap a network in one level after the other; a level is the shares of its devices."""
    for shares in levels:
        net = BalancedDataParallel(None, net, ["cpu"] * len(shares), shares=shares, mode=mode)
    return net


LEVELS = [
    [(1, 1), (1, 1)],
    [(2, 1), (0, 3, 2)],
    [(0, 2, 1), (4, 1)],
    [(1,), (0, 3, 2)],
    [(1, 1, 1), (1, 0, 0)],
    [(1, 2), (1,), (0, 1, 1)],
    [(0, 1), (2, 1), (1, 1, 1)],
]


@pytest.mark.parametrize("mode", ["threads", "lockstep"])
@pytest.mark.parametrize("levels", LEVELS)
def test_nested_steps_match_one_device(levels, mode):
    torch.manual_seed(0)
    truth = SmallNet().double()
    net = convert_sync_batchnorm(copy.deepcopy(truth))
    model, criterion = nest(net, levels, mode), CriterionCE()
    for num_samples, seed in ((7, 1), (2, 2), (5, 3)):
        images, target = make_batch(num_samples, size=9, seed=seed)
        losses = [criterion(each(images), target) for each in (truth, model)]
        for loss in losses:
            loss.backward()
        assert relative_error([losses[1].detach()], [losses[0].detach()]) <= 1e-12
    assert relative_error(grads_of(net), grads_of(truth)) <= 1e-10
    assert state_error(net, truth) <= 1e-12


class Summed(nn.Module):
    def forward(self, x):
        mean, count = allreduce(x.sum(0), torch.tensor(float(len(x))))
        (replicas,) = allreduce(torch.ones(()))
        with pytest.raises(RuntimeError, match="num_replicas of nested models is not known here"):
            _ = current_replica().num_replicas
        return x - mean / count, replicas.expand(len(x))


def test_nested_allreduce_is_over_all_replicas():
    x = torch.arange(10.0).view(5, 2) ** 2
    centered, replicas = nest(Summed(), [(1, 2), (0, 1, 4)])(x)
    torch.testing.assert_close(centered, x - x.mean(0))
    assert replicas.tolist() == [3.0] * 5, "1 replica in a group of its own, and 2"


class Paired(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x), x


def test_nested_outputs_keep_the_order_of_the_samples():
    images, target = make_batch(7)
    inner = DataParallelModel(nn.Sequential(nn.Conv2d(3, 4, 1)).double(), ["cpu"] * 2)
    outer = DataParallelModel(inner, ["cpu"] * 2, gpu0_bsz=3)
    expected = inner.module(images)
    outputs = outer(images)
    assert outputs.sizes == (1, 2, 2, 2)
    assert torch.equal(outputs.gather(), expected)
    pair = BalancedDataParallel(3, Paired(inner), ["cpu"] * 2)(images)
    assert torch.equal(pair[0], expected)
    assert torch.equal(pair[1], images)
    for device_ids in (["cpu"] * 2, []):
        model = BalancedDataParallel(None, inner, device_ids)
        assert torch.equal(model(images), expected)
        assert torch.equal(DataParallelModel(nn.Identity(), [])(outputs)[0], expected), "chunks for a module by itself"
    assert (
        relative_error([DataParallelCriterion(CriterionCE())(outputs, target)], [CriterionCE()(expected, target)])
        <= 1e-12
    )


class Prone(nn.Module):
    """Fails or sleeps on the last of samples 0, 1, and so on."""

    def __init__(self, act):
        super().__init__()
        self.act, self.norm = act, nn.BatchNorm1d(1)

    def forward(self, x):
        if 6 in x:
            self.act()
        return self.norm(x)


def fail():
    raise ValueError("boom")


@pytest.mark.parametrize("mode", ["threads", "lockstep"])
def test_failure_in_one_nested_replica_frees_all(mode):
    model = nest(convert_sync_batchnorm(Prone(fail)), [(1, 1), (1, 1, 1)], mode)
    began = time.monotonic()
    with pytest.raises(Exception, match="boom"):
        model(torch.arange(7.0)[:, None])
    assert time.monotonic() - began < 5
    assert len(model(torch.zeros(7, 1))) == 7, "the model is usable afterwards"


def test_order_within_outer_lockstep_is_fixed():
    net = nn.Sequential(nn.Linear(3, 400), nn.Dropout(0.5))
    model = BalancedDataParallel(3, nest(net, [(1, 1)]), ["cpu"] * 2, mode="lockstep")
    x, found = torch.randn(7, 3), []
    for _ in range(20):
        torch.manual_seed(1)
        found.append(model(x))
    assert all(torch.equal(each, found[0]) for each in found)
