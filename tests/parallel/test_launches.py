"""Upper bounds of the launches of a step on CUDA: what replicas, exchanges and copies cost the host."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from segapp.parallel import DataParallelCriterion, DataParallelModel, allreduce, convert_sync_batchnorm
from segapp.parallel.distributed import wrap_ddp
from tests.support.gpu.batchnorm_kernels import kernels_on_the_cpu
from tests.support.gpu.launches import LaunchCounter
from tests.support.parallel_cases import PlainCE, SmallNet, make_batch


@pytest.fixture
def _two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def launches_of(step):
    step()
    with kernels_on_the_cpu(), LaunchCounter() as counter:
        step()
    return counter.total


@pytest.mark.parametrize(("num_devices", "most"), [(1, 70), (3, 227), (8, 557)])
def test_launches_grow_by_the_networks_own_for_each_device(num_devices, most):
    images, target = make_batch(9, dtype=torch.float32)
    model = DataParallelModel(convert_sync_batchnorm(SmallNet()), ["cpu"] * num_devices)
    criterion = DataParallelCriterion(PlainCE())
    assert launches_of(lambda: criterion(model(images), target).backward()) <= most


@pytest.mark.usefixtures("_two_ranks")
def test_launches_of_a_rank_are_within_bounds():
    images, target = make_batch(9, dtype=torch.float32)
    model = wrap_ddp(convert_sync_batchnorm(SmallNet()))
    model.register_comm_hook(None, all_reduce_bucket)  # the work of a fake process group has no result

    def step():
        PlainCE().finalize(allreduce(*PlainCE().statistics(model(images), target))).backward()

    assert launches_of(step) <= 124


def all_reduce_bucket(_, bucket):
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
