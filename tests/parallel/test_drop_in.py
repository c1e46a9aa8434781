"""`BalancedDataParallel` in many usages, each as `nn.DataParallel` documents it.

A usage runs with `nn.DataParallel` without accelerators, which is its module on one device in plain PyTorch, and with
`BalancedDataParallel` on three logical devices at three splits. What it returns is compared: tensors up to rounding,
with dtype and `requires_grad`, and all else exactly. Quotations are from the documentation of `nn.DataParallel`.
"""

import copy
import io
import pickle
import types
from collections import OrderedDict, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from segapp.parallel import BalancedDataParallel, DataParallelModel, convert_sync_batchnorm
from tests.support.parallel_cases import relative_error

SPLITS = {1: (1, 2, 2), 0: (0, 3, 2), 3: (3, 1, 1)}  # samples per device of a batch of 5, by gpu0_bsz
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 5e-2}
Pair = namedtuple("Pair", ["left", "right"])


class Net(nn.Module):
    """Images (N, 3, h, w) -> (N, 2), with a parameter of dimension 0."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images):
        features = self.norm(self.stem(images.to(next(self.parameters()).dtype)))
        return self.scale * self.head(torch.tanh(features).mean((2, 3)))


class Apply(nn.Module):
    """`function(self, ...)`, with parts for it."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function, self.linear = function, nn.Linear(3, 2)
        self.parts = nn.ModuleDict(parts)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.function(self, *args, **kwargs)


def rows(num_samples, *shape):
    """Samples that differ in mean and scale, (N, 3) by default."""
    index = torch.arange(1.0, num_samples + 1).view(-1, *[1] * len(shape or (3,)))
    return torch.randn(num_samples, *(shape or (3,))) * index + index / 3


def images(num_samples=5):
    return rows(num_samples, 3, 7, 6)


def flat(value, place=""):
    """Yield the leaves and the classes of the containers, each with its place."""
    if isinstance(value, BaseException):
        value = [type(value), value.args, type(value.__cause__)]
    parts = vars(value) if is_dataclass(value) else value
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        parts = dict(enumerate(parts))
    if not isinstance(parts, Mapping):
        yield place, value
        return
    yield place, type(value)
    for key, part in parts.items():
        yield from flat(part, f"{place}.{key}")


def loss_of(output):
    """Return a loss in which every entry of every tensor counts differently."""
    tensors = [leaf for _, leaf in flat(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((each.abs() * torch.arange(1, each.numel() + 1).view_as(each)).square().sum() for each in tensors) / 100


def facts(model):
    """Return copies of everything that a user sees of a model, by name."""
    return {
        "gradients": {name: (p.requires_grad, copy.deepcopy(p.grad)) for name, p in model.named_parameters()},
        "state": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "training": [part.training for part in model.modules()],
    }


def step(model, *args, **kwargs):
    """Return the output, and the facts after the backward pass."""
    output = model(*args, **kwargs)
    loss_of(output).backward()
    return output, facts(model)


def train(model, *sizes, optimizer=None):
    """Return steps on batches of these sizes, by default with SGD, and the optimizer's state."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    steps = [(step(model, images(size)), optimizer.step())[0] for size in sizes]
    return steps, copy.deepcopy(optimizer.state_dict())


def through_disk(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.load(io.BytesIO(stream.getvalue()), **options)


def error_of(call, *args, **kwargs):
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # the caller compares it
        call(*args, **kwargs)
    return caught.value


class Usages:
    """The table: one method each. What it returns is compared, and so are the facts of its models at its end."""

    def __init__(self, gpu0_bsz=None):
        self.gpu0_bsz, self.is_ours, self.models = gpu0_bsz, gpu0_bsz is not None, []
        self.sizes = sorted(size for size in SPLITS[gpu0_bsz] if size) if self.is_ours else [5]

    def _wrap(self, module, dim=0):
        if self.is_ours:
            module = convert_sync_batchnorm(module)
            self.models.append(BalancedDataParallel(self.gpu0_bsz, module, dim=dim, device_ids=["cpu"] * 3))
        else:
            self.models.append(nn.DataParallel(module, dim=dim))
        return self.models[-1]

    # "Arbitrary positional and keyword inputs are allowed"
    def positional_and_keyword_inputs(self):
        model = self._wrap(Apply(lambda net, x, y=1.0, *, z=2.0: net.linear(x) * y + z))
        x, y, z = rows(5), rows(5, 2), rows(5, 1)
        return step(model, x), step(model, x, y), step(model, x, y=y, z=z), step(model, z=z, x=x), step(model, y=y, x=x)

    # "tensors will be scattered ... tuple, list and dict types will be shallow copied"
    def nested_lists_tuples_and_dicts(self):
        def forward(net, batch, extra):
            batch.append(net.linear(batch[0]["deep"][1]))
            return Pair({"a": [batch[-1]]}, OrderedDict(c=(extra.left, *batch[0]["deep"]), b=[]))

        model, batch = self._wrap(Apply(forward)), [{"deep": ("word", rows(5))}]
        result = step(model, batch, extra=Pair(rows(5, 1), None))
        assert len(batch) == (1 if self.is_ours else 2), "the caller's list is unchanged"
        return result

    # "other objects will be copied once per device"
    # "for module without any inputs ... executed on one device which is the first one in device_ids"
    # "scattered on dim specified (default 0)"
    def batch_along_dim_1(self):
        def forward(net, x, y):
            outputs = {"x": net.linear(x.view(-1).view(x.shape)) * y, "y": y}
            return outputs if y[0, 0] == 0 else dict(reversed(outputs.items()))  # replicas differ in the order

        return step(self._wrap(Apply(forward), dim=1), rows(4, 5, 3), y=torch.arange(5.0).view(1, 5, 1))

    def non_contiguous_and_channels_last_inputs(self):
        model, deep = self._wrap(Net()), self._wrap(nn.Sequential(nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4)))
        model, last = (each.to(memory_format=torch.channels_last) for each in (model, images()))
        inputs = [images().transpose(2, 3), rows(5, 3, 7, 12)[..., ::2], rows(5, 3, 1, 1).expand(-1, -1, 7, 6), last]
        output = deep.to(memory_format=torch.channels_last_3d)(rows(5, 7, 6, 4, 3).permute(0, 4, 1, 2, 3))
        return [step(model, x) for x in inputs], output, output.stride()

    def integer_bool_and_complex_inputs(self):
        def forward(net, ids, mask, wave):
            table = net.parts["table"](ids)
            return table[..., 0] * mask, ids * 2, ~mask, wave * table[..., 1]

        model, ids = self._wrap(Apply(forward, table=nn.Embedding(9, 2))), torch.randint(9, (5, 4), dtype=torch.int32)
        wave = torch.complex(rows(5, 4), rows(5, 4)).requires_grad_()
        return step(model, ids, ids > 4, wave), wave.grad

    def gradients_of_inputs(self):
        model = self._wrap(Apply(lambda net, x, y: net.linear(torch.relu_(x * 1)) + y.mul_(x[:, :2])))
        leaf, other = rows(5).requires_grad_(), rows(5, 2).requires_grad_()
        middle = other * 2
        middle.retain_grad()
        return step(model, leaf, middle * 1), leaf.grad, middle.grad, other.grad

    def gradients_of_gradients_of_weights(self):
        model = self._wrap(Net())
        slopes = torch.autograd.grad(loss_of(model(images())), list(model.parameters()), create_graph=True)
        loss_of(slopes).backward()
        return slopes

    # "The batch size should be larger than the number of GPUs used": smaller ones run as well
    # "will return a vector of length equal to number of devices"
    # "Forward and backward hooks defined on module and its submodules will be invoked len(device_ids) times"
    def forward_hooks_of_layers(self):
        net, seen = Net(), []
        net.norm.register_forward_pre_hook(lambda part, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
        net.head.register_forward_hook(lambda part, args, output: seen.append((len(output), part)) or output * 2)
        net.register_forward_hook(lambda part, args, kwargs, output: output - part.scale, with_kwargs=True)
        result = step(self._wrap(net), images())
        assert sorted(size for size, part in seen if (part is net.head) != self.is_ours) == self.sizes
        return result

    def backward_hooks_of_layers(self):
        net, seen = Net(), []
        net.head.register_full_backward_hook(lambda part, inner, outer: seen.append(outer[0]) or (inner[0] / 2,))
        net.stem.register_full_backward_pre_hook(lambda part, outer: (outer[0] * 3,))
        result = step(self._wrap(net), images())
        assert sorted(map(len, seen)) == self.sizes
        return result, sum(grad.sum() for grad in seen)

    # "gradients from each replica are summed into the original module"
    def hooks_of_tensors(self):
        model, grads, updates = self._wrap(Net()), [], []
        model.module.head.weight.register_hook(lambda grad: grads.append(grad.clone()) or grad * 2)
        for parameter in model.parameters():  # the optimizer in the backward pass
            parameter.register_post_accumulate_grad_hook(lambda p: updates.append(p.data.sub_(p.grad / 10).shape))
        return [step(model, images()) for _ in range(2)], grads, sorted(updates)

    def checkpoints_to_data_parallel_ddp_and_bare(self):
        model, plain, bare, last = self._wrap(Net()), nn.DataParallel(Net()), Net(), self._wrap(Net())
        ddp, results = nn.parallel.DistributedDataParallel(Net()), [train(model, 5)]
        for source, target in ((model, plain), (plain, ddp), (ddp, last)):
            target.load_state_dict(source.state_dict())
            results.append(train(target, 5))
        bare.load_state_dict({key.removeprefix("module."): value for key, value in last.state_dict().items()})
        (model if self.is_ours else model.module).load_state_dict(bare.state_dict())  # ours takes both forms
        return results, bare.state_dict()

    def deepcopy_pickle_and_save_of_the_whole_model(self):
        model = self._wrap(Net())
        train(model, 5)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), through_disk(model, weights_only=False)
        return [train(each, 5, 2) for each in copies]

    def dtypes_changed_between_steps(self):
        model, results = self._wrap(Net()).half(), []
        for dtype in (torch.float64, torch.float32, torch.float16):
            model.to(dtype).zero_grad()
            results.append(step(model, images()))
        return results, step(model.bfloat16().eval(), images().bfloat16())

    def states_of_the_calling_thread(self):
        def forward(net, x):
            states = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
            return net.linear(x).tanh(), *states, torch.get_autocast_dtype("cpu"), torch.get_default_device().type

        model, x, results, packed = self._wrap(Apply(forward)), rows(5).requires_grad_(), [], []
        modes = [torch.no_grad(), torch.inference_mode(), torch.set_grad_enabled(True), torch.device("meta")]
        modes += [torch.autocast("cpu", dtype) for dtype in (torch.float16, torch.bfloat16)]
        for mode in modes:
            with mode:
                output, *states = model(x)
            results.append((output.clone(), output.is_inference(), states))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(len(t)) or t, lambda t: t * 2):
            results.append(self._wrap(nn.Tanh())(x))
        with torch.autograd.graph.save_on_cpu():
            results.append(self._wrap(Net())(images()))
        loss_of(results).backward()
        return results, sum(packed), x.grad, model.requires_grad_(False)(rows(5))

    def frozen_unused_and_shared_parts(self):
        def forward(net, x):
            y = net.parts["a"](net.linear(x)) + net.parts["b"](x[:, 1:]) + net.parts["c"](x[:, :2])
            return y, [p.requires_grad for p in (net.linear.weight, net.linear.bias, net.parts["a"].weight)]

        net = Apply(forward)
        net.parts.update({"a": nn.Linear(2, 3), "c": nn.Linear(2, 3), "idle": nn.Linear(3, 2)})
        net.parts["b"], net.parts["c"].weight = net.parts["a"], net.parts["a"].weight
        model, results = self._wrap(net), []
        for part, value in ((net.linear, False), (net.parts["c"], False), (net.linear, True), (net.parts["a"], True)):
            part.requires_grad_(value)
            model.zero_grad()
            results.append(step(model, rows(5).requires_grad_()))
        return results

    def train_and_eval(self):
        model = self._wrap(Net())
        changes = (model.eval, model.train, model.module.norm.eval, model.train, model.module.eval)
        return [(change(), train(model, 5))[1] for change in changes]

    def parts_changed_between_steps(self):
        net = Apply(None, first=nn.Linear(3, 3), second=nn.Linear(3, 3))
        net.register_buffer("offset", torch.zeros(3))

        def forward(net, x):
            return net.parts["second"](net.parts["first"](x)) + (net.moved if hasattr(net, "moved") else net.offset)

        def swap():
            net.parts["first"], net.parts["second"] = net.parts["second"], net.parts["first"]

        def rename_buffer():
            del net.offset
            net.register_buffer("moved", torch.ones(3))
            net.forward = types.MethodType(lambda net, x: net.doubled(forward(net, x)) + 1, net)
            net.doubled = types.MethodType(lambda net, x: net.offset_free(x) * 2, net)
            net.offset_free = types.MethodType(lambda net, x: x - net.moved.sum(), net)

        def tie_weights():
            net.parts["second"].weight = net.parts["first"].weight

        def replace_weight():
            net.parts["first"].weight = nn.Parameter(torch.full((3, 3), 0.5))

        net.function, model, results = forward, self._wrap(net), []
        for change in (swap, lambda: net.offset.add_(3), tie_weights, replace_weight, rename_buffer):
            results.append(step(model, rows(5)))
            change()
        return results, step(model, rows(5))

    def frozen_parameter_replaced_in_a_live_graph(self):
        net = Written(lambda net, x: net.linear(x) * net.u)
        model = self._wrap(net)
        outputs = [model(rows(5))]
        net.u.data = net.u.data * 3
        outputs.append(model(rows(5)))
        loss_of(outputs).backward()
        return outputs

    # "in-place updates to the parameters or buffers on device[0] will be recorded", but not other attributes
    def buffers_and_attributes_changed_in_forward(self):
        def forward(net, x):
            net.num_calls += 1
            net.first.copy_(x[0].detach())
            net.mean, net.rows, net.last = net.mean / 2 + x[0], torch.cat([net.rows, x[:1]]), x[0] * 2  # replaced
            return net.linear(x) * net.calls

        net = Apply(forward)
        net.num_calls, model = 0, self._wrap(net)
        net.register_buffer("first", torch.zeros(3), persistent=False)
        for name, value in (("mean", torch.ones(3)), ("rows", torch.ones(0, 3)), ("last", None)):
            net.register_buffer(name, value)
        mean, results = net.mean, [(step(model, rows(5)), net.first.clone()) for _ in range(3)]
        assert not self.is_ours or net.num_calls == 0
        assert net.mean is not mean, "the graph may have saved the buffer that was replaced"
        return results

    def recurrent_and_attention_layers(self):
        model, attention = nn.LSTM(3, 4, 2, bidirectional=True), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        model, attention = self._wrap(model, dim=1), self._wrap(attention, dim=1)
        first = step(model, rows(6, 5, 3))
        state = tuple(each.detach() for each in first[0][1])
        return first, step(model, rows(6, 5, 3), state), step(attention, rows(4, 5, 8))

    # "BatchNorm2d and spectral_norm rely on this behavior to update the buffers"
    def spectral_norm_and_weight_norm(self):
        norms = [getattr(of, name) for of in (parametrizations, nn.utils) for name in ("spectral_norm", "weight_norm")]
        nets = [nn.Sequential(norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), norm(nn.Conv2d(4, 2, 1))) for norm in norms]
        return [train(self._wrap(net), 5, 2, 5) for net in nets]

    # "device_ids (list of int or torch.device)", "output_device ... (default: device_ids[0])"
    def attributes_and_empty_device_ids(self):
        model, net, cpu = self._wrap(Net(), 0), Net(), torch.device("cpu")
        assert isinstance(model, nn.DataParallel)
        assert not isinstance(DataParallelModel(net, ["cpu"]), nn.DataParallel), "outputs are not gathered"
        if self.is_ours:
            assert (model.device_ids, model.output_device, model.src_device_obj, model.dim) == ([cpu] * 3, cpu, cpu, 0)
        empty = BalancedDataParallel(None, net, device_ids=[]) if self.is_ours else nn.DataParallel(net, device_ids=[])
        assert (empty.device_ids, empty.module) == ([], net)
        return train(model, 5), train(empty, 5, 2)


class KeysAreAttributes(dict):
    """As `AttrDict` in many projects: `getattr` raises KeyError."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Cache:
    """As a key-value cache of Hugging Face: built from what it yields."""

    def __init__(self, layers=()):
        self.layers = [tuple(layer) for layer in layers]

    def __iter__(self):
        return iter(self.layers)

    def __eq__(self, other):
        return all(torch.equal(a, b) for a, b in zip(sum(self.layers, ()), sum(other.layers, ()), strict=True))

    __hash__ = None


def momentum_encoder(net, x):
    with torch.no_grad():
        for own, other in zip(net.parts["slow"].parameters(), net.linear.parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1
    return net.linear(x) * net.parts["slow"](x)


def power_iteration(net, x):
    """Spectral normalization that keeps its vectors as parameters, by `.data =`."""
    net.u.data = F.normalize(
        net.linear.weight.data @ F.normalize(net.linear.weight.data.t() @ net.u.data, dim=0), dim=0
    )
    return net.linear(x) / (net.u @ net.linear.weight).norm()


def counted(net, x):
    net.count.data.add_(torch.arange(1.0, 4.0))
    net.turns.add_(1)
    return net.linear(x * net.count) * net.turns.sum()


def replacing(net, x):
    """Uses what it replaces by another tensor: of another dtype, with a gradient, and a frozen parameter."""
    output = net.linear(x * net.scale * net.count) * net.calls
    net.scale = (net.scale * 0.9 + 0.2).detach().requires_grad_()
    net.count, net.calls = nn.Parameter(net.count * 2, requires_grad=False), net.calls * 0.5
    return output


def renormed(net, x):
    """A trained weight with a largest norm, as in EEGNet."""
    net.linear.weight.data = torch.renorm(net.linear.weight.data, 2, 0, 0.3)
    net.linear.bias.data.clamp_(-0.1, 0.1)
    return net.linear(x)


def growing(net, x):
    net.turns.data = torch.cat([net.turns.data, net.turns.data[-1:] + 1])
    return net.linear(x) * net.turns.sum()


FORWARDS = {
    "input changed in place": lambda net, x: net.linear(x.sub_(0.5)).sin(),
    "input and weight in place": lambda net, x: x.mul_(net.linear.weight[0])[:, 1:].sin() * net.linear(x),
    "first layer in place": lambda net, x: net.linear(F.relu_(x)),
    "buffer with a gradient": lambda net, x: net.linear(x) * net.scale.prod(),
    "buffer with a graph": lambda net, x: net.linear(x) * net.made[:2] + net.made[2],
    "frozen parameter in place": counted,
    "frozen parameter by .data": power_iteration,
    "frozen parameter that grows": growing,
    "expanded frozen parameter": lambda net, x: net.linear(x) * net.wide.sum(),
    "buffers replaced after use": replacing,
    "trained weight by .data": renormed,
    "momentum encoder": momentum_encoder,
    "attribute dictionary": lambda net, x: KeysAreAttributes(y=net.linear(x), z=KeysAreAttributes(x=x)),
    "iterable object": lambda net, x: (net.linear(x), Cache([(x, x * 2), (x + 1, x.sin())])),
}
"""Forward passes of `Written` on rows (5, 3); each runs twice, and what it wrote is compared."""


class Written(Apply):
    """With what a forward pass writes: buffers and frozen parameters."""

    def __init__(self, function):
        super().__init__(function, slow=nn.Linear(3, 2).requires_grad_(False))
        for name, size in (("u", 2), ("count", 3), ("turns", 4)):
            self.register_parameter(name, nn.Parameter(torch.linspace(1, 2, size), requires_grad=False))
        self.wide = nn.Parameter(torch.ones(1).expand(3), requires_grad=False)  # nothing can be copied into it
        self.register_buffer("scale", torch.tensor([2.0, 0.5, 1.5], requires_grad=True))
        self.hyper = nn.Linear(2, 3)
        self.register_buffer("made", None, persistent=False)


USAGES = [*(name for name in vars(Usages) if not name.startswith("_")), *FORWARDS]


def result_of(usage, side):
    """Return what a usage returns, or a forward pass and its gradients in two steps."""
    if usage not in FORWARDS:
        return getattr(side, usage)()
    net, found = Written(FORWARDS[usage]), []
    model = side._wrap(net)
    for _ in range(2):
        net.made = net.hyper(torch.ones(2)).exp()
        found.append((step(model, rows(5)), net.scale.grad))
    return found


def difference(usage, gpu0_bsz):
    """Run a usage in both ways and return the largest difference."""
    results, worst = [], 0.0
    for side in (Usages(gpu0_bsz), Usages()):
        torch.manual_seed(7)
        results.append(flat((result_of(usage, side), *map(facts, side.models))))
    for (place, ours), (there, theirs) in zip(*results, strict=True):
        assert (place, type(ours)) == (there, type(theirs)), (place, there)
        if isinstance(theirs, Tensor):
            kinds = [(each.shape, each.dtype, each.requires_grad) for each in (ours, theirs)]
            assert kinds[0] == kinds[1], place
            parts = [torch.view_as_real(each) if each.is_complex() else each for each in (ours, theirs)]
            error = relative_error(parts[:1], parts[1:])
            assert error <= TOLERANCE.get(parts[1].dtype, 0), (place, ours, theirs)
            worst = max(worst, error)
        else:
            assert ours == theirs, place
    return worst


@pytest.fixture
def splits(monkeypatch):
    """Set float64 and a group for DDP, hide accelerators from `nn.DataParallel`, and record the splits of ours."""
    monkeypatch.setitem(nn.DataParallel.__init__.__globals__, "_get_available_device_type", lambda: None)
    monkeypatch.setattr("segapp.parallel.replicas._BUCKET_BYTES", 100)  # several buckets
    forward, seen = BalancedDataParallel.forward, []

    def recorded(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        seen.append(self.last_split)
        return output

    monkeypatch.setattr(BalancedDataParallel, "forward", recorded)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield seen
    dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("usage", USAGES)
def test_usage_is_as_documented_for_data_parallel(usage, splits):
    for gpu0_bsz, split in SPLITS.items():
        splits.clear()
        difference(usage, gpu0_bsz)
        assert split in splits, "the batch ran on its devices"
