import copy

import pytest
import torch
from torch import nn

from segapp.parallel import DataParallelModel
from segapp.parallel.replicas import _layout_of, _pack, _unpack, replicate  # layouts that no module of a test has
from segapp.parallel.scatter_gather import scatter

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


def test_another_module_of_a_used_model_is_copied_and_checked():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double().eval()
    model = DataParallelModel(net, ["cpu"] * 2)
    model(torch.randn(8, 3).double())
    net[0], net[2] = net[2], net[0]
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
