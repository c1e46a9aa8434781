"""A run's folder: made once, held by one trainer at a time, found again by name."""

import contextlib
import difflib
import fcntl
import json
import os
import re
import secrets
import struct
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from segapp.errors import ConfigError, RunBusyError, StorageError
from segapp.run.files import remove_dead_temporaries, storage_error, write_atomic, write_json
from segapp.run.process import ProcessId, this_process

SCHEMA = 1
"""Of `run.json` and the folder's layout."""

_MAX_NAME_CHARS = 100


class RunInfo(BaseModel):
    """`run.json`: how a run began; written once."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = SCHEMA
    id: str
    """Unlike the id of any other run."""
    name: str
    created_s: float
    """Unix seconds."""
    process: ProcessId
    """The trainer that began it; who holds it now is in `lock`."""
    argv: list[str] = []
    versions: dict[str, str] = {}
    gpus: list[dict[str, Any]] = []
    """Each with its `uuid`."""


class RunFolder:
    """The files of one run.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock_fd = -1

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def run_json(self) -> Path:
        """How the run began."""
        return self.path / "run.json"

    @property
    def config_yaml(self) -> Path:
        """The complete config."""
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        """What happened."""
        return self.path / "events.jsonl"

    @property
    def commands(self) -> Path:
        """The inbox."""
        return self.path / "commands"

    @property
    def checkpoints(self) -> Path:
        """`last.pt`, `best.pt`, `epoch_NNNN.pt` and their manifest."""
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        """Sample pictures."""
        return self.path / "samples"

    @property
    def reports(self) -> Path:
        """What was found out about each out-of-memory."""
        return self.path / "reports"

    @property
    def saved_plan(self) -> Path:
        """The memory plan that the run began with."""
        return self.path / "memory_plan.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's files."""
        return self.path / "tensorboard"

    @property
    def log(self) -> Path:
        """What a detached trainer prints, and tracebacks."""
        return self.path / "trainer.log"

    @property
    def lock(self) -> Path:
        """Locked by the trainer as long as it lives; says who that is."""
        return self.path / "lock"

    @classmethod
    def create(cls, name: str = "run", *, path: Path | str | None = None, root: Path | str = "runs") -> "RunFolder":
        """Makes the folder of a new training, not yet locked.

        Args:
            name: `runs/<name>`; where that is taken, `runs/<name>-2`, `-3` and so on.
            path: This very folder instead; it may exist if it holds no run yet (or one that never made a step).
            root: Where the runs lie.

        Raises:
            ConfigError: the name cannot be that of a folder, or `path` holds a run already.
            StorageError: it cannot be made.
        """
        try:
            folder = cls(Path(path)) if path is not None else cls(_new_directory(Path(root), name))
            if path is not None:
                folder.path.mkdir(parents=True, exist_ok=True)
                if folder._holds_a_run():
                    raise ConfigError(f"{path} holds a run already: add --resume to go on, or choose another folder")
            folder._make_subfolders()
        except FileExistsError as error:
            raise ConfigError(f"{path}: a file is there: choose another folder") from error
        except OSError as error:
            raise storage_error("make the run folder", Path(path) if path else Path(root) / name, error) from error
        return folder

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """The folder of a run that exists.

        Raises:
            ConfigError: there is none.
        """
        folder = cls(path)
        if not is_run(folder.path):
            raise ConfigError(f"{path}: not a run (it has no run.json): see `segapp ls`")
        return folder

    def acquire(self) -> None:
        """Locks the folder for this process, until `release` or its end, however that comes.

        Child processes do not share it: a data worker that outlives its trainer holds nothing.

        Raises:
            RunBusyError: another process holds it; the message names its host and process id.
            StorageError: the lock file cannot be written, or somebody else has prepared the inbox.
        """
        if self._lock_fd >= 0:
            return
        try:
            fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise storage_error("lock", self.lock, error) from error
        try:
            _take_lock(fd)
        except OSError:
            os.close(fd)
            raise RunBusyError(self._busy_message()) from None
        self._lock_fd = fd
        _close_in_children(self)
        with contextlib.suppress(OSError):
            body = this_process().model_dump() | {"acquired_s": round(time.time(), 3)}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(body).encode(), 0)
            self._make_subfolders()
            below = (self.commands, self.checkpoints, self.checkpoints / "objects", self.samples)
            for directory in (self.path, *below):
                remove_dead_temporaries(directory)

    def release(self) -> None:
        """Gives the lock back; the file stays and says who held it last."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                _drop_lock(self._lock_fd)
            self._close_lock()

    def _close_lock(self) -> None:
        """Closes this process's copy of the lock: the lock itself stays as long as another process has one."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> "RunFolder":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def write_info(
        self, *, versions: dict[str, str] | None = None, gpus: list[dict[str, Any]] | None = None
    ) -> RunInfo:
        """Writes `run.json`, by the trainer that holds the lock; one that is there already is left as it is.

        Args:
            versions: Of what matters: segapp, python, torch, cuda.
            gpus: Each with `uuid`, `name`, `total_mib`.

        Returns:
            What the file says.

        Raises:
            StorageError: it cannot be written.
        """
        if (info := self.read_info()) is not None:
            return info
        info = RunInfo(
            id=f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
            name=self.name,
            created_s=round(time.time(), 3),
            process=this_process(),
            argv=[os.fsencode(argument).decode(errors="backslashreplace") for argument in sys.argv],
            versions=versions or {},
            gpus=gpus or [],
        )
        body = info.model_dump()
        flat = {"schema": body.pop("schema_version"), **body, **info.process.model_dump(include={"host", "pid"})}
        flat["process_start_s"] = info.process.start_s
        try:
            write_json(self.run_json, flat)
        except OSError as error:
            raise storage_error("write", self.run_json, error) from error
        return info

    def read_info(self) -> RunInfo | None:
        """What `run.json` says; None when it is missing or damaged."""
        raw = _read_json(self.run_json)
        try:
            return RunInfo.model_validate({**raw, "schema_version": raw.get("schema", SCHEMA)}) if raw else None
        except ValidationError:
            return None

    def write_config(self, text: str) -> None:
        """Writes `config.yaml`.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            write_atomic(self.config_yaml, text)
        except OSError as error:
            raise storage_error("write", self.config_yaml, error) from error

    def read_holder(self) -> ProcessId | None:
        """Who holds the lock, or held it last."""
        raw = _read_json(self.lock)
        try:
            return ProcessId.model_validate(raw) if raw else None
        except ValidationError:
            return None

    def is_locked(self) -> bool | None:
        """Whether a trainer holds the folder, without disturbing it; None where the system does not say."""
        try:
            fd = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        try:
            return _is_write_locked(fd)
        finally:
            os.close(fd)

    def _busy_message(self) -> str:
        holder = self.read_holder()
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        return (
            f"{self.path} is held by {who}: `segapp attach {self.name}` shows it, `segapp ctl {self.name} stop` ends it"
        )

    def _make_subfolders(self) -> None:
        for folder in (self.commands, self.checkpoints, self.samples, self.tensorboard):
            folder.mkdir(exist_ok=True, mode=0o700 if folder == self.commands else 0o777)
        if self.commands.is_symlink() or self.commands.stat().st_uid != os.geteuid():
            self.release()
            raise StorageError(
                f"{self.commands} is a link or belongs to another user, who could command this training: remove it"
            )
        self.commands.chmod(0o700)

    def _holds_a_run(self) -> bool:
        """Whether something would be lost if a new training began here."""
        if any(self.checkpoints.glob("*.pt")) or (self.checkpoints / "manifest.json").exists():
            return True
        try:
            return b'"type":"step"' in self.events.read_bytes()
        except FileNotFoundError:
            return False


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    return (path / "run.json").is_file()


def find_run(what: str | Path | None = None, root: Path | str = "runs") -> RunFolder:
    """The run that a person means.

    Args:
        what: A run's name, a path to its folder (or to a file in it), or None for the one that began last.
        root: Where the runs lie.

    Raises:
        ConfigError: there is no such run; the message names the nearest.
    """
    runs = run_folders(root)
    if what is None:
        if not runs:
            raise ConfigError(f"no run in {root}: start one with `segapp train`, or name a folder")
        return runs[0]
    for path in (Path(root) / what, Path(what), *Path(what).parents[:3]):
        if is_run(path) and path != Path("."):
            return RunFolder(path)
    if str(what) == "." and is_run(Path(what)):
        return RunFolder(what)
    names = [run.name for run in runs]
    close = difflib.get_close_matches(str(what), names, 3, 0.4) or names[:3]
    known = f": there are {', '.join(close)}" if close else f": there are no runs in {root}"
    raise ConfigError(f"{what}: no such run{known} (`segapp ls` lists all)")


def run_folders(root: Path | str = "runs") -> list[RunFolder]:
    """Every run below a folder, the one that began (or was resumed) last first."""
    try:
        paths = [path for path in Path(root).iterdir() if is_run(path)]
    except OSError:
        return []

    def began_s(path: Path) -> float:
        times = []
        for name in ("run.json", "lock"):
            with contextlib.suppress(OSError):
                times.append((path / name).stat().st_mtime)
        return max(times, default=0.0)

    return [RunFolder(path) for path in sorted(paths, key=lambda path: (-began_s(path), path.name))]


def _new_directory(root: Path, name: str) -> Path:
    """Makes `root/name`, or `root/name-2` and so on; two trainings that start at once get two folders."""
    if not re.fullmatch(r"[^/\\\x00-\x1f.-][^/\\\x00-\x1f]*", name) or len(name) > _MAX_NAME_CHARS:
        raise ConfigError(f"name={name!r}: a run's name is that of a folder, without / and at most 100 characters long")
    root.mkdir(parents=True, exist_ok=True)
    for number in range(1, 100_000):
        path = root / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise ConfigError(f"{root / name}: all of its numbers are taken: choose another name")


_FLOCK = "hhqqi4x"
"""`struct flock` of Linux on 64 bits: type, whence, start, length, pid."""


def _take_lock(fd: int) -> None:
    """Locks an open file, for as long as this very opening of it lives (an "open file description" lock).

    Unlike a classic POSIX lock it is not dropped when some other part of the process opens and closes the same file,
    and unlike `flock` it can be asked about without being taken.

    Raises:
        OSError: somebody else holds it.
    """
    if _has_ofd_locks():
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _drop_lock(fd: int) -> None:
    """Unlocks for every process with a copy of this opening: a child just forked may not have closed its own yet."""
    if _has_ofd_locks():
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _is_write_locked(fd: int) -> bool | None:
    """Asks the kernel which lock would stand in the way of a shared one, without taking any."""
    if not _has_ofd_locks():
        return None
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    return int(struct.unpack_from("h", answer)[0]) != fcntl.F_UNLCK


def _has_ofd_locks() -> bool:
    return sys.platform.startswith("linux") and hasattr(fcntl, "F_OFD_SETLK")


def _close_in_children(folder: RunFolder) -> None:
    """Makes forked children give their copy of the lock back at once."""
    reference = weakref.ref(folder)

    def close() -> None:
        if (held := reference()) is not None:
            held._close_lock()

    os.register_at_fork(after_in_child=close)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            raw = from_json(file.read(2**20))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None
