import pytest
import torch
from torch import nn

from segapp.parallel import SyncBatchNorm, convert_sync_batchnorm
from segapp.parallel.batchnorm_guard import no_samples_problem, smallest_chunk, unused_parameters


class Pooled(nn.Module):
    """Global pooling after a convolution, as in DeepLab's ASPP; two inputs, and two outputs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x, gain):
        x = self.body(x) * gain
        return {"features": x.detach(), "out": x + self.pooled(x), "own": x.mean()}


def with_frozen_head(net):
    net.pooled.eval()
    return net


GAIN = torch.linspace(0.5, 2, 5).view(-1, 1, 1, 1)


def test_layer_with_one_value_needs_two_samples_and_is_unchanged():
    net = Pooled()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    x = torch.randn(5, 3, 9, 8)
    assert smallest_chunk(net, x, GAIN) == 2
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not net.pooled[2]._forward_pre_hooks


@pytest.mark.parametrize(
    "build",
    [
        lambda: convert_sync_batchnorm(Pooled()),
        lambda: Pooled().eval(),
        lambda: with_frozen_head(Pooled()),
    ],
)
def test_synchronised_and_frozen_layers_take_any_split(build):
    assert smallest_chunk(build(), torch.randn(5, 3, 9, 8), GAIN) == 1


def test_network_without_samples_runs_or_says_why_not():
    class Flat(nn.Module):
        def forward(self, x):
            return x.reshape(x.size(0), -1)

    x = torch.randn(2, 3, 9, 9)
    net = convert_sync_batchnorm(Pooled())
    assert no_samples_problem(net, x, GAIN[:2]) is None
    assert net.training
    assert all(module.training for module in net.modules())
    plain = Pooled()
    plain.body[1].eval()  # its statistics need no samples
    assert "'pooled.2' is not synchronized" in no_samples_problem(plain, x, GAIN[:2])
    assert no_samples_problem(Flat(), x) == "Flat cannot compute a batch of 0 samples"
    inner = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.Identity(), Flat()))
    assert no_samples_problem(inner, x) == "Flat '1.1' cannot compute a batch of 0 samples"
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in inner.modules())


class Fails(nn.Module):
    """A convolution and dropout; fails without samples in one part of a training step only."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x):
        self.num_calls += self.training
        out = self.net(x)
        if (
            (self.where == "training" and self.training)
            or (self.where == "autocast" and out.dtype == torch.bfloat16)
            or (self.where == "gradient" and torch.is_grad_enabled())
        ):
            out.amax()
        if self.where == "backward":
            out.register_hook(lambda grad: grad.amax())
        return out


@pytest.mark.parametrize("where", ["training", "autocast", "gradient", "backward", "loss", None])
def test_check_without_samples_runs_the_training_step(where):
    net = convert_sync_batchnorm(Fails(where))
    net.net[0].weight.grad = torch.ones_like(net.net[0].weight)
    modes = [module.training for module in net.modules()]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    x, rng = torch.randn(2, 3, 9, 9), torch.get_rng_state()
    problem = no_samples_problem(
        net,
        x,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16),
        loss=lambda outputs: outputs.amax() if where == "loss" else outputs.sum(),
    )
    assert (problem is None) == (where is None), problem
    failed = "the loss or the backward pass" if where in ("backward", "loss") else "Fails"
    assert problem in (None, f"{failed} cannot compute a batch of 0 samples")
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert [p.grad is None for p in net.parameters()] == [False, True, True, True]


@pytest.mark.parametrize("error", [AssertionError, AttributeError, KeyError, StopIteration])
def test_network_may_refuse_a_probe_in_words_of_its_own(error):
    class Refuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

        def forward(self, x):
            if x.is_meta or not len(x):
                raise error
            return self.net(x)

    x = torch.randn(2, 3, 9, 9)
    assert no_samples_problem(convert_sync_batchnorm(Refuses()), x) == "Refuses cannot compute a batch of 0 samples"
    assert smallest_chunk(Refuses(), x) == 2
    assert unused_parameters(Refuses(), x) == []


@pytest.mark.parametrize("build", [Pooled, lambda: convert_sync_batchnorm(Pooled())], ids=["plain", "synchronised"])
def test_unused_parameters_are_found_and_model_unchanged(build):
    net = build()
    net.spare, net.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    kinds = [type(module) for module in net.modules()]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    assert unused_parameters(net, torch.randn(5, 3, 9, 8), GAIN) == ["spare.weight", "spare.bias"]
    assert [type(module) for module in net.modules()] == kinds
    assert any(issubclass(kind, SyncBatchNorm) for kind in kinds) == (build is not Pooled)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_model_reading_values_is_assumed_to_need_two_samples():
    class NeedsValues(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.norm(x) if x.sum().item() > -1e9 else x

    assert smallest_chunk(NeedsValues(), torch.randn(2, 3, 8, 8)) == 2
