"""File systems without locks: a folder there is refused, and nothing in it changes."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from segapp.commands.sweep import save_sweep
from segapp.config import dump_config
from segapp.errors import StorageError
from segapp.run.folder import RunFolder
from segapp.run.lock import FileLock
from segapp.view.runs import run_state
from tests.support.fault_runs import Invariants, case, state_of, tiny_config
from tests.support.programs import segapp


def refusal(folder: Path | str, place: Path) -> str:
    """Returns the message about a folder; `df` names the file system of the place in which it is."""
    kind = subprocess.check_output(["df", "--output=fstype", place], text=True).split()[-1]
    return (
        f"{folder} is on a file system without locks ({kind}): choose a folder on a file system with locks with --run, "
        "start segapp in one, or mount Lustre with flock, NFS without nolock"
    )


@pytest.fixture
def refuse_locks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the system refuse every lock with an error."""

    def refuse_with(number: int) -> None:
        def refuse(*_: object) -> bytes:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "fcntl", refuse)

    return refuse_with


@case("F21", how="a disk without locks", passes="exit 10, nothing changes")
@pytest.mark.faults
@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["train", "--plain", "--config", "config.yaml"], "runs"),
        (["train", "--plain", "--config", "config.yaml", "--run", "old", "--resume"], "old"),
        (["train", "--plain", "--config", "config.yaml", "--run", "copy", "--resume"], "copy"),
        (["sweep", "--config", "config.yaml", "optim.lr=0.1,0.2"], "runs/config-sweep"),
    ],
    ids=["new", "old", "without a lock file", "sweep"],
)
def test_training_without_locks_is_refused_and_changes_nothing(
    tiny_root: Path, tmp_path: Path, words: list[str], place: str
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "config.yaml").write_text(dump_config(tiny_config(tiny_root)))
    for name in ("old", "copy"):
        with RunFolder.create(path=work / name) as folder:
            folder.write_info()
    (work / "copy" / "lock").unlink()
    before = state_of(work)
    done = segapp(*words, cwd=work, SEGAPP_FAILPOINTS="run.lock=raise:ENOLCK")
    Invariants.assert_clear(done, 10, f"error: {refusal(place, work)}\n")
    assert state_of(work) == before


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])
def test_every_error_of_a_file_system_without_locks_is_refused(
    refuse_locks: Callable[[int], None], tmp_path: Path, number: int
) -> None:
    """EIO is one of the disk."""
    folder = RunFolder.create(path=tmp_path / "a")
    refuse_locks(number)
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(2):  # without and with a lock file
        with pytest.raises(StorageError) as refused:
            folder.acquire(environ={})
        if number == errno.EIO:
            assert str(refused.value).startswith(f"cannot lock {folder.lock}: Input/output error: look at the disk")
        else:
            assert str(refused.value) == refusal(folder.path, tmp_path)
        folder.lock.write_text("the last holder")
    if number != errno.EIO:
        for acquire in (FileLock(tmp_path / "other").acquire, lambda: save_sweep(tmp_path / "sweep", [])):
            with pytest.raises(StorageError, match="without locks"):
                acquire()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert folder.lock.read_text() == "the last holder"
    assert not (tmp_path / "sweep").exists()


def test_viewers_of_a_run_without_locks_read_it(refuse_locks: Callable[[int], None], tmp_path: Path) -> None:
    with RunFolder.create(path=tmp_path / "a") as folder:
        folder.write_info()
        before = state_of(tmp_path)
        refuse_locks(errno.ENOLCK)
        assert RunFolder(folder.path).is_locked() is None
        assert run_state(folder.path) == "busy"
        assert state_of(tmp_path) == before
