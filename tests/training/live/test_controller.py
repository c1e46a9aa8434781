"""The controller: its answers without a training, and its effects in trainings in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from segapp import failpoints
from segapp.config import LiveSettings, RunConfig
from segapp.errors import RunError
from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker, MemoryCounters
from segapp.parallel import DataParallelModel
from segapp.run.commands import SETTINGS, parse_command, send_command
from segapp.run.events import EventLog, EventReader, EventWriter
from segapp.run.folder import RunFolder
from segapp.training import validation
from segapp.training.inbox import Inbox
from segapp.training.live.apply import BatchSplit, RecomputableBlocks
from segapp.training.live.changes import ChangeRecord, Replay
from segapp.training.live.controller import CommandController
from segapp.training.live.start import Start
from segapp.training.progress import TrainingPosition
from segapp.training.step.divided import ReplicatedNetwork
from segapp.view.view import EventFold, View
from tests.support.live_runs import assert_answered_once, seen, small, three_devices
from tests.support.runs import alerts, differing, events, final_state, losses, resume, train

MIDDLE = TrainingPosition(epoch=2, step=15, next_epoch=3, epochs=9)


def replicated(gpu0_bsz: int | None = None, num_devices: int = 3) -> ReplicatedNetwork:
    model: Any = nn.Linear(1, 1)
    replicas = DataParallelModel(model, ["cpu"] * num_devices, gpu0_bsz=gpu0_bsz, full_batch=8)
    return ReplicatedNetwork(model, replicas, torch.device("cpu"))


FRESH = Start(ChangeRecord(LiveSettings()), LiveSettings())


class ControllerHarness:
    """A controller with a real inbox, without a training."""

    def __init__(self, path: Path, start: Start = FRESH, counters: Sequence[MemoryCounters] = ()) -> None:
        self.folder = RunFolder.create(path=path)
        self.writer = EventWriter(self.folder.events)
        event_log = EventLog(self.writer)
        self.batch_split = BatchSplit(replicated(), 8, "dp")
        infos = [DeviceInfo(f"cuda:{i}", uuid=str(i)) for i in range(len(counters))]
        memory, blocks = DeviceMemoryTracker(infos, counters=counters), RecomputableBlocks(nn.Linear(1, 1))
        inbox = Inbox(self.folder, event_log)
        self.controller = CommandController(inbox, event_log, self.batch_split, memory, start, blocks=blocks)

    def send(self, text: str, position: TrainingPosition = MIDDLE) -> str:
        command_id = send_command(self.folder.path, parse_command(text))
        self.controller.handle_commands(self.controller.inbox.take(is_due=True), position)
        return command_id

    def begin_epoch(self, step: int) -> None:
        self.controller.add_automatic_changes(step)
        self.controller.apply(self.controller.record.requested, MIDDLE)

    def answers(self, command_id: str) -> list[str]:
        return [event["status"] for event in events(self.folder.path, "command") if event["id"] == command_id]

    def last(self) -> dict[str, Any]:
        return events(self.folder.path, "command")[-1]


@pytest.fixture
def harness(tmp_path: Path) -> ControllerHarness:
    return ControllerHarness(tmp_path / "run")


def test_new_split_is_applied_after_a_full_batch_succeeds(harness: ControllerHarness) -> None:
    command_id = harness.send("set gpu0_bsz=2 lr_factor=0.5")
    assert harness.controller.settings == LiveSettings()
    assert harness.controller.record.requested == LiveSettings(gpu0_bsz=2, lr_factor=0.5)
    harness.send("set gpu0_bsz=0")
    harness.begin_epoch(20)
    assert harness.controller.settings == LiveSettings(gpu0_bsz=0, lr_factor=0.5)
    assert harness.batch_split.current == (0, 4, 4)
    assert harness.answers(command_id) == ["accepted", "applied"]  # lr_factor needs no full batch
    harness.controller.after_step([0, 3, 3], 6, 21)
    assert seen(harness.folder.path, "gpu0_bsz")[-1]["status"] == "pending"  # a short batch does not confirm the split
    harness.controller.after_step([0, 4, 4], 8, 22)
    statuses = [(event["status"], event["new"], event["split"]) for event in seen(harness.folder.path, "gpu0_bsz")]
    assert statuses == [
        ("pending", 2, [2, 3, 3]),
        ("cancelled", 2, [2, 3, 3]),
        ("pending", 0, [0, 4, 4]),
        ("applied", 0, [0, 4, 4]),
    ]
    assert {event["status"] for event in assert_answered_once(harness.folder.path).values()} == {"applied"}
    changes = [event["changes"] for event in events(harness.folder.path, "command") if event["status"] == "applied"]
    assert changes == [{"lr_factor": 0.5}, {"gpu0_bsz": 0}]  # of the first only what was not superseded
    assert harness.last()["step"] == MIDDLE.step, "it is in force since then, and a resume applies it again there"


@pytest.mark.parametrize(("num_full", "num_short"), [(0, 25), (19, 0), (2, 17), (20, 0), (2, 18)])
def test_split_is_reverted_within_twenty_steps_only(harness: ControllerHarness, num_full: int, num_short: int) -> None:
    harness.send("set gpu0_bsz=6")
    controller, before = harness.controller, harness.batch_split.current
    harness.begin_epoch(15)
    for step in range(num_short):
        controller.after_step([4, 1, 1], 6, 16 + step)
    for step in range(num_full):
        controller.after_step([6, 1, 1], 8, 16 + num_short + step)
    done = controller.revert_split("no memory", 36)
    if num_full and num_full + num_short >= 20:
        assert done is None, "its trial is over: the batch did not change, the memory did"
        assert harness.batch_split.current == (6, 1, 1)
        assert not harness.batch_split.checker.failed
    else:
        assert done == "split 6·1·1 does not fit: back to split 2·3·3"
        assert harness.batch_split.current == before == (2, 3, 3)
        assert events(harness.folder.path, "gpu0_bsz")[-1]["status"] == "reverted"
        assert controller.revert_split("no memory", 37) is None, "the split before is not on trial"


def test_peaks_of_failed_steps_are_not_of_those_after_them(tmp_path: Path) -> None:
    """After a split was reverted, blocks are recomputed, or micro-batches are cut, in the middle of an epoch."""
    peaks = [0.0] * 3
    counters: Any = [Mock(pop_peak_mib=Mock(side_effect=lambda i=i: peaks[i])) for i in range(3)]
    harness = ControllerHarness(tmp_path / "run", counters=counters)
    controller = harness.controller
    controller.blocks = Mock(change=lambda old, new: old != new)

    def measured_after_step(split: Sequence[int], *peaks_mib: float) -> list[float | None] | None:
        peaks[:] = peaks_mib
        controller.after_step(split, 8, 16)
        found = controller.measured_mib()
        peaks[:] = 0.0, 0.0, 0.0
        return found

    harness.send("set gpu0_bsz=6")
    harness.begin_epoch(15)
    assert measured_after_step((6, 1, 1), 950.0, 250.0, 260.0) == [950.0, 250.0, 260.0]
    assert controller.revert_split("no memory", 16)
    assert controller.measured_mib() is None
    assert measured_after_step((2, 3, 3), 300.0, 400.0, 410.0) == [300.0, 400.0, 410.0]
    for number, changes in enumerate(({"is_recomputed": True}, {"num_pieces": 2}), start=1):
        controller.adopt(controller.settings.with_changes(changes))
        assert controller.measured_mib() is None
        lower = [300.0 - number, 400.0 - number, 410.0 - number]
        assert measured_after_step((2, 3, 3), *lower) == lower
    controller.after_epoch()
    measured = harness.batch_split.checker.peaks.measured
    assert measured == {(2, 3, 3): (298.0, 398.0, 408.0)}, "the peaks of the failed split had kept activations too"


def test_failed_split_is_refused_from_then_on(harness: ControllerHarness) -> None:
    harness.send("set shares=1,4,3")
    harness.begin_epoch(5)
    harness.controller.after_step([1, 4, 3], 8, 6)
    harness.send("set gpu0_bsz=6")
    harness.begin_epoch(15)
    assert harness.controller.revert_split("no memory", 15) == "split 6·1·1 does not fit: back to split 1·4·3"
    splits = [(event["old"], event["new"], event["status"]) for event in seen(harness.folder.path, "gpu0_bsz")]
    assert splits[1:] == [(None, 1, "applied"), (1, 6, "pending"), (1, 6, "reverted")]
    assert harness.batch_split.current == (1, 4, 3)
    harness.send("set shares=6,2,0")
    assert harness.last()["status"] == "rejected"
    assert "device 0 ran out of memory with 6 samples: use fewer" in harness.last()["reason"]
    harness.send("set gpu0_bsz=6 --force")
    assert harness.last()["status"] == "accepted"
    harness.controller.apply(LiveSettings(gpu0_bsz=7, gpu0_bsz_auto=True), MIDDLE)
    harness.controller.revert_split("no memory", 20)
    assert harness.controller.settings == LiveSettings(shares=[1, 4, 3], gpu0_bsz_auto=True), "auto stays on"


def test_auto_avoids_a_failed_split_after_a_resume_too() -> None:
    def split_of() -> BatchSplit:
        return BatchSplit(replicated(gpu0_bsz=6), 8, "dp")

    fresh = split_of()
    fresh.record_peaks((6, 1, 1), (900.0, 250.0, 250.0))
    best = replace(fresh.checker, usable_mib=[1000.0] * 3).best_move()
    assert best is not None
    failed = split_of()
    failed.record_failure(best.split, (6, 1, 1))
    assert failed.checker.ceiling is None, "device 0 had fewer samples than before: another device ran out of memory"
    failed.record_peaks((6, 1, 1), (900.0, 250.0, 250.0))
    failed.record_peaks((5, 2, 1), (750.0, 400.0, 250.0))
    failed.record_failure((8, 0, 0), (6, 1, 1))
    resumed = split_of()
    resumed.record_failure((7, 1, 0), (6, 1, 1))
    resumed.load_state_dict(failed.state_dict())
    assert (failed.checker.ceiling, resumed.checker.ceiling) == (8, 7)
    assert resumed.checker.failed == {best.split, (8, 0, 0), (7, 1, 0)}
    assert resumed.checker.peaks.measured == failed.checker.peaks.measured
    for batch_split in (failed, resumed):
        move = replace(batch_split.checker, usable_mib=[1000.0] * 3).best_move()
        assert move is not None
        assert move.split != best.split


def test_other_mode_or_devices_forget_what_failed() -> None:
    """Outputs are gathered on device 0 only in dp, so a split that fails there may fit in ddp."""
    before = BatchSplit(replicated(gpu0_bsz=3), 8, "dp")
    before.record_failure((5, 2, 1))
    assert (before.checker.failed, before.checker.ceiling) == ({(5, 2, 1)}, 5)
    for mode, failed in (("dp", {(5, 2, 1), (2, 3, 3)}), ("ddp", {(2, 3, 3)})):
        after = BatchSplit(replicated(gpu0_bsz=3), 8, mode)
        after.record_failure((2, 3, 3))
        after.load_state_dict(before.state_dict())
        assert (after.checker.failed, after.checker.ceiling) == (failed, 5 if mode == "dp" else None)
    after = BatchSplit(replicated(num_devices=2, gpu0_bsz=3), 8, "dp")
    after.load_state_dict(before.state_dict())
    assert (set(after.checker.failed), after.checker.ceiling) == (set(), None)


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("set shares=4,4", "rejected", "names 2 devices"),
        ("set gpu0_bsz=auto", "rejected", "use a number"),
        ("set gpu0_bsz=none", "applied", "already in use"),
        ("set shares=2,3,3", "applied", "already in use"),
        ("resume", "applied", "not paused"),
        ("cancel", "rejected", "nothing to cancel"),
        ("cancel 0123456789ab", "rejected", "0123456789ab"),
    ],
)
def test_invalid_or_redundant_command_is_answered_at_once(
    harness: ControllerHarness, text: str, status: str, reason: str
) -> None:
    harness.send(text)
    assert harness.last()["status"] == status
    assert reason in harness.last()["reason"]
    assert_answered_once(harness.folder.path)


def test_settings_of_two_requests_are_joined_and_told(harness: ControllerHarness) -> None:
    """Of the first only its split is replaced, by the third; what waits holds in the order of the requests."""
    first, second = harness.send("set gpu0_bsz=5 recompute=off"), harness.send("set lr_factor=0.5")
    third = harness.send("set shares=1,4,3")
    harness.send("set lr_factor=3 recompute=config")
    assert harness.controller.record.requested == LiveSettings(shares=[1, 4, 3], lr_factor=3)
    assert [harness.answers(each)[-1] for each in (first, second, third)] == ["cancelled", "cancelled", "accepted"]
    cancelled = [event["id"] for event in seen(harness.folder.path, "gpu0_bsz") if event["status"] == "cancelled"]
    assert cancelled == [first], "once, although a later request takes the rest of the first"
    harness.send("set lr_factor=7 gpu0_bsz=6")
    harness.send("set lr_factor=4")
    assert seen(harness.folder.path, "gpu0_bsz")[-1]["status"] == "pending", "its split still waits"
    kept = harness.send("set gpu0_bsz=2 recompute=off lr_factor=9")
    harness.send("set shares=2,2,4 lr_factor=8")
    harness.begin_epoch(20)
    (answer,) = [event for event in seen(harness.folder.path, "command") if event["id"] == kept][1:]
    assert answer["changes"] == {"recompute": "off"}
    assert answer["reason"].startswith(
        "no blocks recomputed in the backward pass; gpu0_bsz, lr_factor was superseded by "
    )


def test_viewers_know_the_settings_in_force(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was canceled, replaced, applied or reverted."""
    monkeypatch.setattr(DeviceMemoryTracker, "usable_mib", lambda _: [1000.0] * 3)

    def shown() -> tuple[Any, ...]:
        view = View()
        EventFold(view).add(EventReader(harness.folder.events).read_raw())
        assert {**dict.fromkeys(SETTINGS), **view.live} == harness.controller.live
        splits = seen(harness.folder.path, "gpu0_bsz")
        assert all(event["is_auto"] == (event["live"].get("gpu0_bsz") == "auto") for event in splits)
        return tuple(view.live.get(name) for name in ("gpu0_bsz", "shares", "lr_factor", "recompute"))

    harness.send("set gpu0_bsz=auto")
    harness.begin_epoch(5)
    harness.send(f"cancel {harness.send('set gpu0_bsz=3')}")
    harness.send("set gpu0_bsz=4")
    assert shown() == ("auto", None, 1.0, "config"), "what is canceled or waits is not in force"
    harness.send("set shares=1,4,3 lr_factor=0.5")
    harness.begin_epoch(10)
    harness.controller.after_step([1, 4, 3], 8, 11)
    assert shown() == (None, [1, 4, 3], 0.5, "config")
    harness.send("set gpu0_bsz=6 recompute=off")
    harness.begin_epoch(15)
    harness.controller.after_step([6, 1, 1], 8, 16)
    assert shown() == (6, None, 0.5, "off")
    harness.controller.revert_split("no memory", 17)
    assert shown() == (None, [1, 4, 3], 0.5, "off")
    harness.send("set gpu0_bsz=auto")
    harness.begin_epoch(20)
    assert shown() == ("auto", None, 0.5, "off")
    harness.controller.apply(LiveSettings(gpu0_bsz=5, gpu0_bsz_auto=True, lr_factor=0.5, recompute="off"), MIDDLE)
    harness.controller.revert_split("no memory", 21)
    assert shown()[0] == "auto", "no event tells of a change without a request"


def test_pending_auto_is_superseded_by_a_newer_request(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMemoryTracker, "usable_mib", lambda _: [1000.0] * 3)
    first, second = harness.send("set gpu0_bsz=auto"), harness.send("set gpu0_bsz=auto")
    assert (harness.answers(first), harness.answers(second)) == (["accepted", "cancelled"], ["accepted"])
    assert harness.controller.record.requested == LiveSettings(gpu0_bsz_auto=True)
    harness.begin_epoch(20)
    assert harness.last()["changes"] == {"gpu0_bsz_auto": True}
    harness.send("set gpu0_bsz=5")
    harness.send("set gpu0_bsz=2")  # the split in force, but no longer by auto
    assert harness.last()["status"] == "accepted"
    assert harness.controller.record.requested == LiveSettings(gpu0_bsz=2)


def test_settings_are_rejected_in_the_last_epoch(harness: ControllerHarness) -> None:
    harness.send("set lr_factor=2", TrainingPosition(9, 80, 10, 9))
    assert (harness.last()["status"], "epoch 9 is the last" in harness.last()["reason"]) == ("rejected", True)
    harness.send("set lr_factor=2", TrainingPosition(9, 80, 9, 9))
    assert harness.last()["status"] == "accepted"


def test_cancel_removes_one_or_all_pending_commands(harness: ControllerHarness) -> None:
    texts = ("set gpu0_bsz=3", "stop epoch", "stop epoch", "stop epoch", "set lr_factor=0.1")
    first, stop, other_stop, last_stop, second = map(harness.send, texts)
    harness.send(f"cancel {first}")
    harness.send(f"cancel {stop}")
    assert harness.controller.record.requested == LiveSettings(lr_factor=0.1)
    assert harness.controller.requests.stop == "epoch"
    third = harness.send("set gpu0_bsz=5")
    harness.send("cancel")
    assert harness.controller.record.waiting == ()
    assert harness.controller.requests.stop is None
    for command_id in (first, second, third, stop, other_stop, last_stop):
        assert harness.answers(command_id) == ["accepted", "cancelled"]


def test_resume_cancels_pending_pause_and_stop_a_later_stop(harness: ControllerHarness) -> None:
    pause = harness.send("pause")
    assert harness.controller.requests.is_paused
    harness.send("resume")
    assert not harness.controller.requests.is_paused
    assert harness.answers(pause) == ["cancelled"]
    later, *now = (harness.send(text) for text in ("stop epoch", "stop", "stop"))
    harness.send("stop epoch")
    assert harness.controller.requests.stop == "now"
    assert harness.answers(later) == ["accepted", "cancelled"]
    harness.controller.answer_at_end(MIDDLE, "the end", is_finished=False)
    assert [harness.answers(each) for each in now] == [["applied"], ["applied"]]


def test_waiting_setting_keeps_what_an_error_adopts(harness: ControllerHarness) -> None:
    harness.send("set lr_factor=0.5")
    harness.controller.adopt(harness.controller.settings.with_changes({"is_recomputed": True, "num_pieces": 2}))
    harness.begin_epoch(20)
    found = harness.controller.settings
    assert (found.lr_factor, found.recompute, found.num_pieces) == (0.5, "all", 2)


def test_pending_settings_survive_a_stop_and_others_are_answered(harness: ControllerHarness) -> None:
    command_id = harness.send("set gpu0_bsz=3")
    unread = send_command(harness.folder.path, parse_command("pause"))
    harness.controller.answer_at_end(MIDDLE, "stopped", is_finished=False)
    assert harness.answers(unread) == ["rejected"]
    again = Inbox(harness.folder, EventLog(harness.writer))
    assert [received.id for received in again.take()] == [command_id]
    harness.controller.answer_at_end(MIDDLE, "finished", is_finished=True)
    assert harness.answers(command_id) == ["accepted", "cancelled"]


def test_open_commands_are_answered_at_the_end(harness: ControllerHarness) -> None:
    kinds = ("stop", "checkpoint", "pause")
    read = [harness.send(kind) for kind in kinds]
    unread = [send_command(harness.folder.path, parse_command(kind)) for kind in kinds]
    for i in range(1001):
        (harness.folder.path / "commands" / f"junk {i}").touch()
    harness.controller.answer_at_end(MIDDLE, "the end", is_finished=False)
    assert [harness.answers(each) for each in read] == [["applied"], ["applied"], ["cancelled"]]
    assert [harness.answers(each) for each in unread] == [["applied"], ["applied"], ["rejected"]]
    assert len(assert_answered_once(harness.folder.path)) == 4


def test_answered_command_left_by_a_crash_is_not_repeated(harness: ControllerHarness) -> None:
    command_id = harness.send("checkpoint")
    (path,) = (harness.folder.path / "commands").iterdir()
    content = path.read_bytes()
    harness.controller.answer_all("checkpoint", "applied", "checkpoints/last.pt at step 15", 15)
    assert not path.exists()
    path.write_bytes(content)  # the crash came between the answer and the removal
    again = Inbox(harness.folder, EventLog(harness.writer))
    assert again.take() == []
    assert not path.exists()
    assert harness.answers(command_id) == ["applied"]


# --- in a training ---------------------------------------------------------------------------------------------------


def sent_before(folder: Path, *texts: str) -> None:
    """Send commands before the training begins; a `set` then holds from its first epoch on."""
    RunFolder.create(path=folder)
    for text in texts:
        send_command(folder, parse_command(text))


def test_oom_after_a_split_change_reverts_it_and_redoes_the_step(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Every step has the old split: two epochs of two steps are equal bit for bit."""
    folder, reference = tmp_path / "run", tmp_path / "reference"
    assert train(three_devices(tiny, 2), reference) == 0
    sent_before(folder, "set gpu0_bsz=3")
    failpoints.arm("train.backward=1:oom")
    assert train(three_devices(tiny, 2), folder) == 0
    assert losses(folder) == losses(reference)
    paths = differing(final_state(folder), final_state(reference))
    assert [path for path in paths if not path.startswith(("/best", "/live/splits"))] == []
    assert [event["split"] for event in events(folder, "step")] == [[1, 2, 2]] * 4
    reverted = events(folder, "gpu0_bsz")[-1]
    assert (reverted["status"], reverted["old"], reverted["new"]) == ("reverted", None, 3)
    assert "out of memory" in reverted["reason"]
    assert [event["kind"] for event in alerts(folder)] == ["oom"]
    assert assert_answered_once(folder)["set gpu0_bsz=3"]["status"] == "rejected"


def test_lr_factor_holds_from_next_epoch_and_after_resumes(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Also after a crash before the first save: the resumed training applies it again."""
    config = small(tiny, 3, schedule={"name": "constant", "warmup_steps": 0}, train={"batch_size": 5})
    folder = tmp_path / "run"
    sent_before(folder, "set lr_factor=0.5")
    failpoints.arm("train.step=2:raise:RuntimeError")
    with pytest.raises(RunError):
        train(config, folder)
    failpoints.arm("")
    send_command(folder, parse_command("stop epoch"))
    assert resume(config, folder) == 75
    assert resume(config, folder) == 0
    assert [(event["step"], event["lr"]) for event in events(folder, "step")] == [(i, 0.0005) for i in range(1, 7)]
    answers = assert_answered_once(folder)
    assert answers["stop epoch"]["reason"].startswith("asked to stop after the epoch: saved")


@pytest.fixture(scope="module")
def alone(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A reference run on one device without commands: 2 epochs of 2 steps, of three and of two micro-batches."""
    config = small(base, 2, train={"batch_size": 2, "accumulate": 3})
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train(config, folder) == 0
    return config, folder


def test_pause_changes_neither_losses_nor_reported_speed(alone: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, whole = alone
    folder = tmp_path / "run"
    sent_before(folder, "pause")

    def resume_later() -> None:
        while not any(event["status"] == "applied" for event in seen(folder, "command")):
            time.sleep(0.05)
        time.sleep(1.5)
        send_command(folder, parse_command("checkpoint"))
        send_command(folder, parse_command("resume"))

    thread = threading.Thread(target=resume_later)
    thread.start()
    assert train(config, folder) == 0
    thread.join()
    assert losses(folder) == losses(whole)
    assert not differing(final_state(folder), final_state(whole))
    first, others = events(folder, "step")[0], events(folder, "step")[1:]
    assert first["step_s"] < 1.0 + 5 * max(event["step_s"] for event in others)  # without the 1.5 s of the pause
    phases = [event["phase"] for event in events(folder, "heartbeat")]
    assert "paused" in phases
    assert_answered_once(folder)


def test_replays_hold_once_and_what_is_impossible_never(tmp_path: Path) -> None:
    replays = Replay(20, {"gpu0_bsz": 6, "lr_factor": 0.25}), Replay(30, {"shares": [1, 3, 4], "lr_factor": 7})
    start = Start(ChangeRecord(LiveSettings(gpu0_bsz=5), replays=replays), LiveSettings(gpu0_bsz=5))
    harness = ControllerHarness(tmp_path / "run", start)
    harness.begin_epoch(19)
    assert harness.controller.settings == LiveSettings(gpu0_bsz=5)
    harness.begin_epoch(20)
    assert harness.controller.settings == LiveSettings(gpu0_bsz=6, lr_factor=0.25)
    waiting = harness.send("set lr_factor=3")
    harness.begin_epoch(30)
    newer = LiveSettings(shares=[1, 3, 4], lr_factor=3)
    assert harness.controller.settings == newer, "a request is newer than a replay"
    assert harness.batch_split.current == (1, 3, 4)
    harness.controller.after_step([1, 3, 4], 8, 31)
    assert harness.answers(waiting) == ["accepted", "applied"]
    assert [event["id"] for event in events(harness.folder.path)] == [waiting] * 2, "a replay is silent"
    harness.begin_epoch(40)
    assert harness.controller.record.waiting == (), "it is applied once"
    assert harness.batch_split.current == (1, 3, 4)
    impossible = LiveSettings(shares=[4, 4], lr_factor=8)  # of a main rank that sees other devices
    harness.controller.apply(impossible, MIDDLE)
    assert harness.controller.settings == LiveSettings(shares=[1, 3, 4], lr_factor=8)
    # Settings of a machine with two devices.
    start = Start(ChangeRecord(LiveSettings(shares=[4, 4], lr_factor=2)), LiveSettings(gpu0_bsz=4, lr_factor=2))
    harness = ControllerHarness(tmp_path / "two", start)
    assert harness.batch_split.current == (4, 2, 2)
    assert harness.controller.settings == start.configured
    assert "shares=[4, 4] is impossible on these devices" in seen(harness.folder.path, "alert")[-1]["message"]


def test_auto_waits_for_replays_and_frozen_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemoryTracker, "usable_mib", lambda _: [1000.0] * 3)
    live = LiveSettings(gpu0_bsz=6, gpu0_bsz_auto=True)
    record = ChangeRecord(live, replays=(Replay(20, {"lr_factor": 2.0}),))
    harness = ControllerHarness(tmp_path / "run", Start(record, live))
    controller, split = harness.controller, harness.batch_split
    split.apply(live)
    split.record_peaks((6, 1, 1), (900.0, 250.0, 250.0))
    controller.add_automatic_changes(10, is_frozen=True)
    assert controller.record.waiting == (), "what is frozen now will need memory later"
    harness.begin_epoch(20)
    assert (controller.settings.gpu0_bsz, controller.settings.lr_factor) == (6, 2.0)
    controller.adopt(controller.settings.with_changes({"num_pieces": 2}))
    assert not split.checker.peaks.measured, "peaks of larger pieces say nothing about these"
    split.record_peaks((6, 1, 1), (900.0, 250.0, 250.0))
    harness.send("set lr_factor=3")
    for _ in range(2):
        controller.add_automatic_changes(30)
        assert [change.is_split for change in controller.record.waiting] == [False, True], "one move"
    harness.begin_epoch(30)
    assert controller.settings.gpu0_bsz_auto
    assert split.current is not None
    assert split.current[0] < 6


def test_sample_images_show_all_three_and_change_nothing(
    alone: tuple[RunConfig, Path], tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to each other: the image, the prediction, and the mask with stripes at its ignored pixels."""
    config, whole = alone
    paths = sorted((whole / "samples").iterdir())
    names = [f"epoch_000{epoch}_{i}.png" for epoch in (1, 2) for i in range(3)]
    assert [path.name for path in paths] == [*names, "first_batch.png"]
    palette = np.array([*seen(whole, "run_start")[0]["palette"], *[(110, 110, 110)] * 253], np.uint8)
    for number, path in zip((0, 2, 3), paths[3:6], strict=True):  # of 4 images
        image, prediction, truth = np.split(cv2.imread(str(path))[..., ::-1], 3, axis=1)
        assert np.array_equal(image[..., ::-1], cv2.imread(str(tiny_root / "images" / "val" / f"{number:02}.png")))
        mask = cv2.imread(str(tiny_root / "masks" / "val" / f"{number:02}.png"), cv2.IMREAD_UNCHANGED)
        rows, columns = np.indices(mask.shape)
        assert np.array_equal(truth, palette[mask] + 80 * ((mask == 255) & ((rows + columns) // 4 % 2 == 1))[..., None])
        assert not np.array_equal(prediction, truth)
        assert {tuple(color) for color in prediction.reshape(-1, 3).tolist()} <= {*map(tuple, palette[:3].tolist())}
    # A disk that takes no picture changes nothing either.
    monkeypatch.setattr(validation, "encode_png", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    assert train(config, tmp_path / "none") == 0
    assert not list((tmp_path / "none").glob("samples/*"))
    messages = [event["message"] for event in seen(tmp_path / "none", "alert")]
    assert "there is no picture of the first batch: no space" in messages
    assert not differing(final_state(whole), final_state(tmp_path / "none"))
