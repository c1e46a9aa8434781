"""Leases, for file systems without locks: one holder at a time, dead holders replaced, lost ones told."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from segapp import failpoints
from segapp.errors import RunBusyError, StorageError
from segapp.run import folder as folders
from segapp.run import lease as leases
from segapp.run.checkpoints import CheckpointFacts, CheckpointFolder
from segapp.run.events import EventWriter
from segapp.run.folder import RunFolder
from segapp.run.lease import Lease
from tests.support import ROOT

FAST = {"RENEW_S": 0.05, "STILL_S": 0.4, "_LOOK_S": 0.02, "_PAUSE_S": 0.1}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in FAST.items():
        monkeypatch.setattr(leases, name, seconds)


def dead(path: Path) -> Lease:
    """Return a lease whose holder no longer renews it."""
    lease = Lease(path)
    assert lease.acquire()
    lease._stop.set()
    time.sleep(2 * leases.RENEW_S)
    return lease


def test_lease_of_a_live_holder_is_refused_soon(fast: None, tmp_path: Path) -> None:
    holder, other, said = Lease(tmp_path / "lock.lease"), Lease(tmp_path / "lock.lease"), list[str]()
    assert holder.acquire()
    time.sleep(3 * leases.STILL_S)  # renewed all the time
    began_s = time.monotonic()
    assert not other.acquire(said.append)
    assert time.monotonic() - began_s < leases.STILL_S
    assert len(said) == 1
    assert holder.is_own()
    other.release()
    assert holder.is_own(), "who holds no lease releases none"
    holder.release()
    assert not holder.path.exists()
    assert other.acquire()
    other.release()


def test_lease_of_a_dead_holder_is_taken_after_the_wait(fast: None, tmp_path: Path) -> None:
    holder, other = dead(tmp_path / "lock.lease"), Lease(tmp_path / "lock.lease")
    assert not other.acquire(), "without a wait any lease counts as held"
    began_s = time.monotonic()
    assert other.acquire(lambda _: None)
    assert time.monotonic() - began_s >= leases.STILL_S
    assert not holder.is_own()
    holder.release()
    assert other.is_own(), "the former holder does not remove it"
    other.release()


def test_holder_that_wakes_up_late_is_told_and_writes_nothing(fast: None, tmp_path: Path) -> None:
    holder, other, lost = dead(tmp_path / "lock.lease"), Lease(tmp_path / "lock.lease"), threading.Event()
    assert other.acquire(lambda _: None)
    holder.on_lost = lost.set
    holder._stop.clear()
    threading.Thread(target=holder._renew, args=(holder._stop,)).start()
    assert lost.wait(5)
    assert other.is_own()
    holder._write()  # even a write that was under way goes into the former file
    assert other.is_own()
    other.release()


@pytest.mark.parametrize("content", [b"", b"\0\xff"])
def test_lease_with_other_content_can_be_taken(fast: None, tmp_path: Path, content: bytes) -> None:
    lease = Lease(tmp_path / "lock.lease")
    lease.path.write_bytes(content)
    assert lease.acquire(lambda _: None)
    lease.release()


def test_of_many_takers_one_gets_the_lease(fast: None, tmp_path: Path) -> None:
    dead(tmp_path / "lock.lease")
    takers = [Lease(tmp_path / "lock.lease") for _ in range(6)]
    took: list[Lease] = []
    threads = [threading.Thread(target=lambda t=t: t.acquire(lambda _: None) and took.append(t)) for t in takers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [taker.is_own() for taker in took] == [True]
    took[0].release()
    assert os.listdir(tmp_path) == []


def test_time_in_which_the_taker_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now_s, looks = [0.0], [0]

    def sleep(seconds: float) -> None:
        looks[0] += 1
        now_s[0] += 3600 if looks[0] == 5 else seconds

    lease = Lease(tmp_path / "lock.lease")
    lease.path.write_bytes(b"old")
    monkeypatch.setattr(leases, "time", types.SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    assert lease._stands_still() == b"old"
    assert looks[0] >= 58


# -- run folders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_locks() -> object:
    failpoints.arm("run.lock=raise:ENOLCK")
    yield
    failpoints.arm("")


def test_folder_without_locks_is_held_by_a_lease(no_locks: None, fast: None, tmp_path: Path) -> None:
    folder, said = RunFolder.create(path=tmp_path / "a"), list[str]()
    folder.acquire(said.append)
    assert "this file system has no locks (mount Lustre with flock, NFS without nolock)" in said[0]
    assert folder.read_holder().pid == os.getpid()  # type: ignore[union-attr]
    with pytest.raises(RunBusyError, match=f"held by process {os.getpid()} on"):
        RunFolder(folder.path).acquire(environ={})
    failpoints.arm("")
    assert folder.is_locked() is None
    with pytest.raises(RunBusyError):  # a machine with locks respects the lease of one without
        RunFolder(folder.path).acquire(environ={})
    folder.release()
    assert not (folder.path / "lock.lease").exists()
    assert folder.is_locked() is False
    with folder:
        assert not folder.has_lease()


def test_commit_of_a_holder_that_lost_its_lease_is_refused(no_locks: None, fast: None, tmp_path: Path) -> None:
    folder, lost = RunFolder.create(path=tmp_path / "a"), list[str]()
    folder.on_lease_lost(lost.append)
    folder.acquire()
    events = EventWriter(folder.events, check_holder=lambda: folder.check_lease(0.1))
    events.alert("disk", "before")
    store = CheckpointFolder(folder.checkpoints, folder.check_lease)

    def commit(step: int) -> None:
        store.commit(lambda file: file.write(b"x" * step), CheckpointFacts(step=step, epoch=1), keep=3, need_bytes=9)

    commit(1)
    manifest = store.manifest_path.read_bytes()
    (folder.path / "lock.lease").write_text("of another\n")
    with pytest.raises(RunBusyError, match=r"was taken over by process \d+ on \S+, because"):
        commit(2)
    assert store.manifest_path.read_bytes() == manifest
    time.sleep(0.2)  # from here on, its last renewal no longer says that the lease is there
    with pytest.raises(RunBusyError):
        events.alert("disk", "after")
    assert folder.events.read_text().count("\n") == 1
    assert len(lost) >= 1
    folder.release()
    assert (folder.path / "lock.lease").exists()


@pytest.mark.parametrize(
    ("environ", "job", "waits"),
    [
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, None, True),
        ({"SLURM_RESTART_COUNT": "2"}, "slurm 1", True),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, None, False),
        ({"SLURM_JOB_ID": "7"}, "slurm 7", True),
        ({"SLURM_JOB_ID": "7"}, "slurm 8", False),
        ({"TORCHELASTIC_RUN_ID": "a"}, "torchelastic a", True),
        ({"TORCHELASTIC_RUN_ID": "none"}, None, False),
        ({}, None, False),
    ],
)
def test_restart_and_same_job_wait_for_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], job: str | None, waits: bool
) -> None:
    monkeypatch.setattr(folders, "_BUSY_LOOK_S", 0.01)
    holder, other, said = RunFolder.create(path=tmp_path / "a"), RunFolder(tmp_path / "a"), list[str]()
    words = (job or "none none").split()
    holder.acquire(
        environ={"slurm": {"SLURM_JOB_ID": words[1]}, "torchelastic": {"TORCHELASTIC_RUN_ID": words[1]}}.get(
            words[0], {}
        )
    )

    def say(line: str) -> None:
        said.append(line)
        threading.Timer(0.1, holder.release).start()

    if not waits:
        with pytest.raises(RunBusyError):
            other.acquire(say, environ=environ)
        assert said == []
        return
    other.acquire(say, environ=environ)
    assert said == [
        f"{other.path} is still held by process {os.getpid()} on {os.uname().nodename}: waiting up to 120 s for its end"
    ]
    other.release()


def test_wait_for_a_busy_folder_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "BUSY_S", 0.2)
    monkeypatch.setattr(folders, "_BUSY_LOOK_S", 0.01)
    with RunFolder.create(path=tmp_path / "a") as holder, pytest.raises(RunBusyError):
        RunFolder(holder.path).acquire(lambda _: None, environ={"SLURM_RESTART_COUNT": "1"})


# -- a real program on a file system that refuses locks -------------------------------------------------------------

HOLD = f"""
import sys, time
from segapp.errors import SegappError
from segapp.run import lease
for name, seconds in {FAST}.items():
    setattr(lease, name, seconds)
from segapp.run.folder import RunFolder
try:
    RunFolder(sys.argv[1]).acquire(lambda line: print("says:", line, flush=True), environ={{}})
except SegappError as error:
    sys.exit(f"{{error.exit_code}} {{error}}")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def nolock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler, for a library that refuses locks")
    library = tmp_path_factory.mktemp("nolock") / "nolock.so"
    source = ROOT / "tests" / "support" / "nolock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def hold(nolock: Path, tmp_path: Path) -> object:
    processes: list[subprocess.Popen[str]] = []

    def start(number: int) -> subprocess.Popen[str]:
        environ = {**os.environ, "LD_PRELOAD": str(nolock), "NOLOCK_ERRNO": str(number)}
        words = [sys.executable, "-c", HOLD, str(tmp_path / "a")]
        processes.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


Hold = Callable[[int], "subprocess.Popen[str]"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_program_without_locks_takes_the_lease_of_a_killed_one(hold: Hold, tmp_path: Path, number: int) -> None:
    RunFolder.create(path=tmp_path / "a")
    first = hold(number)
    assert first.stdout.readline().startswith("says: ")  # type: ignore[union-attr]
    assert first.stdout.readline() == "held\n"  # type: ignore[union-attr]
    second = hold(number)
    _, error = second.communicate(timeout=60)
    assert second.returncode == 1
    assert error.startswith(f"9 {tmp_path / 'a'} is held by process {first.pid} on")
    first.send_signal(signal.SIGKILL)
    first.wait()
    third = hold(number)
    assert "to see whether its holder renews it" in third.stdout.readline()  # type: ignore[union-attr]
    third.stdout.readline()  # type: ignore[union-attr]
    assert third.stdout.readline() == "held\n"  # type: ignore[union-attr]


def test_program_whose_disk_fails_to_lock_says_so(hold: Hold, tmp_path: Path) -> None:
    RunFolder.create(path=tmp_path / "a")
    process = hold(errno.EIO)
    _, error = process.communicate(timeout=60)
    assert error.startswith(f"{StorageError.exit_code} cannot lock {tmp_path / 'a' / 'lock'}: Input/output error")
