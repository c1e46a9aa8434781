"""The commands of a viewer, until they are answered, and how the last one is taken back."""

from __future__ import annotations

from typing import Any

import pytest

from segapp.errors import CommandError
from segapp.run.commands import Command, format_command, parse_command
from segapp.run.events import CommandAnswer, Gpu0Bsz, RunStart
from segapp.view.view import EventFold, View
from segapp.view.wishes import Wishes, in_force


class Viewer:
    """A view of a run in epoch 315 with three devices, its wishes, and a trainer that answers when it is asked to."""

    def __init__(self) -> None:
        self.now_s, self.sent = 100.0, list[Command]()
        self.view = View(epoch=315, split=(2, 3, 3))
        self.wishes = Wishes(self._send, lambda: self.now_s)

    def _send(self, command: Command) -> str:
        self.sent.append(command)
        return f"{len(self.sent):012x}"

    @property
    def texts(self) -> list[str]:
        return list(map(format_command, self.sent))

    def send(self, text: str) -> str:
        self.wishes.hold(parse_command(text), self.view)
        self.wishes.send_held()
        return f"{len(self.sent):012x}"

    def answer(self, command_id: str, command: str, status: str, by: str = "me@here", **more: Any) -> None:
        event = CommandAnswer(id=command_id, command=command, by=by, status=status, t=self.now_s, **more)  # type: ignore[arg-type]
        EventFold(self.view).add([event.model_dump()])
        self.wishes.take_answers(self.view)

    def apply(self, text: str, by: str = "me@here") -> None:
        """Send a command, or let another viewer send one, and answer it as applied."""
        command, self.now_s = parse_command(text), self.now_s + 1
        command_id = self.send(text) if by == "me@here" else "f" * 12
        changes = getattr(command, "new_settings", None)
        if changes is not None and "gpu0_bsz" in changes:
            change = Gpu0Bsz(status="applied", old=self.view.gpu0.value, new=changes["gpu0_bsz"], t=self.now_s)
            EventFold(self.view).add([change.model_dump()])
        self.answer(command_id, text, "applied", by, changes=changes)

    def undo(self) -> str | None:
        problem = self.wishes.undo(self.view)
        self.wishes.send_held()
        return problem


@pytest.fixture
def viewer() -> Viewer:
    return Viewer()


@pytest.mark.parametrize(
    ("text", "status", "undone_by"),
    [
        ("pause", "sent", "resume"),
        ("pause", "applied", "resume"),
        ("resume", "applied", "pause"),
        ("set gpu0_bsz=1", "sent", "cancel 000000000002"),
        ("set lr_factor=0.25", "accepted", "cancel 000000000002"),
        ("stop epoch", "accepted", "cancel 000000000002"),
        ("set gpu0_bsz=1", "applied", "set gpu0_bsz=4"),
        ("set lr_factor=0.25", "applied", "set lr_factor=1.0"),
        ("set recompute=all lr_factor=2", "applied", "set lr_factor=1.0 recompute=config"),
    ],
)
def test_last_command_is_taken_back_once(viewer: Viewer, text: str, status: str, undone_by: str) -> None:
    viewer.apply("set gpu0_bsz=4")
    if status == "applied":
        viewer.apply(text)
    else:
        command_id = viewer.send(text)
        if status == "accepted":
            viewer.answer(command_id, text, "accepted")
    assert viewer.undo() is None
    assert viewer.texts[2:] == [undone_by]
    assert viewer.undo() == f"nothing to take back: {viewer.texts[1]} was taken back"
    assert len(viewer.sent) == 3


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [
        ("checkpoint", "sent", "checkpoint cannot be taken back"),
        ("checkpoint", "applied", "checkpoint cannot be taken back"),
        ("stop", "sent", "stop cannot be taken back"),
        ("stop epoch", "applied", "stop epoch cannot be taken back"),
        ("set gpu0_bsz=9", "rejected", "nothing to take back: set gpu0_bsz=9 was rejected"),
        ("set lr_factor=9", "cancelled", "nothing to take back: set lr_factor=9.0 was cancelled"),
    ],
)
def test_what_cannot_be_taken_back_is_said(viewer: Viewer, text: str, status: str, problem: str) -> None:
    viewer.apply("set lr_factor=0.5")
    command_id = viewer.send(text)
    if status != "sent":
        viewer.answer(command_id, text, status)
    assert viewer.undo() == problem
    assert len(viewer.sent) == 2


def test_commands_of_others_are_not_taken_back(viewer: Viewer) -> None:
    viewer.apply("set gpu0_bsz=1", by="other@there")
    assert viewer.undo() == "nothing to take back: this view has sent no command"
    viewer.apply("set lr_factor=0.5")
    viewer.apply("set lr_factor=3", by="other@there")
    assert viewer.undo() == "lr_factor was changed by other@there since: set lr_factor=0.5 is not in force any more"
    viewer.apply("pause")
    viewer.apply("resume", by="other@there")
    assert viewer.undo() == "pause is not in force any more"
    assert viewer.texts == ["set lr_factor=0.5", "pause"]


def test_command_applied_before_its_cancel_can_be_taken_back(viewer: Viewer) -> None:
    viewer.apply("set lr_factor=3")
    command_id = viewer.send("set lr_factor=0.5")
    assert viewer.undo() is None
    viewer.answer(command_id, "set lr_factor=0.5", "applied", changes={"lr_factor": 0.5})
    viewer.answer(f"{3:012x}", f"cancel {command_id}", "rejected")
    assert viewer.undo() is None
    assert viewer.texts[2:] == [f"cancel {command_id}", "set lr_factor=3.0"]


@pytest.mark.parametrize("before", ["set gpu0_bsz=4", "set gpu0_bsz=none", "set gpu0_bsz=auto"])
def test_split_before_shares_comes_back_as_it_was(viewer: Viewer, before: str) -> None:
    viewer.apply(before, by="other@there")
    viewer.apply("set shares=2,3,3")
    assert viewer.undo() is None
    assert viewer.texts[-1] == before


def test_split_of_shares_comes_back_as_shares(viewer: Viewer) -> None:
    viewer.apply("set shares=2,3,3", by="other@there")
    assert in_force(viewer.view, "gpu0_bsz") == [2, 3, 3]
    viewer.apply("set gpu0_bsz=4")
    assert viewer.undo() is None
    assert viewer.texts[-1] == "set shares=2,3,3"


def test_auto_is_taken_back_and_comes_back(viewer: Viewer) -> None:
    viewer.apply("set shares=2,3,3", by="other@there")
    viewer.apply("set gpu0_bsz=auto")
    assert in_force(viewer.view, "shares") == "auto"
    moved = Gpu0Bsz(status="applied", old=2, new=5, split=[5, 2, 1], live={"gpu0_bsz": "auto"}, is_auto=True)
    EventFold(viewer.view).add([moved.model_dump()])
    assert viewer.undo() is None
    assert viewer.texts[-1] == "set shares=2,3,3"
    viewer.apply("set gpu0_bsz=auto", by="other@there")
    viewer.apply("set gpu0_bsz=3")
    kept = Gpu0Bsz(status="cancelled", old=3, new=1, live={"gpu0_bsz": 3}, is_auto=False)
    EventFold(viewer.view).add([kept.model_dump()])
    assert viewer.undo() is None
    assert viewer.texts[-1] == "set gpu0_bsz=auto"


def test_start_says_what_holds(viewer: Viewer) -> None:
    """Shares of the config come back as shares; what a resume has overridden is not in force any more."""
    facts: dict[str, Any] = {"classes": ["a"], "num_params": 1, "batch_size": 8, "epochs": 9, "steps_per_epoch": 9}
    start = RunStart(**facts, devices=["cpu"] * 3, gpu0_bsz=2, split=[2, 3, 3], live={"shares": [2, 3, 3]})  # type: ignore[list-item]
    EventFold(viewer.view).add([start.model_dump()])
    assert in_force(viewer.view, "gpu0_bsz") == [2, 3, 3]
    viewer.apply("set gpu0_bsz=4 recompute=all")
    assert viewer.undo() is None
    assert viewer.texts[-1] == "set recompute=config shares=2,3,3"
    viewer.apply("set gpu0_bsz=4 recompute=all")
    EventFold(viewer.view).add([start.model_dump()])
    assert (in_force(viewer.view, "recompute"), viewer.view.changes) == ("config", {})
    assert viewer.undo() == ("gpu0_bsz was changed since: set gpu0_bsz=4 recompute=all is not in force any more")
    viewer.apply("set gpu0_bsz=3")
    viewer.apply("set shares=1,3,4", by="other@there")
    assert viewer.undo() == "gpu0_bsz was changed by other@there since: set gpu0_bsz=3 is not in force any more"


def test_toggle_follows_the_newest_wish(viewer: Viewer) -> None:
    """Held, then sent, then as the run is."""
    assert not viewer.wishes.is_pause_wanted(viewer.view)
    viewer.wishes.hold(parse_command("pause"), viewer.view)
    viewer.wishes.hold(parse_command("checkpoint"), viewer.view)
    assert viewer.wishes.is_pause_wanted(viewer.view)
    assert [wish.text for wish in viewer.wishes.drop_held(type(parse_command("pause")))] == ["pause"]
    assert [wish.text for wish in viewer.wishes.held] == ["checkpoint"]
    viewer.wishes.drop_held()
    viewer.apply("pause")
    assert viewer.wishes.is_pause_wanted(viewer.view)
    command_id = viewer.send("resume")
    assert not viewer.wishes.is_pause_wanted(viewer.view)
    viewer.answer(command_id, "resume", "rejected")
    assert viewer.wishes.is_pause_wanted(viewer.view), "it is still paused"


def test_newest_open_command_is_shown_until_it_is_answered(viewer: Viewer) -> None:
    first = viewer.send("set lr_factor=0.5")
    viewer.answer(first, "set lr_factor=0.5", "accepted")
    viewer.now_s += 1.5
    assert viewer.wishes.waiting(viewer.view) == ""
    viewer.now_s += 1
    assert viewer.wishes.waiting(viewer.view) == "set lr_factor=0.5 after epoch 315"
    stop = viewer.send("stop epoch")
    viewer.answer(stop, "stop epoch", "accepted")
    viewer.view.is_paused = True
    viewer.now_s += 25
    assert viewer.wishes.waiting(viewer.view) == "stop epoch after epoch 315: resume first"
    pause = viewer.send("pause")
    viewer.now_s += 25
    assert viewer.wishes.waiting(viewer.view) == "pause, 25s"
    viewer.answer(pause, "pause", "applied")
    viewer.answer(stop, "stop epoch", "cancelled")
    viewer.view.is_paused = False
    assert viewer.wishes.waiting(viewer.view) == "set lr_factor=0.5 after epoch 315"
    viewer.answer(first, "set lr_factor=0.5", "applied", changes={"lr_factor": 0.5})
    assert viewer.wishes.waiting(viewer.view) == ""


def test_command_that_cannot_be_written_is_no_wish(viewer: Viewer) -> None:
    def refuse(command: Command) -> str:
        raise CommandError("no inbox")

    wishes = Wishes(refuse)
    wishes.hold(parse_command("pause"), viewer.view)
    ((wish, problem),) = wishes.send_held()
    assert (wish.text, problem) == ("pause", "no inbox")
    assert not wishes.is_pause_wanted(viewer.view)
    assert wishes.undo(viewer.view) == "nothing to take back: this view has sent no command"


def test_waiting_command_of_others_is_shown(viewer: Viewer) -> None:
    viewer.answer("f" * 12, "stop epoch", "accepted", "bob@there")
    viewer.answer("d" * 12, "set gpu0_bsz=1", "accepted", "carol@there")
    viewer.answer("e" * 12, "set lr_factor=2.0", "accepted", "bob@there")
    viewer.answer("f" * 12, "stop epoch", "cancelled", "bob@there")
    assert viewer.wishes.waiting(viewer.view) == "set lr_factor=2.0 by bob@there"
    viewer.send("pause")
    viewer.now_s += 25
    assert viewer.wishes.waiting(viewer.view) == "pause, 25s"


def test_after_the_end_only_what_a_resume_would_do_is_canceled(viewer: Viewer) -> None:
    waiting = viewer.send("set lr_factor=0.5")
    stop = viewer.send("stop epoch")
    viewer.now_s += 25
    assert viewer.wishes.undo(viewer.view) is None
    viewer.wishes.hold(parse_command("checkpoint"), viewer.view)
    viewer.answer(stop, "stop epoch", "applied")
    sent = viewer.wishes.send_held(is_over=True)
    assert [(wish.text, problem) for wish, problem in sent] == [
        ("cancel of stop epoch", "cancel of stop epoch was not sent: the run has ended"),
        ("checkpoint", "checkpoint was not sent: the run has ended"),
    ]
    assert viewer.wishes.open_ids == {waiting}
    assert viewer.wishes.waiting(viewer.view, is_over=True) == "set lr_factor=0.5, for a resume"
    assert viewer.wishes.undo(viewer.view) == "stop epoch cannot be taken back", "the cancellation came too late"
