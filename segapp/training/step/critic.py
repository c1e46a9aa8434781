"""The critic of holistic distillation: its own update in every step, exact at any split.

The update needs the gradient of a gradient over the whole batch, which `DistributedDataParallel` cannot compute: the
critic runs as a bare module, over replicas by `DataParallelModel` and over ranks with `all_reduce_gradients`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segapp.datasets.sampling import mix_seed
from segapp.models import Critic
from segapp.parallel import DataParallelModel, all_reduce_gradients, gradient_penalty
from segapp.parallel.penalties import PenaltyKind
from segapp.parallel.ranks import Ranks
from segapp.precision import Precision
from segapp.training.step.rollback import BufferGuard

if TYPE_CHECKING:
    from segapp.datasets.loader import Batch


@dataclass(frozen=True)
class PenaltySettings:
    """The gradient penalty of a critic.

    Attributes:
        kind: wgan-gp, wgan-lp or dragan.
        factor: its weight in the critic's loss.
        seed: of the training; random numbers depend on (seed, step, image) alone.
    """

    kind: PenaltyKind
    factor: float
    seed: int


class CriticTrainer:
    """Makes the critic's update of every step: Wasserstein distance and gradient penalty, exact at any split.

    The critic is trained to low scores for the student's maps and high ones for the teacher's (Liu et al. 2019,
    equation 5, with the penalty of Gulrajani et al. 2017); the student, in `DistilledInput`, to high scores for its
    own. Both use the other's weights from before the step. Random numbers depend on (seed, step, image) alone.

    Args:
        critic: the bare module, on its first device.
        network: computes the critic: a `DataParallelModel` around it, or the module itself.
        optimizer: over its parameters, with `lr_factor` in its groups.
        precision: of the critic.
        penalty: which gradient penalty, and its weight.
        ranks: the processes that share every step.

    Attributes:
        num_steps: steps made.
        values: of the last step, on the device: `critic`, the Wasserstein distance, and `penalty`, not weighted.
        bad_in_row: steps in a row that left the critic as it was, because its gradient was not finite.
    """

    def __init__(
        self,
        critic: Critic,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        penalty: PenaltySettings,
        ranks: Ranks,
    ) -> None:
        self.critic, self.network, self.optimizer, self.precision = critic, network, optimizer, precision
        self.penalty, self.ranks = penalty, ranks
        self.device = precision.device
        self.num_steps = 0
        self.values: dict[str, Tensor] = {}
        self._is_bad = torch.zeros((), device=self.device)
        self.bad_in_row = torch.zeros((), dtype=torch.int64, device=self.device)
        self._guard = BufferGuard(critic)
        self._seen: list[tuple[Tensor, Tensor]] = []
        critic.requires_grad_(False)  # but in its own turn: the student's backward pass goes through it

    def begin(self, network: nn.Module) -> None:
        """Store what `rollback` restores, and divide batches over the devices as the student's network does."""
        if isinstance(self.network, DataParallelModel) and isinstance(network, DataParallelModel):
            self.network.shares = network.shares
            self.network.gpu0_bsz = network.gpu0_bsz
        self._guard.remember()
        self.forget()

    def forget(self) -> None:
        """Drop the maps of the step."""
        self._seen.clear()

    def take(self, outputs: Any) -> None:
        """Keep the maps of a micro-batch for the critic's update."""
        parts = outputs if isinstance(outputs, list) else [outputs]
        real, fake = (torch.cat([part[2][i].to(self.device) for part in parts]) for i in range(2))
        self._seen.append((real, fake))

    def backward(self, batches: Sequence[Batch]) -> None:
        """Compute the gradient of the critic's loss over all micro-batches of the step and all ranks."""
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
                self.precision.scale(gap + self.penalty.factor * part).backward()  # type: ignore[no-untyped-call]
                distances.append(-gap.detach() / self.ranks.world_size)
                penalties.append(part.detach())
            all_reduce_gradients(self.critic.parameters())
        self.forget()
        (distance,) = self.ranks.sums((torch.stack(distances).sum(),))
        self.values = {"critic": distance, "penalty": torch.stack(penalties).sum()}

    def _penalty(self, batch: Batch, real: Tensor, fake: Tensor) -> Tensor:
        noise = alpha = None
        if self.penalty.kind == "dragan":
            noise = self._uniform(batch, real.shape[1:]).to(real)
        else:
            alpha = self._uniform(batch, ()).to(real)
        return gradient_penalty(self._run, real, fake, self.penalty.kind, alpha=alpha, noise=noise)

    def _uniform(self, batch: Batch, shape: Sequence[int]) -> Tensor:
        """Return (N, *shape) random numbers in 0..1 that depend on (seed, step, image) alone."""
        rows = []
        for index in batch.indices:
            generator = torch.Generator().manual_seed(mix_seed("critic", self.penalty.seed, self.num_steps, index))
            rows.append(torch.rand(tuple(shape), generator=generator))
        return torch.stack(rows) if rows else torch.zeros(0, *shape)

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
    def finish_gradients(self) -> None:
        """Unscale the gradients and decide whether they, and the critic's loss, are finite."""
        gradients = [p.grad for p in self.critic.parameters() if p.grad is not None]
        self.precision.unscale(gradients)
        norm = torch.nn.utils.get_total_norm(gradients).to(self.device)
        self._is_bad = (~(torch.isfinite(norm) & torch.isfinite(self.values["critic"]))).float()

    @torch.no_grad()
    def apply(self, is_step_bad: Tensor) -> None:
        """Update the critic, except where its own gradients are not finite or the student's step is skipped."""
        is_skipped = torch.maximum(self._is_bad, is_step_bad)
        self.optimizer.found_inf = is_skipped  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.precision.update(self._is_bad)
        self._guard.restore_where(is_skipped)
        self.bad_in_row = (self.bad_in_row + 1) * self._is_bad.long()
        self.num_steps += 1

    def rollback(self) -> None:
        """Restore the critic's buffers and drop its gradients and the outputs that it received."""
        self._guard.restore()
        self.optimizer.zero_grad(set_to_none=True)
        self.forget()

    def has_diverged(self, max_bad_steps: int) -> bool:
        """True if the loss scale fell below 1, or without a loss scale too many bad steps came in a row."""
        if self.precision.scaler is not None:
            return float(self.precision.scaler.scale) < 1.0
        return int(self.bad_in_row) >= max_bad_steps

    def held_tensors(self) -> list[Tensor]:
        """Return the tensors kept between two steps."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return [*self.critic.parameters(), *self.critic.buffers(), *self._guard.kept, *states]

    def state_dict(self) -> dict[str, Any]:
        """Return the critic's part of a checkpoint."""
        return {
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "num_steps": self.num_steps,
            "bad_in_row": self.bad_in_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state["precision"])
        self.num_steps = int(state["num_steps"])
        self.bad_in_row.copy_(state["bad_in_row"])
