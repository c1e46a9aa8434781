"""Inputs of every kind are cut, or refused in words; chunks that are on their devices stay there."""

import copy
import types
from collections import ChainMap, OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from segapp.losses import CriterionCE
from segapp.parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    ReplicaOutputs,
    convert_sync_batchnorm,
)
from segapp.parallel.scatter_gather import gather, map_tensors, tensors_in
from tests.support.parallel_cases import SmallNet, grads_of, make_batch, relative_error, state_error

CPUS = ["cpu"] * 3
UNEVEN = {"shares": [0, 3, 2]}


class Attributes(dict):
    """Its keys are also its attributes."""

    def __init__(self, **values):
        super().__init__(**values)
        self.__dict__ = self


@dataclass
class Record:
    x: Tensor
    name: str = "r"
    later: Tensor = field(init=False, repr=False)


BATCHES = {
    "UserDict": lambda x: UserDict(name="n", x=x),
    "OrderedDict": lambda x: OrderedDict(name="n", x=x),
    "defaultdict": lambda x: defaultdict(list, name="n", x=x),
    "keys as attributes": lambda x: Attributes(name="n", x=x),
    "two mappings": lambda x: ChainMap({"x": x}, {"name": "n", "x": 0}),
    "mapping proxy": lambda x: types.MappingProxyType({"name": "n", "x": x}),
    "named tuple": lambda x: namedtuple("Pair", ["left", "right"])([x], None),
    "dict of its own": lambda x: type("Tagged", (dict,), {})(x=(x, torch.arange(5)), empty=[]),
    "dataclass": Record,
    "max": lambda x: torch.max(torch.stack([x, x - 1], -1), -1),
}


class Doubled(nn.Module):
    """Returns its container with doubled tensors, and a sum."""

    def forward(self, batch, *, beside=None):
        self.kinds.add(type(batch))
        doubled = map_tensors(lambda tensor: 2 * tensor, batch)
        return doubled, next(tensors_in(batch)) + (0 if beside is None else beside[0]["deep"])


@pytest.mark.parametrize("name", BATCHES)
def test_batch_in_any_container_is_cut_and_joined(name):
    x = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    batch, net = BATCHES[name](x), Doubled()
    net.kinds = set()
    model = BalancedDataParallel(None, net, CPUS, **UNEVEN)
    for options, total in (({}, x), ({"beside": [{"deep": 3 * x}, "word"]}, 4 * x)):
        doubled, found = model(batch=batch, **options)
        assert torch.equal(next(tensors_in(doubled)), 2 * x)
        assert torch.equal(getattr(doubled, "x", 2 * x), 2 * x)
        assert torch.equal(found, total)
        assert model.last_split == (0, 3, 2)
    assert net.kinds == {type(batch), type(doubled)}
    assert str(doubled) == str(map_tensors(lambda tensor: 2 * tensor, batch))
    assert torch.equal(next(tensors_in(batch)), x), "the caller's batch is unchanged"


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        ({"a": torch.ones(5, 3), "b": torch.ones(4)}, {"dim": -3}, r"dim -3, which none.*\[\(5, 3\), \(4,\)\]"),
        (pack_sequence([torch.ones(5, 2)]), {}, "a PackedSequence cannot be cut into"),
        (torch.eye(5).to_sparse_csr(), {}, "a nested or sparse tensor cannot be cut into"),
        (torch.nested.nested_tensor([torch.ones(i + 1, 2) for i in range(5)], layout=torch.jagged), {}, "a nested or"),
    ],
)
def test_batch_that_cannot_be_cut_is_refused(batch, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        DataParallelModel(nn.Identity(), CPUS, **UNEVEN, **options)(batch)


Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sides:
    left: Tensor
    right: int


class Color(Enum):
    red = 1


class Broken:
    def __iter__(self):
        raise LookupError("not now")

    def __eq__(self, other):
        return isinstance(other, Broken)

    __hash__ = None


class Iterable:
    def __init__(self, *tensors):
        if len(tensors) != 2:
            raise ValueError("two tensors are needed")
        self.tensors = tensors

    def __iter__(self):
        return iter(self.tensors)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda x: pack_padded_sequence(x, torch.full((len(x),), 2), batch_first=True), "PackedSequence, which cannot"),
        (lambda x: [x] * len(x), "different structures of list"),
        (lambda x: {f"y{len(x)}": x}, "different structures of dict"),
        (lambda x: x.numpy(), "an array .ndarray.*return tensors"),
        (lambda x: x if len(x) == 3 else len(x), "one replica returned a tensor as output and another 2"),
        (
            lambda x: (x, {"h": [x, x.transpose(0, 1)]}),
            r"output\[1\]\['h'\]\[1\] cannot be joined along dim 0.*\(4, 3, 1\), \(4, 2, 1\), \(4, 1, 1\): return",
        ),
        (lambda x: Sides(x, len(x)), r"replicas returned different values as output.right, such as 3"),
        (lambda x: Pair(0, x if len(x) == 3 else x.sum()), r"output\.y cannot be joined.*\(\)"),
        (lambda x: x[..., 0].to_sparse_csr(), r"along dim 0.*\(3, 4\) \(torch.sparse_csr\), \(2, 4\)"),
        (lambda x: [Iterable(x, x)], r"output\[0\] is a Iterable, which cannot be made from its joined elements"),
        (lambda x: {x}, "different values as output"),
        (lambda x: types.SimpleNamespace(total=torch.ones(1)), "different values as output, such as namespace"),
        (lambda x: iter([x]), "different values as output"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(output, words):
    net = nn.Identity()
    net.register_forward_hook(lambda part, args, x: output(x))
    with pytest.raises((TypeError, ValueError), match=words):
        BalancedDataParallel(None, net, [*CPUS, "cpu"], shares=[0, 3, 2, 1])(torch.ones(6, 4, 1))


def test_packed_output_of_one_replica_keeps_its_sizes_on_the_cpu():
    packed = pack_padded_sequence(torch.ones(3, 4, 1), torch.tensor([1, 4, 2]), True, enforce_sorted=False)
    moved = gather([packed], torch.device("meta"))
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
    assert moved.batch_sizes.tolist() == [3, 2, 1, 1]


@pytest.mark.parametrize("value", [Color.red, np.array(3.5), float("nan"), range(4), "word", Broken()])
def test_equal_values_are_returned(value):
    net = nn.Identity()
    net.register_forward_hook(lambda part, args, x: (x, copy.copy(value)))
    joined, same = BalancedDataParallel(None, net, CPUS, **UNEVEN)(torch.ones(5))
    assert (len(joined), type(same)) == (5, type(value))
    assert same == value or same != same


def test_sparse_outputs_are_joined():
    net, x = nn.Identity(), torch.randn(5, 4) * torch.tensor([1.0, 0, 1, 0])
    net.register_forward_hook(lambda part, args, x: x.to_sparse())
    joined = BalancedDataParallel(None, net, CPUS, **UNEVEN)(x)
    assert joined.is_sparse
    assert torch.equal(joined.to_dense(), x)


@pytest.mark.parametrize("batch", ["word", torch.tensor(3.0), torch.ones(0, 2)], ids=["no tensor", "0-d", "empty"])
def test_calls_without_samples_run_once(batch):
    assert list(DataParallelModel(nn.Identity(), CPUS, **UNEVEN)(batch)) == [batch]


class Refined(nn.Module):
    """Features and images -> (N, 4, h, w)."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(7, 4, 1, bias=False), nn.BatchNorm2d(4)

    def forward(self, images, *, features):
        return self.norm(self.conv(torch.cat([features[1]["deep"], images], 1).tanh()))


@pytest.mark.parametrize("second", [{"gpu0_bsz": 1}, UNEVEN])
def test_chunks_of_one_model_are_inputs_of_the_next(second):
    """`D(G(z))`, with a whole tensor next to the chunks; the second model's own split does not matter."""
    images, target = make_batch(5, size=9)
    torch.manual_seed(0)
    truths = [SmallNet(has_aux=False).double(), Refined().double()]
    nets = [convert_sync_batchnorm(copy.deepcopy(net)) for net in truths]
    first, model = DataParallelModel(nets[0], CPUS, **UNEVEN), DataParallelModel(nets[1], CPUS, **second)
    expected = CriterionCE()(truths[1](images, features=[0, {"deep": truths[0](images)[0]}]), target)
    chunks = [images[:0], *(output[0] for output in first(images))]  # a caller may also name the device without samples
    outputs = model(images, features=[0, {"deep": ReplicaOutputs(chunks)}])
    assert (outputs.sizes, model.last_split) == ((3, 2), (0, 3, 2))
    again = first(first.scatter(images))
    assert (again.sizes, first.last_split) == ((3, 2), (0, 3, 2))
    for part in (target, list(target.split([3, 2])), first.scatter({"t": target})):
        loss = DataParallelCriterion(Named())(outputs, part)
        assert relative_error([loss.detach()], [expected.detach()]) <= 1e-12
    expected.backward()
    loss.backward()
    for net, truth in zip(nets, truths, strict=True):
        assert relative_error(grads_of(net), grads_of(truth)) <= 1e-10
    assert state_error(nets[1], truths[1]) <= 1e-12


class Named(CriterionCE):
    def statistics(self, outputs, target):
        return super().statistics(outputs, target["t"] if isinstance(target, dict) else target)


@pytest.mark.parametrize(
    ("devices", "options", "beside", "words"),
    [
        (CPUS[:2], {}, None, r"chunks for 3 devices, and the model has 2: pass outputs.gather\(\)"),
        (CPUS, {}, torch.ones(4, 3), r"\(4, 3\) cannot be cut"),
        (CPUS, {"dim": 1}, None, "samples along dim 0 meet chunks .* along dim 1"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(devices, options, beside, words):
    chunks = DataParallelModel(nn.Identity(), CPUS, gpu0_bsz=1)(torch.ones(5, 4))
    with pytest.raises(ValueError, match=words):
        DataParallelModel(Doubled(), devices, **options)([chunks], beside)
