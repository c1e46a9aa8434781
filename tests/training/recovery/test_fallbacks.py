"""Fallbacks that need less memory: joined, in their order, adopted after a resume, and splits that ranks reverted."""

from __future__ import annotations

import json
import os
import types
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from segapp.checkpoint.saver import Position
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.preprocessing import Preprocessing
from segapp.inference.sliding import Inference
from segapp.parallel.distributed import Ranks
from segapp.run.events import CommandAnswer, EventLog, EventWriter, Gpu0Bsz
from segapp.run.folder import RunFolder
from segapp.training.inbox import applied_after
from segapp.training.recovery import (
    MemoryFallbacks,
    OomPolicy,
    fallbacks_after,
    next_eval_fallback,
    report_reverted_split,
)
from tests.support.runs import events

WHOLE = Inference(Preprocessing(PixelFormat(mean=(0.5,) * 3, std=(0.25,) * 3)))
"""Whole images."""

PAIRS = [
    (MemoryFallbacks(num_pieces=4), MemoryFallbacks(num_pieces=2), MemoryFallbacks(num_pieces=4)),
    (MemoryFallbacks(is_eval_single=True), MemoryFallbacks(), MemoryFallbacks(is_eval_single=True)),
    (MemoryFallbacks(window_px=(64, 96)), MemoryFallbacks(window_px=(128, 96)), MemoryFallbacks(window_px=(64, 96))),
    (MemoryFallbacks(window_px=(64, 256)), MemoryFallbacks(window_px=(96, 96)), MemoryFallbacks(window_px=(96, 96))),
    (MemoryFallbacks(window_px=(64, 96)), MemoryFallbacks(), MemoryFallbacks(window_px=(64, 96))),
    (MemoryFallbacks(is_recomputed=True), MemoryFallbacks(), MemoryFallbacks(is_recomputed=True)),
    (
        MemoryFallbacks(failed_splits=((3, 5),)),
        MemoryFallbacks(failed_splits=((2, 6), (3, 5))),
        MemoryFallbacks(failed_splits=((2, 6), (3, 5))),
    ),
]


@pytest.mark.parametrize(("one", "two", "both"), PAIRS)
def test_joined_fallbacks_need_as_little_as_either(
    one: MemoryFallbacks, two: MemoryFallbacks, both: MemoryFallbacks
) -> None:
    for first, second in permutations((one, two)):
        assert first.joined(second) == both
        assert MemoryFallbacks.from_json(first.joined(second).to_json()) == both


def test_window_is_no_larger_than_the_config_s() -> None:
    fallbacks = MemoryFallbacks(window_px=(64, 96))
    assert fallbacks.adapted(WHOLE).window_px == (64, 96)
    assert fallbacks.adapted(replace(WHOLE, window_px=(48, 128))).window_px == (48, 96)
    assert MemoryFallbacks().adapted(replace(WHOLE, window_px=(48, 128))).window_px == (48, 128)


def test_evaluation_shrinks_until_nothing_is_left() -> None:
    """Single images, windows of the crop's size, then half of it along each side, down to 64 px."""
    fallbacks, found = MemoryFallbacks(), []
    while True:
        inference = fallbacks.adapted(WHOLE)
        result = next_eval_fallback(fallbacks, inference, 4, (256, 100), is_fixed=False)
        if result is None:
            break
        fallbacks = result.adopted
        found.append((fallbacks.is_eval_single, fallbacks.window_px))
    assert found == [(True, None), (True, (256, 100)), (True, (128, 64)), (True, (64, 64))]
    assert next_eval_fallback(MemoryFallbacks(), WHOLE, 1, (256, 100), is_fixed=True) is None
    small = MemoryFallbacks(window_px=(32, 32))
    assert next_eval_fallback(small, small.adapted(WHOLE), 1, (32, 32), is_fixed=False) is None


def test_later_fallbacks_are_adopted_at_their_steps() -> None:
    later = [(3, MemoryFallbacks(num_pieces=2)), (6, MemoryFallbacks(num_pieces=4)), (7, MemoryFallbacks(num_pieces=8))]
    folder = types.SimpleNamespace(reports=None)
    context: Any = types.SimpleNamespace(ranks=Ranks(), event_log=None, device_memory=None, folder=folder)
    sizes: Any = {"accumulate": 1, "eval_batch_size": 2, "crop_px": (32, 32)}
    cleared: list[int] = []

    def policy() -> OomPolicy:
        batch_split = types.SimpleNamespace(batch_size=4, clear_peaks=lambda: cleared.append(1))
        controller: Any = types.SimpleNamespace(batch_split=batch_split)
        return OomPolicy(context, None, controller, WHOLE, **sizes, to_adopt=later)  # type: ignore[arg-type]

    step_by_step = policy()
    assert [step_by_step.begin(Position(step=step)).num_pieces for step in (2, 3, 5, 6)] == [1, 2, 2, 4]
    assert len(cleared) == 2, "peaks of larger pieces say nothing about these"
    assert policy().begin(Position(step=9)) == MemoryFallbacks(num_pieces=8)


class Run:
    """A run with a change of the split to 3 and 5 samples, and reports of ranks."""

    def __init__(self, path: Path, status: str) -> None:
        self.folder = RunFolder.create(path=path)
        self.log = EventLog(EventWriter(self.folder.events))
        command = "set gpu0_bsz=3"
        self.log.emit(CommandAnswer(id="c1", command=command, by="me", status="accepted", reason=None, step=4))
        self.log.emit(Gpu0Bsz(status=status, old=1, new=3, split=[3, 5], epoch=3, id="c1", step=4))  # type: ignore[arg-type]
        if status == "applied":
            done = {"changes": {"gpu0_bsz": 3}}
            self.log.emit(
                CommandAnswer(id="c1", command=command, by="me", status="applied", reason=None, step=4, **done)
            )

    def rank_fails(self, split: tuple[int, ...], later_s: float = 1.0) -> None:
        self.folder.reports.mkdir(exist_ok=True)
        path = self.folder.reports / "rank_1_step_4.json"
        fallbacks = MemoryFallbacks(failed_splits=(split,)).to_json()
        path.write_text(json.dumps({"step": 4, "problem": "no memory", "fallbacks": fallbacks}))
        at_s = events(self.folder.path)[-1]["t"] + later_s
        os.utime(path, (at_s, at_s))


@pytest.mark.parametrize("status", ["pending", "applied"])
def test_failed_split_of_a_rank_is_reverted_once(tmp_path: Path, status: str) -> None:
    run = Run(tmp_path / "run", status)
    run.rank_fails((3, 5))
    for _ in range(2):
        report_reverted_split(run.folder, run.log)
    reverted = [event for event in events(run.folder.path, "gpu0_bsz") if event["status"] == "reverted"]
    assert [(event["id"], event["old"], event["new"]) for event in reverted] == [("c1", 1, 3)]
    assert "no memory" in reverted[0]["reason"]
    final = [event for event in events(run.folder.path, "command") if event["status"] != "accepted"]
    assert [event["status"] for event in final] == ["rejected" if status == "pending" else "applied"]
    assert applied_after(run.folder.events, 0) == []
    assert fallbacks_after(run.folder, 0) == [(4, MemoryFallbacks(failed_splits=((3, 5),)))]


@pytest.mark.parametrize(("split", "later_s"), [((4, 4), 1.0), ((3, 5), -9.0)], ids=["another split", "before it"])
def test_reports_of_other_failures_revert_nothing(tmp_path: Path, split: tuple[int, ...], later_s: float) -> None:
    run = Run(tmp_path / "run", "pending")
    run.rank_fails(split, later_s)
    report_reverted_split(run.folder, run.log)
    assert [event["status"] for event in events(run.folder.path, "gpu0_bsz")] == ["pending"]
