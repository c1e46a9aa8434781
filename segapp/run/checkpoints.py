"""Where checkpoints lie, and the protocol that never loses one. No torch here: bytes, hashes and names.

```
checkpoints/
  manifest.json                     what is committed: sha256, size, step of each, and what the names mean
  objects/00000120-3fa9c1d2….pt     the bytes; written once under a name never used before, never changed
  last.pt best.pt epoch_0007.pt     hard links to them, for people and other programs
```

A checkpoint exists from the moment `manifest.json`, which names its sha256, is renamed into place; everything before
is preparation, everything after is tidying:

1. write `objects/.tmp-…` (same directory, must not exist, mode 0600), hashing on the way; fsync;
2. drop it from the page cache, read it back, compare size and hash;
3. rename it to its own name; fsync `objects/`;
4. replace `manifest.json` (temporary file, fsync, rename, fsync of the directory): **committed**;
5. point `last.pt`, `epoch_0007.pt`, `best.pt` at it (link to a temporary name, rename over the old);
6. remove what the manifest no longer names.

So `last.pt` and the manifest need not change at one instant: the manifest alone decides, and a crash between 4 and 6
leaves names that the next commit puts right. "Newest" is the order of commits, not the step: a run that was taken back
to epoch 3 goes on from there. At least the two newest checkpoints stay, whatever `keep` says.
"""

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from segapp.errors import CheckpointError, StorageError
from segapp.failpoints import failpoint
from segapp.run.files import (
    TEMPORARY_PREFIX,
    HashingFile,
    free_bytes,
    fsync_directory,
    hash_file,
    hash_open,
    mebibytes,
    open_new,
    remove_dead_temporaries,
    remove_quietly,
    storage_error,
    temporary_name,
    write_json,
)

FORMAT = 1
"""Of the manifest and of what lies in a checkpoint; a higher one is refused."""

LAST, BEST = "last.pt", "best.pt"
_EPOCH_NAME = re.compile(r"epoch_\d{4,}\.pt")
_OBJECT_NAME = re.compile(r"\d{8,}-[0-9a-f]{16}\.pt")
_VISIBLE_NAME = re.compile(r"[A-Za-z0-9][\w-]*\.pt")
_MAX_MANIFEST_BYTES = 16 * 2**20
_NUM_ALWAYS_KEPT = 2


class CheckpointEntry(BaseModel):
    """One committed checkpoint, as the manifest has it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seq: int
    """Order of the commits, from 1."""
    object: str
    """Name of the file in `objects/`."""
    sha256: str
    size_bytes: int
    step: int
    epoch: int
    """The epoch it goes on in, from 1."""
    position: int = 0
    """Batches already used of that epoch."""
    metric: float | None = None
    config_hash: str = ""
    torch_version: str = ""
    saved_s: float = 0.0
    """When it was committed, Unix seconds."""


@dataclass
class Manifest:
    """What is committed in a folder."""

    entries: list[CheckpointEntry] = field(default_factory=list)
    """Newest first."""
    names: dict[str, str] = field(default_factory=dict)
    """What each name in the folder stands for: `last.pt` -> sha256."""
    orphans: list[str] = field(default_factory=list)
    """Objects met when the manifest was lost or damaged; never removed."""
    problems: list[str] = field(default_factory=list)
    """What could not be read of it."""
    is_readable: bool = True

    def names_of(self, entry: CheckpointEntry) -> list[str]:
        """The names that stand for a checkpoint, `last.pt` first."""
        return sorted((name for name, sha in self.names.items() if sha == entry.sha256), key=lambda n: (n != LAST, n))

    def entry_named(self, name: str) -> CheckpointEntry | None:
        """The checkpoint a name stands for."""
        sha256 = self.names.get(name)
        return next((entry for entry in self.entries if entry.sha256 == sha256), None)

    def describe(self, entry: CheckpointEntry) -> str:
        """A checkpoint for people: `last.pt (epoch 7, step 120)`."""
        name = next(iter(self.names_of(entry)), f"objects/{entry.object}")
        return f"{name} (epoch {entry.epoch}, step {entry.step})"


@dataclass(frozen=True)
class CheckpointStatus:
    """One row of `segapp ckpt list` and `verify`."""

    entry: CheckpointEntry
    names: tuple[str, ...]
    problem: str | None
    """What is wrong with it; None when it can be resumed."""


class CheckpointFolder:
    """The `checkpoints` folder of a run.

    Only the holder of the run's lock may call `commit`, `quarantine` and `repair_aliases`; everybody may read.

    Args:
        path: The folder; made by the first commit.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.objects = self.path / "objects"

    # -- reading ------------------------------------------------------------------------------------------------

    def read_manifest(self) -> Manifest:
        """What is committed; a manifest that is damaged reads as empty, with the reason in `problems`.

        Raises:
            CheckpointError: it was written by a newer segapp.
        """
        path = self.path / "manifest.json"
        try:
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                raw = from_json(file.read(_MAX_MANIFEST_BYTES + 1))
        except FileNotFoundError:
            return Manifest(is_readable=self.is_untouched())
        except (OSError, ValueError) as error:
            return Manifest(problems=[f"manifest.json cannot be read: {_reason(error)}"], is_readable=False)
        if not isinstance(raw, dict) or type(raw.get("format")) is not int or not isinstance(raw.get("entries"), list):
            return Manifest(problems=["manifest.json is not a manifest"], is_readable=False)
        if raw["format"] > FORMAT:
            raise CheckpointError(
                f"{path}: format {raw['format']} is of a newer segapp, this one reads up to {FORMAT}: install the newer"
            )
        return _parse_manifest(raw)

    def is_untouched(self) -> bool:
        """Whether nothing was ever committed here: no manifest, and no name that a commit would have made.

        A crash in the very first save leaves a temporary file or an object, which nobody was promised.
        """
        try:
            names = os.listdir(self.path)
        except OSError:
            return not self._object_names()
        return all(name == self.objects.name or name.startswith(TEMPORARY_PREFIX) for name in names)

    def open_verified(self, entry: CheckpointEntry) -> BinaryIO:
        """An intact file of a checkpoint, opened at its start: size and sha256 were just compared.

        Raises:
            DamagedError: no file of it is intact.
            OSError: none could be read to the end (the disk, a permission): no verdict about its content.
        """
        manifest = self.read_manifest()
        object_path = self.objects / entry.object
        names = (self.path / name for name in manifest.names_of(entry))
        paths = [object_path, *(path for path in names if not _is_same_file(path, object_path))]
        problems: list[str] = []
        unreadable: OSError | None = None
        for path in paths:
            try:
                return _open_if_intact(path, entry)
            except FileNotFoundError:
                problems.append("is missing")
            except DamagedError as error:
                problems.append(str(error))
            except OSError as error:
                unreadable = error
        if unreadable is not None:
            raise unreadable
        damage = [problem for problem in problems if problem != "is missing"]
        raise DamagedError((damage or problems)[0])

    def mismatched_aliases(self, manifest: Manifest, entry: CheckpointEntry, *, hashes: bool = True) -> list[str]:
        """The names of a checkpoint that hold no committed bytes at all, `last.pt` first.

        A name that a crash left missing, or still at the checkpoint before, is not astray: the next commit moves it.

        Args:
            manifest: Of this folder.
            entry: Whose names to look at.
            hashes: Read every byte where the file is not the object itself; otherwise only look at the size.
        """
        return [name for name in manifest.names_of(entry) if self._is_astray(self.path / name, manifest, hashes)]

    def _is_astray(self, path: Path, manifest: Manifest, hashes: bool) -> bool:
        objects = self._object_names()
        if not os.path.lexists(path) or any(_is_same_file(path, self.objects / name) for name in objects):
            return False
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                return True
            if not hashes:
                return path.stat().st_size not in {entry.size_bytes for entry in manifest.entries}
            sha256, _ = hash_file(path)
        except OSError:
            return True
        return not any(name.endswith(f"-{sha256[:16]}.pt") for name in objects)

    def verify(self, *, hashes: bool = True) -> list[CheckpointStatus]:
        """The state of every committed checkpoint, newest first.

        Args:
            hashes: Read every byte; otherwise only look at the sizes.

        Raises:
            CheckpointError: the manifest is damaged, or of a newer segapp.
        """
        manifest = self.read_manifest()
        if not manifest.is_readable:
            raise CheckpointError(f"{self.path}: {self._lost_manifest(manifest)}")
        return [
            CheckpointStatus(entry, tuple(manifest.names_of(entry)), self._problem_of(entry, manifest, hashes))
            for entry in manifest.entries
        ]

    def _problem_of(self, entry: CheckpointEntry, manifest: Manifest, hashes: bool) -> str | None:
        problems = [f"{name} is damaged" for name in self.mismatched_aliases(manifest, entry, hashes=hashes)]
        try:
            _open_if_intact(self.objects / entry.object, entry, hashes=hashes).close()
        except FileNotFoundError:
            problems.insert(0, f"objects/{entry.object} is missing")
        except (DamagedError, OSError) as error:
            problems.insert(0, f"objects/{entry.object} {_reason(error)}")
        return "; ".join(problems) or None

    def _lost_manifest(self, manifest: Manifest) -> str:
        files = sorted(path.name for path in self.path.glob("*.pt")) or self._object_names()
        hint = f": name a file to use it without the check: {', '.join(files)}" if files else ""
        return "; ".join(manifest.problems or ["manifest.json is missing"]) + hint

    def _object_names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.objects) if _OBJECT_NAME.fullmatch(name))
        except OSError:
            return []

    # -- writing ------------------------------------------------------------------------------------------------

    def commit(
        self,
        write: Callable[[HashingFile], object],
        *,
        step: int,
        epoch: int,
        position: int = 0,
        metric: float | None = None,
        is_best: bool = False,
        finished_epoch: int | None = None,
        keep: int = 3,
        need_bytes: int = 0,
        config_hash: str = "",
        torch_version: str = "",
    ) -> tuple[CheckpointEntry, list[str]]:
        """Writes one checkpoint by the protocol above; on any failure the old ones are untouched.

        Args:
            write: Writes the content into the file it is given.
            step: Optimizer updates done.
            epoch: The epoch it goes on in, from 1.
            position: Batches already used of that epoch.
            metric: What `best` goes by.
            is_best: Point `best.pt` at it.
            finished_epoch: Keep it as `epoch_0007.pt`, by this number.
            keep: How many `epoch_*.pt` stay, at least 1.
            need_bytes: About how large it will be; checked against the free space before anything is written.
            config_hash: Of the resolved config.
            torch_version: Of the writer.

        Returns:
            The entry, and what went wrong *after* the commit (names, tidying), in sentences.

        Raises:
            StorageError: it could not be written, or did not read back as written.
        """
        try:
            manifest = self._prepare(need_bytes, keep - (finished_epoch is not None))
            temporary, sha256, size_bytes = self._write_verified(write, step)
            entry = CheckpointEntry(
                seq=1 + max((entry.seq for entry in manifest.entries), default=0),
                object=f"{step:08d}-{sha256[:16]}.pt",
                sha256=sha256,
                size_bytes=size_bytes,
                step=step,
                epoch=epoch,
                position=position,
                metric=metric,
                config_hash=config_hash,
                torch_version=torch_version,
                saved_s=round(time.time(), 3),
            )
            self._publish(temporary, entry)
            manifest = _with_entry(manifest, entry, _names_for(finished_epoch, is_best), keep)
            self._write_manifest(manifest)
        except OSError as error:
            self._remove_uncommitted()
            raise storage_error("write a checkpoint in", self.path, error) from error
        failpoint("ckpt.committed")
        problems = self.repair_aliases(manifest)
        failpoint("ckpt.before_retire")
        problems += self._remove_unnamed(manifest)
        failpoint("ckpt.end")
        return entry, problems

    def quarantine(self, damaged: Iterable[CheckpointEntry]) -> list[str]:
        """Takes damaged checkpoints out of the manifest; their files stay, renamed to `*.corrupt`.

        Does nothing if no checkpoint would be left.

        Returns:
            What could not be done, in sentences.
        """
        manifest = self._read_to_replace()
        bad = {entry.sha256: entry for entry in damaged}
        left = [entry for entry in manifest.entries if entry.sha256 not in bad]
        if not left:
            return []
        try:
            for entry in (entry for entry in manifest.entries if entry.sha256 in bad):
                for path in (self.objects / entry.object, *(self.path / name for name in manifest.names_of(entry))):
                    if path.is_symlink() or path.exists():
                        os.rename(path, _corrupt_name(path))
            names = {name: sha for name, sha in manifest.names.items() if sha not in bad}
            names.setdefault(LAST, left[0].sha256)
            manifest = Manifest(left, names, manifest.orphans)
            self._write_manifest(manifest)
        except OSError as error:
            return [f"damaged checkpoints could not be set aside: {_reason(error)}"]
        return self.repair_aliases(manifest)

    def set_aside(self, names: Iterable[str]) -> list[str]:
        """Renames files that do not hold what their names stand for to `*.corrupt`, and puts the names right.

        Returns:
            What could not be done, in sentences.
        """
        for name in names:
            with contextlib.suppress(OSError):
                os.rename(self.path / name, _corrupt_name(self.path / name))
        return self.repair_aliases()

    def repair_aliases(self, manifest: Manifest | None = None) -> list[str]:
        """Points every name at the checkpoint it stands for, where a crash or a hand changed that.

        Returns:
            What could not be done, in sentences.
        """
        manifest = manifest or self.read_manifest()
        problems = []
        for name in sorted(manifest.names, key=lambda n: (n != LAST, n)):
            entry = manifest.entry_named(name)
            if entry is None or _is_same_file(self.path / name, self.objects / entry.object):
                continue
            try:
                self._point_name(name, entry)
            except OSError as error:
                problems.append(f"{name} could not be pointed at step {entry.step}: {_reason(error)}")
        with contextlib.suppress(OSError):
            fsync_directory(self.path)
        return problems

    def _prepare(self, need_bytes: int, keep: int) -> Manifest:
        failpoint("ckpt.start")
        self.objects.mkdir(parents=True, exist_ok=True)
        for directory in (self.path, self.objects):
            remove_dead_temporaries(directory)
        manifest = self._read_to_replace()
        if not manifest.is_readable:
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path / "manifest.json", _corrupt_name(self.path / "manifest.json"))
            manifest.is_readable = True
            return manifest
        self._remove_unnamed(manifest)
        if free_bytes(self.path) >= _with_margin(need_bytes):
            return manifest
        slimmer = _retire(manifest, keep, _NUM_ALWAYS_KEPT - 1)
        if len(slimmer.entries) < len(manifest.entries):
            self._write_manifest(slimmer)
            self._remove_unnamed(slimmer)
            manifest = slimmer
        free = free_bytes(self.path)
        if free < _with_margin(need_bytes):
            raise StorageError(
                f"cannot write a checkpoint in {self.path}: it needs {mebibytes(_with_margin(need_bytes))}, "
                f"{mebibytes(free)} are free: free some space there, or lower checkpoint.keep"
            )
        return manifest

    def _read_to_replace(self) -> Manifest:
        """The manifest; objects that a damaged one may have named become orphans, which nobody removes."""
        manifest = self.read_manifest()
        if manifest.problems or not manifest.is_readable:
            named = {entry.object for entry in manifest.entries}
            manifest.orphans = sorted({*manifest.orphans, *self._object_names()} - named)
        return manifest

    def _write_verified(self, write: Callable[[HashingFile], object], step: int) -> tuple[Path, str, int]:
        temporary = self.objects / temporary_name(step)
        try:
            with HashingFile(open_new(temporary), "ckpt.write") as file:
                failpoint("ckpt.opened")
                _write_content(write, file)
                failpoint("ckpt.before_fsync")
                os.fsync(file.fd)
                failpoint("ckpt.after_fsync")
                with contextlib.suppress(OSError, AttributeError):
                    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            sha256, size_bytes = hash_file(temporary)
            if (sha256, size_bytes) != (file.sha256, file.num_bytes):
                raise StorageError(
                    f"a checkpoint in {self.path} did not read back as it was written (step {step}): "
                    "look at the disk and the memory of this machine"
                )
            failpoint("ckpt.verified")
        except BaseException:
            remove_quietly(temporary)
            raise
        return temporary, sha256, size_bytes

    def _remove_uncommitted(self) -> None:
        """Gives back the space of a checkpoint that did not get as far as the manifest."""
        with contextlib.suppress(OSError, CheckpointError):
            manifest = self.read_manifest()
            if manifest.is_readable and not manifest.problems:
                self._remove_unnamed(manifest)

    def _publish(self, temporary: Path, entry: CheckpointEntry) -> None:
        try:
            failpoint("ckpt.before_rename")
            os.rename(temporary, self.objects / entry.object)
        except BaseException:
            remove_quietly(temporary)
            raise
        failpoint("ckpt.after_rename")
        fsync_directory(self.objects)

    def _write_manifest(self, manifest: Manifest) -> None:
        value = {
            "format": FORMAT,
            "names": manifest.names,
            "entries": [entry.model_dump() for entry in manifest.entries],
            "orphans": manifest.orphans,
        }
        write_json(self.path / "manifest.json", value, point="ckpt.manifest")

    def _point_name(self, name: str, entry: CheckpointEntry) -> None:
        target, source = self.path / name, self.objects / entry.object
        temporary = self.path / temporary_name(entry.step)
        try:
            failpoint("ckpt.before_link")
            try:
                os.link(source, temporary)
            except FileNotFoundError:
                raise
            except OSError:
                _copy_durably(source, temporary)
            failpoint("ckpt.before_name_rename")
            os.rename(temporary, target)
        except BaseException:
            remove_quietly(temporary)
            raise
        failpoint("ckpt.after_name_rename")

    def _remove_unnamed(self, manifest: Manifest) -> list[str]:
        """Removes what a manifest no longer names: first `epoch_*.pt` names, then objects."""
        objects = self._object_names()
        wanted = {entry.object for entry in manifest.entries} | set(manifest.orphans)
        try:
            for path in self.path.iterdir():
                is_stray = _EPOCH_NAME.fullmatch(path.name) and path.name not in manifest.names
                if is_stray and any(_holds_same_bytes(path, self.objects / name) for name in objects):
                    os.unlink(path)
                    failpoint("ckpt.retired_name")
            for name in objects:
                if name not in wanted:
                    os.unlink(self.objects / name)
                    failpoint("ckpt.retired_object")
        except OSError as error:
            return [f"old checkpoints could not be removed: {_reason(error)}"]
        return []


class DamagedError(Exception):
    """The bytes of a file are not those that were committed; the message goes on from the file's name."""


def _write_content(write: Callable[[HashingFile], object], file: HashingFile) -> None:
    try:
        write(file)
    except Exception as error:
        if file.error is not None and error is not file.error:
            raise file.error from error
        raise


def _open_if_intact(path: Path, entry: CheckpointEntry, *, hashes: bool = True) -> BinaryIO:
    file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), "rb")  # noqa: SIM115
    try:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedError("is not a file")
        if facts.st_size != entry.size_bytes:
            raise DamagedError(f"is damaged: it has {facts.st_size} bytes instead of {entry.size_bytes}")
        if hashes:
            sha256, _ = hash_open(file)
            if sha256 != entry.sha256:
                raise DamagedError("is damaged: its sha256 is not the one in manifest.json")
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _parse_manifest(raw: dict[str, Any]) -> Manifest:
    manifest = Manifest()
    for value in raw["entries"]:
        try:
            entry = CheckpointEntry.model_validate(value)
        except ValidationError as error:
            manifest.problems.append(f"manifest.json has an entry that cannot be read: {error.errors()[0]['msg']}")
            continue
        if _OBJECT_NAME.fullmatch(entry.object) is None:
            manifest.problems.append(f"manifest.json names a file outside objects/: {entry.object!r}")
            continue
        manifest.entries.append(entry)
    manifest.entries.sort(key=lambda entry: -entry.seq)
    known = {entry.sha256 for entry in manifest.entries}
    names = raw.get("names")
    for name, sha256 in names.items() if isinstance(names, dict) else ():
        if _VISIBLE_NAME.fullmatch(name) and sha256 in known:
            manifest.names[name] = sha256
    orphans = raw.get("orphans")
    manifest.orphans = [name for name in orphans if isinstance(name, str)] if isinstance(orphans, list) else []
    manifest.is_readable = bool(manifest.entries) or not manifest.problems
    return manifest


def _names_for(finished_epoch: int | None, is_best: bool) -> list[str]:
    epoch = [] if finished_epoch is None else [f"epoch_{finished_epoch:04d}.pt"]
    return [LAST, *epoch, *([BEST] if is_best else [])]


def _with_entry(manifest: Manifest, entry: CheckpointEntry, names: list[str], keep: int) -> Manifest:
    entries = [entry, *(old for old in manifest.entries if old.sha256 != entry.sha256)]
    added = Manifest(entries, {**manifest.names, **dict.fromkeys(names, entry.sha256)}, manifest.orphans)
    return _retire(added, max(keep, 1), _NUM_ALWAYS_KEPT)


def _retire(manifest: Manifest, keep: int, num_newest: int) -> Manifest:
    """The manifest with the `keep` newest epochs, the named ones and the `num_newest` newest of all."""
    seq_of = {entry.sha256: entry.seq for entry in manifest.entries}
    epochs = sorted(filter(_EPOCH_NAME.fullmatch, manifest.names), key=lambda name: -seq_of[manifest.names[name]])
    dropped = set(epochs[max(keep, 0) :])
    names = {name: sha256 for name, sha256 in manifest.names.items() if name not in dropped}
    wanted = set(names.values()) | {entry.sha256 for entry in manifest.entries[:num_newest]}
    return Manifest([entry for entry in manifest.entries if entry.sha256 in wanted], names, manifest.orphans)


def _with_margin(need_bytes: int) -> int:
    return need_bytes + need_bytes // 20 + 64 * 2**10


def _copy_durably(source: Path, target: Path) -> None:
    """A copy, for file systems without hard links."""
    with open(source, "rb") as old, open(open_new(target), "wb") as new:
        shutil.copyfileobj(old, new, 2**20)
        new.flush()
        os.fsync(new.fileno())


def _is_same_file(path: Path, other: Path) -> bool:
    try:
        one, two = os.lstat(path), os.lstat(other)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


def _holds_same_bytes(path: Path, other: Path) -> bool:
    if _is_same_file(path, other):
        return True
    if path.is_symlink() or path.stat().st_size != other.stat().st_size:
        return False
    return hash_file(path) == hash_file(other)


def _corrupt_name(path: Path) -> Path:
    candidate, number = path.with_name(path.name + ".corrupt"), 2
    while os.path.lexists(candidate):
        candidate, number = path.with_name(f"{path.name}.corrupt-{number}"), number + 1
    return candidate


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
