"""Loss, gradients and state equal those of one device at any split."""

import copy
import random
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
from tests.support.parallel_cases import PlainCE, SmallNet, grads_of, make_batch, relative_error, state_error


def errors_of(seed, dtype):
    """Return the errors of loss, gradients and state in a random step of one to three micro-batches."""
    rng = random.Random(seed)
    num_devices, num_samples = rng.randint(1, 5), rng.randint(1, 9)
    sizes = [rng.choice([num_samples, rng.randint(1, 9)]) for _ in range(rng.randint(1, 3))]
    gpu0_bsz = rng.choice([None, *range(0 if num_devices > 1 else 1, num_samples + 1)])
    ignored, is_weighted = rng.choice([0.0, 0.3, 1.0, 1.0, 2.0]), rng.random() < 0.5
    label_smoothing, has_aux = rng.choice([0.0, 0.1]), rng.random() < 0.5
    mode = rng.choice(["threads", "threads", "lockstep"])
    torch.manual_seed(seed)
    weight = torch.rand(4, dtype=torch.float64) + 0.2 if is_weighted else None
    truth, criterion = SmallNet(has_aux=has_aux).to(dtype), PlainCE(weight, label_smoothing)
    net = convert_sync_batchnorm(copy.deepcopy(truth))
    model = DataParallelModel(net, ["cpu"] * num_devices, gpu0_bsz=gpu0_bsz, mode=mode)
    batches = [make_batch(size, dtype=dtype, seed=seed + i, ignored=ignored) for i, size in enumerate(sizes)]
    losses = []
    for forward, each in ((truth, criterion), (model, DataParallelCriterion(criterion))):
        rows = [each.statistics(forward(images), target) for images, target in batches]
        losses.append(each.finalize(tuple(sum(column) for column in zip(*rows, strict=True))))
        losses[-1].backward()
    error = relative_error([losses[1].detach()], [losses[0].detach()])
    return error, relative_error(grads_of(net), grads_of(truth)), state_error(net, truth)


@pytest.mark.parametrize("part", range(3))
def test_84_random_steps_match_one_device_in_float64(part):
    for seed in range(part * 28, part * 28 + 28):
        loss, grads, state = errors_of(seed, torch.float64)
        assert (loss <= 1e-12, grads <= 1e-10, state <= 1e-12) == (True, True, True), (seed, loss, grads, state)


def test_random_steps_match_one_device_in_float32():
    for seed in range(1000, 1012):
        assert max(errors_of(seed, torch.float32)) <= 1e-5, seed


def test_10_threaded_steps_are_bitwise_equal_to_lockstep():
    images, target = make_batch(7, dtype=torch.float32)
    torch.manual_seed(0)
    origin = convert_sync_batchnorm(SmallNet())

    def step(mode):
        net = copy.deepcopy(origin)
        model = DataParallelModel(net, ["cpu"] * 4, gpu0_bsz=1, mode=mode)
        for _ in range(2):  # the first pass of a model on logical devices is always in lockstep
            loss = DataParallelCriterion(PlainCE())(model(images), target)
            loss.backward()
        return [loss.detach(), *grads_of(net), *net.buffers()]

    first = step("lockstep")
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, step("threads"), strict=True))


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
            "with accuracy": (mean, (logits.argmax(1) == target).double().mean()),
            "in a list": [{"loss": mean}, "word"],
            "mapping": UserDict(loss=mean, aux=mean),
            "sums": CriterionCE().statistics(logits, target),
            "sums per class": criterion.statistics(logits, target),
            "with a count": (logits, torch.tensor(len(images))),
        }[self.kind]


MEANS, SUMS = (
    ["mean", "with logits", "with accuracy", "in a list", "mapping"],
    ["sums", "sums per class", "with a count"],
)


@pytest.mark.parametrize("kind", MEANS + SUMS)
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
        assert len(found) == (num_warnings if kind in MEANS else 0)
        assert all(f"LossInForward returned a scalar for chunks of {list(outputs.sizes)}" in each for each in found)


def test_statistics_from_forward_give_the_loss_of_the_batch():
    images, target = make_batch(7)
    net = LossInForward("sums")
    sums = BalancedDataParallel(1, net, ["cpu"] * 3)(images, target)
    truth = CriterionCE()(net.conv(images), target)
    assert relative_error([CriterionCE().finalize([each.sum() for each in sums])], [truth]) <= 1e-12
