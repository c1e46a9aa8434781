"""A step on devices that cannot be mixed issues no collective and reads nothing too early; ranks issue in one order."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from segapp.parallel import allreduce, convert_sync_batchnorm
from segapp.parallel.distributed import wrap_ddp
from tests.parallel.test_launches import all_reduce_bucket
from tests.support.gpu.fake_devices import Action, unordered_reads
from tests.support.parallel_cases import PlainCE, SmallNet, make_batch
from tests.support.programs import start


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    logs = tmp_path_factory.mktemp("fake")
    done = start(cwd=logs, logs=logs, code="from tests.support.gpu.fake_devices import main; main()").finish()
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("kind", "used"),
    [("dp", [0, 1, 2]), ("dp on 5 devices", range(5)), ("dp without gpu 0", [1, 2]), ("dp, sync_bn off", [0, 1, 2])],
)
def test_step_issues_no_collective_and_every_read_waits(found, kind, used):
    step = found[kind]
    assert step["outputs"] == [f"fake:{number}" for number in used]
    assert step["unordered"] == []
    assert step["collective"] == 0, "copies between two streams cannot wait in a circle, collectives can"
    assert step["copy"] >= 3 * (len(used) - 1)
    assert {f"autograd {number}" for number in used} <= set(step["threads"])


def test_defects_put_into_a_step_are_found(found):
    assert found["with collectives"]["collective"] > 0
    assert "reads what replica" in found["without waiting"]["unordered"][0]
    assert any("reads from device" in words for words in found["without copies"]["unordered"])
    assert "device" in found["mixed devices"]


def test_unordered_read_of_two_threads_by_hand():
    write, read = Action("a", (0,), writes=(1,)), Action("b", (0,), reads=((1, 0),), what="add")
    assert unordered_reads([write, read]) == ["add of b reads what a may still issue"]
    assert unordered_reads([write, Action("b", (0,), reads=((1, 0),), after=frozenset({0}))]) == []
    assert unordered_reads([write, Action("a", (0,), reads=((1, 0),))]) == []
    assert unordered_reads([Action("a", (1,), reads=((1, 0),), what="add")]) == ["add of a on [1] reads from device 0"]


class Collectives(TorchDispatchMode):
    """Notes the collectives of a rank in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [t for t in torch.utils._pytree.tree_iter(args) if isinstance(t, torch.Tensor)]
            self.names.append(f"{func._opname} {[tuple(t.shape) for t in tensors]}")
        return func(*args, **(kwargs or {}))


def collectives_of(rank, sizes):
    """Return the collectives of one of several ranks in a step of DDP, in a process group that does not communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(sizes))
    try:
        torch.manual_seed(0)
        net = SmallNet()
        ddp = wrap_ddp(convert_sync_batchnorm(net), bucket_cap_mb=0.0005)
        assert ddp.gradient_as_bucket_view
        assert ddp.__dict__.get("lazy_bucket_allocation", True), "where torch has it"
        ddp.register_comm_hook(None, all_reduce_bucket)
        images, target = make_batch(max(1, sizes[rank]), dtype=torch.float32)
        with Collectives() as mode:
            outputs = ddp(images[: sizes[rank]])
            statistics = PlainCE().statistics(outputs, target[: sizes[rank]])
            PlainCE().finalize(allreduce(*statistics)).backward()
    finally:
        dist.destroy_process_group()
    return mode.names


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_issue_their_collectives_in_one_order(num_ranks):
    sizes = [2, 0, 1, 3, 2, 2, 1, 2][:num_ranks]
    ranks = sorted({0, 1, num_ranks - 1})
    sequences = [collectives_of(rank, sizes) for rank in ranks]
    assert all(sequence == sequences[0] for sequence in sequences)
    assert len(sequences[0]) > 3 * 2 + 2, "3 layers in both passes, 2 sums, buckets"
    assert sequences[0] != sequences[0][::-1], "the names tell one order from another"
