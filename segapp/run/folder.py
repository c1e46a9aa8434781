"""The folder of a run: created once, locked by one trainer at a time, found by name."""

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from segapp.errors import ConfigError, RunBusyError, StorageError, did_you_mean, without_secrets
from segapp.run.events.types import MAX_EVENTS_BYTES
from segapp.run.files import (
    check_tree,
    fsync_directory,
    make_durable_directory,
    open_of_run,
    read_of_run,
    remove_dead_temporaries,
    storage_error,
    storage_errors_of,
    write_atomic,
    write_json,
)
from segapp.run.lock import FileLock, ProcessId, check_locks, this_process

SCHEMA = 1
"""Version of `run.json` and of the folder's layout."""

BUSY_S = 120.0
"""Maximum time that a restart waits until the previous process ends."""

FIRST_BATCH = "first_batch.png"
"""File in `samples` that shows the first batch of the training as the model sees it."""

_BUSY_LOOK_S = 0.5
_MAX_NAME_CHARS = 100


class RunInfo(BaseModel):
    """Content of `run.json`: facts about the start of a run; written once."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = SCHEMA
    id: str
    name: str
    created_s: float
    """Time of the start, Unix seconds."""
    process: ProcessId
    """The process that created the run; `lock` names the present one."""
    argv: list[str] = []
    versions: dict[str, str] = {}
    gpus: list[dict[str, Any]] = []
    """One dict per GPU, with `uuid`, `name` and `total_mib`."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path | str, *, is_made: bool = False) -> None:
        self.path = Path(path)
        self.is_made = is_made
        """True if `create` made the folder."""
        self.run_json = self.path / "run.json"
        """`RunInfo` of the run."""
        self.config_yaml = self.path / "config.yaml"
        """The complete config."""
        self.events = self.path / "events.jsonl"
        """The events of the run."""
        self.commands = self.path / "commands"
        """Inbox of the commands."""
        self.checkpoints = self.path / "checkpoints"
        """`last.pt`, `best.pt`, `epoch_NNNN.pt` and their manifest."""
        self.samples = self.path / "samples"
        """Sample images, and `first_batch.png`: the first batch of the training as the model sees it."""
        self.reports = self.path / "reports"
        """Reports of out-of-memory errors."""
        self.saved_plan = self.path / "memory_plan.json"
        """The memory plan at the start of the run."""
        self.parts = self.path / "parts"
        """Copies of the source files of custom components, in a folder for each version."""
        self.tensorboard = self.path / "tensorboard"
        """TensorBoard event files."""
        self.log = self.path / "trainer.log"
        """Output of a detached trainer, and tracebacks; with several ranks, the tracebacks of rank 0."""
        self.logs = self.path / "logs"
        """`rank-0001.log`: tracebacks of rank 1; `rank-0001-stacks.log`: its stacks after a hang; and so on."""
        self.summary = self.path / "summary.json"
        """What the events say, kept by `segapp ls` and other viewers; without it, they read the events again."""
        self.lock = self.path / "lock"
        """File that the trainer keeps locked while it runs; it names that process."""
        self._file_lock = FileLock(self.lock)

    @property
    def name(self) -> str:
        """Name of the folder; SWEEP/RUN for a run of a sweep."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if is_sweep(path.parent) else path.name

    def log_of(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:04d}.log" if rank else self.log

    def stacks_of(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:04d}-stacks.log" if rank else self.path / "stacks.log"

    @property
    def argument(self) -> str:
        """The shortest argument that names the run on a command line in the current folder."""
        return self.name if Path("runs", self.name).resolve() == self.path.resolve() else str(self.path)

    @classmethod
    def create(cls, name: str = "run", *, path: Path | str | None = None, root: Path | str = "runs") -> "RunFolder":
        """Create the folder of a new training, not yet locked: `path`, else `root/name`.

        `path` may exist if it contains no run, or a run without a single step. If `root/name` exists, the folder is
        `root/name-2`, `-3` and so on; a start that failed before any training is replaced.

        Raises:
            ConfigError: The name is not a valid folder name, or `path` already contains a run.
            StorageError: The folder cannot be created, its file system has no locks, or `check` refuses it.
        """
        try:
            # Refused before anything is created.
            check_locks(Path(path or root))
            folder = cls(path or _new_directory(Path(root), name), is_made=path is None or not Path(path).exists())
            if path is not None:
                make_durable_directory(folder.path)
                folder.check(is_writer=True)
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
        """Return the folder of an existing run; ConfigError for any other folder, StorageError like `check`."""
        folder = cls(path)
        if not is_run(folder.path):
            raise ConfigError(f"{path}: not a run (it has no run.json): see `segapp ls`", path=path)
        folder.check()
        return folder

    def check(self, *, is_writer: bool = False) -> None:
        """Raise StorageError if `check_tree` refuses the folder, or if its events are too many to be read."""
        with storage_errors_of("open", self.path), contextlib.suppress(FileNotFoundError):
            check_tree(self.path, is_writer=is_writer)
            os.close(open_of_run(self.events, max_bytes=MAX_EVENTS_BYTES))

    def acquire(self, say: Callable[[str], None] | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        """Lock the folder for this process, until `release` or the end of the process.

        Args:
            say: Called with the reason for a wait of up to `BUSY_S` for a holder that is about to end, because this is
                a restart or the holder belongs to the same job. None: do not wait.
            environ: Environment variables; by default of this process.

        Raises:
            RunBusyError: Another process holds the lock; the message names its host and process id.
            StorageError: The lock file cannot be written, the file system has no locks, or `check` refuses the folder.
        """
        if self._file_lock.fd >= 0:
            return
        self.check(is_writer=True)
        environ = os.environ if environ is None else environ
        deadline_s = None
        while not self._try_to_lock():
            if deadline_s is None and say is not None and self._is_about_to_end(environ):
                deadline_s = time.monotonic() + BUSY_S
                say(f"{self.path} is still held by {self._holder_words()}: waiting up to {BUSY_S:g} s for its end")
            if deadline_s is None or time.monotonic() >= deadline_s:
                raise RunBusyError(self._busy_message(), path=self.path)
            time.sleep(_BUSY_LOOK_S)
        with contextlib.suppress(OSError):
            inode = os.fstat(self._file_lock.fd).st_ino
            taken = {"acquired_s": round(time.time(), 3), "inode": inode, "job": job_of(environ)}
            body = this_process().model_dump() | taken
            # In place, because the lock belongs to this file and would not follow a new one of the same name.
            os.ftruncate(self._file_lock.fd, 0)
            os.pwrite(self._file_lock.fd, json.dumps(body).encode(), 0)
            self._make_subfolders()
            below = (self.commands, self.checkpoints, self.checkpoints / "objects", self.samples)
            for directory in (self.path, *below):
                remove_dead_temporaries(directory)

    def _try_to_lock(self) -> bool:
        with storage_errors_of("lock", self.lock):
            return self._file_lock.acquire()

    def _is_about_to_end(self, environ: Mapping[str, str]) -> bool:
        """Return True if this is a restart, or the holder belongs to the same job, so the earlier process is ending."""
        restarts = (environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
        job = job_of(environ)
        return any(count.isdecimal() and int(count) > 0 for count in restarts) or (
            job is not None and (_read_json(self.lock) or {}).get("job") == job
        )

    def release(self) -> None:
        """Release the lock; the file stays and names the last holder."""
        self._file_lock.release()

    def __enter__(self) -> "RunFolder":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def write_info(
        self, *, versions: dict[str, str] | None = None, gpus: list[dict[str, Any]] | None = None
    ) -> RunInfo:
        """Write `run.json`, as the holder of the lock, and return its content; an existing one is not changed."""
        if (info := self.read_info()) is not None:
            return info
        info = RunInfo(
            id=f"{self.name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
            name=self.name,
            created_s=round(time.time(), 3),
            process=this_process(),
            argv=[without_secrets(os.fsencode(word).decode(errors="backslashreplace")) for word in sys.argv],
            versions=versions or {},
            gpus=gpus or [],
        )
        body = info.model_dump()
        flat = {"schema": body.pop("schema_version"), **body, **info.process.model_dump(include={"host", "pid"})}
        flat["process_start_s"] = info.process.start_s
        with storage_errors_of("write", self.run_json):
            write_json(self.run_json, flat)
        return info

    def read_info(self) -> RunInfo | None:
        """Return the content of `run.json`; None if it is missing or damaged."""
        raw = _read_json(self.run_json)
        try:
            return RunInfo.model_validate({**raw, "schema_version": raw.get("schema", SCHEMA)}) if raw else None
        except ValidationError:
            return None

    def train_command(self) -> str | None:
        """Return the command that started the run; None if it is unknown."""
        info = self.read_info()
        words = [word for word in info.argv[1:] if word != "--plain"] if info is not None else []
        return shlex.join(["segapp", *words]) if words else None

    def write_config(self, text: str) -> None:
        with storage_errors_of("write", self.config_yaml):
            write_atomic(self.config_yaml, text)

    def read_holder(self) -> ProcessId | None:
        """Return the process that holds the lock, or held it last."""
        with contextlib.suppress(OSError, ValidationError):
            return ProcessId.model_validate_json(read_of_run(self.lock))
        return None

    def lock_inode(self) -> int | None:
        """Return the inode of the lock's file; None if there is none."""
        try:
            return self.lock.stat(follow_symlinks=False).st_ino
        except OSError:
            return None

    def is_locked(self) -> bool | None:
        """Return True if a trainer holds the lock, without taking it; None if the system cannot tell."""
        return self._file_lock.is_held()

    def _holder_words(self) -> str:
        holder = self.read_holder()
        return f"process {holder.pid} on {holder.host}" if holder else "another process"

    def _busy_message(self) -> str:
        if self.is_locked() is False:
            return f"{self.lock} is held by a process that is no trainer: end it (`lslocks` shows it), or try again"
        return (
            f"{self.path} is held by {self._holder_words()}: `segapp attach {self.argument}` shows it, "
            f"`segapp ctl {self.argument} stop` ends it"
        )

    def _make_subfolders(self) -> None:
        for folder in (self.commands, self.checkpoints, self.samples, self.tensorboard):
            folder.mkdir(0o755, exist_ok=True)

    def is_failed_start(self) -> bool:
        """Return True if the run failed before its training began, or if this process made it and nothing began."""
        if self.path.is_symlink() or self._holds_a_run():
            return False
        if not is_run(self.path):
            return self.is_made
        try:
            text = read_of_run(self.events)
        except OSError:
            return False
        return b'"status":"failed"' in text and b'"type":"run_start"' not in text

    def _holds_a_run(self) -> bool:
        """Return True if a new training here would overwrite something."""
        if any(self.checkpoints.glob("*.pt")) or (self.checkpoints / "manifest.json").exists():
            return True
        try:
            return b'"type":"step"' in read_of_run(self.events)
        except OSError as error:
            return not isinstance(error, FileNotFoundError)


def job_of(environ: Mapping[str, str]) -> str | None:
    """Return a name for the scheduler's or elastic launcher's job that a process belongs to; None for neither."""
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm {job}"
    job = environ.get("TORCHELASTIC_RUN_ID")
    return None if job in (None, "", "none") else f"torchelastic {job}"


def is_run(path: Path | str) -> bool:
    return os.path.lexists(os.path.join(path, "run.json"))


def is_sweep(path: Path | str) -> bool:
    return os.path.isfile(os.path.join(path, "sweep.json"))


def runs_of(what: str | Path, root: Path | str = "runs") -> list[str]:
    """Return the folders of the runs of a sweep, which the user names by its name or folder, or else the word itself.

    Raises:
        ConfigError: the sweep has no runs.
    """
    sweep = next((path for path in (Path(root) / what, Path(what)) if is_sweep(path)), None)
    if sweep is None:
        return [str(what)]
    if not (found := sorted(str(run.path) for run in run_folders(sweep))):
        raise ConfigError(f"{what}: no run of this sweep has begun", path=sweep)
    return found


def find_run(what: str | Path | None = None, root: Path | str = "runs") -> RunFolder:
    """Return a run's folder by name, or by a path to it or a file in it; None: the run that started last.

    Raises:
        ConfigError: There is no such run; the message names the most similar ones.
        StorageError: `RunFolder.check` refuses it.
    """
    for path in () if what is None else (Path(root) / what, Path(what), *Path(what).parents[:3]):
        # The parents of a relative path end with the current folder, which a wrong name must not mean.
        if is_run(path) and (path != Path(".") or str(what) == "."):
            return RunFolder.open(path)
    runs = run_folders(root, with_sweeps=True)
    if what is None:
        if not runs:
            raise ConfigError(f"no run in {root}: start one with `segapp train`, or name a folder", path=root)
        return RunFolder.open(runs[0].path)
    names = [run.name for run in runs]
    for path in (Path(root) / what, Path(what)):
        if is_sweep(path):
            inside = [name for name in names if name.startswith(f"{path.name}/")]
            example = f", such as {inside[0]}" if inside else ""
            raise ConfigError(
                f"{what} is a sweep: name one of its runs{example} (`segapp ls {what}` lists them)", path=what
            )
    if Path(what).is_dir():
        raise ConfigError(f"{what}: no such run: this folder has no run.json (`segapp ls` lists all runs)", path=what)
    there = did_you_mean(str(what), names, most=3) or (f"there are {', '.join(names[:3])}" if names else "")
    raise ConfigError(
        f"{what}: no such run: {there or f'there are no runs in {root}'} (`segapp ls` lists all)", path=what
    )


def run_of_file(path: Path) -> RunFolder | None:
    """Return the run that contains a file, such as one of its checkpoints; None for a file outside a run."""
    return next((RunFolder(folder) for folder in list(path.absolute().parents)[:3] if is_run(folder)), None)


def run_folders(root: Path | str = "runs", *, with_sweeps: bool = False) -> list[RunFolder]:
    """Return all runs in a folder, the last started or resumed first, optionally with the runs of its sweeps."""
    paths = [Path(path) for path in run_paths(root, with_sweeps=with_sweeps)]
    return [RunFolder(path) for path in sorted(paths, key=lambda path: (-last_start_s(path), path.name))]


def run_paths(root: Path | str, *, with_sweeps: bool = True, known: Container[str] = ()) -> list[str]:
    """Return the paths of all runs in a folder, optionally also in its sweeps; `known` ones are not looked at."""
    try:
        inside = [str(Path(root) / name) for name in os.listdir(root)]
        paths = [path for path in inside if path in known or is_run(path)]
        if with_sweeps:
            sweeps = [path for path in inside if path not in known and is_sweep(path)]
            paths += [run for sweep in sweeps for run in run_paths(sweep, with_sweeps=False, known=known)]
    except OSError:
        return []
    return paths


def last_start_s(path: Path) -> float:
    """Return the last start or resume of a run or sweep, Unix seconds; 0 if unknown."""
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
            path.mkdir(0o755)
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
        if folder.is_failed_start():  # check again: another process may have replaced it
            removed = folder.path.with_name(f".{folder.path.name}-{secrets.token_hex(4)}")
            folder.path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
            return True
    return False


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        raw = from_json(read_of_run(path))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None
