"""Recomputed blocks give the bits of a network that keeps all activations, in every division of the batch."""

import copy
import gc
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from segapp.parallel import (
    BalancedDataParallel,
    DataParallelModel,
    allreduce,
    convert_sync_batchnorm,
    recomputed_blocks,
    set_recompute,
)
from segapp.parallel.recompute import RecomputedBlock


class Block(nn.Module):
    """Residual, with dropout, in-place activations and a momentum of None, the mean over all batches."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=None)
        self.drop, self.act = nn.Dropout2d(0.3), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.act(x + self.drop(self.last(self.second(self.act(self.norm(self.first(x)))))))
        (total,) = allreduce(y.sum())  # of all replicas, also in the second pass
        return y * (total / 1000).tanh()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *(Block() for _ in range(3)), nn.Conv2d(6, 4, 1)).double()


def outcome(sets, *, num_devices=1, is_synced=False, gpu0_bsz=None, penalty=0.0, passes=2):
    """Return loss, gradients, buffers and the next random numbers after some forward and backward passes."""
    net = network()
    if is_synced:
        convert_sync_batchnorm(net)
    set_recompute(net, sets)
    run = DataParallelModel(net, ["cpu"] * num_devices, gpu0_bsz=gpu0_bsz) if num_devices > 1 else net
    torch.manual_seed(2)
    found = []
    for _ in range(passes):
        x = torch.randn(5, 3, 8, 8, dtype=torch.float64, requires_grad=bool(penalty))
        y = run(x).gather(device="cpu") if num_devices > 1 else run(x)
        loss = (y**2).mean()
        if penalty:
            (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
            loss = loss + penalty * (gradient**2).sum()
        loss.backward()
        found.append(loss.detach())
    return [*found, *(parameter.grad for parameter in net.parameters()), *net.buffers(), torch.rand(3)]


EVERYWHERE = ("1", "2", "3")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("penalty", [0.0, 2.0], ids=["first order", "second order"])
@pytest.mark.parametrize(
    ("division", "sets"),
    [
        ({}, [EVERYWHERE]),
        ({"num_devices": 3, "is_synced": True}, [EVERYWHERE] * 3),
        ({"num_devices": 3, "is_synced": True}, [("1", "2"), ("2",), ()]),
        ({"num_devices": 3, "is_synced": True, "gpu0_bsz": 0}, [(), EVERYWHERE, ()]),
        ({"num_devices": 3, "is_synced": False, "gpu0_bsz": 1}, [(), EVERYWHERE, ("1",)]),
        ({"num_devices": 2, "is_synced": True, "gpu0_bsz": 5}, [EVERYWHERE] * 2),
    ],
    ids=["single", "dp", "dp, uneven sets", "dp, empty device", "dp, own statistics", "dp, all on device 0"],
)
def test_recomputation_changes_no_bit(division, sets, penalty):
    """Losses, gradients, running statistics, counters, and the random numbers that follow."""
    kept, again = (outcome(each, **division, penalty=penalty) for each in ([], sets))
    assert all(map(torch.equal, kept, again))
    assert any(tensor.abs().max() > 0 for tensor in kept)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_inputs_of_blocks_are_freed_by_the_backward_pass(num_devices):
    """Without a cycle of references, which would hold them until the garbage collector runs."""
    net = convert_sync_batchnorm(network())
    set_recompute(net, [EVERYWHERE] * num_devices)
    inputs = []
    for block in net[1:4]:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    run = DataParallelModel(net, ["cpu"] * num_devices, mode="lockstep")
    gc.collect()
    gc.disable()
    try:
        run(torch.randn(4, 3, 8, 8, dtype=torch.float64)).gather(device="cpu").sum().backward()
        assert len(inputs) == 3 * num_devices
        assert not any(ref() is not None for ref in inputs)
    finally:
        gc.enable()


def test_blocks_keep_class_names_and_references_and_are_undone():
    net = network()
    block, keys = net[1], list(net.state_dict())
    set_recompute(net, [["1"], ["2"]])
    assert net[1] is block
    assert isinstance(block, Block)
    assert isinstance(block, RecomputedBlock)
    assert [type(part).__name__ for part in net] == [type(part).__name__ for part in network()]
    assert list(net.state_dict()) == keys
    assert isinstance(copy.deepcopy(net)[2], RecomputedBlock)
    set_recompute(net, [["3"]])
    assert [isinstance(part, RecomputedBlock) for part in net] == [False, False, False, True, False]
    set_recompute(net, [])
    assert [type(part) for part in net] == [type(part) for part in network()]


def test_blocks_within_each_other_and_strings_are_refused():
    net = network()
    set_recompute(net, (iter(blocks) for blocks in (["1"], ["3", "2"], [])))  # read once
    assert recomputed_blocks(net, num_devices=3) == (("1",), ("2", "3"), ())
    with pytest.raises(ValueError, match=r"1\.first lies within 1: name one of them"):
        set_recompute(network(), [["1.first", "2"], ["1", ""]])
    for sets in (["10"], "10", [["1"], "10", 11]):
        with pytest.raises(TypeError, match=r"got '10' instead of a set of names: write \[\['layer1'\]\]"):
            set_recompute(network(), sets)


def test_input_that_changes_in_place_is_an_error():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x + 1)  # autograd saves the sum, and would not notice a change of x

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Shifted(4, 4)

        def forward(self, x):
            x = x * 2
            y = self.block(x)
            x.add_(1)
            return y

    net = InPlace()
    set_recompute(net, [["block"]])
    loss = net(torch.randn(2, 4)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Dropped(nn.Module):
    """Recomputed by torch if `is_reentrant` is given; draws nothing if the input is 0."""

    def __init__(self, is_reentrant=None):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
        self.is_reentrant = is_reentrant

    def forward(self, x):
        if not x.any():
            return self.block[0](x)
        if self.is_reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x.requires_grad_(), use_reentrant=self.is_reentrant)


@pytest.mark.parametrize("mode", ["threads", "lockstep"])
@pytest.mark.parametrize("is_reentrant", [None, False, True], ids=["set_recompute", "torch", "torch, reentrant"])
def test_gradients_belong_to_the_masks_of_the_output(is_reentrant, mode):
    """The output is linear in the last weight, so the product of weight and gradient is its sum."""
    net, x, sums = Dropped(is_reentrant).double(), torch.randn(12, 6, dtype=torch.float64), []
    set_recompute(net, [["block"]] if is_reentrant is None else [])
    model, weight = BalancedDataParallel(1, net, ["cpu"] * 3, mode=mode), net.block[3].weight
    for seed in (1, 2, 1, 1, 2, 1):
        torch.manual_seed(seed)
        weight.grad, output = None, model(x)
        output.sum().backward()
        torch.testing.assert_close((weight.grad * weight).sum(), output.sum())
        sums.append(output.sum().item())
    assert len(set(sums)) == 2, "the seed sets all masks"


def test_first_random_numbers_of_a_later_pass_are_warned_of():
    model = DataParallelModel(Dropped(), ["cpu"] * 2)
    x = torch.ones(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.zeros(4, 6))
        with torch.no_grad():
            model(x), model(x)
    with pytest.warns(UserWarning, match="Dropped drew its first random numbers, in several replicas on one device"):
        model(x)
    torch.manual_seed(0)
    outputs = model(x).gather()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.zeros(4, 6))  # draws nothing, and the next one does again
        torch.manual_seed(0)
        assert torch.equal(model(x).gather(), outputs), "replicas run one after the other"


def test_list_of_inputs_that_grows_later_stays_as_it_was():
    """A dense block gives each layer the list to which it appends the layer's output."""

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Joined(2 * n, 2) for n in (1, 2, 3))

        def forward(self, x):
            features = [x]
            for layer in self.layers:
                features.append(layer(features))
            return torch.cat(features, 1)

    class Joined(nn.Linear):
        def forward(self, features):
            return super().forward(torch.cat(features, 1)).tanh()

    found = []
    for sets in ([], [["layers.0", "layers.1", "layers.2"]]):
        torch.manual_seed(0)
        net = Dense()
        set_recompute(net, sets)
        net(torch.randn(3, 2)).square().sum().backward()
        found.append([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, *found))


def test_buffer_that_each_pass_changes_is_an_error():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("still", torch.ones(4))
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            self.scale += 1
            return self.layer(x) * self.still * self.scale

    net = nn.Sequential(Counting(), nn.Linear(4, 4))
    set_recompute(net, [["0"]])
    with pytest.raises(RuntimeError, match=r"0\.scale is a buffer that each forward pass changes"):
        net(torch.randn(2, 4))


def note(calls, name, *_):
    calls.append(name)


def test_one_set_holds_for_all_devices_and_two_do_not():
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    for sets, shares, expected in (
        ([["2"]], [1, 1, 1], {"1": 3, "2": 6}),
        ([["2"]], [0, 3, 2], {"1": 2, "2": 4}),
        ([["1"], ["2"], ["1"]], [0, 3, 2], {"1": 3, "2": 3}),
    ):
        net, calls = network(), []
        set_recompute(net, sets)
        for name in expected:
            net.get_submodule(name).second.register_forward_hook(partial(note, calls, name))
        DataParallelModel(net, ["cpu"] * 3, shares=shares)(x).gather().sum().backward()
        assert {name: calls.count(name) for name in expected} == expected
        assert recomputed_blocks(net, num_devices=3) == tuple(
            tuple(blocks) for blocks in (sets * 3 if len(sets) == 1 else sets)
        )
    for num_sets, num_samples in ((2, 5), (2, 1), (4, 5)):
        set_recompute(net, [["1"]] * num_sets)
        with pytest.raises(Exception, match=rf"set_recompute got {num_sets} sets for a model on 3 devices: give one"):
            DataParallelModel(net, ["cpu"] * 3)(x[:num_samples])


def test_autocast_of_the_first_pass_holds_in_the_second():
    found = []
    for sets in ([], [EVERYWHERE]):
        net = network().float()
        set_recompute(net, sets)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.randn(4, 3, 8, 8)).float().square().mean()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in net.parameters()), *net.buffers()])
    assert all(map(torch.equal, *found))


def test_activations_are_freed_and_computed_again():
    net = network()
    calls = []
    for block in net[1:4]:
        block.second.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    saved, sizes = [], {}
    for name, sets in (("kept", []), ("again", [EVERYWHERE])):
        set_recompute(net, sets)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            loss = net(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum()
        sizes[name] = sum(saved)
        calls.clear()
        loss.backward()
        assert len(calls) == {"kept": 0, "again": 3}[name]
    assert sizes["again"] < sizes["kept"] / 4
    with torch.no_grad():
        net(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert len(calls) == 6, "without gradients a block runs once"
