"""Learning from a teacher: what a training step has more of, and the critic that learns beside the student.

`DistilledInput` is the network that the devices run: the student, beside it the teacher of that device and the critic.
It gives the terms' values per image, so that `CriterionDistilled` can add them at any split. The critic's own update
(`CriticTrainer`) needs the gradient of a gradient over the whole batch, which `DistributedDataParallel` cannot make: it
runs as a bare module, over replicas by `DataParallelModel` and over ranks with `all_reduce_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segapp.datasets.sampling import mix_seed
from segapp.errors import CheckpointError
from segapp.losses import CriterionDistilled, node_features, pair_wise_difference, pixel_wise_divergence
from segapp.models.critic import Critic, critic_input
from segapp.parallel import DataParallelModel, all_reduce_gradients, gradient_penalty
from segapp.parallel.penalties import PenaltyKind
from segapp.precision import Precision
from segapp.train.buffers import BufferGuard
from segapp.train.normalize import NormalizedInput, Normalizer
from segapp.train.ranks import Ranks

if TYPE_CHECKING:
    from segapp.datasets.loader import Batch
    from segapp.models import SegmentationModel

PIXEL_WISE, PAIR_WISE, HOLISTIC = "pixel_wise", "pair_wise", "holistic"


class Teacher:
    """A trained network on every device that needs it; it never learns.

    No `nn.Module`: the copies are made once, not with the student's replicas in every step.

    Args:
        model: on the CPU.
        normalizer: what it was trained with.
        devices: where it is needed; several logical devices share a copy.
        precision: of the training.
        sha256: of the checkpoint that it comes from.
    """

    def __init__(
        self,
        model: SegmentationModel,
        normalizer: Normalizer,
        devices: Sequence[torch.device],
        precision: Precision,
        sha256: str = "",
    ) -> None:
        import copy

        self.sha256 = sha256
        model = model.eval().requires_grad_(False)
        precision.prepare(model)
        normalizer.dtype = precision.input_dtype
        self._on = {
            device: (copy.deepcopy(model).to(device), copy.deepcopy(normalizer).to(device))
            for device in dict.fromkeys(devices)
        }

    def __call__(self, images: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor | None]:
        """Logits (N, C, h, w), and the nodes of its features where a grid is given.

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
        """What it holds on one device."""
        model, _ = next(iter(self._on.values()))
        return [*model.parameters(), *model.buffers()]


@dataclass(frozen=True)
class TermSettings:
    """Which terms there are.

    Attributes:
        factors: weight of each term that counts, by name.
        temperature: of the pixel-wise term.
        grid: nodes of the pair-wise term along height and width.
        align_corners: where maps of two sizes meet.
        critic_size: height and width of the critic's input.
    """

    factors: Mapping[str, float]
    temperature: float
    grid: tuple[int, int]
    align_corners: bool
    critic_size: tuple[int, int]


class DistilledInput(NormalizedInput):
    """A student that takes uint8 images, and beside its outputs gives what the terms of the distillation need.

    Args:
        model: the student.
        normalizer: its own.
        teacher: on every device where this network runs.
        critic: of the holistic term; None without it.
        settings: which terms.
        channels_last: give the student NHWC memory.
        autocast: context of the critic.
    """

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
        self._teacher, self._settings, self._autocast = teacher, settings, autocast

    def forward(self, images: Tensor) -> tuple[Any, ...]:
        """uint8 images (N, 3, H, W) -> (outputs of the student, values (N, terms), the critic's real and fake maps)."""
        settings = self._settings
        normalized = self.normalized(images)
        heads, features = self.student.compute_with_features(normalized)
        grid = settings.grid if PAIR_WISE in settings.factors else None
        told, told_nodes = self._teacher(images, grid)
        values, maps = [], ()
        if PIXEL_WISE in settings.factors:
            values.append(
                pixel_wise_divergence(heads[0], told, settings.temperature, align_corners=settings.align_corners)
            )
        if grid is not None and told_nodes is not None:
            cells = _common_grid(features, told_nodes, grid)
            values.append(pair_wise_difference(node_features(features, cells), told_nodes))
        if self.critic is not None:
            fake = critic_input(normalized, heads[0], settings.critic_size)
            with self._autocast():
                values.append(-self.critic(fake).float())
            with torch.no_grad():
                real = critic_input(normalized, told, settings.critic_size)
            maps = (real, fake.detach())
        return heads, torch.stack(values, 1), maps
