"""The inbox: when the file of a command is removed, and which settings a resumed training applies again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segapp import failpoints
from segapp.run.commands import parse_command, send_command
from segapp.run.events import EventLog, EventWriter
from segapp.run.folder import RunFolder
from segapp.training.inbox import Inbox
from segapp.training.live.replay import applied_after
from tests.support.live_runs import events


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
    assert applied_after(path, 10) == [(10, {"lr_factor": 0.5}, "a"), (12, {"gpu0_bsz_auto": True}, "c")]
    assert applied_after(path, 11) == [(12, {"gpu0_bsz_auto": True}, "c")]


def test_reverted_split_is_left_out_and_auto_moves_are_kept(tmp_path: Path) -> None:
    def split(status: str, **fields: Any) -> dict[str, Any]:
        return {"type": "gpu0_bsz", "status": status, "old": None, "new": 3, "epoch": 2, "step": 10, **fields}

    path = events_file(
        tmp_path,
        answer("a", "set gpu0_bsz=3 lr_factor=0.5", 10, changes={"gpu0_bsz": 3, "lr_factor": 0.5}),
        split("reverted", id="a", step=None),
        answer("b", "set shares=0,3,2 recompute=all", 12, changes={"shares": [0, 3, 2], "recompute": "all"}),
        split("reverted", id="b", step=None),
        split("applied", epoch=3, step=20),
        split("applied", epoch=4, step=30, new=4),
        split("reverted", epoch=4, step=None, new=4),
    )
    expected = [
        (10, {"lr_factor": 0.5}, "a"),
        (12, {"recompute": "all"}, "b"),
        (20, {"gpu0_bsz": 3, "gpu0_bsz_auto": True}, None),
        (30, {"gpu0_bsz_auto": True}, None),
    ]
    assert applied_after(path, 0) == expected
    assert applied_after(path, 20) == expected[2:]


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    """The inbox of a run with a command."""
    folder = RunFolder.create(path=tmp_path / "run")
    send_command(folder.path, parse_command("pause"))
    event_log = EventLog(EventWriter(folder.events))
    yield Inbox(folder, event_log)
    event_log.close()


@pytest.mark.parametrize("is_crash", [False, True])
def test_many_answers_are_synced_together(
    inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_crash: bool
) -> None:
    commands = tmp_path / "run" / "commands"
    for i in range(1, 700):
        (commands / f"{'y' * 60}{i}").touch()
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for received in inbox.take(is_due=True):
        inbox.answer(received, "rejected", "no", 1)
    assert len(list(commands.iterdir())) == 700, "a file stays until its answer is durable"
    assert not synced
    if is_crash:
        inbox = Inbox(RunFolder(tmp_path / "run"), inbox._event_log)
    num_polls = 0
    while any(commands.iterdir()) and num_polls < 100:  # as many as a busy machine needs
        assert inbox.take(is_due=True) == []
        num_polls += 1
    assert 0 < len(synced) <= num_polls + is_crash
    assert not any(commands.iterdir())
    assert len({event["id"] for event in events(tmp_path / "run", "command")}) == 700


def test_the_file_stays_until_the_answer_is_on_disk(inbox: Inbox, tmp_path: Path) -> None:
    (received,) = inbox.take()
    failpoints.arm("events.before_write=raise:ENOSPC")
    inbox.answer(received, "applied", None, 1)
    for word in ("set lr_factor=0.5", "stop"):
        send_command(tmp_path / "run", parse_command(word))
    assert [each.text for each in inbox.take(is_due=True)] == ["stop"], "others wait for the disk, too"
    assert len(list((tmp_path / "run" / "commands").iterdir())) == 3
    failpoints.arm("")
    assert inbox._event_log.writer is not None
    assert inbox._event_log.writer.flush()
    assert [each.text for each in inbox.take(is_due=True)] == ["set lr_factor=0.5"]
    assert len(list((tmp_path / "run" / "commands").iterdir())) == 2
    assert [event["status"] for event in events(tmp_path / "run", "command")] == ["applied"]
