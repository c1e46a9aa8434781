"""The errors that a user can act on, as a tree. Every message names the thing, the value and the next move.

SegappError                 exit code 1
├── ConfigError             2   a config file, an override, a command line
├── DataError               3   a data set, an image, a mask
├── CheckpointError         4   a checkpoint or a weights file that cannot be used
├── CommandError            2   a command sent to a run
└── RunError                1   the training itself
    ├── NonFiniteError      5
    ├── OutOfMemoryError    6
    ├── WorkerError         7   a data worker died or hung
    ├── DistributedError    8   a rank or a collective
    ├── RunBusyError        9   another trainer holds the run folder
    └── StorageError        10  disk full, read-only, quota
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Self


class SegappError(Exception):
    """A failure that a user can act on; printed as one line, without a traceback.

    The message is the only argument, so that every error survives pickling between processes.
    """

    exit_code = 1
    topic: str | None = None
    """The page of `segapp docs` that says more, if there is one; printed behind the message."""

    def see(self, topic: str) -> Self:
        """Return this error with the page of `segapp docs` that says more."""
        self.topic = topic
        return self


class ConfigError(SegappError):
    """A config file, an override or a command line that cannot be used."""

    exit_code = 2


class DataError(SegappError):
    """A data set, an image or a mask that cannot be used."""

    exit_code = 3
    topic = "data-refused"


class CheckpointError(SegappError):
    """A checkpoint or a weights file that cannot be used."""

    exit_code = 4
    topic = "checkpoint-refused"


class CommandError(SegappError):
    """A command to a run that is refused."""

    exit_code = 2


class RunError(SegappError):
    """The training failed."""


class NonFiniteError(RunError):
    """The loss or a gradient was not finite for too many steps in a row."""

    exit_code = 5
    topic = "not-finite"


class OutOfMemoryError(RunError):
    """A device ran out of memory and no smaller step was possible."""

    exit_code = 6
    topic = "out-of-memory"


class WorkerError(RunError):
    """A data worker died or did not answer in time."""

    exit_code = 7
    topic = "data-workers"


class DistributedError(RunError):
    """A rank or a collective failed."""

    exit_code = 8
    topic = "ranks"


class RunBusyError(RunError):
    """Another process holds the run folder."""

    exit_code = 9
    topic = "run-busy"


class StorageError(RunError):
    """The run folder or an output file cannot be written."""

    exit_code = 10
    topic = "disk-full"


def cannot_be_written(path: str | os.PathLike[str], error: Exception, advice: str = "choose another --out") -> str:
    """Return the message for a file that a user asked for: its name, the system's reason, what to do."""
    reason = getattr(error, "strerror", None) or error
    return f"{os.fspath(path)} cannot be written: {reason}: {advice}"


@contextlib.contextmanager
def storage_errors(path: str | os.PathLike[str], advice: str = "choose another --out") -> Iterator[None]:
    """Raise StorageError about `path` in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise StorageError(cannot_be_written(path, error, advice)) from None
