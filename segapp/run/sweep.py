"""The folder of a sweep: its runs, their folders, and their progress. No torch here."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from segapp.errors import ConfigError, RunBusyError, storage_errors
from segapp.run.files import check_tree, make_durable_directory, read_of_run, reason_of, write_atomic
from segapp.run.folder import RunFolder, is_run, is_sweep
from segapp.run.lock import FileLock, check_locks
from segapp.run.state import State, run_state

SCHEMA = 1
"""Version of `sweep.json` and of the folder's layout."""

SweepRunState = Literal["waiting", State]
"""`waiting`: not started yet; else the state of its run."""


class SweepRun(BaseModel):
    """One run of a sweep."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str = Field(pattern=r"^[^/.][^/]*$")
    """Name of its folder in the folder of the sweep."""
    config: str
    """Name of its config file, without folder and suffix."""
    settings: dict[str, Any]
    """Value of each config key that the sweep varies or sets."""
    exit_code: int | None = None
    """Exit code of the trainer that failed last; None: none has."""
    reason: str | None = None
    """First line of its error."""


class SweepInfo(BaseModel):
    """Content of `sweep.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = SCHEMA
    created_s: float
    """Unix seconds."""
    axes: dict[str, list[str]]
    """Config key -> its values as YAML, from all commands so far."""
    runs: list[SweepRun]


@dataclass(frozen=True)
class SweepProgress:
    """Numbers of runs of a sweep, by outcome."""

    num_runs: int
    num_finished: int
    num_failed: int
    num_running: int
    is_active: bool
    """True if a process is running the sweep."""

    @property
    def state(self) -> State:
        """State of the sweep, like a run's: `stopped` if runs are left and no process is running the sweep."""
        if self.is_active:
            return "live"
        if self.num_finished == self.num_runs:
            return "finished"
        return "failed" if self.num_finished + self.num_failed == self.num_runs else "stopped"


class SweepFolder:
    """The files of one sweep: `sweep.json`, `sweep.html`, `configs/RUN.yaml`, and a run folder for each run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = FileLock(self.path / "lock")

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().name

    @property
    def page(self) -> Path:
        """The page with the results."""
        return self.path / "sweep.html"

    def config_of(self, run: str) -> Path:
        """Return the file with the complete config of a run."""
        return self.path / "configs" / f"{run}.yaml"

    def folder_of(self, run: str) -> RunFolder:
        """Return the folder of a run, which may not exist yet."""
        return RunFolder(self.path / run)

    def state_of(self, run: SweepRun) -> SweepRunState:
        """Return the state of a run; `failed` even if its trainer failed before it wrote an event."""
        folder = self.folder_of(run.name)
        state = run_state(folder.path) if is_run(folder.path) else "waiting"
        is_over_or_unknown = state in ("waiting", "crashed", "stopped", "failed")
        return "failed" if is_over_or_unknown and run.exit_code is not None else state

    def read(self) -> SweepInfo:
        """Return the content of `sweep.json`; ConfigError if it is missing or damaged."""
        try:
            return SweepInfo.model_validate_json(read_of_run(self.path / "sweep.json"))
        except (OSError, ValidationError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else "its sweep.json is damaged"
            reason = "it has no sweep.json" if isinstance(error, FileNotFoundError) else reason
            raise ConfigError(
                f"{self.path}: not a sweep ({reason}): `segapp ls` lists sweeps and runs", path=self.path
            ) from None

    def write(self, info: SweepInfo) -> None:
        """Write `sweep.json`."""
        path = self.path / "sweep.json"
        with storage_errors(path, "free space or choose another folder"):
            make_durable_directory(self.path)
            write_atomic(path, info.model_dump_json(indent=1) + "\n")

    def note_end(self, run: str, exit_code: int | None, reason: str | None) -> None:
        """Record in `sweep.json`, as the holder of the lock, how a run failed; None removes the record."""
        info, changes = self.read(), {"exit_code": exit_code, "reason": reason}
        runs = [each.model_copy(update=changes) if each.name == run else each for each in info.runs]
        if runs != info.runs:
            self.write(info.model_copy(update={"runs": runs}))

    def acquire(self) -> None:
        """Lock the sweep until `release` or the end of this process; RunBusyError if another process is running it."""
        with storage_errors(self.path, "choose another folder"):
            check_locks(self.path)
            make_durable_directory(self.path)
            check_tree(self.path, is_writer=True, max_depth=0)
            is_acquired = self._lock.acquire()
        if not is_acquired:
            raise RunBusyError(
                f"{self.path} is in use by another process: `segapp ls {self.name}` shows how far it is",
                path=self.path,
            )

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def is_locked(self) -> bool:
        """Return True if a process is running the sweep."""
        return bool(self._lock.is_held())

    def progress(self) -> SweepProgress:
        """Return the progress of the sweep."""
        states = [self.state_of(run) for run in self.read().runs]
        return SweepProgress(
            num_runs=len(states),
            num_finished=states.count("finished"),
            num_failed=states.count("failed"),
            num_running=sum(state in ("live", "busy", "stale", "lost") for state in states),
            is_active=self.is_locked(),
        )


def find_sweep(what: str | Path, root: Path | str = "runs") -> SweepFolder | None:
    """Return the sweep that the user names, by its name or folder; None if there is none."""
    return next((SweepFolder(path) for path in (Path(root) / what, Path(what)) if is_sweep(path)), None)


def sweep_folders(root: Path | str = "runs") -> list[SweepFolder]:
    """Return every sweep in a folder except damaged ones."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(root).iterdir()):
            with contextlib.suppress(ConfigError):
                if is_sweep(path) and SweepFolder(path).read():
                    found.append(SweepFolder(path))
    return found


def new_info() -> SweepInfo:
    """Return the content of `sweep.json` before the first run is planned."""
    return SweepInfo(created_s=round(time.time(), 3), axes={}, runs=[])
