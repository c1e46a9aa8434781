"""What goes wrong while a checkpoint is written: the old or the new one is there, and training goes on."""

from __future__ import annotations

import itertools
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.fault_runs import (
    SHORT,
    SYNCHRONOUS,
    FaultRun,
    Invariants,
    case,
    course,
    is_stopped,
    needs,
    small_disk,
    some,
    traced,
)

NewRun = Callable[..., FaultRun]

CALLS = "openat,write,pwrite64,fsync,fdatasync,close,rename,renameat,renameat2,link,linkat,unlink,unlinkat,ftruncate"


BEFORE_TWO_SAVES = f"train.step=7:kill;{SYNCHRONOUS}"
"""It leaves a run that has made one epoch of two, so that one more start makes two saves."""


@case("F01", how="strace: SIGKILL at the Nth system call of a save", passes="old or new, nothing lost, exact")
@case("F01", how="strace: SIGKILL at every system call of a save, in turn", passes="old or new, nothing lost, exact")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("calls", some([((1, 200, 300),), (range(1, 9999),)], ((1, 200, 300),)), ids=["three", "all"])
def test_sigkill_at_a_system_call_leaves_old_or_new(
    left_by: NewRun, invariants: Invariants, calls: Sequence[int], record_property: Callable[[str, object], None]
) -> None:
    """By any thread."""
    needs("strace")
    for number in calls:
        run = left_by(BEFORE_TWO_SAVES, name=f"call-{number}", **SHORT)
        program = run.start(failpoints=f"ckpt.start=1:stop;ckpt.end=1:exit:0;{SYNCHRONOUS}")
        with traced(run, program, "-e", f"trace={CALLS}", "-e", f"inject={CALLS}:signal=KILL:when={number}"):
            done = run.ended(program, must_act=False)
        assert run.num_acts(program, "ckpt.start") == 1
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        assert (done.returncode == 0) == (run.num_acts(program, "ckpt.end") == 1)
        invariants.check(run)
        shutil.rmtree(run.work)
        if done.returncode == 0:
            break  # the save has fewer calls
    assert number >= 300, "fewer system calls than a save has"
    record_property("figure", f"killed at {len(calls) if len(calls) < 9 else number - 1} calls of a save")


@case(
    "F03",
    how="strace: the order of one save's system calls",
    passes="new file beside, fsync, rename, fsync, then the event",
)
@case("F05", how="the run folder on another file system than the temporary folder", passes="the same order holds")
@pytest.mark.faults
def test_save_syncs_renames_and_syncs_before_the_event(left_by: NewRun, tmp_path: Path) -> None:
    needs("strace")
    run = left_by(BEFORE_TWO_SAVES, **SHORT)
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


@pytest.mark.sampled(4)
@case(
    "F14",
    how="every save refused (EROFS)",
    passes="no false promise, an alert each time, exit 10 at the end, old ones kept",
)
@case(
    "F15",
    how="rename: EACCES, fsync: EIO, manifest rename: EIO, every time",
    passes="no promise, old intact, exit 10 at the end",
)
@pytest.mark.faults
@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("ckpt.manifest.before_rename=raise:EIO", "Input/output error"),
        ("ckpt.opened=raise:EROFS", "Read-only file system"),
        ("ckpt.before_rename=raise:EACCES", "Permission denied"),
        ("ckpt.before_fsync=raise:EIO", "Input/output error"),
    ],
)
def test_refused_saves_exit_10_and_keep_the_old_one(
    left_by: NewRun, invariants: Invariants, point: str, words: str
) -> None:
    """From step 7 on: at step 8, at the end of the epoch, and the last attempt."""
    run = left_by(BEFORE_TWO_SAVES, **SHORT)
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


@case("F13", how="EIO once while a checkpoint is written", passes="goes on, says so, the next save is good, exact")
@case(
    "F17b",
    how="only the event file cannot be written for a while",
    passes="training goes on, the events come later, checkpoints good",
)
@case("F24", how="a weight set to NaN before a save (failpoint)", passes="refused, the reason told, the old one stays")
@pytest.mark.faults
@pytest.mark.parametrize(
    ("failpoints", "says"),
    [
        ("ckpt.write=20:raise:EIO*1", "Input/output error.*tried again"),
        ("events.before_write=12:raise:ENOSPC*3;train.step=sleep:0.1", "could not be written for a while"),
        ("ckpt.capture=8:nan*1", "is not finite"),
    ],
    ids=["save", "events", "weight"],
)
def test_one_error_is_reported_and_the_run_is_exact(
    new_run: NewRun, invariants: Invariants, failpoints: str, says: str
) -> None:
    run = new_run()
    done = run.train(failpoints=f"{failpoints};{SYNCHRONOUS}", timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert [alert["message"] for alert in run.events("alert") if re.search(says, alert["message"])]
    invariants.assert_same(run)


@case(
    "F16",
    how="a write of 4 s while steps go on; SIGKILL, and SIGTERM, in the middle of it",
    passes="one step's state; waits",
)
@case("F22", how="a write that takes 4 s", passes="heartbeat and alert say so, steps go on, SIGTERM saves")
@case("F36", how="a save slower than the grace period", passes="an alert names the grace period")
@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_training_continues_while_a_checkpoint_is_written(
    new_run: NewRun, invariants: Invariants, number: signal.Signals
) -> None:
    run = new_run(train={"epochs": 40}, checkpoint={"every_steps": 3, "grace_s": 1.0})
    program = run.start(failpoints="ckpt.before_fsync=1:sleep:4;train.step=sleep:0.03")

    def blocked() -> bool:
        return any("checkpoint write blocked" in e["message"] for e in run.events("alert") if e["kind"] == "storage")

    run.wait_for(blocked, program)
    assert run.events("checkpoint") == []
    assert run.events("step")[-1]["step"] >= 5, "steps were made while step 3 was being written"
    if number == signal.SIGTERM:
        assert any((beat["saving_s"] or 0) >= 1 for beat in run.events("heartbeat") if "saving_s" in beat)
        run.wait_for(lambda: [e for e in run.events("alert") if e["kind"] == "grace"], program)
    program.send(number)
    assert run.ended(program).returncode == (75 if number == signal.SIGTERM else -number)
    if number == signal.SIGTERM:
        assert run.acknowledged_step() >= 5
    invariants.check(run, resume=False)


@case(
    "F17",
    how="a file system with room for one checkpoint and a half, and with more at the end or not",
    passes="old intact, space given back, says need and free; waits for space, then saves, or a signal ends it with 10",
)
@pytest.mark.faults
@pytest.mark.parametrize("is_freed", [True, False], ids=["freed", "stopped"])
def test_full_disk_is_waited_for_at_the_end(
    new_run: NewRun, invariants: Invariants, tmp_path: Path, is_freed: bool
) -> None:
    run = new_run("disk/work", train={"epochs": 2}, checkpoint={"every_steps": None, "every_epochs": 1})
    with small_disk(run.folder, 2000):
        program = run.start()
        run.wait_for(
            lambda: "its last save waits for space, for at most 600 s" in program.stderr + program.stdout, program
        )
        assert shutil.disk_usage(run.folder).free // 1024 > 200, "what could not be written was given back"
        assert run.committed()[0]["step"] == 5
        if is_freed:
            subprocess.run(["mount", "-o", "remount,size=64m", str(run.folder)], check=True)
            assert run.ended(program).returncode == 0
            assert run.committed()[0]["step"] == 10
            assert course(run) == invariants.references.of(run.config).course
        else:
            program.send(signal.SIGTERM)
            invariants.assert_clear(run.ended(program, 30), 10, "it needs", "are free")
            subprocess.run(["mount", "-o", "remount,size=64m", str(run.folder)], check=True)
            invariants.check(run)


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


@case(
    "W03",
    how="a disk that takes 0.3 s longer for each checkpoint, a save every second step",
    passes="p99 of a step < a copy, and half a write, more",
)
@pytest.mark.faults_long
@pytest.mark.timeout(1200)
def test_step_waits_at_most_for_one_state_copy(new_run: NewRun, record_property: Callable[[str, object], None]) -> None:
    found = {}
    for name, every, failpoints in (("without", None, ""), ("with", 2, "ckpt.before_fsync=sleep:0.3")):
        run = new_run(name, train={"epochs": 60}, checkpoint={"every_steps": every, "every_epochs": None})
        assert run.train(failpoints=failpoints, timeout_s=550).returncode == 0
        pairs = itertools.pairwise((event["epoch"], event["t"]) for event in run.events("step"))
        times_s = sorted(b[1] - a[1] for a, b in pairs if a[0] == b[0])
        copies = [event["copy_s"] for event in run.events("checkpoint") if event.get("copy_s")]
        found[name] = times_s[int(0.99 * len(times_s))], max(copies, default=0.0)
    (p99_without, _), (p99_with, copy_s) = found["without"], found["with"]
    times_ms = [round(1000 * value) for value in (p99_without, p99_with, copy_s)]
    record_property("figure", "p99 of a step {} ms without saves, {} ms with, longest copy {} ms".format(*times_ms))
    # A step that waited for the disk would take 0.3 s more. What the writer computes takes time from the steps too.
    assert p99_with < p99_without + copy_s + 0.15
