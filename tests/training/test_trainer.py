"""What the loop of a training saves when it ends by an error, and whose random state it takes up again."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from segapp.checkpoint.saver import Position
from segapp.config import validate_config
from segapp.errors import DataError, NonFiniteError, OutOfMemoryError, WorkerError
from segapp.training import trainer as module
from segapp.training.live.apply import BatchSplit
from segapp.training.progress import Best
from segapp.training.signals import StopRequest
from segapp.training.trainer import Trainer


@pytest.mark.parametrize(
    ("error", "world_size", "is_required", "waits"),
    [
        (StopRequest("SIGTERM"), 2, True, False),
        (NonFiniteError("x"), 2, False, True),
        (NonFiniteError("diverged"), 2, None, True),
        (OutOfMemoryError("x"), 2, False, True),
        (DataError("x"), 1, False, True),
        (DataError("x"), 2, None, True),  # no save: the other ranks would not come to it
        (WorkerError("x"), 1, False, True),
        (WorkerError("x"), 3, None, True),
        (ValueError("x"), 1, None, True),
    ],
)
def test_state_is_saved_where_every_rank_has_it_whole(
    error: Exception, world_size: int, is_required: bool | None, waits: bool
) -> None:
    trainer = Mock(Trainer)
    trainer.saver, trainer.oom_policy, trainer.ranks = Mock(), Mock(can_save=True), Mock(world_size=world_size)
    trainer.position, trainer.has_diverged = Position(2, 3, 7), str(error) == "diverged"
    with pytest.raises(type(error)), Trainer._saved_on_failure(trainer):
        raise error
    saves = [call.kwargs["is_required"] for call in trainer.saver.finish.call_args_list]
    assert saves == ([] if is_required is None else [is_required])
    assert trainer.saver.wait_for_writer.called == waits
    assert trainer.answer_commands.called == isinstance(error, StopRequest)


def load(
    before: dict[str, Any], now: dict[str, Any], rank: int = 0, splits: BatchSplit | None = None, **saved: Any
) -> None:
    """Let a training with one config continue from the state of one with another."""
    parts = {"engine": Mock(), "progress": Mock(), "controller": Mock(batch_split=splits or Mock())}
    trainer = Mock(Trainer, **parts, plateau=None, facts=Mock(config=now), ranks=Mock(rank=rank))
    state = {"position": dataclasses.asdict(Position()), "best": dataclasses.asdict(Best()), "config": before}
    Trainer.load_state_dict(trainer, {"rng": [], "live": {"splits": {}}, **state, **saved})


@pytest.mark.parametrize(("rank", "restored"), [(0, ["first"]), (1, ["second"]), (2, [])])
def test_rank_takes_its_own_random_state_up_again(
    rank: int, restored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that the saved run did not have keeps the one of its seed."""
    found: list[str] = []
    config = {"parallel": {}, "train": {"recompute": "off"}}
    monkeypatch.setattr(module, "restore_rng", found.append)
    load(config, config, rank=rank, rng=["first", "second"])
    assert found == restored


@pytest.mark.parametrize(
    ("mode", "changes", "is_kept"),
    [
        ("dp", {"train": {"epochs": 9}, "parallel": {"gpu0_bsz": 3}}, True),
        ("dp", {"train": {"recompute": "all"}}, False),
        ("dp", {"train": {"compile": True}}, False),
        ("dp", {"parallel": {"sync_bn": False}}, False),
        ("ddp", {}, False),
    ],
)
def test_peaks_are_kept_if_steps_are_made_as_before(mode: str, changes: dict[str, Any], is_kept: bool) -> None:
    config: dict[str, Any] = validate_config({"name": "x", "data": {"format": "voc", "root": "x"}}).model_dump()
    network: Any = Mock(split_of=lambda num: [num - 1, 1], smallest_chunk=1, needs_samples=None)
    before, after = BatchSplit(network, 8, "dp"), BatchSplit(network, 8, mode)
    before.record_peaks((7, 1), (900.0, 250.0))
    before.record_failure((7, 1), (5, 3))
    new = {name: {**config[name], **changes.get(name, {})} for name in ("train", "parallel", "checkpoint")}
    load(config, new, splits=after, live={"splits": before.state_dict()})
    assert bool(after.checker.peaks.measured) == is_kept
    assert (set(after.checker.failed), after.checker.ceiling) == (({(7, 1)}, 7) if is_kept else (set(), None))


def test_only_finished_steps_have_had_their_algorithms_timed() -> None:
    """A step that runs out of memory is repeated in pieces: other sizes, whose algorithms cuDNN times again."""
    trainer = Mock(Trainer, device_memory=Mock(), engine=Mock(), oom_policy=Mock(), position=Position())
    trainer.safe_point, trainer.reporter, trainer.controller = Mock(), Mock(), Mock(recomputed=((),))
    trainer.liveness, trainer.ranks = Mock(has_stepped=False), Mock()
    trainer.settings, trainer.train_loader = Mock(batch_size=3), Mock(dataset=range(9))
    trainer._sizes = lambda *args: Trainer._sizes(trainer, *args)
    trainer.engine.network.split_of = lambda num: [num - 1, 1]
    trainer.engine.model.frozen_parameters = ()
    trainer.engine.step.side_effect = [torch.OutOfMemoryError("full"), "result"]
    trainer.oom_policy.begin.side_effect = [Mock(num_pieces=1), Mock(num_pieces=2)]
    trainer.oom_policy.undo_recompute_if_cause.return_value = False
    assert Trainer.train_step(trainer, [range(3)]) == "result"  # type: ignore[list-item, comparison-overlap]
    calls = [(name, args[0][:3]) for name, args, _ in trainer.device_memory.method_calls]
    whole, pieces = ((3,), 1, (2, 1)), ((3,), 2, (2, 1))
    assert calls == [("begin_step", whole), ("begin_step", pieces), ("end_step", pieces)]
