"""Distillation from a teacher: the network that runs student, teacher and critic, and its part in a step.

`DistilledInput` is the network that the devices run: the student, beside it the teacher of that device and the critic.
It returns the terms' values per image, so that `CriterionDistilled` can add them at any split. `Distillation` and
`HolisticDistillation` are the step's participants: the teacher's identity, and the update of the critic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segapp.errors import CheckpointError
from segapp.inference.normalize import NormalizedInput, Normalizer
from segapp.losses import node_features, pair_wise_difference, pixel_wise_divergence
from segapp.models import Critic, critic_input
from segapp.optim.optimizers import set_lr
from segapp.training.step.critic import CriticTrainer
from segapp.training.step.participant import StepParticipant

if TYPE_CHECKING:
    from segapp.datasets.loader import Batch
    from segapp.models import SegmentationModel

PIXEL_WISE, PAIR_WISE, HOLISTIC = "pixel_wise", "pair_wise", "holistic"


class Teacher:
    """A trained network with fixed weights, one copy per device.

    It is no `nn.Module`, so that its copies are made once and not with the student's replicas in every step.

    Args:
        on: device -> the network in evaluation mode and its normaliser, both on that device.
        sha256: of the checkpoint that it comes from.
    """

    def __init__(self, on: Mapping[torch.device, tuple[SegmentationModel, Normalizer]], sha256: str = "") -> None:
        self.sha256 = sha256
        self._on = dict(on)

    def __call__(self, images: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor | None]:
        """Return logits (N, C, h, w), and the nodes of the features if a grid is given.

        Args:
            images: uint8 (N, 3, H, W), on one of the devices.
            grid: of `node_features`; None: no nodes.
        """
        model, normalizer = self._on[images.device]
        with torch.inference_mode():
            heads, features = model.compute_with_features(normalizer(images))
            nodes = None if grid is None else node_features(features, grid)
        # Autograd refuses to keep an inference tensor for the backward pass; a copy of these small ones it keeps.
        return heads[0].clone(), None if nodes is None else nodes.clone()

    def tensors(self) -> list[Tensor]:
        """Return the tensors on one device."""
        model, _ = next(iter(self._on.values()))
        return [*model.parameters(), *model.buffers()]


@dataclass(frozen=True)
class TermSettings:
    """The terms of the distillation.

    Attributes:
        factors: weight of each term that counts, by name.
        temperature: of the pixel-wise term.
        grid: nodes of the pair-wise term along height and width.
        align_corners: of the interpolation between maps of two sizes.
        critic_size: height and width of the critic's input.
    """

    factors: Mapping[str, float]
    temperature: float
    grid: tuple[int, int]
    align_corners: bool
    critic_size: tuple[int, int]


class DistilledInput(NormalizedInput):
    """A student that takes uint8 images and returns its outputs and the values of the distillation's terms.

    Args:
        model: the student.
        normalizer: its own.
        teacher: on every device where this network runs.
        critic: of the holistic term; None without it.
        settings: of the terms.
        channels_last: give the student NHWC memory.
        autocast: context of the critic.
    """

    model: SegmentationModel

    def __init__(
        self,
        model: SegmentationModel,
        normalizer: Normalizer,
        teacher: Teacher,
        critic: Critic | None,
        settings: TermSettings,
        *,
        channels_last: bool,
        autocast: Callable[[], Any],
    ) -> None:
        super().__init__(model, normalizer, channels_last=channels_last)
        self.critic = critic
        self.teacher, self._settings, self._autocast = teacher, settings, autocast

    def forward(self, images: Tensor) -> tuple[Any, ...]:
        """Return the student's outputs, the terms' values (N, terms), and the critic's real and fake maps.

        Args:
            images: uint8 (N, 3, H, W).
        """
        settings = self._settings
        normalized = self.normalized(images)
        heads, features = self.model.compute_with_features(normalized)
        grid = settings.grid if PAIR_WISE in settings.factors else None
        told, told_nodes = self.teacher(images, grid)
        values: list[Tensor] = []
        maps: tuple[Tensor, ...] = ()
        if PIXEL_WISE in settings.factors:
            values.append(
                pixel_wise_divergence(heads[0], told, settings.temperature, align_corners=settings.align_corners)
            )
        if grid is not None and told_nodes is not None:
            values.append(pair_wise_difference(node_features(features, grid), told_nodes))
        if self.critic is not None:
            fake = critic_input(normalized, heads[0], settings.critic_size)
            with self._autocast():
                values.append(-self.critic(fake).float())
            with torch.no_grad():
                real = critic_input(normalized, told, settings.critic_size)
            maps = (real, fake.detach())
        return heads, torch.stack(values, 1), maps


class Distillation(StepParticipant):
    """The participant for a teacher without a critic; keeps only state, as `DistilledInput` computes the terms."""

    name = "distillation"

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    def held_tensors(self) -> list[Tensor]:
        """Return the teacher's tensors on the first device."""
        return self.teacher.tensors()

    def replicated_bytes(self) -> int:
        """Return the size of the teacher's copy on every other device."""
        return sum(tensor.nbytes for tensor in self.teacher.tensors())

    def state_dict(self) -> dict[str, Any]:
        """Return the hash of the teacher's checkpoint: a resume refuses another teacher."""
        return {"teacher_sha256": self.teacher.sha256, "critic": None}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Check that the saved training had this teacher.

        Raises:
            CheckpointError: it had another one, or none.
        """
        if state is None or state["teacher_sha256"] != self.teacher.sha256:
            raise CheckpointError(
                "distill.teacher is another checkpoint than the one that this training learned from: "
                "put that one back, or start a new run",
                key="distill.teacher",
            )


class HolisticDistillation(Distillation):
    """The participant for a teacher and a critic, which is updated in every step."""

    def __init__(self, teacher: Teacher, critic: CriticTrainer) -> None:
        super().__init__(teacher)
        self.critic = critic

    def begin(self, network: nn.Module) -> None:
        """Store the critic's buffers."""
        self.critic.begin(network)

    def take(self, outputs: Any) -> None:
        """Keep the maps of a micro-batch for the critic's update."""
        self.critic.take(outputs)

    def backward(self, batches: Sequence[Batch]) -> None:
        """Compute the gradients of the critic's loss."""
        self.critic.backward(batches)

    def finish_gradients(self) -> None:
        """Unscale the critic's gradients."""
        self.critic.finish_gradients()

    def apply(self, is_step_bad: Tensor) -> None:
        """Update the critic."""
        self.critic.apply(is_step_bad)

    def rollback(self) -> None:
        """Restore the critic."""
        self.critic.rollback()

    def set_lr(self, lr: float) -> None:
        """Set the critic's learning rate, in proportion to the student's."""
        set_lr(self.critic.optimizer, lr)

    def terms(self) -> dict[str, Tensor]:
        """Return the critic's loss and its gradient penalty, not weighted."""
        return self.critic.values

    def divergence(self, max_bad_steps: int) -> str | None:
        """Return a message if the critic cannot learn any more."""
        if self.critic.has_diverged(max_bad_steps):
            return "the gradient of the distillation's critic not finite for too many steps in a row"
        return None

    def held_tensors(self) -> list[Tensor]:
        """Return the tensors of teacher and critic on the first device."""
        return [*super().held_tensors(), *self.critic.held_tensors()]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the critic's optimizer."""
        return [self.critic.optimizer]

    def replicated_bytes(self) -> int:
        """Return the size of the copies of teacher and critic on every other device."""
        return super().replicated_bytes() + sum(p.nbytes for p in self.critic.critic.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return the teacher's hash and the state of critic, optimizer and loss scale."""
        return {**super().state_dict(), "critic": self.critic.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: the training had another teacher.
        """
        super().load_state_dict(state)
        assert state is not None
        self.critic.load_state_dict(state["critic"])
