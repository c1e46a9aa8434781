"""The wrappers behave as the bare model: state, copies, hooks, tied and constrained weights, unusual inputs."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from segapp.parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    ReplicaError,
    convert_sync_batchnorm,
)
from segapp.parallel.data_parallel import ReplicaOutputs
from tests.support.parallel_cases import PlainCE, SmallNet, grads_of, make_batch, relative_error, state_error


def test_one_device_runs_without_threads_or_copies(monkeypatch):
    monkeypatch.setattr("threading.Thread.start", lambda self: pytest.fail("a thread was started"))
    module = nn.Linear(2, 2)
    model = DataParallelModel(module, ["cpu"])
    outputs = model(torch.ones(3, 2))
    assert isinstance(outputs, ReplicaOutputs)
    assert (len(outputs), outputs.sizes, model.last_split) == (1, (3,), (3,))
    outputs[0].sum().backward()
    assert module.weight.grad is not None


def test_new_gpu0_bsz_holds_from_the_next_forward():
    model = DataParallelModel(nn.Linear(2, 2), ["cpu"] * 3, gpu0_bsz=1)
    x = torch.ones(7, 2)
    assert model(x).sizes == (1, 3, 3)
    model.gpu0_bsz = 5
    assert model(x).sizes == (5, 1, 1)
    model.gpu0_bsz = 0
    outputs = model(x)
    assert (outputs.sizes, model.last_split) == ((4, 3), (0, 4, 3))
    model.gpu0_bsz = None
    assert model(x).sizes == (2, 3, 2)
    assert model(x[:2]).sizes == (1, 1), "devices without samples are left out"


def test_shares_and_full_batch_scale_a_short_batch():
    model = DataParallelModel(nn.Linear(2, 2), ["cpu"] * 3, shares=[2, 3, 3])
    assert model(torch.ones(8, 2)).sizes == (2, 3, 3)
    assert model(torch.ones(4, 2)).sizes == (1, 2, 1)
    model = DataParallelModel(nn.Linear(2, 2), ["cpu"] * 3, gpu0_bsz=4, full_batch=8)
    assert model(torch.ones(4, 2)).sizes == (2, 1, 1)
    with pytest.raises(ValueError, match="gpu0_bsz=9 is more than the batch of 8"):
        model.gpu0_bsz = 9


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, first, *, second=None, flag=None, more=()):
        return {"out": self.linear(first + second["deep"] + more[0]), "flag": flag}


def test_nested_and_keyword_inputs_keep_their_structure():
    module = Mixed()
    inputs = {"second": {"deep": torch.ones(3, 2)}, "flag": "f", "more": (torch.zeros(3, 2),)}
    truth = module(torch.ones(3, 2), **inputs)
    out = BalancedDataParallel(1, module, ["cpu"] * 2)(torch.ones(3, 2), **inputs)
    torch.testing.assert_close(out["out"], truth["out"])
    assert out["flag"] == "f"
    keywords_only = BalancedDataParallel(0, module, ["cpu"] * 2)(first=torch.ones(3, 2), **inputs)
    torch.testing.assert_close(keywords_only["out"], truth["out"])


def test_calls_without_samples_run_once():
    class Constant(nn.Module):
        def forward(self, word=None):
            return torch.ones(2), word

    outputs = DataParallelModel(Constant(), ["cpu"] * 3)(word="w")
    assert len(outputs) == 1
    empty = DataParallelModel(nn.Linear(2, 3), ["cpu"] * 3)(torch.ones(0, 2))
    assert [tuple(output.shape) for output in empty] == [(0, 3)]


def test_published_balanced_data_parallel_call_works():
    model = BalancedDataParallel(2, nn.Linear(2, 1), dim=0, device_ids=["cpu", "cpu"])
    assert model(torch.ones(5, 2)).shape == (5, 1)
    assert model.device_ids == [torch.device("cpu")] * 2, "an attribute of torch.nn.DataParallel"


def test_batch_along_another_dim_matches_one_device():
    class Transposed(nn.Module):
        def forward(self, x):
            return x * 2

    x = torch.randn(3, 6)
    model = BalancedDataParallel(1, Transposed(), ["cpu"] * 3, dim=1)
    assert torch.equal(model(x), x * 2)
    assert model.last_split == (1, 3, 2)


def test_state_dict_has_no_prefix_and_loads_both_ways():
    module = SmallNet()
    model = DataParallelModel(module, ["cpu"] * 2)
    assert list(model.state_dict()) == list(SmallNet().state_dict())
    assert model.load_state_dict(SmallNet().state_dict()).missing_keys == []
    holder = nn.ModuleDict({"net": model})
    assert list(holder.state_dict()) == [f"net.{key}" for key in module.state_dict()]
    other = SmallNet().state_dict()
    holder.load_state_dict({f"net.{key}": value for key, value in other.items()})
    assert all(torch.equal(value, other[key]) for key, value in module.state_dict().items())


def test_wrapper_can_be_copied_pickled_and_switched_mode():
    model = DataParallelModel(SmallNet(), ["cpu"] * 2, gpu0_bsz=1)
    images, _ = make_batch(3, dtype=torch.float32)
    outputs = model(images)
    twin = copy.deepcopy(model)
    assert twin.module is not model.module
    again = pickle.loads(pickle.dumps(model))
    assert again.gpu0_bsz == 1
    stream = io.BytesIO()
    torch.save(model, stream)
    assert not model.eval().module.training
    assert model.train().module.training
    assert pickle.loads(pickle.dumps(ReplicaOutputs([1], [1], ["cpu"], "cpu"))).sizes == (1,)
    assert outputs.gather()[0].shape[0] == 3


def test_running_statistics_survive_any_split():
    for gpu0_bsz in (None, 0, 1, 6):
        module = nn.BatchNorm2d(3)
        before = module.running_mean.clone()
        BalancedDataParallel(gpu0_bsz, module, ["cpu"] * 3)(torch.randn(6, 3, 2, 2) + 5)
        assert (module.running_mean - before).abs().max() > 0.1
        assert module.num_batches_tracked == 1, "one step counts once"


class StorageLedger(nn.Module):
    """Replaces its buffers in forward instead of changing them in place: the mean, all rows so far, the last row."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("rows", torch.zeros(0, 2))
        self.register_buffer("last", None)

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.rows = torch.cat([self.rows, x])
        self.last = x[-1]
        return self.scale * x

    def statistics(self, outputs, target):
        return (self(outputs).sum(),)

    def finalize(self, totals):
        return totals[0]


def run_model(recorder, x):
    DataParallelModel(recorder, ["cpu"] * 2, gpu0_bsz=2)(x)


def run_criterion(recorder, x):
    outputs = DataParallelModel(nn.Identity(), ["cpu"] * 2, gpu0_bsz=2)(x)
    DataParallelCriterion(recorder)(outputs, torch.zeros(len(x)))


@pytest.mark.parametrize("run", [run_model, run_criterion])
def test_buffers_replaced_in_forward_are_kept(run):
    recorder, bare = StorageLedger(), StorageLedger()
    mean = recorder.mean
    for x in torch.arange(20.0).view(2, 5, 2):
        run(recorder, x)
        bare(x[:2])  # what the first replica, the owner of the buffers, had of the batch
    assert recorder.mean is mean, "a buffer of the same shape keeps its memory, which a state dict may share"
    for name, buffer in bare.named_buffers():
        assert torch.equal(recorder.get_buffer(name), buffer), name


def build_constrained(kind):
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrap = {
            "spectral": torch.nn.utils.parametrizations.spectral_norm,
            "spectral hook": torch.nn.utils.spectral_norm,
            "weight": torch.nn.utils.parametrizations.weight_norm,
            "weight hook": torch.nn.utils.weight_norm,
        }[kind]
        return nn.Sequential(wrap(nn.Conv2d(3, 4, 3).double()), nn.ReLU(), wrap(nn.Conv2d(4, 2, 1).double()))


@pytest.mark.parametrize("kind", ["spectral", "spectral hook", "weight", "weight hook"])
def test_constrained_weights_match_the_single_model(kind):
    x, _ = make_batch(6)
    truth = build_constrained(kind)
    expected = truth(x)
    expected.square().mean().backward()
    for num_devices, gpu0_bsz in ((3, 1), (3, 0), (2, None)):
        module = build_constrained(kind)
        output = BalancedDataParallel(gpu0_bsz, module, ["cpu"] * num_devices)(x)
        output.square().mean().backward()
        assert relative_error([output.detach()], [expected.detach()]) <= 1e-12
        assert relative_error(grads_of(module), grads_of(truth)) <= 1e-10
        assert state_error(module, truth) <= 1e-12


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 2)

    def forward(self, x):
        return self.out(self.lstm(x.to(next(self.parameters()).dtype))[0])


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (Recurrent, (6, 3, 4)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (6, 4, 8)),
    ],
)
def test_recurrent_and_attention_layers_match_the_single_model(build, shape):
    torch.manual_seed(0)
    truth = build().double()
    module = copy.deepcopy(truth)
    x = torch.randn(shape, dtype=torch.float64)
    truth(x).square().sum().backward()
    BalancedDataParallel(1, module, ["cpu"] * 3)(x).square().sum().backward()
    assert relative_error(grads_of(module), grads_of(truth)) <= 1e-10


def test_hooks_fire_per_replica_and_on_the_summed_gradient():
    module = nn.Linear(2, 2)
    forwards, gradients = [], []
    module.register_forward_hook(lambda part, args, out: forwards.append((part is module, len(out))))
    module.weight.register_hook(lambda grad: gradients.append(grad.clone()))
    sum(output.sum() for output in DataParallelModel(module, ["cpu"] * 3, gpu0_bsz=1)(torch.ones(7, 2))).backward()
    assert sorted(forwards) == [(False, 1), (False, 3), (False, 3)]
    assert len(gradients) == 1
    assert torch.equal(gradients[0], torch.full((2, 2), 7.0))


def test_input_gradients_with_in_place_operations_match():
    class InPlace(nn.Module):
        def forward(self, x):
            return torch.relu_(x * 1)

    x = torch.randn(4, 3, requires_grad=True)
    sum(output.sum() for output in DataParallelModel(InPlace(), ["cpu"] * 3, gpu0_bsz=1)(x)).backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_channels_last_layout_is_kept():
    images = torch.randn(5, 3, 8, 8).to(memory_format=torch.channels_last)
    net = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).to(
        memory_format=torch.channels_last
    )
    for output in DataParallelModel(net, ["cpu"] * 2)(images):
        assert output.is_contiguous(memory_format=torch.channels_last)


def test_bad_models_devices_and_splits_are_refused():
    with pytest.raises(TypeError, match=r"not an nn\.Module"):
        DataParallelModel(3, ["cpu"])
    with pytest.raises(TypeError, match="compiled"):
        DataParallelModel(torch.compile(nn.Linear(1, 1), backend="eager"), ["cpu"] * 2)
    with pytest.raises(ValueError, match="no shape yet"):
        DataParallelModel(nn.LazyLinear(1), ["cpu"] * 2)
    with pytest.raises(ValueError, match="gpu0_bsz=-1"):
        DataParallelModel(nn.Linear(1, 1), ["cpu"] * 2, -1)
    with pytest.raises(ValueError, match="add a device"):
        DataParallelModel(nn.Linear(1, 1), ["cpu"], 0)
    with pytest.raises(ValueError, match=r"weight of Linear is on meta and device 0 is cpu: call module.to\('cpu'\)"):
        DataParallelModel(nn.Linear(1, 1, device="meta"), ["cpu"] * 2)(torch.ones(2, 1))
    with pytest.raises(ValueError, match="is not known"):
        DataParallelModel(nn.Linear(1, 1), ["cpu"] * 2, mode="fast")(torch.ones(2, 1))


def test_compiled_module_runs_on_one_device():
    model = DataParallelModel(torch.compile(nn.Linear(2, 2), backend="eager"), ["cpu"])
    assert model(torch.ones(3, 2))[0].shape == (3, 2)


def test_batchnorm_on_single_values_error_names_next_move():
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3))
    x = torch.randn(5, 3, 4, 4)
    with pytest.raises(ReplicaError, match="use convert_sync_batchnorm"):
        DataParallelModel(pooled, ["cpu"] * 3, gpu0_bsz=1)(x)
    assert len(DataParallelModel(convert_sync_batchnorm(pooled), ["cpu"] * 3, gpu0_bsz=1)(x)) == 3


class TestCriterion:
    def test_targets_split_by_the_caller_are_accepted(self):
        images, target = make_batch(7)
        outputs = DataParallelModel(SmallNet().double().eval(), ["cpu"] * 3, gpu0_bsz=2)(images)
        criterion = DataParallelCriterion(PlainCE())
        loss = criterion(outputs, target)
        parts = list(target.split(list(outputs.sizes)))
        assert criterion(outputs, parts) == loss
        assert criterion(list(outputs), target) == loss, "a plain list tells its sizes by its tensors"

    def test_summed_statistics_give_a_differentiable_loss(self):
        images, target = make_batch(4)
        net = SmallNet().double().eval()
        criterion = DataParallelCriterion(PlainCE())
        totals = criterion.statistics(DataParallelModel(net, ["cpu"] * 2)(images), target)
        assert isinstance(totals, tuple)
        loss = criterion.finalize(totals)
        assert loss.ndim == 0
        loss.backward()
        assert net.head.weight.grad is not None

    def test_criterion_parameters_get_their_gradient(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
                self.register_buffer("calls", torch.zeros(()))

            def statistics(self, outputs, target):
                self.calls += 1
                return (self.scale * outputs.sum(), outputs.new_tensor(float(outputs.numel())))

            def finalize(self, totals):
                return totals[0] / totals[1]

        criterion = Scaled()
        x = torch.arange(6.0, dtype=torch.float64).view(6, 1)
        outputs = DataParallelModel(nn.Identity(), ["cpu"] * 3)(x)
        DataParallelCriterion(criterion)(outputs, x).backward()
        assert criterion.scale.grad == x.mean()
        assert criterion.calls == 1

    def test_outputs_and_targets_that_do_not_match_are_refused(self):
        with pytest.raises(TypeError, match="CrossEntropyLoss has no statistics"):
            DataParallelCriterion(nn.CrossEntropyLoss())
        images, target = make_batch(4)
        outputs = DataParallelModel(SmallNet().double(), ["cpu"] * 2)(images)
        with pytest.raises(ValueError, match=r"the target has 3 samples and the outputs have \[2, 2\]"):
            DataParallelCriterion(PlainCE())(outputs, target[:3])
        with pytest.raises(ValueError, match="no tensor with samples"):
            DataParallelCriterion(PlainCE())([], target)

        class Wrong(PlainCE):
            def statistics(self, outputs, target):
                return outputs[0].sum()

        with pytest.raises(TypeError, match="return a tuple"):
            DataParallelCriterion(Wrong())(outputs, target)
