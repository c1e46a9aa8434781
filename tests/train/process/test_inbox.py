"""Which settings a resumed training applies again, from the events of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from segapp.train.process.inbox import applied_after


def events_file(folder: Path, *events: dict[str, Any]) -> Path:
    path = folder / "events.jsonl"
    lines = [json.dumps({"v": 1, "seq": i, "t": float(i), **event}) for i, event in enumerate(events, 1)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def answer(command_id: str, text: str, step: int, **fields: Any) -> dict[str, Any]:
    status = fields.pop("status", "applied")
    return {"type": "command", "id": command_id, "command": text, "by": "a@b", "status": status, "step": step, **fields}


def test_changes_of_the_event_are_read_and_not_the_text(tmp_path: Path) -> None:
    path = events_file(
        tmp_path,
        answer("a", "set gpu0_bsz=2 lr_factor=0.5", 10, changes={"lr_factor": 0.5}),
        answer("b", "set gpu0_bsz=none", 10, changes={}),
        answer("c", "set gpu0_bsz=auto", 12, changes={"gpu0_bsz_auto": True}),
        answer("d", "set lr_factor=9", 14, status="rejected"),
        answer("e", "checkpoint", 14),
    )
    assert applied_after(path, 10) == [(10, {"lr_factor": 0.5}), (12, {"gpu0_bsz_auto": True})]
    assert applied_after(path, 11) == [(12, {"gpu0_bsz_auto": True})]


def test_events_without_changes_are_read_by_their_text(tmp_path: Path) -> None:
    path = events_file(
        tmp_path,
        answer("a", "set gpu0_bsz=2 lr_factor=0.5", 10),
        answer("b", "set gpu0_bsz=auto lr_factor=0.25", 12),
        answer("c", "pause", 12),
    )
    expected = [(10, {"gpu0_bsz": 2, "lr_factor": 0.5}), (12, {"lr_factor": 0.25, "gpu0_bsz_auto": True})]
    assert applied_after(path, 0) == expected


def test_reverted_split_is_left_out_and_auto_moves_are_kept(tmp_path: Path) -> None:
    def split(status: str, **fields: Any) -> dict[str, Any]:
        return {"type": "gpu0_bsz", "status": status, "old": None, "new": 3, "epoch": 2, "step": 10, **fields}

    path = events_file(
        tmp_path,
        answer("a", "set gpu0_bsz=3 lr_factor=0.5", 10, changes={"gpu0_bsz": 3, "lr_factor": 0.5}),
        split("reverted", id="a", step=None),
        split("applied", epoch=3, step=20),
        split("applied", epoch=4, step=30, new=4),
        split("reverted", epoch=4, step=None, new=4),
    )
    expected = [(10, {"lr_factor": 0.5}), (20, {"gpu0_bsz": 3, "gpu0_bsz_auto": True}), (30, {"gpu0_bsz_auto": True})]
    assert applied_after(path, 0) == expected
    assert applied_after(path, 20) == expected[1:]
