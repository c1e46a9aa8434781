"""segapp.losses in the parallel engine: low-resolution logits, auxiliary heads, class weights."""

import copy

import pytest
import torch
from torch import nn

from segapp.losses import CriterionCE
from segapp.parallel import BalancedDataParallel, DataParallelCriterion, DataParallelModel, convert_sync_batchnorm
from tests.support.parallel_cases import SmallNet, grads_of, make_batch, relative_error


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
