"""Storages that a recorder counts, by hand; buckets and casts beside those of torch's reducer and autocast."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from segapp.memory.ledger import PhaseMarks, Recorder
from segapp.memory.simulated.buckets import Buckets
from segapp.memory.simulated.devices import _WeightCache


def test_peaks_by_hand():
    recorder = Recorder(granule_bytes=512)
    with recorder:
        recorder.mark("forward")
        freed = torch.empty(256)  # 1024 bytes
        kept = torch.empty(100)  # 400 bytes take 512
        recorder.enter("head")
        view = kept.view(10, 10)
        own = torch.zeros(129)  # 516 bytes take 1024
        recorder.leave()
        recorder.tag([kept], "weights")
        del freed
        recorder.mark("backward")
        more = torch.zeros(2, 64, dtype=torch.float16)  # 256 bytes take 512
        recorder.mark("step")
    assert view.shape == (10, 10)
    assert (own.numel(), more.numel()) == (129, 128)
    peaks = recorder.peaks(first_mark=1)["cpu"]
    assert {phase: (peak.num_bytes, peak.by_kind, peak.by_module) for phase, peak in peaks.items()} == {
        "forward": (2560, {"forward": 2048, "weights": 512}, {"head": 1024}),
        "backward": (2048, {"forward": 1024, "weights": 512, "backward": 512}, {"head": 1024}),
        "step": (2048, {"forward": 1024, "weights": 512, "backward": 512}, {"head": 1024}),
    }
    first = peaks["backward"].largest[0]
    assert (first.num_bytes, first.module, first.what) == (1024, "head", "zeros 129 float32")


def test_later_and_smaller_storages_do_not_move_the_peak():
    recorder = Recorder(granule_bytes=512)
    with recorder:
        recorder.mark("forward")
        first = torch.empty(1024)  # 4096 bytes
        del first
        others = [torch.empty(128) for _ in range(3)]  # 512 bytes each
    assert len(others) == 3
    assert recorder.peaks(first_mark=1)["cpu"]["forward"].num_bytes == 4096


def test_tensors_from_outside_count_once_they_are_tagged():
    recorder, outside = Recorder(granule_bytes=512), torch.zeros(3)
    assert recorder.kind_of(outside) is None
    recorder.tag([outside], "input")
    assert recorder.kind_of(outside) == "input"
    assert [allocation.num_bytes for allocation in recorder.allocations] == [512]


def test_skipped_operators_change_nothing():
    values = torch.zeros(3)
    with Recorder(skipped=[torch.ops.aten.add_.Tensor]):
        assert values.add_(1) is values
        values.mul_(2).sub_(1)
    assert values.tolist() == [-1, -1, -1]


def test_only_parts_of_a_model_become_replicas_on_other_devices():
    recorder = Recorder()
    with recorder:
        parts, inputs = [torch.zeros(3), torch.zeros(4)], torch.zeros(5)
        recorder.tag([None, parts[0]], "weights")
        recorder.tag(parts[1:], "buffers")
        recorder.mark("forward")
        made = {
            "replicas": [*(part.to("meta") for part in parts), torch.cat(parts), torch.cat([parts[1], inputs])],
            "forward": [inputs.to("meta"), parts[0].half(), torch.cat([inputs, parts[0]])],
        }
        made["forward"].append(made["replicas"][0].to(torch.float64))
        recorder.enter("head")
        made["forward"].append(torch.cat(parts))
        recorder.leave()
        for kind, tensors in made.items():
            assert [recorder.kind_of(tensor) for tensor in tensors] == [kind] * len(tensors)
    assert recorder.kind_of(torch.zeros(1)) is None
    assert [recorder.kind_of(part.view(-1, 1)) for part in parts] == ["weights", "buffers"]


def test_phases_of_a_step_begin_in_their_order():
    class Scaling:
        def scale(self, loss):
            return 8 * loss

        def unscale(self, gradients):
            gradients.append("unscaled")

    marks, precision, network = [], Scaling(), nn.Linear(2, 1)
    PhaseMarks(marks.append).attach(network, precision)
    for _ in range(2):
        loss = network(torch.ones(1, 2)).sum()
        assert marks[-2:] == ["forward", "loss"]
        assert precision.scale(loss) == 8 * loss
        gradients = []
        precision.unscale(gradients)
        assert gradients == ["unscaled"]
    assert marks == ["forward", "loss", "backward", "step"] * 2


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

    recorder = Recorder(granule_bytes=1)
    with recorder:
        buckets = Buckets(parameters, as_views=as_views, is_lazy=is_lazy, recorder=recorder)
        recorder.mark("backward")
        sum(parameter.sum() for parameter in parameters).backward()
        recorder.mark("step")
    kind = "gradients" if as_views else "buckets"
    made = sorted(a.num_bytes for a in recorder.allocations if a.kind == kind)
    assert made == sorted(bytes_of_buckets)
    assert (kind in recorder.peaks()["cpu"]["build"].by_kind) is not is_lazy
    if as_views:
        together = [{backwards[i].grad.untyped_storage().data_ptr() for i in bucket} for bucket in expected]
        assert [len(addresses) for addresses in together] == [1, 1, 1]
        assert len(set.union(*together)) == 3
        for parameter in parameters:
            parameter.grad = None
    buckets.end_backward()
    recorder.mark("next")
    assert (kind in recorder.peaks()["cpu"]["next"].by_kind) is not is_lazy


def test_only_weights_are_cast_once_for_all_uses():
    cache, half = _WeightCache(), torch.bfloat16
    weight = nn.Parameter(torch.ones(3))
    assert cache.cast(weight, half) is cache.cast(weight, half)
    assert cache.cast(weight, half).dtype == half
    assert cache.cast(weight, torch.float16).dtype == torch.float16
    for value in (torch.ones(3), weight * 1, weight.detach()):
        assert cache.cast(value, half) is not cache.cast(value, half)
        assert cache.cast(value, half).dtype == half
    half_weight = nn.Parameter(torch.ones(3, dtype=half))
    assert cache.cast(half_weight, torch.float32) is not cache.cast(half_weight, torch.float32)
    for unchanged in (None, 2, torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int64)):
        assert cache.cast(unchanged, half) is unchanged
