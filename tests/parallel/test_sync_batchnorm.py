"""SyncBatchNorm, also by torch's kernels, equals torch's BatchNorm on the whole batch and saves no more."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchvision.models.feature_extraction import create_feature_extractor

from segapp.parallel import (
    BalancedDataParallel,
    DataParallelModel,
    SyncBatchNorm,
    allreduce,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
    sync_batchnorm,
)
from segapp.parallel.replica_threads import ReplicaThreads
from segapp.parallel.scatter_gather import scatter
from tests.support.gpu.batchnorm_kernels import kernels_on_the_cpu
from tests.support.parallel_cases import grads_of, relative_error, state_error

CPU = torch.device("cpu")
SHAPES = {nn.BatchNorm1d: [(9, 5), (9, 5, 4)], nn.BatchNorm2d: [(9, 5, 3, 4)], nn.BatchNorm3d: [(9, 5, 2, 3, 2)]}


def layer_and_twin(kind, **options):
    torch.manual_seed(1)
    layer = kind(5, **options)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer, convert_sync_batchnorm(copy.deepcopy(layer))


def outcome(layer, run, x, weights, steps=2):
    x = x.clone().requires_grad_()
    for _ in range(steps):
        y = run(x)
        (y * weights).sum().backward()
    return [y.detach(), x.grad, *grads_of(layer), *layer.buffers()]


BATCHNORM_OPTIONS = [
    {},
    {"momentum": 0.3},
    {"momentum": 0.0},
    {"momentum": None},
    {"eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
]
"""Every option of a layer at a value that is not its default."""

ways = pytest.mark.parametrize("way", [nullcontext, kernels_on_the_cpu], ids=["operators", "kernels of CUDA"])


@pytest.mark.sampled(2)
@ways
@pytest.mark.parametrize("options", BATCHNORM_OPTIONS, ids=str)
@pytest.mark.parametrize(("kind", "shape"), [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes])
def test_sync_batchnorm_matches_batchnorm_on_the_whole_batch(kind, shape, options, way):
    torch.manual_seed(0)
    x, weights = torch.randn(shape, dtype=torch.float64) * 3 + 2, torch.randn(shape, dtype=torch.float64)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    for training in (True, False):
        for num_devices, gpu0_bsz in ((3, 1), (4, 0), (5, None), (2, 8)):
            truth, layer = (m.double().train(training) for m in layer_and_twin(kind, **options))
            parallel = BalancedDataParallel(gpu0_bsz, layer, ["cpu"] * num_devices)
            expected = outcome(truth, truth, x, weights, steps=3)
            inputs = x.contiguous(memory_format=last if gpu0_bsz == 0 else torch.contiguous_format)
            with way():
                assert relative_error(outcome(layer, parallel, inputs, weights, steps=3), expected) <= 1e-11


@pytest.mark.parametrize("ratio", [0.0, 330.0, 3000.0])
def test_float32_far_from_zero_is_as_accurate_as_batchnorm(ratio):
    torch.manual_seed(0)
    x, weights = torch.randn(9, 5, 6, 7) * 3 + 3 * ratio, torch.randn(9, 5, 6, 7)
    truth = outcome(*[layer_and_twin(nn.BatchNorm2d)[0].double()] * 2, x.double(), weights.double(), steps=1)
    plain, layer = layer_and_twin(nn.BatchNorm2d)
    alone = relative_error(outcome(plain, plain, x, weights, steps=1), truth)
    parallel = BalancedDataParallel(2, layer, ["cpu"] * 4)
    assert relative_error(outcome(layer, parallel, x, weights, steps=1), truth) <= max(2 * alone, 1e-6)


@ways
@pytest.mark.parametrize("has_half_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_normalised_with_float32_statistics(dtype, has_half_weights, way):
    torch.manual_seed(0)
    x = (torch.randn(6, 5, 4, 4) * 30 + 200).to(dtype)
    plain, layer = layer_and_twin(nn.BatchNorm2d)
    expected, inputs = plain(x.float()), x.clone().requires_grad_()
    with way():
        output = BalancedDataParallel(1, layer.to(dtype) if has_half_weights else layer, ["cpu"] * 3)(inputs)
        output.sum().backward()
    assert inputs.grad.dtype == output.dtype == dtype
    assert layer.weight.grad.dtype == layer.running_var.dtype == (dtype if has_half_weights else torch.float32)
    assert state_error(layer, plain) <= (0.02 if has_half_weights else 1e-5)
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)


def outputs_of_3_replicas(x, weight, bias):
    layer = SyncBatchNorm(2, track_running_stats=False).double()

    def call(chunk):
        replica = layer._replicate_for_data_parallel()
        replica.weight, replica.bias = weight, bias
        return lambda: replica(chunk)

    return ReplicaThreads([CPU] * 3).run([call(chunk) for chunk in scatter(x, [CPU] * 3, [1, 2, 1])])


@pytest.mark.parametrize("is_differentiable", [False, True])
def test_gradients_are_exact_where_the_loss_needs_one_part(is_differentiable):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 2, 2, 1), (2,), (2,))]
    whole = torch.nn.functional.batch_norm(inputs[0], None, None, *inputs[1:], training=True)
    losses = [output.pow(3).sum() for output in (outputs_of_3_replicas(*inputs)[1], whole[1:3])]
    own, expected = (torch.autograd.grad(loss, inputs, create_graph=is_differentiable) for loss in losses)
    assert relative_error(own, expected) <= 1e-10


def test_allreduce_passes_gradcheck_and_gradgradcheck():
    def f(x):
        def call(chunk, i):
            return lambda: sum(t.sum() * (i + 1) for t in allreduce(chunk.pow(3), (chunk * (i + 2)).sin()))

        parts = scatter(x, [CPU] * 3, [2, 2, 2])
        return torch.stack(ReplicaThreads([CPU] * 3).run([call(part, i) for i, part in enumerate(parts)]))

    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)


def saved_bytes(layer, x, num_devices):
    """Return the bytes saved for backward, repeated ones included, for every chunk."""
    total = []
    model = DataParallelModel(layer, ["cpu"] * num_devices)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: total.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        model(x)
    return sum(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sync_batchnorm_saves_no_more_than_batchnorm(dtype):
    x = torch.randn(6, 16, 48, 48).to(dtype).requires_grad_()
    plain, layer = nn.BatchNorm2d(16), SyncBatchNorm(16)
    assert saved_bytes(layer, x, 1) <= saved_bytes(plain, x, 1)
    limit = saved_bytes(plain, x, 3)
    # The layer's vectors are exchanged, so there are a few copies of them; of the activations there is one.
    vectors = 3 * 10 * (2 * 16 + 1) * 8
    assert saved_bytes(layer, x, 3) <= limit + vectors
    assert vectors < 0.05 * limit
    assert saved_bytes(layer, x.detach(), 3) <= limit + vectors, "also where the input needs no gradient"


def test_checkpointing_without_set_recompute_is_refused():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), SyncBatchNorm(3))

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=False)

    outputs = DataParallelModel(Checkpointed(), ["cpu"] * 2)(torch.randn(4, 3, 2, 2))
    with pytest.raises(
        RuntimeError, match=r"use segapp\.parallel\.set_recompute for activation checkpointing, .* exchange$"
    ):
        sum(output.sum() for output in outputs).backward()


def test_conversion_keeps_keys_and_hooks_and_is_reversible():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm3d(4)), nn.InstanceNorm2d(2))
    shared = net[1][0]
    net.append(shared)
    calls = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    parameters, keys = list(net.parameters()), list(net.state_dict())
    assert convert_sync_batchnorm(net) is net
    assert [isinstance(m, SyncBatchNorm) for m in net.modules()] == [False, True, False, True, True, False]
    assert [repr(m).partition("(")[0] for m in net[1]] == ["SyncBatchNorm2d", "SyncBatchNorm3d"]
    assert net[3] is shared
    assert type(net[2]) is nn.InstanceNorm2d
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert list(net.state_dict()) == keys
    shared(torch.randn(4, 3, 2, 2))
    assert calls == [1]
    convert_sync_batchnorm(net)
    revert_sync_batchnorm(copy.deepcopy(net))
    revert_sync_batchnorm(net)
    assert [type(net[0]), *(type(m) for m in net[1])] == [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    assert type(revert_sync_batchnorm(SyncBatchNorm(3))) is nn.BatchNorm2d
    assert type(revert_sync_batchnorm(convert_sync_batchnorm(nn.SyncBatchNorm(3)))) is nn.SyncBatchNorm
    assert pickle.loads(pickle.dumps([SyncBatchNorm])) == [SyncBatchNorm]


class Gained(nn.BatchNorm2d):
    """BatchNorm with an input of its own, and with names that SyncBatchNorm has too."""

    def __init__(self, num_features, power):
        super().__init__(num_features, eps=0.01)
        self.power = power

    def _name(self):
        raise AssertionError

    _track = _moments = _join = _exchange = _name

    def _check_input_dim(self, x):
        assert x.dim() in (3, 4)

    def forward(self, x, gain):
        return super().forward(x) * gain.view(-1, 1, *[1] * (x.dim() - 2)) ** self.power


class Tanh:
    def forward(self, *inputs):
        return super().forward(*inputs).tanh()


class GainedTanh(Tanh, Gained):
    pass


class Named(nn.BatchNorm2d):
    def forward(self, x):
        return super(Named, self).forward(x) + 1  # noqa: UP008


SHARES = {"device_ids": ["cpu"] * 3, "shares": (0, 3, 2)}
GAIN = torch.linspace(0.5, 2, 5, dtype=torch.float64)
OWN_LAYERS = {
    "named": (lambda: Named(4), ()),
    "gained": (lambda: Gained(4, 3), (GAIN,)),
    "mixed": (lambda: GainedTanh(4, 2), (GAIN,)),
    "timm": (lambda: BatchNormAct2d(4, drop_layer=lambda: nn.Threshold(-0.5, 3.0), act_layer=nn.Tanh), ()),
}


@pytest.mark.parametrize("name", OWN_LAYERS)
def test_own_layers_convert_copy_and_revert_exactly(name):
    build, others = OWN_LAYERS[name]
    torch.manual_seed(0)
    truth = build().double()
    nn.init.normal_(truth.weight)
    layer = convert_sync_batchnorm(copy.deepcopy(truth))
    x, weights = torch.randn(2, 5, 4, 3, 7, dtype=torch.float64)
    expected = outcome(truth, lambda x: truth(x, *others), x, weights)
    for synced in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer):
        assert isinstance(synced, type(truth))
        assert type(synced) is type(layer)
        model = DataParallelModel(synced, **SHARES)
        found = outcome(synced, lambda x, model=model: torch.cat(list(model(x, *others))), x, weights)
        assert relative_error(found, expected) <= 1e-12
    assert relative_error([layer.eval()(x, *others)], [truth.eval()(x, *others)]) <= 1e-12
    assert type(revert_sync_batchnorm(layer)) is type(truth)


def own(forward, base=nn.BatchNorm2d):
    return type("Own", (base,), {"forward": forward})(3)


NEXT = nn.BatchNorm2d  # `super()` of a function outside of a class


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: own(lambda self, x: x.batch_norm() if self.training else super(NEXT, self).forward(x)), "has a forw"),
        (
            lambda: own(lambda self, x: NEXT.forward(self, x)),
            r"has a forward .* super\(\)\.forward\(input\) for the wh",
        ),
        (lambda: own(lambda self, x: super(NEXT, self).forward(x.chunk(2)[0])), "has a forward"),
        (lambda: nn.SyncBatchNorm(3, process_group="half"), "has process_group=half, and segapp synchronizes over all"),
        (nn.LazyBatchNorm2d, "has no channels yet: run the module once"),
    ],
)
def test_layers_that_cannot_be_synchronized_are_refused(build, words):
    net = nn.Sequential(nn.BatchNorm2d(3), build())
    with pytest.raises(TypeError, match=rf"1 \({type(net[1]).__name__}\) {words}") as refused:
        convert_sync_batchnorm(net)
    assert "sync_bn" not in str(refused.value)
    assert type(net[0]) is nn.BatchNorm2d, "a refused network stays as it is"


class Twice(SyncBatchNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1, bias=False), norm

    def forward(self, x):
        return self.norm(self.conv(x)).relu() + x


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda net: create_feature_extractor(net, ["1.norm", "3"])])
def test_tracers_make_one_node_of_each_layer(trace):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), *map(Block, (nn.BatchNorm2d(4), Named(4), SyncBatchNorm(4)))).double()
    truth, calls = revert_sync_batchnorm(copy.deepcopy(net)), []
    net[1].norm.register_forward_hook(lambda *_: calls.append(1))
    traced = trace(convert_sync_batchnorm(net))
    nodes = [node.target for node in traced.graph.nodes if node.op == "call_module" and "norm" in node.target]
    assert (nodes, calls) == (["1.norm", "2.norm", "3.norm"], [])
    x = torch.randn(5, 3, 9, 7, dtype=torch.float64)
    outputs = DataParallelModel(traced, **SHARES)(x)
    inner = truth[1].norm(truth[1].conv(truth[0](x)))
    truth[1].norm.load_state_dict(revert_sync_batchnorm(copy.deepcopy(net[1].norm)).state_dict())
    if isinstance(outputs[0], dict):
        assert relative_error([torch.cat([output["1.norm"] for output in outputs])], [inner]) <= 1e-12
        outputs = [output["3"] for output in outputs]
    assert calls == [1, 1]
    whole = truth(x)
    torch.cat(list(outputs)).pow(3).sum().backward()
    whole.pow(3).sum().backward()
    assert relative_error([torch.cat(list(outputs)), *grads_of(net)], [whole, *grads_of(truth)]) <= 1e-11
    assert state_error(net[3], truth[3]) <= 1e-12
    with pytest.raises(torch.fx.proxy.TraceError):  # a node would call its forward, and the trace double that again
        trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(Twice(4)), *net[2:]))


class Reads(TorchDispatchMode):
    """Counts the values that the host reads from tensors."""

    def __init__(self):
        super().__init__()
        self.num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def other_rows(monkeypatch):
    """What the other ranks exchange, in a list that a test fills with functions of the own row."""
    rows = []
    monkeypatch.setattr(sync_batchnorm, "has_other_ranks", lambda: True)
    monkeypatch.setattr(sync_batchnorm, "stack_ranks", lambda row: torch.stack([row, *(other(row) for other in rows)]))
    return rows


def test_rank_without_samples_never_waits_for_its_device(other_rows):
    """The other ranks check every batch: one value in all is refused there."""
    other = torch.cat([*sync_batchnorm.moments_of(torch.randn(3, 2, 4, 4)), torch.tensor([3.0 * 4 * 4])])
    other_rows.append(lambda row: other)
    layer, x, reads = SyncBatchNorm(2), torch.randn(0, 2, 4, 4), []
    for _ in range(3):
        with Reads() as mode:
            layer(x)
        reads.append(mode.num_reads)
    assert reads == [0, 0, 0]
    assert layer.num_batches_tracked == 3


def test_replicas_that_differ_in_gradients_are_refused():
    layer = SyncBatchNorm(2, affine=False)
    parts = [torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)]
    with pytest.raises(ValueError, match="only some replicas compute gradients at SyncBatchNorm"):
        ReplicaThreads([CPU] * 2).run([lambda part=part: layer(part) for part in parts])


@kernels_on_the_cpu()
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


@kernels_on_the_cpu()
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


@pytest.mark.parametrize("mode", ["threads", "lockstep"])
@pytest.mark.parametrize("derive", [lambda y, x: torch.autograd.grad(y, x)[0], lambda y, x: y.backward() or x.grad])
def test_derivatives_within_forward_are_refused(derive, mode):
    """Forces of an energy: autograd would have the sums of one replica only."""

    class Energy(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), norm, nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            x = x.detach().requires_grad_()
            return derive(self.net(x).sum(), x)

    x = torch.randn(7, 3)
    for norm, num_devices in ((nn.LayerNorm(8), 3), (nn.BatchNorm1d(8), 1)):
        energy = convert_sync_batchnorm(Energy(norm))
        torch.testing.assert_close(BalancedDataParallel(1, energy, ["cpu"] * num_devices, mode=mode)(x), energy(x))
    model = BalancedDataParallel(1, energy, ["cpu"] * 3, mode=mode)
    with pytest.raises(
        RuntimeError, match=r"forward pass of a replica.*call it on the outputs.*or use gradient_penalty"
    ):
        model(x)
    assert model.eval()(x).shape == x.shape, "with running statistics, no replica depends on another one"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("weight", torch.ones(1), "weight has 1 values for 4 channels"),
        ("bias", torch.ones(5), "bias has 5 values for 4 channels"),
        ("running_mean", torch.ones(3), "running_mean has 3 values"),
        ("running_var", torch.ones(8), "running_var has 8 values"),
    ],
)
def test_sizes_are_checked_before_kernels_read(name, value, words):
    net = nn.Sequential(convert_sync_batchnorm(nn.BatchNorm1d(4)))
    setattr(net[0], name, nn.Parameter(value) if name in ("weight", "bias") else value)
    with pytest.raises(ValueError, match=f"SyncBatchNorm 0: {words}"):
        BalancedDataParallel(1, net, ["cpu"] * 3)(torch.randn(7, 4))


def test_allreduce_of_one_replica_returns_its_arguments():
    x = torch.ones(2)
    assert allreduce(x)[0] is x


def test_values_of_other_ranks_count(other_rows):
    layer = SyncBatchNorm(2)
    x = torch.full((1, 2), 7.0)
    other_rows.append(torch.clone)
    assert not layer(x).any(), "two values; the other columns hold means and variances"
    other_rows.clear()
    with pytest.raises(ValueError, match="got 1 in the whole batch"):
        layer(x)
