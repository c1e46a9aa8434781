"""Loss, gradients and state equal those of one device at any split; the mean of means does not."""

import copy
import math
import warnings
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from segapp.losses import CriterionCE, CriterionDice, CriterionSum
from segapp.parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    convert_sync_batchnorm,
)
from tests.support.parallel_cases import Case, PlainCE, SmallNet, grads_of, make_batch, relative_error, state_error


def step_on_one_device(net, criterion, batches):
    rows = [criterion.statistics(net(images), target) for images, target in batches]
    loss = criterion.finalize(tuple(sum(column) for column in zip(*rows, strict=True)))
    loss.backward()
    return loss.detach()


def step_in_parallel(case, net, criterion, batches):
    model = DataParallelModel(
        convert_sync_batchnorm(net), ["cpu"] * case.num_devices, gpu0_bsz=case.gpu0_bsz, mode=case.mode
    )
    parallel = DataParallelCriterion(criterion)
    rows = [parallel.statistics(model(images), target) for images, target in batches]
    loss = parallel.finalize(tuple(sum(column) for column in zip(*rows, strict=True)))
    loss.backward()
    return loss.detach()


def errors_of(case, dtype):
    truth, criterion, batches = case.build(dtype)
    net = copy.deepcopy(truth)
    true_loss = step_on_one_device(truth, criterion, batches)
    loss = step_in_parallel(case, net, criterion, batches)
    return (
        relative_error([loss], [true_loss]),
        relative_error(grads_of(net), grads_of(truth)),
        state_error(net, truth),
    )


@pytest.mark.parametrize("part", range(3))
def test_84_random_steps_match_one_device_in_float64(part):
    for seed in range(part * 28, part * 28 + 28):
        case = Case.draw(seed)
        loss, grads, state = errors_of(case, torch.float64)
        assert loss <= 1e-12, (case, loss)
        assert grads <= 1e-10, (case, grads)
        assert state <= 1e-12, (case, state)


def test_random_steps_match_one_device_in_float32():
    for seed in range(1000, 1012):
        case = Case.draw(seed)
        assert max(errors_of(case, torch.float32)) <= 1e-5, case


def mean_of_means(outputs, target, sizes):
    parts = [
        F.cross_entropy(chunk[0], labels, ignore_index=255)
        for chunk, labels in zip(outputs, target.split(list(sizes)), strict=True)
    ]
    return torch.stack(parts).mean()


def test_mean_of_means_fails_the_exactness_check():
    images, target = make_batch(7, ignored=0.95)
    torch.manual_seed(0)
    truth = SmallNet(has_aux=False).double().eval()
    true_loss = PlainCE()(truth(images), target)
    true_loss.backward()
    net = copy.deepcopy(truth)
    net.zero_grad()
    outputs = DataParallelModel(net, ["cpu"] * 3, gpu0_bsz=1)(images)
    loss = mean_of_means(outputs, target, outputs.sizes)
    loss.backward()
    assert relative_error([loss.detach()], [true_loss.detach()]) > 1e-3
    assert relative_error(grads_of(net), grads_of(truth)) > 1e-2
    target[:1] = 255
    assert math.isnan(mean_of_means(outputs, target, outputs.sizes).item()), "a chunk without a valid pixel"
    assert torch.isfinite(DataParallelCriterion(PlainCE())(outputs, target))


def test_10_threaded_steps_are_bitwise_equal_to_lockstep():
    images, target = make_batch(7, dtype=torch.float32)
    torch.manual_seed(0)
    origin = convert_sync_batchnorm(SmallNet())

    def step(mode):
        net = copy.deepcopy(origin)
        model = DataParallelModel(net, ["cpu"] * 4, gpu0_bsz=1, mode=mode)
        loss = DataParallelCriterion(PlainCE())(model(images), target)
        loss.backward()
        return [loss.detach(), *grads_of(net), *net.buffers()]

    first = step("lockstep")
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, step("threads"), strict=True))


def test_unconverted_batchnorm_fails_the_exactness_check():
    images, target = make_batch(7)
    torch.manual_seed(0)
    truth = SmallNet().double()
    net = copy.deepcopy(truth)
    PlainCE()(truth(images), target).backward()
    DataParallelCriterion(PlainCE())(DataParallelModel(net, ["cpu"] * 3)(images), target).backward()
    assert relative_error(grads_of(net), grads_of(truth)) > 1e-2


class Coarse(nn.Module):
    """Logits at a quarter of the images' resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallNet()

    def forward(self, images):
        return tuple(nn.functional.avg_pool2d(logits, 3) for logits in self.net(images))


@pytest.mark.parametrize("gpu0_bsz", [None, 0, 1, 3, 7])
def test_parallel_loss_equals_criterion_on_the_whole_batch(gpu0_bsz):
    images, target = make_batch(7)
    torch.manual_seed(0)
    truth = Coarse().double()
    criterion = CriterionCE(ignore_index=255, weight=torch.rand(4), label_smoothing=0.1)
    start = copy.deepcopy(truth)
    expected = criterion(truth(images), target)
    expected.backward()
    for wrap in (
        lambda net: DataParallelModel(net, ["cpu"] * 3, gpu0_bsz=gpu0_bsz),
        lambda net: BalancedDataParallel(gpu0_bsz, net, ["cpu"] * 3),
    ):
        net = convert_sync_batchnorm(copy.deepcopy(start))
        loss = DataParallelCriterion(criterion, device_ids=None)(wrap(net)(images), target)
        loss.backward()
        # The criterion sums in float32 or better, so chunks differ in rounding only.
        assert relative_error([loss.detach()], [expected.detach()]) <= 1e-12
        assert relative_error(grads_of(net), grads_of(truth)) <= 1e-10


class LossInForward(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.conv, self.kind = nn.Conv2d(3, 4, 1).double(), kind

    def forward(self, images, target):
        logits = self.conv(images)
        mean = F.cross_entropy(logits, target, ignore_index=255)
        criterion = CriterionSum([(1.0, CriterionCE()), (0.5, CriterionDice())])
        return {
            "mean": mean,
            "with logits": (logits, mean),
            "mapping": UserDict(loss=mean, aux=mean),
            "sums": CriterionCE().statistics(logits, target),
            "sums per class": criterion.statistics(logits, target),
            "with a count": (logits, torch.tensor(len(images))),
        }[self.kind]


@pytest.mark.parametrize("kind", ["mean", "with logits", "mapping", "sums", "sums per class", "with a count"])
def test_means_of_uneven_chunks_are_warned_of_once(kind):
    net = LossInForward(kind)
    images, target = make_batch(7)
    for shares, num_warnings in (([1, 3, 3], 1), ([0, 3, 2], 1), ([1, 1, 1], 0)):
        num_samples = 6 if shares == [1, 1, 1] else 7
        model = DataParallelModel(net, ["cpu"] * 3, shares=shares)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                outputs = model(images[:num_samples], target[:num_samples])
        found = [str(each.message) for each in caught]
        assert len(found) == (num_warnings if kind in ("mean", "with logits", "mapping") else 0)
        assert all(f"LossInForward returned a scalar for chunks of {list(outputs.sizes)}" in each for each in found)


def test_statistics_from_forward_give_the_loss_of_the_batch():
    images, target = make_batch(7)
    net = LossInForward("sums")
    sums = BalancedDataParallel(1, net, ["cpu"] * 3)(images, target)
    truth = CriterionCE()(net.conv(images), target)
    assert relative_error([CriterionCE().finalize([each.sum() for each in sums])], [truth]) <= 1e-12
