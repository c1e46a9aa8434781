"""A power cut at every moment of a save: what was promised is there, and intact (F04)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from segapp.run.checkpoints import CheckpointFolder
from tests.support.fault_runs import SYNCHRONOUS, FaultRun, case, is_stopped, needs, traced
from tests.support.power_loss import Call, Disk, read_trace

CALLS = "openat,write,fsync,fdatasync,close,rename,renameat,renameat2,link,linkat,unlink,unlinkat"


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
    lean = {"optim": {"name": "sgd", "lr": 0.01, "momentum": 0.0}, "train": {"epochs": 2, "ema": None}}
    run = new_run(**lean, checkpoint={"every_steps": 4})
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
    assert disk.names() == {str(p.relative_to(disk.root)) for p in disk.root.rglob("*") if p.is_file()}
    record_property("figure", f"{num_calls} calls, {len(seen)} states of the disk")
