import copy
import types

import pytest
import torch
from torch import nn

from segapp.parallel import BalancedDataParallel, DataParallelModel
from segapp.parallel.replicas import _layout_of, _pack, _unpack, replicate  # layouts that no module of a test has
from segapp.parallel.scatter_gather import resolve_devices, scatter

CPU = torch.device("cpu")


@pytest.mark.parametrize("dim", [0, 1])
def test_only_the_first_chunk_may_be_a_view(dim):
    x = torch.randn(6, 6, requires_grad=True)
    chunks = scatter((x, x.t(), torch.ones(())), [CPU] * 3, [2, 3, 1], dim)
    for i, (chunk, turned, scalar) in enumerate(chunks):
        begin = [0, 2, 5][i]
        assert torch.equal(chunk, x.narrow(dim, begin, len(turned) if dim == 0 else turned.size(1)))
        assert torch.equal(turned, x.t().narrow(dim, begin, chunk.size(dim)))
        assert chunk.is_contiguous(), "as the whole batch is"
        assert (chunk._base is x) == (i == 0 and dim == 0)
        assert (turned._base is x) == (i == 0)
        assert i == 0 or scalar is not chunks[0][2]
    sum((i + 1) * (chunk.sum() + turned.sum()) for i, (chunk, turned, _) in enumerate(chunks)).backward()
    assert (x.grad if dim == 0 else x.grad.t())[:, 3].tolist() == [3, 3, 4, 4, 4, 5]


@pytest.mark.parametrize(
    ("device_ids", "error", "words"),
    [
        (["cuda:99"], ValueError, "cuda:99"),
        ([99], ValueError, "device 'cuda:99'"),
        (["nonsense"], ValueError, "use 'cpu', 'cuda:0' or a CUDA index"),
        ([], ValueError, "name at least one device"),
        (["meta"], ValueError, "holds no values"),
        ([True], TypeError, "not a CUDA index"),
        ("cpu", TypeError, "is not a list: give one, such as"),
    ],
)
def test_absent_devices_are_refused(device_ids, error, words):
    with pytest.raises(error, match=words):
        resolve_devices(device_ids)


def test_flat_buckets_keep_values_and_strides():
    torch.manual_seed(0)
    tensors = [
        torch.randn(4, 3, 3, 3),
        torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(1, 3, 5, 2).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        torch.randn(5, 3).t(),
        torch.randn(1, 5)[:, :3],
        torch.randn(7),
        torch.randn(()),
        torch.randn(0, 3),
    ]
    layouts = [_layout_of(tensor) for tensor in tensors]
    flat = _pack(tensors, layouts)
    assert flat.numel() == sum(tensor.numel() for tensor in tensors)
    for ours, original in zip(_unpack(flat, layouts), tensors, strict=True):
        assert torch.equal(ours, original)
        assert ours.stride() == original.stride()
    for sparse_in_memory in (torch.randn(4, 6)[:, ::2], torch.randn(4, 4)[:, ::2]):
        layout = _layout_of(sparse_in_memory)
        (dense,) = _unpack(_pack([sparse_in_memory], [layout]), [layout])
        assert torch.equal(dense, sparse_in_memory)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x):
        return self.second(self.norm(self.first(x))) + self.offset


def swap_layers(net):
    net.first, net.second = net.second, net.first


def rename_buffer(net):
    offset = net.offset
    del net.offset
    net.register_buffer("moved", offset + 1)
    net.forward = types.MethodType(lambda self, x: self.second(self.first(x)) + self.moved, net)


def tie_weights(net):
    net.second.weight = net.first.weight


CHANGES = [
    swap_layers,
    rename_buffer,
    tie_weights,
    lambda net: setattr(net.first, "weight", nn.Parameter(torch.full((3, 3), 0.5))),
    lambda net: net.offset.add_(3),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_the_module_between_steps_reach_the_replicas(change):
    net = Small().eval()
    model = DataParallelModel(net, ["cpu"] * 2)
    x = torch.randn(8, 3)
    x = torch.cat([x, x])  # both replicas get the same
    model(x).gather().sum().backward()
    net.zero_grad()
    change(net)
    twin = copy.deepcopy(net)
    x = x.to(next(net.parameters()).dtype)
    expected = torch.cat([twin(part) for part in x.split(8)])
    expected.square().sum().backward()
    outputs = model(x).gather()
    torch.testing.assert_close(outputs, expected)
    outputs.square().sum().backward()
    for (name, ours), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_another_module_of_a_used_model_is_copied_and_checked():
    net = Small().double().eval()
    model = DataParallelModel(net, ["cpu"] * 2)
    model(torch.randn(8, 3).double())
    swap_layers(net)
    model.module = copy.deepcopy(net)
    other = copy.deepcopy(model)
    for each in (model, other):
        torch.testing.assert_close(each(torch.ones(8, 3).double()).gather(), net(torch.ones(8, 3).double()))
    net.compile(backend="eager")
    model.module = net
    with pytest.raises(TypeError, match="one process per device"):
        model(torch.ones(8, 3).double())


def test_copied_buffers_have_versions_of_their_own():
    """One may change while autograd has saved another."""
    net = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(3)])
    for inference in (False, True):
        with torch.inference_mode(inference):
            _, second = replicate(net, [CPU] * 2)
            second[0].running_mean.add_(1)
            assert torch.equal(second[1].running_mean, net[1].running_mean)
            if not inference:
                assert second[0].running_mean._version == 1
                assert second[1].running_mean._version == second[0].running_var._version == 0


def test_frozen_copies_in_use_take_the_present_values():
    """Their first graph is alive while the caller replaces the values, as the module's own tensor is in it."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.u = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor([1.0, 2, 3]), False)

        def forward(self, x):
            return x * self.weight * self.u

    found = []
    for num_devices in (1, 3):
        net, x = Scaled(), torch.arange(15.0).view(5, 3)
        model = BalancedDataParallel(1 if num_devices > 1 else None, net, ["cpu"] * num_devices)
        outputs = [model(x)]
        net.u.data = net.u.data * 3
        outputs.append(model(x))
        sum(each.sum() for each in outputs).backward()
        found.append([outputs[1].detach(), net.weight.grad])
    assert all(map(torch.equal, *found))
