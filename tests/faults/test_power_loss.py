"""A power cut at every moment of a save, of the events and of a command: what was promised is there, intact (F04)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from segapp.run.checkpoints import CheckpointFolder
from segapp.run.commands import drain_commands, parse_command, send_command
from segapp.run.events import EventReader, EventWriter, read_answers
from segapp.run.files import machine_id
from tests.support.fault_runs import SYNCHRONOUS, FaultRun, Invariants, case, is_stopped, needs, some, traced
from tests.support.power_loss import Call, Disk, read_trace

CALLS = "openat,write,fsync,fdatasync,close,rename,renameat,renameat2,link,linkat,unlink,unlinkat"
ALL_CALLS = f"{CALLS},mkdir,mkdirat,ftruncate,pwrite64,fcntl"

LEAN: dict[str, Any] = {
    "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.0},
    "train": {"epochs": 2, "ema": None},
    "checkpoint": {"every_steps": 4},
}

EVENTS, MANIFEST = "run/events.jsonl", "run/checkpoints/manifest.json"


def promised_by(call: Call) -> int:
    """The step of a `checkpoint` event that a call writes; 0 where it writes none."""
    if call.name != "write" or "events.jsonl" not in call.arguments.partition(",")[0]:
        return 0
    events = [json.loads(line) for line in call.strings[0].splitlines()]
    return max((event["step"] for event in events if event["type"] == "checkpoint"), default=0)


def put(state: dict[str, bytes], folder: Path) -> None:
    """Makes a folder hold exactly these files."""
    (folder / "objects").mkdir(parents=True, exist_ok=True)
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in state:
            path.unlink()
    for name, content in state.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)


@case(
    "F04",
    how="strace: a power cut after each system call of two saves; what was not synced is kept, lost, kept in part",
    passes="every committed checkpoint intact, the newest not older than the last promise",
)
@pytest.mark.faults
def test_power_cut_at_any_call_keeps_committed_checkpoints(
    new_run: Callable[..., FaultRun], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    needs("strace")
    run = new_run(**LEAN)
    run.train(failpoints=f"train.step=7:kill;{SYNCHRONOUS}")
    promised = run.acknowledged_step()
    program = run.start(failpoints=f"ckpt.start=1:stop;{SYNCHRONOUS}")
    options = ("-s", str(2**24), "-e", f"trace={CALLS}")
    run.wait_for(lambda: is_stopped(program), program)
    disk = Disk(run.folder / "checkpoints")
    with traced(run, program, *options) as trace:
        assert run.ended(program).returncode == 0, program.stderr
    found, num_calls, seen = tmp_path / "found", 0, set()
    for call in read_trace(trace):
        promised = max(promised, promised_by(call))
        num_calls += disk.apply(call, run.work)
        if call.name == "write" and not promised_by(call):
            continue  # it only adds to bytes that the next call but one still finds unsynced
        for state in disk.states():
            key = (promised, frozenset(state.items()))
            if key not in seen:
                seen.add(key)
                put(state, found)
                rows = CheckpointFolder(found).verify()
                assert [row.problem for row in rows] == [None] * len(rows), (call.name, call.arguments[:200])
                assert rows[0].entry.step >= promised, (call.name, call.arguments[:200])
    assert promised == 10
    assert disk.files() == {str(p.relative_to(disk.root)): p.read_bytes() for p in disk.root.rglob("*") if p.is_file()}
    record_property("figure", f"{num_calls} calls, {len(seen)} states of the disk")


# --- events and commands ----------------------------------------------------------------------------------------------


@dataclass
class Written:
    """What a trainer has written so far, read from its system calls alone.

    Args:
        sent: the ids of the commands in the inbox.
        lines: all lines of events, also those in the file that replaces events.jsonl at a resume.
        promised: the lines that were synced by a call of their own: `seq` apart, they are never lost.
    """

    sent: set[str]
    lines: set[bytes] = field(default_factory=set)
    promised: set[str] = field(default_factory=set)
    _unsynced: set[str] = field(default_factory=set)

    def note(self, call: Call) -> None:
        """Takes up a call."""
        place = call.arguments.partition(">")[0]
        if call.name == "write" and place.endswith(("/run/events.jsonl", "@" + machine_id())):
            lines = [line for line in call.strings[0].split(b"\n") if line.startswith(b'{"v":1,"seq":')]
            self.lines |= set(lines)
            durable = ("run_start", "checkpoint", "command", "run_end")
            self._unsynced |= {without_seq(e) for e in map(json.loads, lines) if e["type"] in durable}
        elif call.name == "fsync" and place.endswith("/run/events.jsonl"):
            self.promised |= self._unsynced
            self._unsynced.clear()


def without_seq(event: dict[str, Any]) -> str:
    """An event as text, without the number that a resume may change."""
    return json.dumps({key: value for key, value in event.items() if key != "seq"})


class Reading:
    """Reads a folder in each state that a power cut may leave.

    Args:
        work: an empty folder.
        written: what the trainer has written.
    """

    def __init__(self, work: Path, written: Written) -> None:
        self.work, self.written = work, written
        self._seen: set[object] = set()

    def state(self, state: dict[str, bytes]) -> bool:
        """Checks events, commands and checkpoints of a state; False if it was checked before."""
        inbox = {name: content for name, content in state.items() if name.startswith("run/commands/")}
        key = (len(self.written.promised), state.get(EVENTS), state.get(MANIFEST), frozenset(inbox.items()))
        if key in self._seen:
            return False
        self._seen.add(key)
        found = self.events(state.get(EVENTS, b""))
        commands = self.work / "run" / "commands"
        shutil.rmtree(commands, ignore_errors=True)
        commands.mkdir(parents=True)
        for name, content in inbox.items():
            (self.work / name).write_bytes(content)
        waiting = drain_commands(self.work / "run")
        assert [received.problem for received in waiting] == [None] * len(waiting)
        assert {received.id for received in waiting} | set(read_answers(found)) == self.written.sent
        assert {received.id for received in waiting} <= self.written.sent
        entries = json.loads(state[MANIFEST])["entries"] if MANIFEST in state else []
        steps = {event["step"] for event in found if event["type"] == "step"}
        newest = max((entry["step"] for entry in entries), default=0)
        assert steps >= set(range(1, newest + 1)), "a checkpoint is there, and events of before it are not"
        return True

    def events(self, content: bytes) -> list[dict[str, Any]]:
        """Checks a content of events.jsonl, and that it can be continued; returns its events."""
        path = self.work / "events.jsonl"
        path.write_bytes(content)
        found = EventReader(path).read_raw()
        lines = content.split(b"\n")[:-1]
        whole = [line for line in lines if line in self.written.lines]
        assert found == [json.loads(line) for line in whole], "only whole lines that were written are read"
        assert [event["seq"] for event in found] == list(range(1, len(found) + 1))
        assert self.written.promised <= {without_seq(event) for event in found}, "a synced event is lost"
        with EventWriter(path) as writer:
            before = writer.last_seq
            writer.alert("test", "goes on")
        reader = EventReader(path)
        after = reader.read_raw()
        assert [event["seq"] for event in after] == list(range(1, len(after) + 1))
        assert len(after) == before + 1
        assert after[: len(found)] == found
        assert set(path.read_bytes().split(b"\n")[:before]) <= self.written.lines
        assert reader.num_bad == 0
        return found


def calls_of(run: FaultRun, failpoints: str) -> Iterator[Call]:
    """Trains with a trace of the calls, and yields them."""
    program = run.start(failpoints=f"{failpoints};{SYNCHRONOUS}", is_stopped=True)
    with traced(run, program, "-s", str(2**24), "-e", f"trace={ALL_CALLS}") as trace:
        run.ended(program)
    yield from read_trace(trace)


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of thousands of contents do not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.slow
@case(
    "F04",
    how="strace: a power cut after each call of a start and a resume; events and commands kept, lost, torn at any byte",
    passes="synced events and answers there, none invented, every command whole or answered, no step missing; exact",
)
@pytest.mark.parametrize(("every_byte", "num_resumed"), some([(29, 2), (1, 40)], (29, 2)))
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("no_fsync")
def test_power_cut_keeps_synced_events_and_commands(
    new_run: Callable[..., FaultRun],
    invariants: Invariants,
    tmp_path: Path,
    every_byte: int,
    num_resumed: int,
    record_property: Callable[[str, object], None],
) -> None:
    needs("strace")
    run, written = new_run(**LEAN), Written(set())
    reading = Reading(tmp_path / "read", written)
    reading.work.mkdir()
    num_calls = num_states = num_torn = 0
    kept: list[dict[str, bytes]] = []
    for failpoints in ("train.step=8:kill", ""):
        disk = Disk(run.work, only="run")
        for call in calls_of(run, failpoints):
            if call.name == "fsync" or call.name == "ftruncate":
                for content in list(disk.torn(EVENTS))[::every_byte]:
                    reading.events(content)
                    num_torn += 1
            written.note(call)
            num_calls += disk.apply(call, run.work)
            if call.name == "write":
                continue  # it only adds to bytes that the next call but one still finds unsynced
            new = [state for state in disk.states() if reading.state(state)]
            num_states += len(new)
            kept += new[-1:]
        assert disk.files() == {
            str(path.relative_to(run.work)): path.read_bytes() for path in run.folder.rglob("*") if path.is_file()
        }
        if failpoints:
            assert run.acknowledged_step() == 5
            with open(run.folder / "events.jsonl", "ab") as file:
                file.write(b'{"v":1,"seq":99,"t":1.5,"ty')  # as a power cut may leave it
            for text in ("checkpoint", "set gpu0_bsz=9", "checkpoint"):
                written.sent.add(send_command(run.folder, parse_command(text), "test"))
    invariants.assert_same(run)
    assert set(read_answers(run.events())) == written.sent
    for number, state in enumerate(kept[:: max(1, len(kept) // num_resumed)]):
        resumed = new_run(f"resumed-{number}", **LEAN)
        for name, content in state.items():
            (resumed.work / name).parent.mkdir(parents=True, exist_ok=True)
            (resumed.work / name).write_bytes(content)
        invariants.check(resumed)
    record_property("figure", f"{num_calls} calls, {num_states} states, {num_torn} torn files, {number + 1} resumed")


@case(
    "F04",
    how="strace: a power cut after each call of `segapp ctl`",
    passes="the command is whole or not there; once sent, it is there",
)
@pytest.mark.faults
def test_power_cut_leaves_a_command_whole_or_absent(new_run: Callable[..., FaultRun], tmp_path: Path) -> None:
    needs("strace")
    run, found = new_run(), tmp_path / "found"
    trainer = run.start(failpoints="train.step=2:stop")
    run.wait_for(lambda: is_stopped(trainer), trainer)
    disk, is_sent, num_states = Disk(run.folder, only="commands"), False, 0
    program = run.program("ctl", "run", "set", "lr_factor=0.25", is_stopped=True)
    with traced(run, program, "-s", "65536", "-e", f"trace={ALL_CALLS}") as trace:
        assert run.ended(program).returncode == 0, program.stderr
    for call in read_trace(trace):
        disk.apply(call, run.work)
        is_sent |= call.name == "write" and call.fd == 1 and call.strings[0].startswith(b"sent ")
        for state in disk.states():
            num_states += 1
            shutil.rmtree(found, ignore_errors=True)
            (found / "commands").mkdir(parents=True)
            for name, content in state.items():
                (found / name).write_bytes(content)
            texts = [(received.text, received.problem) for received in drain_commands(found)]
            assert texts == [("set lr_factor=0.25", None)] or (texts == [] and not is_sent)
    assert is_sent
    assert num_states > 10
    run.kill_all()
