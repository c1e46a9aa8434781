"""The blocks of the network that are recomputed in the backward pass, chosen between two steps."""

from __future__ import annotations

from torch import nn

from segapp.config import RecomputeChoice
from segapp.errors import ConfigError
from segapp.models.blocks import find_blocks
from segapp.parallel import recomputed_blocks, set_recompute
from segapp.parallel.recompute import is_recomputable


class RecomputeController:
    """Applies the choice of recomputed blocks: the config's, all, or none.

    Args:
        model: the network, in which the blocks of the config, or of the memory plan, are already chosen.
        num_devices: number of devices of a `DataParallelModel`; else 1.
        problem: why no other blocks can be chosen; None if they can.
    """

    def __init__(self, model: nn.Module, num_devices: int = 1, problem: str | None = None) -> None:
        self._model = model
        self._configured = self.current = recomputed_blocks(model, num_devices)
        self.blocks: tuple[str, ...] = ()
        try:
            self.blocks = tuple(name for name, block in find_blocks(model).items() if is_recomputable(block))
        except ConfigError as error:  # `checkpoint_blocks` of a custom network without recomputation
            problem = problem or str(error)
        self.problem = problem or (None if self.blocks else "the model has no blocks")

    def sets_of(self, choice: RecomputeChoice) -> tuple[tuple[str, ...], ...]:
        """Return the names of the blocks for each device; without `config`, the same for all."""
        if choice == "config":
            return self._configured
        return (self.blocks if choice == "all" else (),) * len(self._configured)

    def words(self, choice: RecomputeChoice) -> str:
        """Return a choice in words."""
        which = {"off": "no blocks", "all": f"all {len(self.blocks)} blocks", "config": "the blocks of train.recompute"}
        return f"{which[choice]} recomputed in the backward pass"

    @property
    def has_kept(self) -> bool:
        """True if a device keeps the activations of a block that could be recomputed."""
        return self.problem is None and self.current != self.sets_of("all")

    def apply(self, choice: RecomputeChoice) -> bool:
        """Choose the blocks from the next step on; return True if this changes the choice."""
        wanted = self.sets_of(choice)
        is_new = wanted != self.current
        if is_new:
            set_recompute(self._model, wanted)
            self.current = wanted
        return is_new
