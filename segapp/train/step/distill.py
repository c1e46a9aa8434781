"""Learning from a teacher: what a training step has more of, and the critic that learns beside the student.

`DistilledInput` is the network that the devices run: the student, beside it the teacher of that device and the critic.
It gives the terms' values per image, so that `CriterionDistilled` can add them at any split. The critic's own update
(`CriticTrainer`) needs the gradient of a gradient over the whole batch, which `DistributedDataParallel` cannot make: it
runs as a bare module, over replicas by `DataParallelModel` and over ranks with `all_reduce_gradients`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segapp.datasets.sampling import mix_seed
from segapp.errors import CheckpointError
from segapp.inference.normalize import NormalizedInput, Normalizer
from segapp.losses import node_features, pair_wise_difference, pixel_wise_divergence
from segapp.models import Critic, critic_input
from segapp.parallel import DataParallelModel, all_reduce_gradients, gradient_penalty
from segapp.parallel.penalties import PenaltyKind
from segapp.parallel.ranks import Ranks
from segapp.precision import Precision
from segapp.train.step.rollback import BufferGuard

if TYPE_CHECKING:
    from segapp.datasets.loader import Batch
    from segapp.models import SegmentationModel

PIXEL_WISE, PAIR_WISE, HOLISTIC = "pixel_wise", "pair_wise", "holistic"


class Teacher:
    """A trained network on every device that needs it; it never learns.

    No `nn.Module`: the copies are made once, not with the student's replicas in every step.

    Args:
        on: device -> the network in evaluation mode and what it was normalised with, both there.
        sha256: of the checkpoint that it comes from.
    """

    def __init__(self, on: Mapping[torch.device, tuple[SegmentationModel, Normalizer]], sha256: str = "") -> None:
        self.sha256 = sha256
        self._on = dict(on)

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
        """uint8 images (N, 3, H, W) -> (outputs of the student, values (N, terms), the critic's real and fake maps)."""
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


class CriticTrainer:
    """Makes the critic's share of every step: Wasserstein distance and gradient penalty, exact at any split.

    The critic wants low scores for the student's maps and high ones for the teacher's, Liu et al., equation 5 with the
    penalty of Gulrajani et al. 2017; the student, by `DistilledInput`, wants high scores for its own. Both see the
    other as it was before the step. Random numbers depend on (seed, step, image) alone.

    Args:
        critic: the bare module, on its first device.
        network: runs it: a `DataParallelModel` around it, or the module itself.
        optimizer: over its parameters, with `lr_factor` in its groups.
        precision: of the critic.
        kind: which gradient penalty.
        penalty_factor: its weight.
        seed: of the training.
        ranks: the processes that share every step.

    Attributes:
        num_steps: steps made.
        terms: of the last step, on the device: `critic`, how far it tells the two apart, and `penalty`, not weighted.
        bad_in_row: steps in a row that left the critic as it was, because its gradient was not finite.
    """

    def __init__(
        self,
        critic: Critic,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        *,
        kind: PenaltyKind,
        penalty_factor: float,
        seed: int,
        ranks: Ranks,
    ) -> None:
        self.critic, self.network, self.optimizer, self.precision = critic, network, optimizer, precision
        self.kind, self.penalty_factor, self.seed, self.ranks = kind, penalty_factor, seed, ranks
        self.device = precision.device
        self.num_steps = 0
        self.terms: dict[str, Tensor] = {}
        self.bad_in_row = torch.zeros((), dtype=torch.int64, device=self.device)
        self._guard = BufferGuard(critic)
        self._seen: list[tuple[Tensor, Tensor]] = []
        critic.requires_grad_(False)  # but in its own turn: the student's backward pass goes through it

    def begin(self) -> None:
        """Remembers what a step may have to take back."""
        self._guard.remember()
        self.forget()

    def forget(self) -> None:
        """Lets go of the maps that were taken."""
        self._seen.clear()

    def take(self, outputs: Any) -> None:
        """Keeps the maps of a micro-batch for the critic's turn.

        Args:
            outputs: of a network around `DistilledInput`.
        """
        parts = outputs if isinstance(outputs, list) else [outputs]
        real, fake = (torch.cat([part[2][i].to(self.device) for part in parts]) for i in range(2))
        self._seen.append((real, fake))

    def follow(self, network: nn.Module) -> None:
        """Divides batches over the devices as the student's network does."""
        if isinstance(self.network, DataParallelModel) and isinstance(network, DataParallelModel):
            self.network.shares = network.shares
            self.network.gpu0_bsz = network.gpu0_bsz

    def backward(self, batches: Sequence[Batch]) -> None:
        """The gradient of the critic's loss over all micro-batches of the step and all ranks.

        Args:
            batches: whose maps were taken, in this order.
        """
        own = torch.tensor([len(batch.indices) for batch in batches], dtype=torch.float64, device=self.device)
        (counts,) = self.ranks.sums((own,))
        per_image, shares = self.ranks.world_size / counts.sum(), counts / counts.sum()
        distances, penalties = [], []
        with self._learning():
            for batch, (real, fake), share in zip(batches, self._seen, shares, strict=True):
                gap = self._scores(fake).sum() - self._scores(real).sum()
                gap = gap * per_image.to(gap.dtype)
                part = self._penalty(batch, real, fake)
                part = part * share.to(part.dtype)
                self.precision.scale(gap + self.penalty_factor * part).backward()  # type: ignore[no-untyped-call]
                distances.append(-gap.detach() / self.ranks.world_size)
                penalties.append(part.detach())
            all_reduce_gradients(self.critic.parameters())
        self.forget()
        (distance,) = self.ranks.sums((torch.stack(distances).sum(),))
        self.terms = {"critic": distance, "penalty": torch.stack(penalties).sum()}

    def _penalty(self, batch: Batch, real: Tensor, fake: Tensor) -> Tensor:
        noise = alpha = None
        if self.kind == "dragan":
            noise = self._uniform(batch, real.shape[1:]).to(real)
        else:
            alpha = self._uniform(batch, ()).to(real)
        return gradient_penalty(self._run, real, fake, self.kind, alpha=alpha, noise=noise)

    def _uniform(self, batch: Batch, shape: Sequence[int]) -> Tensor:
        """(N, *shape) numbers in 0..1, of each image its own."""
        rows = []
        for index in batch.indices:
            generator = torch.Generator().manual_seed(mix_seed("critic", self.seed, self.num_steps, index))
            rows.append(torch.rand(tuple(shape), generator=generator))
        return torch.stack(rows)

    def _run(self, maps: Tensor) -> Any:
        with self.precision.autocast():
            return self.network(maps)

    def _scores(self, maps: Tensor) -> Tensor:
        scores = self._run(maps)
        gathered: Tensor = scores.gather(self.device) if isinstance(self.network, DataParallelModel) else scores
        return gathered.float()

    @contextlib.contextmanager
    def _learning(self) -> Iterator[None]:
        self.critic.requires_grad_(True)
        try:
            yield
        finally:
            self.critic.requires_grad_(False)

    @torch.no_grad()
    def finish_gradients(self) -> Tensor:
        """Unscales the gradients; gives whether they are bad."""
        gradients = [p.grad for p in self.critic.parameters() if p.grad is not None]
        self.precision.unscale(gradients)
        norm = torch.nn.utils.get_total_norm(gradients).to(self.device)
        return (~(torch.isfinite(norm) & torch.isfinite(self.terms["critic"]))).float()

    @torch.no_grad()
    def apply(self, is_bad: Tensor, is_step_bad: Tensor) -> None:
        """Changes the critic.

        Args:
            is_bad: its own gradients are not finite.
            is_step_bad: the student's step is not made either.
        """
        is_left_out = torch.maximum(is_bad, is_step_bad)
        self.optimizer.found_inf = is_left_out  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.precision.update(is_bad)
        self._guard.restore_where(is_left_out)
        self.bad_in_row = (self.bad_in_row + 1) * is_bad.long()
        self.num_steps += 1

    def undo(self) -> None:
        """Leaves the critic as it was before the step."""
        self._guard.restore()
        self.optimizer.zero_grad(set_to_none=True)
        self.forget()

    def has_diverged(self, max_bad_steps: int) -> bool:
        """Whether it learns no more: its loss scale fell below 1, or without one too many bad steps came in a row."""
        if self.precision.scaler is not None:
            return float(self.precision.scaler.scale) < 1.0
        return int(self.bad_in_row) >= max_bad_steps

    def held_tensors(self) -> list[Tensor]:
        """What lies in memory between two steps."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return [*self.critic.parameters(), *self.critic.buffers(), *self._guard.kept, *states]

    def state_dict(self) -> dict[str, Any]:
        """What a continuation needs."""
        return {
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "num_steps": self.num_steps,
            "bad_in_row": self.bad_in_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state["precision"])
        self.num_steps = int(state["num_steps"])
        self.bad_in_row.copy_(state["bad_in_row"])


class Distillation:
    """What a step engine needs to know of a distillation.

    Args:
        teacher: whom the student learns from.
        critic: of the holistic term; None without it.
    """

    def __init__(self, teacher: Teacher, critic: CriticTrainer | None) -> None:
        self.teacher, self.critic = teacher, critic

    def held_tensors(self) -> list[Tensor]:
        """What lies on the first device between two steps."""
        return [*self.teacher.tensors(), *([] if self.critic is None else self.critic.held_tensors())]

    def replicated_bytes(self) -> int:
        """What every other device holds of it."""
        critic = [] if self.critic is None else list(self.critic.critic.parameters())
        return sum(t.nbytes for t in (*self.teacher.tensors(), *critic))

    def state_dict(self) -> dict[str, Any]:
        """What a continuation needs; the teacher only so far that another one is noticed."""
        return {
            "teacher_sha256": self.teacher.sha256,
            "critic": None if self.critic is None else self.critic.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Takes over what `state_dict` gave.

        Raises:
            CheckpointError: it is of a training with another teacher.
        """
        if state is None or state["teacher_sha256"] != self.teacher.sha256:
            raise CheckpointError(
                "distill.teacher is another checkpoint than the one that this training learned from: "
                "put that one back, or start a new run"
            )
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
