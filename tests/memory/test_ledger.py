"""Storages that a ledger counts, by hand; buckets and casts beside those of torch's reducer and autocast."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from segapp.memory.ledger import StorageLedger
from segapp.memory.simulated_devices import Buckets


def test_peaks_by_hand():
    ledger = StorageLedger(alloc_unit_bytes=512)
    with ledger:
        ledger.mark("forward")
        freed = torch.empty(256)  # 1024 bytes
        kept = torch.empty(100)  # 400 bytes take 512
        ledger.modules.append("head")
        view = kept.view(10, 10)
        own = torch.zeros(129)  # 516 bytes take 1024
        ledger.modules.pop()
        ledger.tag([kept], "weights")
        del freed
        ledger.mark("backward")
        more = torch.zeros(2, 64, dtype=torch.float16)  # 256 bytes take 512
        ledger.mark("step")
    assert view.shape == (10, 10)
    assert (own.numel(), more.numel()) == (129, 128)
    peaks = ledger.peaks(first_mark=1)["cpu"]
    assert {phase: (sum(peak.values()), peak) for phase, peak in peaks.items()} == {
        "forward": (2560, {"forward": 2048, "weights": 512}),
        "backward": (2048, {"forward": 1024, "weights": 512, "backward": 512}),
        "step": (2048, {"forward": 1024, "weights": 512, "backward": 512}),
    }
    assert ledger.allocations[2].what == "zeros 129 float32"


def test_later_and_smaller_storages_do_not_move_the_peak():
    ledger = StorageLedger(alloc_unit_bytes=512)
    with ledger:
        ledger.mark("forward")
        first = torch.empty(1024)  # 4096 bytes
        del first
        others = [torch.empty(128) for _ in range(3)]  # 512 bytes each
    assert len(others) == 3
    assert ledger.peaks(first_mark=1)["cpu"]["forward"]["forward"] == 4096


def test_tensors_from_outside_count_once_they_are_tagged():
    """They count with their whole storage: a row of 2400 bytes takes 2560, and one number for all elements 512."""
    ledger, outside = StorageLedger(alloc_unit_bytes=512), torch.zeros(3, 200)[1]
    assert ledger.kind_of(outside) is None
    ledger.tag([outside, torch.zeros(1).expand(1000)], "input")
    assert ledger.kind_of(outside) == "input"
    assert [allocation.num_bytes for allocation in ledger.allocations] == [2560, 512]


def test_skipped_operators_change_nothing():
    values = torch.zeros(3)
    with StorageLedger(is_skipped=lambda operator: operator is torch.ops.aten.add_.Tensor):
        assert values.add_(1) is values
        values.mul_(2).sub_(1)
    assert values.tolist() == [-1, -1, -1]


def test_only_parts_of_a_model_become_replicas_on_other_devices():
    ledger = StorageLedger()
    with ledger:
        parts, inputs = [torch.zeros(3), torch.zeros(4)], torch.zeros(5)
        ledger.tag([None, parts[0]], "weights")
        ledger.tag(parts[1:], "buffers")
        ledger.mark("forward")
        made = {
            "replicas": [*(part.to("meta") for part in parts), torch.cat(parts), torch.cat([parts[1], inputs])],
            "forward": [inputs.to("meta"), parts[0].half(), torch.cat([inputs, parts[0]])],
        }
        made["forward"].append(made["replicas"][0].to(torch.float64))
        ledger.modules.append("head")
        made["forward"].append(torch.cat(parts))
        ledger.modules.pop()
        for kind, tensors in made.items():
            assert [ledger.kind_of(tensor) for tensor in tensors] == [kind] * len(tensors)
    assert ledger.kind_of(torch.zeros(1)) is None
    assert [ledger.kind_of(part.view(-1, 1)) for part in parts] == ["weights", "buffers"]


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("is_lazy", [True, False])
def test_buckets_are_those_of_torch_s_reducer(as_views, is_lazy):
    # Backwards, in MiB: 0.00 + 0.38 + 0.57 + 0.11 reach 1, 0.00 + 14.11 + 10.38 + 1.14 reach 25; one is left.
    sizes = [1000, 300_000, 2_720_000, 3_700_000, 10, 30_000, 150_000, 100_000, 5]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    backwards = parameters[::-1]
    limits = [2**20, 25 * 2**20]
    expected, _ = dist._compute_bucket_assignment_by_size(backwards, limits, [False] * len(sizes))
    bytes_of_buckets = [sum(4 * backwards[i].numel() for i in bucket) for bucket in expected]
    assert len(expected) == 3, "the case is meant to have buckets of both limits"

    ledger = StorageLedger(alloc_unit_bytes=1)
    with ledger:
        buckets = Buckets(parameters, as_views=as_views, is_lazy=is_lazy, ledger=ledger)
        ledger.mark("backward")
        sum(parameter.sum() for parameter in parameters).backward()
        ledger.mark("step")
    kind = "gradients" if as_views else "buckets"
    made = sorted(a.num_bytes for a in ledger.allocations if a.kind == kind)
    assert made == sorted(bytes_of_buckets)
    assert (kind in ledger.peaks()["cpu"]["build"]) is not is_lazy
    if as_views:
        together = [{backwards[i].grad.untyped_storage().data_ptr() for i in bucket} for bucket in expected]
        assert [len(addresses) for addresses in together] == [1, 1, 1]
        assert len(set.union(*together)) == 3
        for parameter in parameters:
            parameter.grad = None
    buckets.end_backward()
    ledger.mark("next")
    assert (kind in ledger.peaks()["cpu"]["next"]) is not is_lazy


class PlusOne(torch.autograd.Function):
    """A function in Python, whose backward pass adds tensors of its own."""

    @staticmethod
    def forward(ctx, values):
        return values + 1

    @staticmethod
    def backward(ctx, gradient):
        twice = gradient * 2
        return (twice + gradient) * twice


@pytest.mark.parametrize(
    ("combine", "num_bytes"),
    [
        (lambda h: h * 2 + h * 3 + h * 4, 20008),  # the second gradient is added to the first, and the third to that
        (lambda h: torch.cat([h, h * 3]), 24008),  # the first gradient is a part of the whole one: a new tensor
        (lambda h: torch.cat([h, h * 3, h * 5]), 28008),  # the sum of the first two is autograd's own
        (PlusOne.apply, 24008),  # a function's own sums are new tensors
    ],
    ids=["products", "one part", "two parts", "function"],
)
def test_gradients_are_added_in_place_as_by_autograd(combine, num_bytes):
    """Vectors of 4000 bytes: x and h, what the operators keep, and at most the gradients that torch allocates."""
    ledger = StorageLedger(alloc_unit_bytes=1)
    with ledger:
        x = torch.ones(1000, requires_grad=True)
        h = x * 2
        out = combine(h)
        ledger.mark("backward")
        out.sum().backward()
    assert ledger.peaks()["cpu"]["backward"].total() == num_bytes
