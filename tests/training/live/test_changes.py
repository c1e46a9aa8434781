"""The changes of live settings against a reference: requests, cancels, out of memory, epochs, kills and resumes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from segapp.chunks import EVEN, plan_chunks, replan_shares
from segapp.config import validate_config
from segapp.memory.counters import DeviceMemoryTracker
from segapp.parallel import DataParallelModel
from segapp.run.commands import SetCommand, parse_command, send_command
from segapp.run.events import EventLog, EventWriter, Settings
from segapp.run.folder import RunFolder
from segapp.training.context import DeviceLocations
from segapp.training.inbox import Inbox
from segapp.training.live.apply import BatchSplit, RecomputableBlocks
from segapp.training.live.changes import Replay
from segapp.training.live.controller import CommandController
from segapp.training.live.replay import applied_after, fallbacks_after, reverted_splits
from segapp.training.live.start import start_of
from segapp.training.progress import TrainingPosition
from segapp.training.step.divided import ReplicatedNetwork
from tests.support.runs import events

BATCH, TRIAL_STEPS = 8, 20
NAMES = ("gpu0_bsz", "shares", "lr_factor", "recompute", "num_pieces", "gpu0_bsz_auto")


class Reference:
    """What the settings of a run should be: plain values, and no code of segapp but the arithmetic of a split."""

    def __init__(self) -> None:
        self.step, self.devices = 0, "abc"
        self.live: dict[str, Any] = dict(zip(NAMES, (None, None, 1.0, "config", 1, False), strict=True))
        self.waiting: dict[str, dict[str, Any]] = {}  # id -> new values, in the order of the requests
        self.final: dict[str, str] = {}  # id -> the only final answer
        self.trial: tuple[str, dict[str, Any], int] | None = None  # id, the settings before, steps that are left
        self.is_measured = True
        self.has_other = False  # True if the request on trial changed more than the split, which is not reverted
        self.ceiling = BATCH + 1  # samples with which device 0 ran out of memory

    def split(self, values: dict[str, Any] | None = None) -> tuple[int, ...]:
        live = self.live if values is None else self.folded(self.live, values)
        full = None if live["shares"] else BATCH
        return plan_chunks(BATCH, len(self.devices), live["gpu0_bsz"], shares=live["shares"], full_batch=full)

    @staticmethod
    def folded(live: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        of_split = {"gpu0_bsz": None, "shares": None} if {"gpu0_bsz", "shares"} & values.keys() else {}
        return {**live, **of_split, **values}

    def request(self, command_id: str, values: dict[str, Any], *, force: bool) -> None:
        if values.get("shares") and len(values["shares"]) != len(self.devices):
            self.final[command_id] = "rejected"
            return
        names = {*values, *(("gpu0_bsz", "shares") if {"gpu0_bsz", "shares"} & values.keys() else ())}
        is_split = len(names) > len(values)
        if is_split and self.split(values) != self.split() and self.split(values)[0] >= self.ceiling and not force:
            self.final[command_id] = "rejected"
            return
        for older, left in list(self.waiting.items()):
            self.waiting[older] = {name: value for name, value in left.items() if name not in names}
            if not self.waiting[older]:
                self.cancel(older)
        if is_split and len(values) == 1 and self.split(values) == self.split():
            self.final[command_id] = "applied"
        else:
            self.waiting[command_id] = values

    def cancel(self, command_id: str) -> None:
        del self.waiting[command_id]
        self.final[command_id] = "cancelled"

    def begin_epoch(self) -> None:
        before, split = dict(self.live), self.split()
        for values in self.waiting.values():
            self.live = self.folded(self.live, values)
        is_new = self.split() != split
        if is_new and not self.is_measured and self.trial is not None:
            self.final[self.trial[0]] = "applied"
        for command_id, values in self.waiting.items():
            if is_new and {"gpu0_bsz", "shares"} & values.keys():
                self.trial, self.is_measured = (command_id, before, TRIAL_STEPS), False
                self.has_other = len(values) > 1
            else:
                self.final[command_id] = "applied"
        self.waiting = {}

    def make_step(self, *, is_full: bool) -> None:
        self.step += 1
        if self.trial is not None:
            command_id, before, left = self.trial
            if is_full and not self.is_measured:
                self.is_measured, self.final[command_id] = True, "applied"
            self.trial = None if left <= 1 and self.is_measured else (command_id, before, left - 1)

    def run_out_of_memory(self) -> None:
        if self.trial is None:
            self.live["num_pieces"] *= 2
            return
        command_id, before, _ = self.trial
        failed = self.split()
        self.live = {**self.live, "gpu0_bsz": before["gpu0_bsz"], "shares": before["shares"]}
        self.ceiling = min(self.ceiling, failed[0]) if failed[0] > self.split()[0] else self.ceiling
        if not self.is_measured:
            self.final[command_id] = "applied" if self.has_other else "rejected"
        self.trial, self.is_measured = None, True

    def resume_on(self, devices: str) -> None:
        """Let each device that stays have its last share, in proportion, if somebody chose the split."""
        if len(devices) != len(self.devices) and (self.live["gpu0_bsz"], self.live["shares"]) != (None, None):
            planned = list(replan_shares(self.split(), self.devices, devices, BATCH))
            is_shared = self.live["shares"] is not None
            self.live |= {"shares": planned} if is_shared else {"gpu0_bsz": planned[0]}
        self.devices = devices


class LiveRun(RuleBasedStateMachine):
    """A controller with a real inbox and real events, which is killed and resumed, without a network."""

    @initialize()
    def begin(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.folder = RunFolder.create(path=Path(self.place.name) / "run")
        self.writer = EventWriter(self.folder.events)
        self.reference, self.sent, self.asked = Reference(), list[str](), dict[str, dict[str, Any]]()
        self.start_process(None)
        self.epoch = 1
        self.save()

    def start_process(self, state: dict[str, Any] | None, step: int = 0) -> None:
        data = {"format": "folder", "root": "nowhere", "classes": ["a", "b"]}
        config = validate_config({"name": "r", "data": data, "train": {"batch_size": BATCH}})
        self.locations, num_devices = DeviceLocations(tuple(self.reference.devices)), len(self.reference.devices)
        adopted = (Replay(each.step, each.fallbacks) for each in fallbacks_after(self.folder, step))
        replays = [*applied_after(self.folder.events, step), *adopted]
        state = None if state is None else {**state, "config": config.model_dump(mode="json")}
        reverted = reverted_splits(self.folder.events)
        start = start_of(config, EVEN, self.locations, state, replays if state else (), reverted)
        model, log = nn.Linear(1, 1), EventLog(self.writer)
        replicas = DataParallelModel(model, ["cpu"] * num_devices)
        replicas.divide(start.configured.split, BATCH)
        network = ReplicatedNetwork(model, replicas, torch.device("cpu"))  # type: ignore[arg-type]
        self.split = BatchSplit(network, BATCH, "dp")
        memory, blocks = DeviceMemoryTracker([]), RecomputableBlocks(model)
        self.controller = CommandController(Inbox(self.folder, log), log, self.split, memory, start, blocks=blocks)

    @property
    def position(self) -> TrainingPosition:
        return TrainingPosition(self.epoch, self.reference.step, self.epoch + 1, 99)

    def send(self, text: str) -> str:
        self.sent.append(send_command(self.folder.path, parse_command(text)))
        self.controller.handle_commands(self.controller.inbox.take(is_due=True), self.position)
        return self.sent[-1]

    @rule(
        split=st.sampled_from(["", "gpu0_bsz=0", "gpu0_bsz=3", "gpu0_bsz=5", "shares=1,4,3", "gpu0_bsz=none"]),
        factor=st.sampled_from([None, 0.5, 3.0]),
        force=st.booleans(),
    )
    def request(self, split: str, factor: float | None, force: bool) -> None:
        words = [*([split] if split else []), *([f"lr_factor={factor}"] if factor else [])]
        if words:
            text = " ".join(["set", *words, *(["--force"] if force and split else [])])
            command = parse_command(text)
            assert isinstance(command, SetCommand)
            command_id = self.send(text)
            self.asked[command_id] = dict(command.changes)
            self.reference.request(command_id, self.asked[command_id], force=force)

    @precondition(lambda self: self.reference.waiting)
    @rule(which=st.integers(0, 5), is_all=st.booleans())
    def cancel(self, which: int, is_all: bool) -> None:
        ids = list(self.reference.waiting)
        chosen = ids if is_all else [ids[which % len(ids)]]
        self.reference.final[self.send("cancel" if is_all else f"cancel {chosen[0]}")] = "applied"
        for command_id in chosen:
            self.reference.cancel(command_id)

    @rule(num_steps=st.sampled_from([0, 1, 5, 21]), is_full=st.booleans())
    def train_epoch(self, num_steps: int, is_full: bool) -> None:
        self.epoch += 1
        self.controller.add_automatic_changes(self.reference.step)
        self.controller.apply(self.controller.record.requested, self.position)
        self.reference.begin_epoch()
        for _ in range(num_steps):
            self.reference.make_step(is_full=is_full)
            split = self.split.current or (BATCH,)
            self.controller.after_step(split, BATCH if is_full else BATCH - 1, self.reference.step)

    @rule()
    def run_out_of_memory(self) -> None:
        if self.controller.revert_split("full", self.reference.step) is None:
            pieces = {"num_pieces": 2 * self.controller.settings.num_pieces}
            self.controller.adopt(self.controller.settings.with_changes(pieces))
            adopted = self.controller.settings.fallbacks
            self.writer.write(Settings(step=self.reference.step, reason="out of memory", fallbacks=adopted))
        self.reference.run_out_of_memory()

    @rule()
    def save(self) -> None:
        self.saved = {"live": self.controller.state_dict(self.locations)}
        self.saved_step = self.reference.step

    @precondition(lambda self: self.reference.trial is None)
    @rule()
    def kill_and_resume(self) -> None:
        """Make the steps since the checkpoint again: the settings are those of the run that was not killed."""
        self.start_process(self.saved, self.saved_step)
        self.make_steps_again()

    @rule(devices=st.sampled_from(["ab", "cb", "abc", "dca", "abcd"]))
    def resume_on_other_devices(self, devices: str) -> None:
        """Stop with a checkpoint after the trial of a split, and continue on these devices."""
        self.train_epoch(TRIAL_STEPS, is_full=True)
        self.save()
        self.reference.resume_on(devices)
        self.start_process(self.saved, self.saved_step)
        self.make_steps_again()

    def make_steps_again(self) -> None:
        self.split.load_state_dict(self.saved["live"]["splits"])
        for step in range(self.saved_step, self.reference.step + 1):
            self.controller.add_automatic_changes(step)
            self.controller.apply(self.controller.record.requested, self.position)
            self.controller.adopt(self.controller.take_due_fallbacks(step))
        self.controller.record = replace(self.controller.record, trial=None)  # of a replay: its 20 steps are over
        self.reference.ceiling = self.split.checker.ceiling or BATCH + 1
        unanswered, self.reference.waiting = dict(self.reference.waiting), {}
        self.controller.handle_commands(self.controller.inbox.take(is_due=True), self.position)
        for command_id in unanswered:  # read again, whole
            self.reference.request(command_id, self.asked[command_id], force=False)
        self.save()

    @invariant()
    def settings_are_those_of_the_reference(self) -> None:
        if hasattr(self, "reference"):
            found = {name: getattr(self.controller.settings, name) for name in NAMES}
            assert found == self.reference.live
            assert self.split.current == self.reference.split()

    @invariant()
    def commands_have_one_final_answer(self) -> None:
        if hasattr(self, "reference"):
            final = [each for each in events(self.folder.path, "command") if each["status"] != "accepted"]
            assert {each["id"]: each["status"] for each in final} == self.reference.final
            assert len(final) == len(self.reference.final)

    def teardown(self) -> None:
        if hasattr(self, "reference"):
            self.controller.answer_at_end(self.position, "finished", is_finished=True)
            final = [each["id"] for each in events(self.folder.path, "command") if each["status"] != "accepted"]
            assert sorted(final) == sorted(self.sent), "every command is answered once"
            self.place.cleanup()


TestLiveRun = pytest.mark.filterwarnings("ignore")(LiveRun.TestCase)
TestLiveRun.settings = settings(max_examples=60, stateful_step_count=14, deadline=None)
