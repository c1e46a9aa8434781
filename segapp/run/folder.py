"""The folder of a run: created once, locked by one trainer at a time, found by name.

Locks end with the process that holds them, and can be queried without being taken.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import struct
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from segapp.errors import ConfigError, RunBusyError, StorageError, did_you_mean
from segapp.run.files import (
    fsync_directory,
    make_durable_directory,
    remove_dead_temporaries,
    storage_error,
    write_atomic,
    write_json,
)
from segapp.run.process import ProcessId, this_process

SCHEMA = 1
"""Version of `run.json` and of the folder's layout."""

_MAX_NAME_CHARS = 100


class RunInfo(BaseModel):
    """Content of `run.json`: facts about the start of a run; written once."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = SCHEMA
    id: str
    """Unique id."""
    name: str
    created_s: float
    """Unix seconds."""
    process: ProcessId
    """The trainer that created the run; `lock` names the present one."""
    argv: list[str] = []
    versions: dict[str, str] = {}
    gpus: list[dict[str, Any]] = []
    """One dict a GPU, with `uuid`, `name` and `total_mib`."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path | str, *, is_made: bool = False) -> None:
        self.path, self.is_made = Path(path), is_made  # made: by `create`, where no folder was before
        self._lock_fd = -1

    @property
    def name(self) -> str:
        """Name of the folder; SWEEP/RUN for a run of a sweep."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if is_sweep(path.parent) else path.name

    @property
    def argument(self) -> str:
        """The shortest argument that names the run on a command line in the current folder."""
        return self.name if Path("runs", self.name).resolve() == self.path.resolve() else str(self.path)

    @property
    def run_json(self) -> Path:
        """`RunInfo` of the run."""
        return self.path / "run.json"

    @property
    def config_yaml(self) -> Path:
        """The complete config."""
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        """The events of the run."""
        return self.path / "events.jsonl"

    @property
    def commands(self) -> Path:
        """Inbox of the commands."""
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
        """Reports of out-of-memory errors."""
        return self.path / "reports"

    @property
    def saved_plan(self) -> Path:
        """The memory plan at the start of the run."""
        return self.path / "memory_plan.json"

    @property
    def parts(self) -> Path:
        """Folder with copies of the source files of own parts."""
        return self.path / "parts"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def log(self) -> Path:
        """Output of a detached trainer, and tracebacks."""
        return self.path / "trainer.log"

    @property
    def lock(self) -> Path:
        """File that the trainer keeps locked while it runs; names that process."""
        return self.path / "lock"

    @classmethod
    def create(cls, name: str = "run", *, path: Path | str | None = None, root: Path | str = "runs") -> "RunFolder":
        """Create the folder of a new training, not yet locked.

        Args:
            name: `runs/<name>`; if that exists, `runs/<name>-2`, `-3` and so on. A start that failed before any
                training is replaced.
            path: This folder instead; it may exist if it holds no run, or one without a single step.
            root: The folder of the runs.

        Raises:
            ConfigError: The name is not a valid folder name, or `path` already holds a run.
            StorageError: The folder cannot be created.
        """
        try:
            folder = cls(path or _new_directory(Path(root), name), is_made=path is None or not Path(path).exists())
            if path is not None:
                make_durable_directory(folder.path)
                if folder._holds_a_run():
                    raise ConfigError(
                        f"{path} already holds a run: add --resume to continue it, or choose another folder", path=path
                    )
            folder._make_subfolders()
        except FileExistsError as error:
            raise ConfigError(f"{path} is a file: choose another folder", path=path) from error
        except OSError as error:
            raise storage_error("make the run folder", Path(path) if path else Path(root) / name, error) from error
        return folder

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """Return the folder of an existing run.

        Raises:
            ConfigError: The folder holds no run.
        """
        folder = cls(path)
        if not is_run(folder.path):
            raise ConfigError(f"{path}: not a run (it has no run.json): see `segapp ls`", path=path)
        return folder

    def acquire(self) -> None:
        """Lock the folder for this process, until `release` or the end of the process.

        Child processes do not inherit the lock: a data worker that outlives its trainer does not hold it.

        Raises:
            RunBusyError: Another process holds the lock; the message names its host and process id.
            StorageError: The lock file cannot be written, or the inbox belongs to another user.
        """
        if self._lock_fd >= 0:
            return
        try:
            fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise storage_error("lock", self.lock, error) from error
        try:
            take_lock(fd)
        except OSError:
            os.close(fd)
            raise RunBusyError(self._busy_message(), path=self.path) from None
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
        """Release the lock; the file stays and names the last holder."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                drop_lock(self._lock_fd)
            self.close_lock()

    def close_lock(self) -> None:
        """Close this process's copy of the lock; the lock is held until every process has closed its copy."""
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
        """Write `run.json`, as the holder of the lock; an existing one is not changed.

        Returns:
            The content of the file.

        Raises:
            StorageError: The file cannot be written.
        """
        if (info := self.read_info()) is not None:
            return info
        info = RunInfo(
            id=f"{self.name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
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
        """Return the content of `run.json`; None if it is missing or damaged."""
        raw = _read_json(self.run_json)
        try:
            return RunInfo.model_validate({**raw, "schema_version": raw.get("schema", SCHEMA)}) if raw else None
        except ValidationError:
            return None

    def write_config(self, text: str) -> None:
        """Write `config.yaml`.

        Raises:
            StorageError: The file cannot be written.
        """
        try:
            write_atomic(self.config_yaml, text)
        except OSError as error:
            raise storage_error("write", self.config_yaml, error) from error

    def read_holder(self) -> ProcessId | None:
        """Return the process that holds the lock, or held it last."""
        raw = _read_json(self.lock)
        try:
            return ProcessId.model_validate(raw) if raw else None
        except ValidationError:
            return None

    def is_locked(self) -> bool | None:
        """Return True if a trainer holds the lock, without taking it; None if the system cannot tell."""
        try:
            fd = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        try:
            return is_write_locked(fd)
        finally:
            os.close(fd)

    def _busy_message(self) -> str:
        holder = self.read_holder()
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        return (
            f"{self.path} is held by {who}: `segapp attach {self.argument}` shows it, "
            f"`segapp ctl {self.argument} stop` ends it"
        )

    def _make_subfolders(self) -> None:
        for folder in (self.commands, self.checkpoints, self.samples, self.tensorboard):
            folder.mkdir(exist_ok=True, mode=0o700 if folder == self.commands else 0o777)
        if self.commands.is_symlink() or self.commands.stat().st_uid != os.geteuid():
            self.release()
            raise StorageError(
                f"{self.commands} is a link or belongs to another user, who could send commands to the run: remove it",
                path=self.commands,
            )
        self.commands.chmod(0o700)

    def is_failed_start(self) -> bool:
        """Return True if the run failed before its training began, or if this process made it and nothing began."""
        if self.path.is_symlink() or self._holds_a_run():
            return False
        if not is_run(self.path):
            return self.is_made
        try:
            text = self.events.read_bytes()
        except OSError:
            return False
        return b'"status":"failed"' in text and b'"type":"run_start"' not in text

    def _holds_a_run(self) -> bool:
        """Return True if a new training here would overwrite something."""
        if any(self.checkpoints.glob("*.pt")) or (self.checkpoints / "manifest.json").exists():
            return True
        try:
            return b'"type":"step"' in self.events.read_bytes()
        except FileNotFoundError:
            return False


def is_run(path: Path) -> bool:
    """Return True if a folder is that of a run."""
    return (path / "run.json").is_file()


def is_sweep(path: Path) -> bool:
    """Return True if a folder is that of a sweep, which holds the folders of its runs."""
    return (path / "sweep.json").is_file()


def find_run(what: str | Path | None = None, root: Path | str = "runs") -> RunFolder:
    """Return the folder of the run that the user names.

    Args:
        what: A run's name, a path to its folder (or to a file in it), or None for the run that began last.
        root: The folder of the runs.

    Raises:
        ConfigError: There is no such run; the message names the most similar ones.
    """
    runs = run_folders(root, with_sweeps=True)
    if what is None:
        if not runs:
            raise ConfigError(f"no run in {root}: start one with `segapp train`, or name a folder", path=root)
        return runs[0]
    for path in (Path(root) / what, Path(what), *Path(what).parents[:3]):
        if is_run(path) and path != Path("."):
            return RunFolder(path)
    if str(what) == "." and is_run(Path(what)):
        return RunFolder(what)
    names = [run.name for run in runs]
    for path in (Path(root) / what, Path(what)):
        if is_sweep(path):
            inside = [name for name in names if name.startswith(f"{path.name}/")]
            example = f", such as {inside[0]}" if inside else ""
            raise ConfigError(
                f"{what} is a sweep: name one of its runs{example} (`segapp ls {what}` lists them)", path=what
            )
    there = did_you_mean(str(what), names, most=3) or (f"there are {', '.join(names[:3])}" if names else "")
    raise ConfigError(
        f"{what}: no such run: {there or f'there are no runs in {root}'} (`segapp ls` lists all)", path=what
    )


def run_of_file(path: Path) -> RunFolder | None:
    """Return the run that a file lies in, such as one of its checkpoints; None for a file outside a run."""
    found = next((folder for folder in list(path.absolute().parents)[:3] if is_run(folder)), None)
    return None if found is None else RunFolder(found)


def run_folders(root: Path | str = "runs", *, with_sweeps: bool = False) -> list[RunFolder]:
    """Return every run below a folder, the last one to begin or resume first; with the runs of its sweeps, or not."""
    try:
        inside = list(Path(root).iterdir())
        paths = [path for path in inside if is_run(path)]
        if with_sweeps:
            paths += [run for path in inside if is_sweep(path) for run in path.iterdir() if is_run(run)]
    except OSError:
        return []
    return [RunFolder(path) for path in sorted(paths, key=lambda path: (-last_start_s(path), path.name))]


def last_start_s(path: Path) -> float:
    """Return when a run or sweep began or was resumed last, Unix seconds; 0 if unknown."""
    times = []
    for name in ("run.json", "sweep.json", "lock"):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times, default=0.0)


def _new_directory(root: Path, name: str) -> Path:
    """Create `root/name`, or `root/name-2` and so on; trainings that start at the same time get different folders."""
    if not re.fullmatch(r"[^/\\\x00-\x1f.-][^/\\\x00-\x1f]*", name) or len(name) > _MAX_NAME_CHARS:
        raise ConfigError(
            f"name={name!r}: the name must be a valid folder name, without / and at most 100 characters long",
            key="name",
            value=name,
        )
    make_durable_directory(root)
    for number in range(1, 100_000):
        path = root / (name if number == 1 else f"{name}-{number}")
        remove_failed_start(RunFolder(path))
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            fsync_directory(root)
            return path
    raise ConfigError(
        f"{root / name}: all numbered names are in use: choose another name", key="name", value=name, path=root / name
    )


def remove_failed_start(folder: RunFolder) -> bool:
    """Remove a run that failed before its training began, unless a trainer holds it; return True if it is gone."""
    if not folder.is_failed_start():
        return False
    with contextlib.suppress(OSError, RunBusyError, StorageError), folder:
        if folder.is_failed_start():  # still: another process may have replaced it
            removed = folder.path.with_name(f".{folder.path.name}-{secrets.token_hex(4)}")
            folder.path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
            return True
    return False


def _close_in_children(folder: RunFolder) -> None:
    """Make forked children close their copy of the lock immediately."""
    reference = weakref.ref(folder)

    def close() -> None:
        if (held := reference()) is not None:
            held.close_lock()

    os.register_at_fork(after_in_child=close)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            raw = from_json(file.read(2**20))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None


_FLOCK = "hhqqi4x"
"""`struct flock` of Linux on 64 bits: type, whence, start, length, pid."""


def take_lock(fd: int) -> None:
    """Lock an open file until its file description is closed (an "open file description" lock).

    Unlike a POSIX record lock it is not released when another part of the process opens and closes the same file,
    and unlike `flock` it can be queried without being taken.

    Raises:
        OSError: Another process holds the lock.
    """
    if _has_ofd_locks():
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def drop_lock(fd: int) -> None:
    """Unlock for all processes that share the file description: a new child may not have closed its copy yet."""
    if _has_ofd_locks():
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_write_locked(fd: int) -> bool | None:
    """Return the lock that conflicts with a shared one, without taking any."""
    if not _has_ofd_locks():
        return None
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    return int(struct.unpack_from("h", answer)[0]) != fcntl.F_UNLCK


def _has_ofd_locks() -> bool:
    return sys.platform.startswith("linux") and hasattr(fcntl, "F_OFD_SETLK")
