"""The critic's update by hand: its random numbers, and the steps in which it must stay as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.checkpoint.snapshot import snapshot
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.pool import Batch
from segapp.datasets.preprocessing import Preprocessing
from segapp.models import Critic
from segapp.models.critic import SelfAttention
from segapp.optim import adam
from segapp.parallel.distributed import Ranks
from segapp.precision import Precision
from segapp.training.step import distill as module
from segapp.training.step.distill import CriticTrainer, DistilledInput
from segapp.training.step.update import WeightUpdate

CPU = torch.device("cpu")


def build(kind: Any = "wgan-gp", seed: int = 7) -> CriticTrainer:
    torch.manual_seed(0)
    critic = Critic(5, (8, 8), width=2)
    optimizer = adam([{"params": list(critic.parameters()), "lr_factor": 1.0}], 0.01, (0.0, 0.9))
    update = WeightUpdate(critic, optimizer, Precision("fp32", CPU))  # type: ignore[arg-type]
    return CriticTrainer(critic, critic, update, Ranks(), penalty=kind, factor=10.0, seed=seed)


def test_self_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    layer, features = SelfAttention(16).double(), torch.randn(2, 16, 3, 5, dtype=torch.float64)
    torch.nn.init.constant_(layer.strength, 0.5)
    query, key, value = (part(features).flatten(2).mT for part in (layer.query, layer.key, layer.value))
    expected = F.scaled_dot_product_attention(query, key, value, scale=1.0).mT.view_as(features)
    torch.testing.assert_close(layer(features), features + 0.5 * expected)


def batch_of(*indices: int) -> Batch:
    return Batch(torch.zeros(len(indices), 3, 1, 1), torch.zeros(len(indices), 1, 1), indices)


def make_step(trainer: CriticTrainer, *indices: int, is_step_bad: bool = False, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(trainer.num_steps)
    real, fake = torch.rand(2, len(indices), 5, 8, 8, generator=generator)
    trainer.begin()
    trainer.take((None, None, (real, factor * fake)))
    trainer.backward([batch_of(*indices)])
    trainer.finish_gradients()
    trainer.apply(torch.tensor(float(is_step_bad)))


def test_distance_over_uneven_micro_batches_by_hand() -> None:
    """Liu et al., equation 5: low scores for the student's maps, high ones for the teacher's."""
    trainer = build()
    trainer.factor = 0.0
    maps = [torch.rand(2, size, 5, 8, 8) for size in (3, 2)]
    trainer.begin()
    for each in maps:
        trainer.take((None, None, tuple(each)))
    trainer.backward([batch_of(1, 2, 3), batch_of(4, 5)])
    parameters = list(trainer.critic.parameters())
    found = [parameter.grad for parameter in parameters]
    trainer.critic.requires_grad_(True)
    loss = sum(trainer.critic(fake).sum() - trainer.critic(real).sum() for real, fake in maps) / 5
    for ours, theirs in zip(found, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(trainer.values["critic"], -loss.detach())


def test_student_is_trained_to_high_scores_for_its_maps() -> None:
    class Student(nn.Module):
        def suitable_size(self, *size: int) -> tuple[int, ...]:
            return size

        def compute_with_features(self, images: Tensor) -> tuple[tuple[Tensor, ...], None]:
            return (images[:, :2],), None

    critic, teacher = build().critic, Mock(return_value=(torch.rand(3, 2, 8, 8), None))
    student: Any = Student()
    sizes: Any = {"temperature": 1.0, "align_corners": True, "critic_size": (8, 8), "channels_last": False}
    preprocessing = Preprocessing(PixelFormat(mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3)))
    inner = DistilledInput(
        student, preprocessing, teacher, critic, factors={"holistic": 0.5}, autocast=contextlib.nullcontext, **sizes
    )
    _, terms, (_, fake) = inner(torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8))
    torch.testing.assert_close(terms[:, 0], -critic(fake))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The random numbers of every gradient penalty: places between real and fake, or noise."""
    numbers: list[Tensor] = []
    penalty = module.gradient_penalty

    def recorded(*arguments: Any, alpha: Tensor | None, noise: Tensor | None) -> Tensor:
        (given,) = (each for each in (alpha, noise) if each is not None)
        numbers.append(given)
        return penalty(*arguments, alpha=alpha, noise=noise)

    monkeypatch.setattr(module, "gradient_penalty", recorded)
    return numbers


@pytest.mark.parametrize("kind", ["wgan-gp", "wgan-lp", "dragan"])
def test_random_numbers_depend_on_seed_step_and_image(kind: str, drawn: list[Tensor]) -> None:
    trainer = build(kind)
    make_step(trainer, 4, 5)
    state = snapshot(trainer.state_dict())
    make_step(trainer, 5, 4)
    first, second = drawn
    assert len({row.flatten()[0].item() for numbers in drawn for row in numbers}) == 4, "a number was drawn twice"

    again = build(kind)
    make_step(again, 5)
    assert torch.equal(drawn[-1][0], first[1]), "other images of the batch change nothing"
    resumed = build(kind)
    resumed.load_state_dict(state)
    make_step(resumed, 4)
    assert torch.equal(drawn[-1][0], second[1]), "a resumed training draws what the other one would have drawn"
    other = build(kind, seed=8)
    make_step(other, 4, 5)
    assert not torch.equal(drawn[-1], first)


def everything_of(trainer: CriticTrainer) -> dict[str, Any]:
    state: dict[str, Any] = snapshot(trainer.state_dict())
    own = state["critic"]
    return {"critic": own["critic"], "optimizer": own["optimizer"]["state"]}


def num_different(one: Any, two: Any) -> int:
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        return sum(num_different(one[key], two[key]) for key in one)
    return int(not torch.equal(one, two))


@pytest.mark.parametrize(
    ("how", "bad_in_row"),
    [(lambda t: make_step(t, 1, 2, is_step_bad=True), 0), (lambda t: make_step(t, 1, 2, factor=float("inf")), 1)],
    ids=["the student's step is skipped", "its own gradient is not finite"],
)
def test_skipped_step_leaves_the_critic_as_it_was(how: Callable[[CriticTrainer], None], bad_in_row: int) -> None:
    trainer = build()
    make_step(trainer, 0, 1)
    before = everything_of(trainer)
    how(trainer)
    assert num_different(everything_of(trainer), before) == 0, "weights, BatchNorm statistics or moments have changed"
    assert (trainer.num_steps, int(trainer.update.bad_in_row)) == (2, bad_in_row)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in trainer.critic.parameters())
    make_step(trainer, 1, 2)
    assert num_different(everything_of(trainer), before) > len(list(trainer.critic.parameters()))
    assert int(trainer.update.bad_in_row) == 0
