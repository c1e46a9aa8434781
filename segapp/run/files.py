"""Files of a run: the one way to open them, and atomic writes.

A run folder may come from a stranger, and other users may write into it. So `check_tree` refuses, by name, whatever is
not a plain file or folder of its owner, and a file is opened below a handle of its directory without following links.

After a crash, a full disk or a power cut, a file that is written atomically has its old or its new content.
The order is recommended by SQLite and the ALICE study: a temporary file in the same directory, fsync, rename, fsync of
the directory. A failed fsync is never repeated on the same file, because its pages may be lost (PostgreSQL's
"fsyncgate").
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from segapp.errors import DiskFullError, StorageError
from segapp.failpoints import failpoint
from segapp.run.words import size
from segapp.waiting import is_pid_alive

OTHERS_WRITE = 0o022
"""The permissions that a run folder and its files never have: users other than the owner may write."""

MOUNTS = Path("/proc/self/mountinfo")

_OTHER_RULES = ("commands", "wandb")
"""Folders whose content is not checked: the inbox checks each file, and Weights & Biases makes links in its own."""

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(r"\.tmp-\d+-(?P<pid>\d+)-(?P<token>[0-9a-f]+)(?:@(?P<machine>[\w.-]*)(?:\+[\w.]*)?)?")
_STALE_TEMPORARY_S = 3600.0
_PROCESS = secrets.token_hex(4)


def temporary_name(tag: int = 0, suffix: str = "") -> str:
    """Return a name for a temporary file that contains the writer's process id and machine, to recognize dead writers.

    `tag`, such as the step, helps a reader of the folder. `suffix`, such as .tif, is for libraries that look at it.
    """
    end = f"+{suffix}" if suffix else ""
    return f"{TEMPORARY_PREFIX}{tag}-{os.getpid()}-{_PROCESS}{secrets.token_hex(4)}@{machine_id()}{end}"


_unfinished: set[Path] = set()


def unfinished_path(path: Path, suffix: str) -> Path:
    """Return a temporary path next to a file; its writer calls `remove_quietly` at the end in any case."""
    temporary = path.parent / temporary_name(suffix=suffix)
    _unfinished.add(temporary)
    return temporary


def remove_unfinished() -> None:
    """Remove the files of `unfinished_path`, because this process ends without another chance."""
    for path in [*_unfinished]:
        remove_quietly(path)


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the file system of a path, which need not exist, such as "ext4"; None if it is unknown."""
    try:
        lines = [line.split(" ") for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    real, found, longest = os.path.realpath(path), None, 0
    for words in lines:
        place = words[4].replace("\\040", " ")
        # The deepest mount counts, and of several at one place the last, which covers the others.
        if (real == place or real.startswith(place.rstrip("/") + "/")) and len(place) >= longest:
            found, longest = words[words.index("-") + 1], len(place)
    return found


def boot_id() -> str | None:
    """Return the random id that the kernel draws when the machine starts; None if it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


@functools.cache
def machine_id() -> str:
    """Return an id that is equal for all processes whose process ids can be compared with this one's.

    It consists of the kernel's boot id and the namespace of process ids. Host names are not enough: two machines may
    have equal names, and containers on one kernel have separate process ids. If the system has neither, the host name
    is used.
    """
    with contextlib.suppress(OSError):
        if boot := boot_id():
            return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    return re.sub(r"[^\w.-]", "_", socket.gethostname())[:60]


def machine_names(ranks: Sequence[tuple[str, str]]) -> dict[str, str | None]:
    """Return a name for each machine from the `machine_id` and host name of every rank; None for the only one.

    >>> machine_names([("a", "node"), ("a", "node"), ("b", "node"), ("c", "other")])
    {'a': 'node', 'b': 'node (2)', 'c': 'other'}
    """
    hosts = dict(ranks)
    if len(hosts) == 1:
        return dict.fromkeys(hosts)
    names, seen = dict[str, str | None](), Counter[str]()
    for machine, host in hosts.items():
        seen[host] += 1
        names[machine] = host if seen[host] == 1 else f"{host} ({seen[host]})"
    return names


class NotOfRunError(OSError):
    """A path in a run folder is not a plain file or folder of the run's owner, or has too many bytes."""


@contextlib.contextmanager
def open_directory(path: Path, flags: int = 0) -> Iterator[int]:
    """Yield a descriptor of a directory, for calls with `dir_fd`; raise OSError if it cannot be opened."""
    fd = os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def open_of_run(path: Path, flags: int = os.O_RDONLY, *, max_bytes: int = sys.maxsize, mode: int = 0o644) -> int:
    """Open a file in a folder that `check_tree` accepts, and return its descriptor; raise OSError if that fails.

    NotOfRunError is raised if it is not a plain file of the folder's owner, or has more than `max_bytes`, or is opened
    for writing and has a second name (a hard link), which may be outside the run.
    """
    with open_directory(path.parent) as at:
        fd = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=at)
        facts, owner = os.fstat(fd), os.fstat(at).st_uid
    problem = _problem_of(facts, owner)
    if flags & (os.O_WRONLY | os.O_RDWR) and facts.st_nlink > 1:
        problem = "has a second name (a hard link): replace it with a copy of itself"
    if facts.st_size > max_bytes:
        problem = f"is too large: {facts.st_size} bytes, {max_bytes} are accepted: move it away"
    if problem is not None:
        os.close(fd)
        raise NotOfRunError(errno.EPERM, f"{path} {problem}")
    return fd


def read_of_run(path: Path, max_bytes: int = 16 * 2**20) -> bytes:
    """Return the content of a small file of a run; raise OSError like `open_of_run`."""
    with open(open_of_run(path, max_bytes=max_bytes), "rb") as file:
        return file.read(max_bytes)


def append_to_run(path: Path) -> BinaryIO:
    """Open a file of a run for appending, and create it if it is missing; raise OSError like `open_of_run`."""
    return open(open_of_run(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def check_tree(folder: Path, *, is_writer: bool = False, max_depth: int = 16) -> None:
    """Refuse a folder in which anything is not a plain file or folder of the folder's owner, or of root.

    The folder itself may be reached through links, which its user chose. A writer must be its owner, and takes the
    permission to write from everyone else, so that nobody can replace what was checked. There are two passes because
    something may be replaced before the first one ends. Folders below `max_depth` others are not looked into. Raises
    NotOfRunError about the first wrong file or folder.
    """
    with open_directory(folder) as top:
        owner = os.geteuid() if is_writer else os.fstat(top).st_uid
        for place, folders, files, at in (found for _ in range(1 + is_writer) for found in os.fwalk(".", dir_fd=top)):
            for name in (".", *folders, *files):
                with contextlib.suppress(FileNotFoundError):  # a temporary file of a training
                    facts = os.stat(name, dir_fd=at, follow_symlinks=False)
                    if problem := _problem_of(facts, owner):
                        raise NotOfRunError(errno.EPERM, f"{folder / place / name} {problem}")
                    if is_writer and facts.st_mode & OTHERS_WRITE:
                        with contextlib.suppress(PermissionError):  # a file system without permissions
                            os.chmod(name, stat.S_IMODE(facts.st_mode) & ~OTHERS_WRITE, dir_fd=at)
            skipped = folders if place.count("/") >= max_depth else _OTHER_RULES if place == "." else ()
            folders[:] = [name for name in folders if name not in skipped]


def _problem_of(facts: os.stat_result, owner: int) -> str | None:
    """Return why something is not a plain file or folder of the owner or of root, and what to do; None if it is."""
    if stat.S_ISLNK(facts.st_mode):
        return "is a symbolic link, which a run folder must not have: replace it with what it points to, or remove it"
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        return "is neither a plain file nor a folder: remove it"
    if facts.st_uid not in (owner, 0):
        whose = f"another user (uid {facts.st_uid} instead of {owner})"
        return f"belongs to {whose}: use a copy of the run (cp -r), or change the owner (chown)"
    return None


def open_new(path: Path, mode: int = 0o644) -> int:
    """Open a new file for writing and return its descriptor; an existing file or symbolic link is refused."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable, if directories support fsync and this one is readable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def make_durable_directory(path: Path) -> None:
    """Create a directory and its parents durably, so that a power cut does not remove their names."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    for directory in reversed(missing or [path]):
        directory.mkdir(0o755, exist_ok=True)
    for directory in missing:
        fsync_directory(directory.parent)


def write_atomic(
    path: Path, data: bytes | str | Iterable[bytes], *, point: str = "file", is_derived: bool = False
) -> None:
    """Replace a file atomically: readers see the old or the new content, even after a power cut.

    The data may come in parts. A derived file is not synced: its readers must detect damage by a power cut. `point` is
    the prefix of the failpoints `.before_write`, `.before_fsync`, `.before_rename`, `.after_rename`.

    Raises:
        OSError: The file could not be written; the old one is unchanged, the temporary one removed.
    """
    data = data.encode() if isinstance(data, str) else data
    temporary = path.parent / temporary_name()
    try:
        fd = open_new(temporary)
        try:
            failpoint(point + ".before_write")
            for part in [data] if isinstance(data, bytes) else data:
                write_all(fd, part)
            failpoint(point + ".before_fsync")
            # Before the rename: a power cut could otherwise keep the new name without the content.
            if not is_derived:
                os.fsync(fd)
        finally:
            os.close(fd)
        failpoint(point + ".before_rename")
        os.rename(temporary, path)
    except BaseException:
        remove_quietly(temporary)
        raise
    failpoint(point + ".after_rename")
    # The rename itself is durable only with its directory.
    if not is_derived:
        fsync_directory(path.parent)


def write_json(path: Path, value: Any, *, point: str = "file") -> None:
    """Replace a small JSON file, without NaN and infinities, with `write_atomic`."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n", point=point)


class HashingFile:
    """A file that hashes written bytes and keeps the first error, because torch.save replaces some errors.

    `point` is the failpoint at every write.
    """

    def __init__(self, fd: int, point: str = "file.write") -> None:
        self.fd = fd
        self._point = point
        self.num_bytes = 0
        self.error: OSError | None = None
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hash of all bytes written so far, hexadecimal."""
        return self._hash.hexdigest()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all bytes; after a failure, every further write raises the same error."""
        if self.error is not None:
            raise self.error
        view = memoryview(data).cast("B")
        try:
            failpoint(self._point)
            write_all(self.fd, view)
        except OSError as error:
            self.error = error
            raise
        self._hash.update(view)
        self.num_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: the file has no buffer."""

    def __enter__(self) -> "HashingFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def hash_file(path: Path) -> tuple[str, int]:
    """Return the sha256 of a file, hexadecimal, and its size in bytes."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()


def remove_quietly(path: Path) -> None:
    _unfinished.discard(path)
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_dead_temporaries(directory: Path, *, is_recursive: bool = False) -> int:
    """Remove temporary files of dead writers, and return how many; live ones keep theirs for an hour or longer."""
    pattern = f"**/{TEMPORARY_PREFIX}*" if is_recursive else f"{TEMPORARY_PREFIX}*"
    dead = [path for path in directory.glob(pattern) if _is_dead_temporary(path)]
    for path in dead:
        remove_quietly(path)
    return len(dead)


def _is_dead_temporary(path: Path) -> bool:
    try:
        written_s = path.lstat().st_mtime
    except OSError:
        return False
    match = _TEMPORARY.fullmatch(path.name)
    if match and (match["machine"] in (None, machine_id())):
        pid = int(match["pid"])
        if pid == os.getpid():  # in a container, process ids repeat: an earlier process may have had this one's
            return not match["token"].startswith(_PROCESS)
        if not is_pid_alive(pid):
            return True
    return time.time() - written_s > _STALE_TEMPORARY_S


def free_bytes(directory: Path) -> int:
    """Return the free bytes for this user on the file system of `directory`, without regard to quotas."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


@contextlib.contextmanager
def storage_errors_of(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(action, path, error) from error


def storage_error(action: str, path: Path, error: OSError) -> StorageError:
    """Return the error that says which action failed, why, and what to do."""
    reason = error.strerror or str(error)
    if isinstance(error, NotOfRunError):
        return StorageError(reason, path=path).see("run-folder")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            reason += f" ({size(free_bytes(path if path.is_dir() else path.parent))} free)"
        return DiskFullError(f"cannot {action} {path}: {reason}: free some space there", path=path)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        advice = "make the folder writable"
    elif error.errno == errno.EFBIG:
        advice = "raise the file size limit (ulimit -f)"
    else:
        advice = "look at the disk and the system log"
    return StorageError(f"cannot {action} {path}: {reason}: {advice}", path=path)


def is_same_file(path: Path, other: Path) -> bool:
    """Return True if two paths are hard links to one file; False if one is missing."""
    try:
        return os.path.samestat(os.lstat(path), os.lstat(other))
    except OSError:
        return False


def has_same_bytes(path: Path, other: Path) -> bool:
    """Return True if two files have the same content; raise OSError if one cannot be read."""
    if is_same_file(path, other):
        return True
    if path.is_symlink() or path.stat().st_size != other.stat().st_size:
        return False
    return hash_file(path) == hash_file(other)


def reason_of(error: Exception) -> str:
    """Return an error's text; for an OSError, without number and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
