"""Distillation from a teacher: the network that runs student, teacher and critic, and its part in a step.

`DistilledInput` is the network that the devices run: the student, the device's teacher, and the critic. It returns the
terms' values per image, so `CriterionDistilled` can add them for any batch split. `TeacherIdentity` and `CriticTrainer`
are participants of the step.

The critic's update needs the gradient of a gradient over the whole batch, which `DistributedDataParallel` cannot
compute. So the critic runs as a bare module, over replicas with `DataParallelModel` and over ranks with
`all_reduce_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.accelerator import wide_dtype
from segapp.config import DistillConfig
from segapp.datasets.preprocessing import Preprocessing, padded
from segapp.datasets.sampling import mix_seed
from segapp.errors import CheckpointError, ConfigError
from segapp.inference.sliding import NormalizedInput
from segapp.losses import (
    node_features,
    pair_wise_difference,
    pixel_wise_divergence,
)
from segapp.models import Critic, SegmentationModel, critic_input, critic_size
from segapp.optim import adam, set_lr
from segapp.parallel import (
    DataParallelModel,
    all_reduce_gradients,
    convert_sync_batchnorm,
    gradient_penalty,
    sample_masks,
)
from segapp.parallel.distributed import Ranks
from segapp.parallel.penalties import PenaltyKind
from segapp.precision import Precision
from segapp.training.step.divided import TrainedNetwork
from segapp.training.step.engine import StepParticipant
from segapp.training.step.rollback import BufferGuard
from segapp.training.step.update import WeightUpdate

if TYPE_CHECKING:
    from segapp.datasets.pool import Batch

CRITIC_LR = 0.0004
"""Initial learning rate of the critic; it follows the schedule. Both values are from Liu et al., 2019."""
PENALTY_WEIGHT = 10.0
PIXEL_WISE, PAIR_WISE, HOLISTIC = "pixel_wise", "pair_wise", "holistic"


class CriticTrainer(StepParticipant):
    """Updates the critic in every step: Wasserstein distance and gradient penalty, exact for any batch split.

    The critic is trained to low scores for the student's maps and high scores for the teacher's (Liu et al. 2019,
    equation 5, with the penalty of Gulrajani et al. 2017). The student, in `DistilledInput`, is trained to high scores
    for its own maps. Both use the other's weights from before the step. Random numbers depend only on (seed, step,
    image).

    The network is a `DataParallelModel` around the critic, which takes over the split of `student`, or the critic
    itself. `update` is the critic's, and `factor` is the weight of the penalty.
    """

    name = "distillation"

    def __init__(
        self,
        critic: Critic,
        network: nn.Module,
        update: WeightUpdate,
        ranks: Ranks,
        *,
        penalty: PenaltyKind,
        factor: float,
        seed: int,
        student: nn.Module | None = None,
    ) -> None:
        self.critic, self.network, self.update, self._student = critic, network, update, student
        self.ranks, self.penalty, self.factor, self.seed = ranks, penalty, factor, seed
        self.precision, self.device = update.precision, update.precision.device
        self.num_steps = 0
        self.values: dict[str, Tensor] = {}
        """Values of the last step, on the device: `critic`, the Wasserstein distance, and `penalty`, unweighted."""
        self._is_bad = torch.zeros((), device=self.device)
        self._guard = BufferGuard(critic)
        self._seen: list[tuple[Tensor, Tensor]] = []
        critic.requires_grad_(False)  # except in its own update: the student's backward pass goes through it

    def begin(self) -> None:
        """Store the state for `rollback`, and divide batches over the devices as the student's network does."""
        if isinstance(self.network, DataParallelModel) and isinstance(self._student, DataParallelModel):
            self.network.divide(self._student.split, self._student.full_batch)
        self._guard.remember()
        self._seen.clear()

    def take(self, outputs: Any) -> None:
        """Keep the maps of a micro-batch for the critic's update."""
        parts = outputs if isinstance(outputs, list) else [outputs]
        real, fake = (torch.cat([part[2][i].to(self.device) for part in parts]) for i in range(2))
        self._seen.append((real, fake))

    def backward(self, batches: Sequence[Batch]) -> None:
        """Compute the gradient of the critic's loss over all micro-batches of the step and all ranks."""
        own = torch.tensor([len(batch.indices) for batch in batches], dtype=wide_dtype(self.device), device=self.device)
        (counts,) = self.ranks.sums((own,))
        # Times the number of ranks, over which `all_reduce_gradients` takes the mean.
        per_image, shares = self.ranks.world_size / counts.sum(), counts / counts.sum()
        distances, penalties = [], []
        self.critic.requires_grad_(True)
        try:
            for batch, (real, fake), share in zip(batches, self._seen, shares, strict=True):
                gap = self._scores(fake).sum() - self._scores(real).sum()
                gap = gap * per_image.to(gap.dtype)
                part = self._penalty(batch, real, fake)
                part = part * share.to(part.dtype)
                self.precision.backward(gap + self.factor * part)
                distances.append(-gap.detach() / self.ranks.world_size)
                penalties.append(part.detach())
            all_reduce_gradients(self.critic.parameters())
        finally:
            self.critic.requires_grad_(False)
        self._seen.clear()
        (distance,) = self.ranks.sums((torch.stack(distances).sum(),))
        self.values = {"critic": distance, "penalty": torch.stack(penalties).sum()}

    def _penalty(self, batch: Batch, real: Tensor, fake: Tensor) -> Tensor:
        is_dragan = self.penalty == "dragan"
        drawn = self._uniform(batch, real.shape[1:] if is_dragan else ()).to(real)
        alpha, noise = (None, drawn) if is_dragan else (drawn, None)
        return gradient_penalty(self._run, real, fake, self.penalty, alpha=alpha, noise=noise)

    def _uniform(self, batch: Batch, shape: Sequence[int]) -> Tensor:
        """Return (N, *shape) random numbers in 0..1 that depend only on (seed, step, image)."""
        seeds = [mix_seed("critic", self.seed, self.num_steps, index) for index in batch.indices]
        rows = [torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows) if rows else torch.zeros(0, *shape)

    def _run(self, maps: Tensor) -> Any:
        with self.precision.autocast():
            return self.network(maps)

    def _scores(self, maps: Tensor) -> Tensor:
        scores = self._run(maps)
        gathered: Tensor = scores.gather(device=self.device) if isinstance(self.network, DataParallelModel) else scores
        return gathered.float()

    @torch.no_grad()
    def finish_gradients(self) -> None:
        _, self._is_bad = self.update.finish_gradients(self.values["critic"])

    @torch.no_grad()
    def apply(self, is_step_bad: Tensor) -> None:
        """Update the critic, unless its own gradients are not finite or the student's step is skipped."""
        is_skipped = torch.maximum(self._is_bad, is_step_bad)
        self._guard.restore_where(is_skipped)
        self.update.apply(self._is_bad, is_skipped)
        self.num_steps += 1

    def rollback(self) -> None:
        self._guard.restore()
        self.update.optimizer.zero_grad(set_to_none=True)
        self._seen.clear()

    def set_lr(self, lr: float) -> None:
        set_lr(self.update.optimizer, lr)

    def terms(self) -> dict[str, Tensor]:
        """Return the Wasserstein distance and the gradient penalty, not weighted."""
        return self.values

    def divergence(self) -> str | None:
        is_alive = self.update.divergence() is None
        return None if is_alive else "the gradient of the distillation's critic not finite for too many steps in a row"

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.update.optimizer]

    def state_dict(self) -> dict[str, Any]:
        critic = {"critic": self.critic.state_dict(), "num_steps": self.num_steps}
        return {"critic": critic | self.update.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        assert state is not None
        critic = state["critic"]
        self.critic.load_state_dict(critic["critic"])
        self.update.load_state_dict(critic)
        self.num_steps = int(critic["num_steps"])


class Teacher:
    """A trained network with fixed weights, one copy per device.

    It is not an `nn.Module`, so its copies, in evaluation mode, are made only once, not with the student's replicas in
    every step.
    """

    def __init__(
        self,
        on: Mapping[torch.device, tuple[SegmentationModel, Preprocessing]],
        sha256: str = "",
        *,
        align_corners: bool = True,
    ) -> None:
        self.sha256, self.align_corners = sha256, align_corners
        self._on = dict(on)

    def __call__(self, images: Tensor, frame_px: Sequence[int], *, with_nodes: bool) -> tuple[Tensor, Tensor | None]:
        """Return logits (N, C, h, w) of uint8 images (N, 3, H, W), and the nodes of the features if asked for.

        The model sees the images padded to `frame_px`, as the student does.
        """
        model, preprocessing = self._on[images.device]
        with torch.inference_mode():
            heads, features = model.compute_with_features(padded(preprocessing.normalize(images), frame_px))
            nodes = node_features(features, PAIR_GRID) if with_nodes and features is not None else None
        # Autograd cannot save an inference tensor for the backward pass, but it can save a copy of these small ones.
        return heads[0].clone(), None if nodes is None else nodes.clone()


PAIR_GRID = 8, 8
"""Number of image regions of the pair-wise term along height and width."""


class DistilledInput(NormalizedInput):
    """A student that takes uint8 images and returns its outputs and the values of the distillation's terms.

    `critic_size` has height and width of the critic's input.
    """

    def __init__(
        self,
        model: SegmentationModel,
        preprocessing: Preprocessing,
        teacher: Teacher,
        critic: Critic | None,
        *,
        factors: Mapping[str, float],
        temperature: float,
        align_corners: bool,
        critic_size: tuple[int, int],
        channels_last: bool,
        autocast: Callable[[], Any],
    ) -> None:
        super().__init__(model, preprocessing, channels_last=channels_last)
        self.critic = critic
        self.teacher, self._autocast, self._factors = teacher, autocast, factors
        self._temperature, self._align_corners, self._critic_size = temperature, align_corners, critic_size

    def forward(self, images: Tensor, keys: Tensor | None = None) -> tuple[Any, ...]:
        """Return the student's outputs, the terms' values (N, terms), and the critic's real and fake maps."""
        factors = self._factors
        normalized = self.normalized(images)
        with sample_masks(keys):
            heads, features = self.model.compute_with_features(normalized)
        taught, teacher_nodes = self.teacher(images, normalized.shape[-2:], with_nodes=PAIR_WISE in factors)
        values: list[Tensor] = []
        maps: tuple[Tensor, ...] = ()
        if PIXEL_WISE in factors:
            values.append(self._pixel_wise(heads[0], taught, normalized.shape[-2:]))
        if features is not None and teacher_nodes is not None:
            values.append(pair_wise_difference(node_features(features, PAIR_GRID), teacher_nodes))
        if self.critic is not None:
            fake = critic_input(normalized, heads[0], self._critic_size)
            with self._autocast():
                values.append(-self.critic(fake).float())
            with torch.no_grad():
                real = critic_input(normalized, taught, self._critic_size)
            maps = (real, fake.detach())
        return heads, torch.stack(values, 1), maps

    def _pixel_wise(self, logits: Tensor, taught: Tensor, size: Sequence[int]) -> Tensor:
        own, other = self._align_corners, self.teacher.align_corners
        if own != other:  # their logits lie at the same places only at the size of the images
            logits, taught = (
                F.interpolate(values.float(), size, mode="bilinear", align_corners=is_aligned)
                for values, is_aligned in ((logits, own), (taught, other))
            )
        return pixel_wise_divergence(logits, taught, temperature=self._temperature, align_corners=own)


class TeacherIdentity(StepParticipant):
    """Keeps the hash of the teacher's checkpoint, so that a resume refuses another teacher."""

    name = "distillation"

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    def state_dict(self) -> dict[str, Any]:
        """Return the hash; `critic` is None unless a later participant sets it."""
        return {"teacher_sha256": self.teacher.sha256, "critic": None}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Check that the saved training had this teacher.

        Raises:
            CheckpointError: it had another one, or none.
        """
        if state is None or state["teacher_sha256"] != self.teacher.sha256:
            raise CheckpointError(
                "distill.teacher differs from the teacher at the start of this training: "
                "put the original checkpoint back, or start a new run",
                key="distill.teacher",
            )


def factors_of(section: DistillConfig) -> dict[str, float]:
    """Return the factors of the terms by name, without the terms that are off."""
    factors = {name: getattr(section, name) for name in (PIXEL_WISE, PAIR_WISE, HOLISTIC)}
    return {name: factor for name, factor in factors.items() if factor}


def check_frame(crop_px: tuple[int, int], student: SegmentationModel, teacher: SegmentationModel) -> None:
    """Raise ConfigError if the teacher would pad the crops further than the student, or takes only other sizes."""
    frame = student.suitable_size(*crop_px)
    wanted = teacher.suitable_size(*frame)
    if wanted != frame:
        is_common = student.suitable_size(*wanted) == wanted
        raise ConfigError(
            f"data.crop_px = {list(crop_px)}, which {student.name} sees as {list(frame)}, does not suit the teacher "
            f"{teacher.name}: use {list(wanted) if is_common else 'another teacher'}",
            key="data.crop_px",
        )


def build_critic(
    section: DistillConfig,
    num_channels: int,
    crop_px: tuple[int, int],
    precision: Precision,
    device: torch.device,
    *,
    is_synced: bool,
) -> Critic | None:
    """Return the critic of the holistic term; None if the term's weight is 0."""
    if not section.holistic:
        return None
    critic = Critic(num_channels, critic_size(crop_px), width=section.critic_width)
    if is_synced:
        convert_sync_batchnorm(critic)
    precision.prepare(critic.to(device))
    return critic.requires_grad_(False)  # before DistributedDataParallel collects the trainable parameters


def build_distillation(
    section: DistillConfig,
    network: TrainedNetwork,
    inner: DistilledInput,
    precision: Precision,
    *,
    base_lr: float,
    seed: int,
) -> list[StepParticipant]:
    """Build the participants of the distillation; a critic is trained on the devices of the student's network.

    `network` is the student's, and `inner` the same without its division over devices; `precision` is the critic's.
    """
    critic = inner.critic
    identity = TeacherIdentity(inner.teacher)
    if critic is None:
        return [identity]
    student, own = network.module, cast(nn.Module, critic)
    if isinstance(student, DataParallelModel):
        own = DataParallelModel(critic, student.devices, mode=student.mode)
    groups = [{"params": precision.master_weights(critic.parameters()), "lr_factor": CRITIC_LR / base_lr}]
    update = WeightUpdate(cast(Any, critic), adam(groups, CRITIC_LR, (0.9, 0.99)), precision)
    trainer = CriticTrainer(
        critic,
        own,
        update,
        network.ranks,
        penalty=section.critic_penalty,
        factor=PENALTY_WEIGHT,
        seed=seed,
        student=student,
    )
    return [identity, trainer]
