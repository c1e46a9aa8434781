"""How often the ranks meet: once per step, before it, and once between its micro-batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from segapp.parallel.distributed import Ranks
from segapp.training.step.engine import StepEngine
from tests.support.runs import merged, train


@pytest.mark.parametrize(("accumulate", "meetings"), [(1, 1), (2, 2)])
def test_ranks_meet_once_per_micro_batch(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int, meetings: int
) -> None:
    """Every poll of signals and commands is one collective of all ranks; other collectives are counted elsewhere."""
    counts: Counter[str] = Counter()
    between: list[int] = []
    poll, step = Ranks.any_of, StepEngine.step

    def counted_poll(self: Ranks, *flags: bool) -> tuple[bool, ...]:
        counts["polls"] += len(flags) == 4  # an evaluation asks one question of its own
        return poll(self, *flags)

    def counted_step(self: StepEngine, *arguments: Any, **keywords: Any) -> Any:
        result = step(self, *arguments, **keywords)
        between.append(counts.pop("polls", 0))
        return result

    monkeypatch.setattr(Ranks, "any_of", counted_poll)
    monkeypatch.setattr(StepEngine, "step", counted_step)
    config = merged(tiny, train={"epochs": 1, "batch_size": 2, "accumulate": accumulate, "ema": None})
    assert train(config, tmp_path / "run") == 0
    assert between[0] == meetings + 1, "the first step of an epoch is preceded by the poll that applies settings"
    full = list(between[1:-1])
    assert full
    assert set(full) == {meetings}
