"""Penalties and their second-order gradients equal those of one device; the published exchange does not."""

import copy

import pytest
import torch
from torch import nn

from segapp.parallel import DataParallelModel, convert_sync_batchnorm, gradient_penalty
from tests.support.parallel_cases import Critic, grads_of, relative_error

KINDS = ["wgan-gp", "wgan-lp", "dragan"]


@pytest.fixture
def samples():
    torch.manual_seed(2)
    shape = (6, 3, 16, 16)
    real, fake, noise = torch.randn(shape).double(), torch.randn(shape).double() * 4, torch.rand(shape).double()
    return {"real": real, "fake": fake, "alpha": torch.rand(6).double(), "noise": noise}


def used(kind, samples):
    return {name: each for name, each in samples.items() if name != ("alpha" if kind == "dragan" else "noise")}


def by_hand(critic, kind, real, fake, alpha, noise):
    """The three formulas, implemented again for one device."""
    if kind == "dragan":
        x = real + 0.5 * real.std() * noise
    else:
        x = alpha.view(-1, 1, 1, 1) * real + (1 - alpha.view(-1, 1, 1, 1)) * fake
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    excess = gradient.flatten(1).norm(dim=1) - 1
    return (excess.clamp_min(0) if kind == "wgan-lp" else excess).square().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_penalties_match_their_formulas_at_every_split(kind, samples):
    torch.manual_seed(3)
    truth = Critic().double()
    real, fake = samples["real"], samples["fake"]
    expected = truth(fake).mean() - truth(real).mean() + 10 * by_hand(truth, kind, **samples)
    expected.backward()
    for num_devices in (1, 2, 3, 5):
        for gpu0_bsz in (None, 0, 1, 4, 6) if num_devices > 1 else (None,):
            critic = convert_sync_batchnorm(copy.deepcopy(truth))
            critic.zero_grad()
            model = DataParallelModel(critic, ["cpu"] * num_devices, gpu0_bsz=gpu0_bsz)
            scores = [torch.cat(list(model(x))).mean() for x in (fake, real)]
            loss = scores[0] - scores[1] + 10 * gradient_penalty(model, kind=kind, **used(kind, samples))
            loss.backward()
            assert relative_error([loss.detach()], [expected.detach()]) <= 1e-12
            assert relative_error(grads_of(critic), grads_of(truth)) <= 1e-9


def test_zero_gradient_gives_a_finite_penalty_gradient():
    critic = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(critic.weight)
    penalty = gradient_penalty(critic, torch.randn(3, 4), torch.randn(3, 4))
    penalty.backward()
    assert penalty.item() == 1
    assert torch.equal(critic.weight.grad, torch.zeros(1, 4))


def test_half_samples_give_a_float32_penalty():
    critic = nn.Linear(4, 1).half()
    assert gradient_penalty(critic, torch.randn(3, 4).half(), torch.randn(3, 4).half()).dtype == torch.float32
