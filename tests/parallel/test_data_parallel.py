"""The wrappers behave as the bare model: state, copies, hooks, tied and constrained weights, unusual inputs."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from segapp.losses import (
    CriterionCE,
    CriterionDice,
    CriterionDistilled,
    CriterionMaskClassification,
    upsample_argmax,
    upsample_cross_entropy,
    upsample_probabilities,
)
from segapp.parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    convert_sync_batchnorm,
)
from segapp.parallel.data_parallel import ReplicaOutputs
from tests.support.parallel_cases import PlainCE, SmallNet, make_batch


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
    following = DataParallelModel(nn.Identity(), ["cpu"] * 3)
    assert (following(outputs).sizes, following.last_split) == ((4, 3), (0, 4, 3)), "the chunks' devices, not the first"
    model.gpu0_bsz = None
    assert model(x).sizes == (2, 3, 2)
    assert model(x[:2]).sizes == (1, 1), "devices without samples are left out"
    model.gpu0_bsz, model.full_batch = 4, 8
    assert model(x[:4]).sizes == (2, 1, 1), "a short batch is scaled down"


class WithChildModule(nn.Module):
    """A module whose own child is called `module`, as the child of every wrapper is."""

    _version = 3

    def __init__(self, has_scale=True):
        super().__init__()
        self.module = nn.Linear(2, 2)
        if has_scale:
            self.scale = nn.Parameter(torch.rand(()))
        self.version_read = None

    def forward(self, x):
        return self.module(x)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.version_read = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@pytest.mark.parametrize("build", [SmallNet, WithChildModule, lambda: WithChildModule(has_scale=False)])
@pytest.mark.parametrize("wrap", [lambda module: module, nn.DataParallel, lambda m: DataParallelModel(m, ["cpu"] * 2)])
def test_state_dicts_load_with_and_without_module(build, wrap):
    model, saved = BalancedDataParallel(1, build(), ["cpu"] * 3), wrap(build()).state_dict()
    keys, truth = list(saved), [value.clone() for value in saved.values()]
    assert list(model.state_dict()) == [f"module.{key}" for key in model.module.state_dict()]
    assert {name for name, _ in model.named_parameters()} <= set(model.state_dict())
    assert model.load_state_dict(saved).missing_keys == []
    assert all(map(torch.equal, model.state_dict().values(), truth))
    assert list(saved) == keys, "the caller's state dict is unchanged"
    assert getattr(model.module, "version_read", 3) == 3
    with pytest.raises(RuntimeError, match=r'Missing key.*"module\.'):
        model.load_state_dict({keys[0]: truth[0], "other.weight": truth[0]})


def test_keys_that_fit_neither_form_are_refused_as_they_are():
    model = BalancedDataParallel(1, WithChildModule(), ["cpu"] * 3)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"module\.other"'):
        model.load_state_dict({"module.other": torch.zeros(())})
    found = model.load_state_dict({"module.scale": torch.tensor(3.0), "module.weight": torch.zeros(2, 2)}, strict=False)
    assert (model.module.scale.item(), found.unexpected_keys) == (3.0, ["module.weight"]), "of the own form, if equal"
    with pytest.raises(RuntimeError, match=r'Missing key.*"module\.module\.weight"'):
        BalancedDataParallel(1, WithChildModule(has_scale=False), ["cpu"]).load_state_dict(nn.Linear(2, 2).state_dict())


@pytest.mark.parametrize("prefix", ["net.", "net.module."])
def test_wrapper_within_a_module_loads_both_forms(prefix):
    holder, other = nn.ModuleDict({"net": BalancedDataParallel(1, WithChildModule(), ["cpu"] * 3)}), WithChildModule()
    assert list(holder.state_dict()) == [f"net.module.{key}" for key in other.state_dict()]
    holder.load_state_dict({f"{prefix}{key}": value for key, value in other.state_dict().items()})
    assert all(map(torch.equal, holder.state_dict().values(), other.state_dict().values()))


def test_key_of_a_child_is_not_overwritten_by_its_parents():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.module = nn.Parameter(torch.rand(3)), nn.Linear(2, 2)

    holder, other = nn.ModuleDict({"net": DataParallelModel(Twice(), ["cpu"] * 2)}), Twice()
    holder.load_state_dict({f"net.{key}": value for key, value in other.state_dict().items()})
    assert all(map(torch.equal, holder.state_dict().values(), other.state_dict().values()))


class TestDataParallel:
    """`BalancedDataParallel` in place of `nn.DataParallel`."""

    @pytest.mark.parametrize("name", ["scatter", "replicate", "parallel_apply", "gather"])
    def test_overriding_what_is_never_called_is_refused(self, name):
        part = type("Mixin", (), {name: lambda self, *args: None})
        for bases, body in (((BalancedDataParallel,), {name: getattr(part, name)}), ((part, BalancedDataParallel), {})):
            with pytest.raises(TypeError, match=rf"^Mine: .*{name}.* override forward"):
                type("Mine", bases, body)
        model = BalancedDataParallel(1, nn.Linear(2, 1), ["cpu"] * 3)
        with pytest.raises(TypeError, match="override forward"):
            setattr(model, name, print)
        with pytest.raises(TypeError, match="override forward" if name != "scatter" else "positional arguments"):
            getattr(model, name)([torch.zeros(1)], 0)

        class Doubled(BalancedDataParallel):
            def forward(self, x):
                return 2 * super().forward(x)

        x = torch.randn(7, 2)
        assert torch.allclose(Doubled(1, model.module, ["cpu"] * 3)(x), 2 * model(x))

    @pytest.mark.parametrize("device_ids", [[], ()])
    def test_no_devices_run_the_module_where_it_is(self, device_ids):
        module, x = nn.Linear(2, 1, device="meta"), torch.zeros(7, 2, device="meta")
        model = BalancedDataParallel(None, module, device_ids)
        assert (model(x).device.type, model.device_ids, model.last_split) == ("meta", [], (7,))
        outputs = DataParallelModel(module, device_ids)(x)
        assert (outputs.sizes, outputs.main_device.type, outputs.gather().shape) == ((7,), "meta", (7, 1))
        target, logits = torch.tensor([1, 0, 1]), torch.randn(3, 2)
        criterion = DataParallelCriterion(PlainCE(), device_ids)
        assert torch.allclose(criterion([(logits[:1],), (logits[1:],)], target), F.cross_entropy(logits, target))

    def test_compiled_calls_run_the_same_code(self):
        net, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.randn(7, 3, 2, 5)
        model, target = BalancedDataParallel(1, net, ["cpu"] * 3), torch.randint(0, 2, (7, 2, 5))
        outputs, criterion = DataParallelModel(net, ["cpu"] * 3, gpu0_bsz=1), DataParallelCriterion(CriterionCE())
        for num_samples in (7, 2):
            part, loss = x[:num_samples], F.cross_entropy(net(x[:num_samples]), target[:num_samples])
            assert torch.allclose(torch.compile(model, backend="eager")(part), net(part))
            assert model.last_split == model.plan(num_samples)
            chunks = torch.compile(outputs, backend="eager")(part)
            assert isinstance(chunks, ReplicaOutputs)
            assert torch.allclose(torch.compile(criterion, backend="eager")(chunks, target[:num_samples]), loss)
            whole = torch.compile(lambda part, labels: criterion(outputs(part * 1), labels) * 2, backend="eager")
            assert torch.allclose(whole(part, target[:num_samples]), 2 * loss)
        torch.compiler.reset()  # the code above is cached
        with pytest.raises(Exception, match="runs replicas in threads, which cannot be part of a graph"):
            torch.compile(model, backend="eager", fullgraph=True)(x)
        with pytest.raises(TypeError, match="BalancedDataParallel runs in threads and cannot be exported"):
            torch.export.export(model, (x,))


def test_outputs_are_no_tensor_in_arithmetic_and_losses():
    outputs = DataParallelModel(nn.Conv2d(3, 2, 1), ["cpu"] * 3, gpu0_bsz=1)(torch.randn(7, 3, 2, 2))
    two, target = torch.tensor(2), torch.zeros(7, 2, 2).long()
    for compute in (
        lambda: 2 * outputs,
        lambda: outputs - two,
        lambda: -outputs,
        lambda: torch.sigmoid(outputs),
        lambda: nn.CrossEntropyLoss()(outputs, target),
        lambda: CriterionCE()(outputs, target),
        lambda: CriterionDice().statistics((outputs[0], outputs), target),
        lambda: CriterionDistilled(CriterionCE(), {"pixel_wise": 1.0}).statistics(outputs, target),
        lambda: CriterionMaskClassification(num_queries=2, num_classes=2).statistics(outputs, target),
        lambda: upsample_argmax([outputs, outputs], (4, 4)),
        lambda: upsample_probabilities(outputs, (4, 4)),
        lambda: upsample_cross_entropy(outputs, torch.zeros(7, 2, 2, 2)),
    ):
        with pytest.raises(TypeError, match=r"DataParallelCriterion\(criterion\)\(outputs, target\)"):
            compute()
    assert [*outputs, *outputs][3] is outputs[0]
    assert torch.cat(outputs).shape == (7, 2, 2, 2)
    assert repr(pickle.loads(pickle.dumps(outputs))) == repr(outputs)


def test_batchnorm_on_single_values_error_names_next_move():
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3))
    x = torch.randn(5, 3, 4, 4)
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        DataParallelModel(pooled, ["cpu"] * 3, gpu0_bsz=1)(x)
    assert caught.value.__notes__[0] == "raised in replica 0 on cpu"
    assert caught.value.__notes__[1].startswith("use convert_sync_batchnorm(model)")
    synced = DataParallelModel(convert_sync_batchnorm(pooled), ["cpu"] * 3, gpu0_bsz=1)
    assert len(synced(x)) == 3
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        synced(x[:1])
    assert caught.value.__notes__ == ["raised in replica 0 on cpu"], "synchronization would not help"


class TestCriterion:
    def test_targets_split_by_the_caller_are_accepted(self):
        images, target = make_batch(7)
        outputs = DataParallelModel(SmallNet().double().eval(), ["cpu"] * 3, gpu0_bsz=2)(images)
        assert "shapes=[[(2, 4, 11, 11), (2, 4, 11, 11)], [(3, 4, 11, 11), " in repr(outputs)
        criterion = DataParallelCriterion(PlainCE())
        loss = criterion(outputs, target)
        parts = list(target.split(list(outputs.sizes)))
        assert criterion(outputs, parts) == loss
        assert criterion(list(outputs), target) == loss, "a plain list tells its sizes by its tensors"
        torch.testing.assert_close(criterion(outputs.gather(), target), loss, rtol=1e-12, atol=0)

    def test_criterion_parameters_get_their_gradient(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
                self.register_buffer("calls", torch.zeros(()))
                self.register_buffer("last", None)

            def statistics(self, outputs, target):
                self.calls += 1
                self.last = outputs[-1]  # replaces its value instead of changing it
                return (self.scale * outputs.sum(), outputs.new_tensor(float(outputs.numel())))

            def finalize(self, totals):
                return totals[0] / totals[1]

        criterion = Scaled()
        x = torch.arange(6.0, dtype=torch.float64).view(6, 1).requires_grad_()
        outputs = DataParallelModel(nn.Identity(), ["cpu"] * 3)(x)
        DataParallelCriterion(criterion)(outputs, x.detach()).backward()
        assert criterion.scale.grad == x.mean()
        assert (criterion.calls, criterion.last) == (1, 1), "of the first replica"
        assert criterion.last.grad_fn is None, "the graph of a step is not kept until the next one"
