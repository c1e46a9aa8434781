"""File systems without locks: a folder there is refused, and nothing in it changes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from segapp import failpoints
from segapp.commands.sweep import save_sweep
from segapp.config import dump_config
from segapp.errors import StorageError
from segapp.run.folder import RunFolder
from segapp.run.lock import FileLock
from tests.support import ROOT
from tests.support.fault_runs import Invariants, case, tiny_config

ACQUIRE = """
import sys
from segapp.errors import SegappError
from segapp.run.folder import RunFolder
try:
    RunFolder(sys.argv[1]).acquire(environ={})
except SegappError as error:
    sys.exit(f"{error.exit_code} {error}")
"""

Start = Callable[..., "subprocess.CompletedProcess[str]"]


def state_of(folder: Path) -> list[tuple[Path, int, int, bytes]]:
    """Returns everything in a folder that a program could change."""
    facts = [(path, path.lstat()) for path in (folder, *sorted(folder.rglob("*")))]
    return [
        (path, seen.st_mode, seen.st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path, seen in facts
    ]


def refusal(folder: Path | str, place: Path) -> str:
    """Returns the message about a folder; `df` names the file system of the place in which it is."""
    kind = subprocess.check_output(["df", "--output=fstype", place], text=True).split()[-1]
    return (
        f"{folder} is on a file system without locks ({kind}): choose a folder on a file system with locks with --run, "
        "start segapp in one, or mount Lustre with flock, NFS without nolock"
    )


@pytest.fixture(scope="module")
def nolock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that refuses every lock."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler, for a library that refuses locks")
    library = tmp_path_factory.mktemp("nolock") / "nolock.so"
    source = ROOT / "tests" / "support" / "nolock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def python(nolock: Path, tmp_path: Path) -> Start:
    """Runs Python in a folder of its own, with every lock refused for a reason."""

    def start(*words: object, number: int = errno.ENOLCK) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "LD_PRELOAD": str(nolock), "NOLOCK_ERRNO": str(number), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip

    return start


@pytest.fixture
def no_locks() -> Iterator[None]:
    failpoints.arm("run.lock=raise:ENOLCK")
    yield
    failpoints.arm("")


@case("F21", how="a disk without locks", passes="exit 10, nothing changes")
@pytest.mark.faults
@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["train", "--plain", "--config", "config.yaml"], "runs"),
        (["train", "--plain", "--config", "config.yaml", "--run", "empty"], "empty"),
        (["train", "--plain", "--config", "config.yaml", "--run", "old", "--resume"], "old"),
        (["train", "--plain", "--config", "config.yaml", "--run", "copy", "--resume"], "copy"),
        (["sweep", "--config", "config.yaml", "optim.lr=0.1,0.2"], "runs/config-sweep"),
    ],
)
def test_training_without_locks_is_refused_and_changes_nothing(
    python: Start, tiny_root: Path, tmp_path: Path, words: list[str], place: str
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(tiny_config(tiny_root)))
    (tmp_path / "empty").mkdir()
    for name in ("old", "copy"):
        with RunFolder.create(path=tmp_path / name) as folder:
            folder.write_info()
    (tmp_path / "copy" / "lock").unlink()
    before = state_of(tmp_path)
    done = python("-m", "segapp", *words)
    Invariants.assert_clear(done, 10, f"error: {refusal(place, tmp_path)}\n")
    assert state_of(tmp_path) == before


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_every_error_of_a_file_system_without_locks_is_refused(python: Start, tmp_path: Path, number: int) -> None:
    folder = RunFolder.create(path=tmp_path / "a")
    for _ in range(2):  # without and with a lock file
        assert python("-c", ACQUIRE, folder.path, number=number).stderr == f"10 {refusal(folder.path, tmp_path)}\n"
        with folder:
            pass


def test_program_whose_disk_fails_to_lock_says_so(python: Start, tmp_path: Path) -> None:
    RunFolder.create(path=tmp_path / "a")
    done = python("-c", ACQUIRE, tmp_path / "a", number=errno.EIO)
    assert done.stderr.startswith(f"10 cannot lock {tmp_path / 'a' / 'lock'}: Input/output error")


def test_viewers_of_a_run_without_locks_read_it(python: Start, tmp_path: Path) -> None:
    with RunFolder.create(path=tmp_path / "a") as folder:
        folder.write_info()
        before = state_of(tmp_path)
        code = "import sys; from segapp.run.folder import RunFolder; print(RunFolder(sys.argv[1]).is_locked())"
        assert python("-c", code, folder.path).stdout == "None\n"
        done = python("-m", "segapp", "status", folder.path)
        assert done.returncode == 0, done.stderr
        assert "busy" in done.stdout
        assert state_of(tmp_path) == before


def test_refused_lock_leaves_no_file_open(no_locks: None, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("the last holder")
    num_open = len(os.listdir("/proc/self/fd"))
    for refused in (
        FileLock(tmp_path / "lock").acquire,
        FileLock(tmp_path / "other").acquire,
        lambda: save_sweep(tmp_path / "sweep", []),
    ):
        with pytest.raises(StorageError, match="without locks"):
            refused()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert os.listdir(tmp_path) == ["lock"]
    assert (tmp_path / "lock").read_text() == "the last holder"
