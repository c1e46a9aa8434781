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
import copy
import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Self

__all__ = [
    "CheckpointError",
    "CommandError",
    "ConfigError",
    "DataError",
    "DiskFullError",
    "DistributedError",
    "NonFiniteError",
    "OutOfMemoryError",
    "RunBusyError",
    "RunError",
    "SegappError",
    "StorageError",
    "WorkerError",
]

_FIELDS = ("key", "path", "value")

# In an address: name and password of a user; for http also only a name, which may be a token; secrets of a query.
_SECRETS = re.compile(
    r"""(?<=http://)[^/?#\s]+@ | (?<=https://)[^/?#\s]+@ | (?<=//)([^/?#\s:]*):[^/?#\s]*(?=@)
    | (?<=//)([^/?#\s:\[]*):(?!\d*[/?#])\S{0,200}(?=@)  # a password in which / ? or # is not escaped
    | (?:(?<=[?&;#])|(?<=%3B))(?:[\w.-]*(?:pass(?:word|wd)?|pwd|token|secret|signature)
        |(?:[\w.-]*(?:api|access|auth|secret)[_.-]?)?key|sig)(?:=|%3D)[^&;\#\s"]+""",
    re.IGNORECASE | re.VERBOSE,
)


def without_secrets(text: str) -> str:
    """Return a text without the passwords and tokens of the addresses in it.

    >>> without_secrets("http://bob:pw@box:5000/a?token=1 and postgresql://bob:pw@box/a")
    'http://box:5000/a? and postgresql://bob@box/a'
    """
    return _SECRETS.sub(r"\1\2", text)


def install_command(name: str) -> str:
    """Return how to install an optional dependency group: segapp is not in a package index.

    >>> install_command("geo")
    "run `uv sync --extra geo` or `pip install '.[geo]'` in the clone, or `pip install 'WHEEL[geo]'`"
    """
    return f"run `uv sync --extra {name}` or `pip install '.[{name}]'` in the clone, or `pip install 'WHEEL[{name}]'`"


class SegappError(Exception):
    """A failure that a user can act on; printed as one line, without a traceback. It survives pickling.

    Args:
        message: names the thing, the value and the next move.
        key: the config key to change, such as `train.batch_size`.
        path: the file or folder that cannot be used.
        value: the value of the key.
    """

    exit_code = 1
    topic: str | None = None
    """The page of `segapp docs` with more information, if there is one; printed after the message."""

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        path: str | os.PathLike[str] | None = None,
        value: Any = None,
    ) -> None:
        super().__init__(without_secrets(message))
        self.key, self.path = key, None if path is None else os.fspath(path)
        self.value = without_secrets(value) if isinstance(value, str) else value
        self.problems: list[dict[str, Any]] = []
        """For an error that lists several errors, the fields of each."""

    @classmethod
    def together(cls, errors: Sequence["SegappError"], heading: str, num_more: int = 0) -> "SegappError":
        """Return the only error of a list, or an error of this class that lists them below a heading.

        `num_more` further errors are counted but not listed.
        """
        if len(errors) == 1 and num_more <= 0:
            return errors[0]
        more = [f"and {num_more} more"] if num_more > 0 else []
        listed = cls("\n  ".join([heading, *map(str, errors), *more]))
        listed.problems = [
            {"message": str(error), **{name: getattr(error, name) for name in _FIELDS}} for error in errors
        ]
        return listed

    def as_json(self) -> dict[str, Any]:
        """Return the fields of this error for a program, as every `--json` command prints them."""
        fields = {"type": type(self).__name__, "message": str(self), "exit_code": self.exit_code, "topic": self.topic}
        own = {name: getattr(self, name) for name in (*_FIELDS, "problems")}
        return fields | {name: value for name, value in own.items() if value not in (None, [])}

    def reworded(self, message: str) -> Self:
        error = copy.copy(self)
        error.args = (without_secrets(message),)
        return error

    def see(self, topic: str) -> Self:
        """Return this error with a page of `segapp docs` for more information."""
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
    topic = "resume-refused#a-checkpoint-is-refused"


class CommandError(SegappError):
    """A command to a run that is refused."""

    exit_code = 2


class RunError(SegappError):
    """The training failed."""


class NonFiniteError(RunError):
    """The loss or a gradient was not finite for too many steps in a row, or the training has diverged."""

    exit_code = 5
    topic = "low-miou#the-loss-is-nan"


class OutOfMemoryError(RunError):
    """A device ran out of memory and no smaller step was possible."""

    exit_code = 6
    topic = "out-of-memory"


class WorkerError(RunError):
    """A data worker died or did not answer in time."""

    exit_code = 7
    topic = "hangs#a-data-worker-died"


class DistributedError(RunError):
    """A rank or a collective failed."""

    exit_code = 8
    topic = "ranks"


class RunBusyError(RunError):
    """Another process holds the run folder."""

    exit_code = 9
    topic = "resume-refused#another-trainer-holds-the-run"


class StorageError(RunError):
    """The run folder or an output file cannot be written, or a run folder is refused."""

    exit_code = 10
    topic: str | None = "disk-full"


class DiskFullError(StorageError):
    """The disk of the run folder, or the user's quota on it, is full."""


def cannot_be_written(
    path: str | os.PathLike[str], error: Exception, advice: str = "choose another --out"
) -> StorageError:
    """Return the error for a file that cannot be written: its name, the system's reason, and the advice."""
    reason = getattr(error, "strerror", None) or error
    found = StorageError(f"{os.fspath(path)} cannot be written: {reason}: {free_or(advice, error)}", path=path)
    found.topic = None if isinstance(error, NotADirectoryError | IsADirectoryError | FileExistsError) else found.topic
    return found


def free_or(advice: str, error: Exception) -> str:
    """Return the advice, and before it to free space, if a disk or a quota is full."""
    return f"free space or {advice}" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else advice


@contextlib.contextmanager
def storage_errors(path: str | os.PathLike[str], advice: str = "choose another --out") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_be_written(path, error, advice) from None


def closest_words(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the known words that the user probably meant, the most similar first; [] if none is similar.

    Case, "-", "_" and spaces are ignored. Words of which one begins with the other are similar.

    >>> closest_words("onx", ["onnx", "pt2"]), closest_words("DiceLoss", ["ce", "dice"]), closest_words("x", ["ce"])
    (['onnx'], ['dice'], [])
    """
    import difflib  # most commands never need it

    wanted = _plain(word)
    least = 0.5 if len(wanted) < 4 else 0.6
    scores: dict[str, float] = {}
    for name in known:
        plain = _plain(name)
        begins = min(len(plain), len(wanted)) > 2 and (plain.startswith(wanted) or wanted.startswith(plain))
        # If one word begins with the other, they are as similar as four letters of which one is wrong.
        scores[name] = max(difflib.SequenceMatcher(None, plain, wanted).ratio(), 0.75 if begins else 0.0)
    return [name for name in sorted(scores, key=lambda name: -scores[name]) if scores[name] >= least][:most]


def some_names(names: Collection[str], most: int = 2) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + rest


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "").replace(" ", "")


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return "did you mean ce?" with the closest of the known words; "" if none is similar."""
    found = closest_words(word, known, most)
    return f"did you mean {' or '.join(found)}?" if found else ""


def accepted_words(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return the end of a message about an unknown word: the closest known one, and all of them unless there are many.

    >>> accepted_words("onx", ["onnx", "pt2"])
    'did you mean onnx? use one of onnx, pt2'
    """
    words = list(known)
    hint = did_you_mean(word, words, most)
    if not words:
        return "none exists"
    if len(words) > 20:
        return hint or f"there are {len(words)}, such as {', '.join(words[:20])}"
    return f"{hint} use {'one of ' if len(words) > 1 else ''}{', '.join(words)}".strip()
