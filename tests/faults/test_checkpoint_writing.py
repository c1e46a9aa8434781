"""What goes wrong while a checkpoint is written: the old or the new one is there, and training goes on."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_runs import (
    LEAN,
    SYNCHRONOUS,
    FaultRun,
    Invariants,
    case,
    is_stopped,
    needs,
    small_disk,
    traced,
)

NewRun = Callable[..., FaultRun]

CALLS = "openat,write,pwrite64,fsync,fdatasync,close,rename,renameat,renameat2,link,linkat,unlink,unlinkat,ftruncate"


def one_save(new_run: NewRun, name: str = "work", **sections: Any) -> FaultRun:
    """A run that has made one epoch of two, so that one more start makes two saves."""
    run = new_run(name, **one_save_sections(sections))
    run.train(failpoints=f"train.step=7:kill;{SYNCHRONOUS}")
    return run


def one_save_sections(sections: dict[str, Any]) -> dict[str, Any]:
    """The sections of `one_save`."""
    return {**sections, "train": {"epochs": 2, **sections.get("train", {})}, "checkpoint": {"every_steps": 4}}


def killed_at_call(new_run: NewRun, invariants: Invariants, saved: FaultRun, number: int) -> bool:
    """SIGKILL at the Nth system call of one save, by any thread; False where the save has fewer.

    Args:
        new_run: the fixture.
        invariants: the fixture.
        saved: `one_save`, of which a copy is used.
        number: from 1.
    """
    run = new_run(f"call-{number}", **one_save_sections(LEAN))
    shutil.copytree(saved.folder, run.folder, symlinks=True)
    program = run.start(failpoints=f"ckpt.start=1:stop;ckpt.end=1:exit:0;{SYNCHRONOUS}")
    with traced(run, program, "-e", f"trace={CALLS}", "-e", f"inject={CALLS}:signal=KILL:when={number}"):
        done = run.ended(program, must_act=False)
    assert run.num_acts(program, "ckpt.start") == 1
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert (done.returncode == 0) == (run.num_acts(program, "ckpt.end") == 1)
    invariants.check(run)
    shutil.rmtree(run.work)
    return done.returncode != 0


@case("F01", how="strace: SIGKILL at the Nth system call of a save", passes="old or new, nothing lost, exact")
@pytest.mark.faults
def test_sigkill_at_a_system_call_leaves_old_or_new(new_run: NewRun, invariants: Invariants) -> None:
    needs("strace")
    saved = one_save(new_run, **LEAN)
    for number in (1, 200, 300):
        assert killed_at_call(new_run, invariants, saved, number)


@case("F01", how="strace: SIGKILL at every system call of a save, in turn", passes="old or new, nothing lost, exact")
@pytest.mark.faults_long
@pytest.mark.timeout(7200)
def test_sigkill_at_every_system_call_leaves_old_or_new(
    new_run: NewRun, invariants: Invariants, record_property: Callable[[str, object], None]
) -> None:
    needs("strace")
    saved = one_save(new_run, **LEAN)
    number = 1
    while killed_at_call(new_run, invariants, saved, number):
        number += 1
    assert number > 15, "fewer system calls than open, write, fsync, rename and their like"
    record_property("figure", f"killed at each of the {number - 1} calls of a save")


@case(
    "F03",
    how="strace: the order of one save's system calls",
    passes="new file beside, fsync, rename, fsync, then the event",
)
@case("F05", how="the run folder on another file system than the temporary folder", passes="the same order holds")
@pytest.mark.faults
def test_save_syncs_renames_and_syncs_before_the_event(new_run: NewRun, tmp_path: Path) -> None:
    needs("strace")
    run = one_save(new_run)
    program = run.start(failpoints=f"ckpt.start=1:stop;{SYNCHRONOUS}", TMPDIR="/dev/shm")
    with traced(run, program, "-s", "200", "-e", f"trace={CALLS}") as trace:
        assert run.ended(program).returncode == 0, program.stderr
    lines = [line for line in trace.read_text(errors="replace").splitlines() if "run/" in line]
    order = []
    for line in lines:
        if match := re.search(r'openat\(.*objects/(\.tmp-8-[^"]+)", (\S+),', line):
            assert "O_EXCL" in match[2]
            order.append("open")
        elif re.search(r"fsync\(\d+<[^>]*objects/\.tmp-8-", line):
            order.append("fsync file")
        elif re.search(r"rename\w*\(.*objects/\.tmp-8-[^,]+, .*objects/00000008-", line):
            order.append("rename")
        elif re.search(r"fsync\(\d+<[^>]*/objects>", line):
            order.append("fsync directory")
        elif re.search(r'rename\w*\(.*manifest\.json"', line):
            order.append("manifest")
        elif '\\"type\\":\\"checkpoint\\"' in line or '"type\\":\\"checkpoint' in line:
            order.append("event")
    first = ["open", "fsync file", "rename", "fsync directory", "manifest", "event"]
    assert order[:6] == first, order
    assert not [line for line in lines if "O_TRUNC" in line and ".pt" in line]


@case("F13", how="EIO once while a checkpoint is written", passes="goes on, says so, the next save is good, exact")
@pytest.mark.faults
def test_one_write_error_is_reported_and_next_save_is_good(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run()
    done = run.train(failpoints=f"ckpt.write=20:raise:EIO*1;{SYNCHRONOUS}")
    assert done.returncode == 0, done.stderr
    [alert] = run.events("alert")
    assert alert["kind"] == "checkpoint"
    assert "Input/output error" in alert["message"]
    assert "tried again" in alert["message"]
    invariants.assert_same(run)


@case(
    "F14",
    how="every save refused (EROFS)",
    passes="no false promise, an alert each time, exit 10 at the end, old ones kept",
)
@pytest.mark.faults
def test_read_only_disk_exits_10_with_an_alert_each_save(new_run: NewRun, invariants: Invariants) -> None:
    refused_saves(new_run, invariants, "ckpt.opened=raise:EROFS", "Read-only file system")


@pytest.mark.sampled(3)
@case(
    "F15",
    how="rename: EACCES, fsync: EIO, manifest rename: EIO, every time",
    passes="no promise, old intact, exit 10 at the end",
)
@pytest.mark.faults
@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("ckpt.before_rename=raise:EACCES", "Permission denied"),
        ("ckpt.before_fsync=raise:EIO", "Input/output error"),
        ("ckpt.manifest.before_rename=raise:EIO", "Input/output error"),
    ],
)
def test_failing_call_of_every_save_exits_10_and_keeps_old(
    new_run: NewRun, invariants: Invariants, point: str, words: str
) -> None:
    refused_saves(new_run, invariants, point, words)


def refused_saves(new_run: NewRun, invariants: Invariants, point: str, words: str) -> None:
    """Every save from step 7 on is refused: at step 8, at the end of the epoch, and the last attempt."""
    run = one_save(new_run)
    before, promised = run.committed(), run.events("checkpoint")
    program = run.start(failpoints=f"{point};{SYNCHRONOUS}")
    done = run.ended(program)
    invariants.assert_clear(done, 10, "cannot write a checkpoint", words)
    assert run.committed() == before
    assert run.events("checkpoint") == promised
    alerts = [alert for alert in run.events("alert") if alert["kind"] == "checkpoint"]
    assert all(words in alert["message"] for alert in alerts)
    assert len(alerts) == run.num_acts(program, point.partition("=")[0]) >= 2
    assert run.events("step")[-1]["step"] == 10, "training went on to its end"
    invariants.check(run)


@case(
    "F16",
    how="a write of 2 s while steps go on; SIGKILL, and SIGTERM, in the middle of it",
    passes="one step's state; waits",
)
@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_training_continues_while_a_checkpoint_is_written(
    new_run: NewRun, invariants: Invariants, number: signal.Signals
) -> None:
    run = new_run(train={"epochs": 30}, checkpoint={"every_steps": 3})
    program = run.start(failpoints="ckpt.before_fsync=1:sleep:2;train.step=sleep:0.05")
    run.wait_for_step(5, program)
    assert run.events("checkpoint") == [], "steps 4 and 5 were made while step 3 was being written"
    program.send(number)
    done = run.ended(program)
    assert done.returncode == (75 if number == signal.SIGTERM else -number)
    if number == signal.SIGTERM:
        assert run.acknowledged_step() >= 5
    invariants.check(run, resume=False)


@case("F22", how="a write that takes 4 s", passes="heartbeat and alert say so, steps go on, SIGTERM saves")
@case("F36", how="a save slower than the grace period", passes="an alert names the grace period")
@pytest.mark.faults
def test_blocked_write_is_reported(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(train={"epochs": 40}, checkpoint={"every_steps": 3, "grace_s": 1.0})
    program = run.start(failpoints="ckpt.before_fsync=1:sleep:4;train.step=sleep:0.02")
    blocked = run.wait_for(
        lambda: [e for e in run.events("alert") if "checkpoint write blocked" in e["message"]], program
    )
    assert run.events("checkpoint") == []
    assert any((beat["saving_s"] or 0) >= 1 for beat in run.events("heartbeat") if "saving_s" in beat)
    run.wait_for(lambda: [e for e in run.events("alert") if e["kind"] == "grace"], program)
    program.send(signal.SIGTERM)
    assert run.ended(program).returncode == 75
    assert blocked[0]["kind"] == "storage"
    invariants.check(run, resume=False)


@case(
    "F17",
    how="a file system with room for one checkpoint and a half",
    passes="old intact, space given back, says need and free",
)
@pytest.mark.faults
def test_full_disk_keeps_old_and_reports_need_and_free(new_run: NewRun, invariants: Invariants, tmp_path: Path) -> None:
    run = new_run("disk/work", train={"epochs": 2}, checkpoint={"every_steps": None, "every_epochs": 1})
    with small_disk(run.folder, 2000):
        done = run.train()
        free_kib = int(
            subprocess.run(
                ["df", "-k", "--output=avail", str(run.folder)], capture_output=True, text=True, check=True
            ).stdout.split()[1]
        )
        if done.returncode == 0:
            pytest.fail("the disk was large enough: make it smaller")
        invariants.assert_clear(done, 10, "it needs", "are free")
        assert run.committed()[0]["step"] == 5
        assert free_kib > 200, "what could not be written was given back"
        subprocess.run(["mount", "-o", "remount,size=64m", str(run.folder)], check=True)
        invariants.check(run)


@case(
    "F17b",
    how="only the event file cannot be written for a while",
    passes="training goes on, the events come later, checkpoints good",
)
@pytest.mark.faults
def test_event_write_errors_are_repaired_later(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run()
    done = run.train(failpoints="events.before_write=12:raise:ENOSPC*3;train.step=sleep:0.2", timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert any("could not be written for a while" in alert["message"] for alert in run.events("alert"))
    invariants.assert_same(run)


@pytest.mark.slow
@case("F17c", how="RLIMIT_FSIZE below the checkpoint's size", passes="no death by SIGXFSZ, exit 10, says ulimit")
@pytest.mark.faults
def test_file_size_limit_exits_10_and_names_ulimit(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(train={"epochs": 1})
    program = run.start(is_stopped=True)
    run.wait_for(lambda: is_stopped(program), program)
    resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (400_000, 400_000))
    program.send(signal.SIGCONT)
    invariants.assert_clear(run.ended(program), 10, "ulimit -f")
    invariants.check(run)


@case("F24", how="a weight set to NaN before a save (failpoint)", passes="refused, the reason told, the old one stays")
@pytest.mark.faults
def test_non_finite_state_is_not_committed(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(train={"epochs": 2})
    done = run.train(failpoints=f"ckpt.capture=8:nan*1;{SYNCHRONOUS}")
    assert done.returncode == 0, done.stderr
    assert any("is not finite" in alert["message"] for alert in run.events("alert"))
    invariants.assert_same(run)


@case(
    "W03",
    how="a disk that takes 0.3 s longer for each checkpoint, a save every second step",
    passes="p99 of a step < a copy, and half a write, more",
)
@pytest.mark.faults_long
@pytest.mark.timeout(1200)
def test_step_waits_at_most_for_one_state_copy(new_run: NewRun, record_property: Callable[[str, object], None]) -> None:
    def step_times_s(run: FaultRun) -> list[float]:
        times = [event["t"] for event in run.events("step")]
        epochs = [event["epoch"] for event in run.events("step")]
        pairs = zip(times, times[1:], epochs, epochs[1:], strict=False)
        return sorted(b - a for a, b, epoch, following in pairs if epoch == following)

    found = {}
    for name, every, failpoints in (("without", None, ""), ("with", 2, "ckpt.before_fsync=sleep:0.3")):
        run = new_run(name, train={"epochs": 60}, checkpoint={"every_steps": every, "every_epochs": None})
        assert run.train(failpoints=failpoints, timeout_s=550).returncode == 0
        times_s = step_times_s(run)
        copies = [event["copy_s"] for event in run.events("checkpoint") if event.get("copy_s")]
        found[name] = times_s[int(0.99 * len(times_s))], max(copies, default=0.0)
    p99_without, (p99_with, copy_s) = found["without"][0], found["with"]
    p99_ms, copy_ms = (round(1000 * value) for value in (p99_with, copy_s))
    figure = f"p99 of a step {1000 * p99_without:.0f} ms without saves, {p99_ms} ms with, longest copy {copy_ms} ms"
    record_property("figure", figure)
    # A step that waited for the disk would take 0.3 s more. What the writer computes takes time from the steps too.
    assert p99_with < p99_without + copy_s + 0.15
