"""The `checkpoints` folder of a run, and the commit protocol that keeps the newest ones through a crash. No torch here.

```
checkpoints/
  manifest.json                     the committed checkpoints: sha256, size and step of each, and the alias names
  objects/00000120-3fa9c1d2….pt     the files; each is written once under a new name and never changed
  last.pt best.pt epoch_0007.pt     aliases: hard links to objects, for users and other programs
```

A checkpoint is committed when `manifest.json`, which has its sha256, is renamed into place:

1. write `objects/.tmp-…` (same directory, must not exist, mode 0600), computing the hash in the same pass; fsync;
2. rename it to its own name; fsync `objects/`;
3. replace `manifest.json` (temporary file, fsync, rename, fsync of the directory): **committed**;
4. point `last.pt`, `epoch_0007.pt`, `best.pt` at it (link to a temporary name, rename over the old);
5. remove the objects that the manifest no longer lists.

Only the manifest decides which checkpoint an alias refers to; a crash between 3 and 5 leaves aliases that the next
commit repairs. "Newest" is the order of commits, not the step: a run that was set back to epoch 3 continues from there.
The two newest checkpoints are always kept, whatever `keep` is.
"""

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from segapp.errors import CheckpointError, DiskFullError
from segapp.failpoints import failpoint
from segapp.run.files import (
    TEMPORARY_PREFIX,
    HashingFile,
    free_bytes,
    fsync_directory,
    has_same_bytes,
    hash_file,
    is_same_file,
    make_durable_directory,
    open_directory,
    open_new,
    read_of_run,
    reason_of,
    remove_dead_temporaries,
    remove_quietly,
    storage_error,
    temporary_name,
    write_json,
)
from segapp.run.words import size

FORMAT = 1
"""Format of the manifest and of checkpoints; a higher one is refused."""

LAST, BEST = "last.pt", "best.pt"
EPOCH_NAME = re.compile(r"epoch_\d{4,}\.pt")
OBJECT_NAME = re.compile(r"\d{8,}-[0-9a-f]{16}\.pt")
_ALIAS_NAME = re.compile(r"[A-Za-z0-9][\w-]*\.pt")
NUM_ALWAYS_KEPT = 2


class DamagedError(Exception):
    """The bytes of a file are not the committed ones; the message follows the file's name: "is damaged: ..."."""


class CheckpointFacts(BaseModel):
    """The position of a checkpoint in its training."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    """Number of finished optimizer updates."""
    epoch: int
    """The epoch in which training continues, from 1."""
    position: int = 0
    """Number of batches of that epoch that were already used."""
    metric: float | None = None
    """The score by which the best checkpoint is chosen."""

    @property
    def last_epoch(self) -> int:
        """The epoch of its last step, as in the name `epoch_0007.pt`; 0 before the first step."""
        return self.epoch if self.position else self.epoch - 1


class CheckpointEntry(CheckpointFacts):
    """One committed checkpoint in the manifest."""

    seq: int
    """Order of the commits, from 1."""
    object: str
    """Name of the file in `objects/`."""
    sha256: str
    size_bytes: int


@dataclass
class Manifest:
    """The committed checkpoints of a folder."""

    entries: list[CheckpointEntry] = field(default_factory=list)
    """Newest first."""
    names: dict[str, str] = field(default_factory=dict)
    """The checkpoint of each alias: `last.pt` -> sha256."""
    orphans: list[str] = field(default_factory=list)
    """Objects that were found when the manifest was lost or damaged; never removed."""
    problems: list[str] = field(default_factory=list)
    is_readable: bool = True

    def names_of(self, entry: CheckpointEntry) -> list[str]:
        """Return the aliases of a checkpoint, `last.pt` first."""
        return sorted((name for name, sha in self.names.items() if sha == entry.sha256), key=last_first)

    def entry_named(self, name: str) -> CheckpointEntry | None:
        sha256 = self.names.get(name)
        return next((entry for entry in self.entries if entry.sha256 == sha256), None)

    def describe(self, entry: CheckpointEntry) -> str:
        """Return a checkpoint's alias, and the epoch and number of its last step: `last.pt (epoch 7, step 120)`."""
        name = next(iter(self.names_of(entry)), f"objects/{entry.object}")
        return f"{name} (epoch {entry.last_epoch}, step {entry.step})"

    def with_entry(self, entry: CheckpointEntry, names: list[str], keep: int) -> "Manifest":
        """Return the manifest after a commit: the new entry first, its aliases set, old ones removed."""
        entries = [entry, *(old for old in self.entries if old.sha256 != entry.sha256)]
        added = Manifest(entries, {**self.names, **dict.fromkeys(names, entry.sha256)}, self.orphans)
        return added.retire(max(keep, 1), NUM_ALWAYS_KEPT)

    def retire(self, keep: int, num_newest: int) -> "Manifest":
        """Return the manifest with the `keep` newest epochs, the other aliases, and the `num_newest` newest entries."""
        seq_of = {entry.sha256: entry.seq for entry in self.entries}
        epochs = sorted(filter(EPOCH_NAME.fullmatch, self.names), key=lambda name: -seq_of[self.names[name]])
        dropped = set(epochs[max(keep, 0) :])
        names = {name: sha256 for name, sha256 in self.names.items() if name not in dropped}
        wanted = set(names.values()) | {entry.sha256 for entry in self.entries[:num_newest]}
        return Manifest([entry for entry in self.entries if entry.sha256 in wanted], names, self.orphans)


def last_first(name: str) -> tuple[bool, str]:
    """Return a sort key that puts `last.pt` before the other aliases."""
    return name != LAST, name


def alias_names(finished_epoch: int | None, is_best: bool) -> list[str]:
    epoch = [] if finished_epoch is None else [f"epoch_{finished_epoch:04d}.pt"]
    return [LAST, *epoch, *([BEST] if is_best else [])]


def read_manifest(path: Path) -> Manifest | None:
    """Return `manifest.json`; None if it is missing; a damaged one is empty, with the reason in `problems`.

    Raises:
        CheckpointError: The manifest was written by a newer segapp.
    """
    try:
        raw = from_json(read_of_run(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return Manifest(problems=[f"manifest.json cannot be read: {reason_of(error)}"], is_readable=False)
    if not isinstance(raw, dict) or type(raw.get("format")) is not int or not isinstance(raw.get("entries"), list):
        return Manifest(problems=["manifest.json is not a manifest"], is_readable=False)
    # Its entries may mean something else, and would be lost when it is written anew.
    if raw["format"] > FORMAT:
        raise CheckpointError(
            f"{path}: format {raw['format']} was written by a newer segapp, this one reads up to {FORMAT}: "
            "install the newer one",
            path=path,
        )
    return _parse(raw)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace `manifest.json` atomically and durably, which commits its entries. Raises OSError."""
    value = {
        "format": FORMAT,
        "names": manifest.names,
        "entries": [entry.model_dump() for entry in manifest.entries],
        "orphans": manifest.orphans,
    }
    write_json(path, value, point="ckpt.manifest")


def _parse(raw: dict[str, Any]) -> Manifest:
    manifest = Manifest()
    for value in raw["entries"]:
        try:
            entry = CheckpointEntry.model_validate(value)
        except ValidationError as error:
            manifest.problems.append(f"manifest.json has an entry that cannot be read: {error.errors()[0]['msg']}")
            continue
        # Listed files are read, renamed and removed, so a name must not lead out of the folder.
        if OBJECT_NAME.fullmatch(entry.object) is None:
            manifest.problems.append(f"manifest.json names a file outside objects/: {entry.object!r}")
            continue
        manifest.entries.append(entry)
    manifest.entries.sort(key=lambda entry: -entry.seq)
    known = {entry.sha256 for entry in manifest.entries}
    names = raw.get("names")
    for name, sha256 in names.items() if isinstance(names, dict) else ():
        if _ALIAS_NAME.fullmatch(name) and sha256 in known:
            manifest.names[name] = sha256
    orphans = raw.get("orphans")
    manifest.orphans = [name for name in orphans if isinstance(name, str)] if isinstance(orphans, list) else []
    manifest.is_readable = bool(manifest.entries) or not manifest.problems
    return manifest


def open_if_intact(path: Path, size_bytes: int, sha256: str | None) -> BinaryIO:
    """Open a file at its start if it has the committed size and hash; a hash of None is not compared.

    Raises:
        DamagedError: Size or hash differ, or it is not a regular file.
        OSError: It cannot be read.
    """
    # A pipe would block without O_NONBLOCK, and a link may lead out of the run.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    file = open(path, "rb", opener=lambda name, _: os.open(name, flags))  # noqa: SIM115
    try:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedError("is not a file")
        # Before the hash, which reads gigabytes.
        if facts.st_size != size_bytes:
            raise DamagedError(f"is damaged: it has {facts.st_size} bytes instead of {size_bytes}")
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise DamagedError("is damaged: its sha256 is not the one in manifest.json")
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def corrupt_name(path: Path) -> Path:
    """Return a free name for a damaged file: `last.pt.corrupt`, `last.pt.corrupt-2`, ..."""
    candidate, number = path.with_name(path.name + ".corrupt"), 2
    while os.path.lexists(candidate):
        candidate, number = path.with_name(f"{path.name}.corrupt-{number}"), number + 1
    return candidate


@dataclass(frozen=True)
class CheckpointStatus:
    """One row of `segapp ckpt list` and `verify`."""

    entry: CheckpointEntry
    names: tuple[str, ...]
    problem: str | None
    """Description of the damage; None if the checkpoint can be resumed."""


class CheckpointFolder:
    """The `checkpoints` folder of a run, which the first commit creates.

    Only the holder of the run's lock may call `commit`, `quarantine`, `set_aside` and `repair_aliases`; any process may
    read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.objects = self.path / "objects"
        self.manifest_path = self.path / "manifest.json"

    def read_manifest(self) -> Manifest:
        """Return the manifest; a damaged one is returned empty, and a newer segapp's raises CheckpointError."""
        manifest = read_manifest(self.manifest_path)
        return Manifest(is_readable=self.is_untouched()) if manifest is None else manifest

    def is_untouched(self) -> bool:
        """Return True if nothing was ever committed here: no manifest, and no name that a commit creates.

        A crash in the very first save leaves a temporary file or an object, neither of which is committed.
        """
        try:
            names = os.listdir(self.path)
        except OSError:
            return not object_names(self.objects)
        return all(name == self.objects.name or name.startswith(TEMPORARY_PREFIX) for name in names)

    def open_verified(self, entry: CheckpointEntry) -> BinaryIO:
        """Open an intact file of a checkpoint at its start, after comparing size and sha256.

        Raises:
            DamagedError: No file of the checkpoint is intact.
            OSError: No file could be read to the end (disk, permission), so its content is unknown.
        """
        manifest = self.read_manifest()
        object_path = self.objects / entry.object
        aliases = (self.path / name for name in manifest.names_of(entry))
        # On a disk without hard links an alias is a copy, which may be intact.
        paths = [object_path, *(path for path in aliases if not is_same_file(path, object_path))]
        damage: DamagedError | None = None
        unreadable: OSError | None = None
        for path in paths:
            try:
                return open_if_intact(path, entry.size_bytes, entry.sha256)
            except FileNotFoundError:
                pass
            except DamagedError as error:
                damage = damage or error
            except OSError as error:
                unreadable = error
        # A file that could not be read may be intact, so it is not called damaged.
        raise unreadable or damage or DamagedError("is missing")

    def mismatched_aliases(self, manifest: Manifest, entry: CheckpointEntry, *, hashes: bool = True) -> list[str]:
        """Return the aliases of a checkpoint that have the bytes of no committed checkpoint, `last.pt` first.

        An alias that is missing, or that still links to the previous checkpoint after a crash, is no mismatch: the next
        commit repairs it. With `hashes`, every byte of an alias that is not a link to an object is read; otherwise only
        sizes are compared.
        """
        names = manifest.names_of(entry)
        return [name for name in names if self._is_mismatched(self.path / name, manifest, hashes)]

    def _is_mismatched(self, alias: Path, manifest: Manifest, hashes: bool) -> bool:
        names = object_names(self.objects)
        if not os.path.lexists(alias) or any(is_same_file(alias, self.objects / name) for name in names):
            return False
        try:
            if not stat.S_ISREG(alias.lstat().st_mode):
                return True
            if not hashes:
                return alias.stat().st_size not in {entry.size_bytes for entry in manifest.entries}
            sha256, _ = hash_file(alias)
        except OSError:
            return True
        # A kill between the objects and the manifest leaves an object that no entry names yet.
        is_committed = any(entry.sha256 == sha256 for entry in manifest.entries)
        return not is_committed and not any(name.endswith(f"-{sha256[:16]}.pt") for name in names)

    def verify(self, *, hashes: bool = True) -> list[CheckpointStatus]:
        """Return the state of every committed checkpoint, newest first; without `hashes`, only sizes are compared.

        Raises:
            CheckpointError: The manifest is damaged, or was written by a newer segapp.
        """
        manifest = self.read_manifest()
        if not manifest.is_readable:
            raise CheckpointError(f"{self.path}: {self._lost_manifest(manifest)}", path=self.path)
        return [
            CheckpointStatus(entry, tuple(manifest.names_of(entry)), self._problem_of(entry, manifest, hashes))
            for entry in manifest.entries
        ]

    def _problem_of(self, entry: CheckpointEntry, manifest: Manifest, hashes: bool) -> str | None:
        problems = [f"{name} is damaged" for name in self.mismatched_aliases(manifest, entry, hashes=hashes)]
        path = self.objects / entry.object
        try:
            open_if_intact(path, entry.size_bytes, entry.sha256 if hashes else None).close()
        except FileNotFoundError:
            problems.insert(0, f"objects/{entry.object} is missing")
        except (DamagedError, OSError) as error:
            problems.insert(0, f"objects/{entry.object} {reason_of(error)}")
        return "; ".join(problems) or None

    def _lost_manifest(self, manifest: Manifest) -> str:
        files = sorted(path.name for path in self.path.glob("*.pt")) or object_names(self.objects)
        hint = f": name a file to use it without the check: {', '.join(files)}" if files else ""
        return "; ".join(manifest.problems or ["manifest.json is missing"]) + hint

    def commit(
        self,
        write: Callable[[HashingFile], object],
        facts: CheckpointFacts,
        *,
        is_best: bool = False,
        finished_epoch: int | None = None,
        keep: int,
        need_bytes: int,
    ) -> tuple[CheckpointEntry, list[str]]:
        """Write and commit one checkpoint; after any failure, the old ones are unchanged.

        Args:
            write: Writes the content into the given file.
            facts: Facts for the manifest.
            is_best: Point `best.pt` at it.
            finished_epoch: Keep it as `epoch_0007.pt`, with this number.
            keep: Number of `epoch_*.pt` that are kept, at least 1.
            need_bytes: Approximate size; compared with the free disk space before anything is written.

        Returns:
            The entry, and sentences about restorations, and about failures *after* the commit (aliases, removal of old
            checkpoints).

        Raises:
            StorageError: The checkpoint could not be written.
        """
        try:
            manifest = self._prepare(need_bytes, keep - (finished_epoch is not None))
            restored = restore_objects(self.path, self.objects, manifest)
            temporary, sha256, size_bytes = self._write_temporary(write, facts.step)
            entry = CheckpointEntry(
                **facts.model_dump(),
                seq=1 + max((entry.seq for entry in manifest.entries), default=0),
                object=f"{facts.step:08d}-{sha256[:16]}.pt",
                sha256=sha256,
                size_bytes=size_bytes,
            )
            self._publish(temporary, entry)
            manifest = manifest.with_entry(entry, alias_names(finished_epoch, is_best), keep)
            write_manifest(self.manifest_path, manifest)
        except OSError as error:
            self._remove_uncommitted()
            raise storage_error("write a checkpoint in", self.path, error) from error
        failpoint("ckpt.committed")
        problems = restored + self.repair_aliases(manifest)
        failpoint("ckpt.before_retire")
        problems += remove_unlisted(self.path, self.objects, manifest)
        failpoint("ckpt.end")
        return entry, problems

    def quarantine(self, damaged: Iterable[CheckpointEntry]) -> list[str]:
        """Remove damaged checkpoints from the manifest and rename their files to `*.corrupt`, if others are left.

        Returns sentences about failures.
        """
        manifest = self._read_to_replace()
        bad = {entry.sha256: entry for entry in damaged}
        left = [entry for entry in manifest.entries if entry.sha256 not in bad]
        # Damaged files are better than none, so the last ones stay.
        if not left:
            return []
        try:
            for entry in (entry for entry in manifest.entries if entry.sha256 in bad):
                for path in (self.objects / entry.object, *(self.path / name for name in manifest.names_of(entry))):
                    if path.is_symlink() or path.exists():
                        os.rename(path, corrupt_name(path))
            names = {name: sha for name, sha in manifest.names.items() if sha not in bad}
            names.setdefault(LAST, left[0].sha256)
            manifest = Manifest(left, names, manifest.orphans)
            # After a crash between the renames and this line, entries lack their files, and a resume skips them.
            write_manifest(self.manifest_path, manifest)
        except OSError as error:
            return [f"damaged checkpoints could not be renamed: {reason_of(error)}"]
        return self.repair_aliases(manifest)

    def set_aside(self, names: Iterable[str]) -> list[str]:
        """Rename aliases with wrong content to `*.corrupt`, create them anew, and return sentences about failures."""
        for name in names:
            with contextlib.suppress(OSError):
                os.rename(self.path / name, corrupt_name(self.path / name))
        return self.repair_aliases()

    def repair_aliases(self, manifest: Manifest | None = None) -> list[str]:
        """Repair aliases that a crash or a user changed: each links to its checkpoint; restore objects from aliases.

        Returns sentences about restorations and failures.
        """
        manifest = manifest or self.read_manifest()
        messages = restore_objects(self.path, self.objects, manifest)
        for name in sorted(manifest.names, key=last_first):
            entry = manifest.entry_named(name)
            if entry is None or is_same_file(self.path / name, self.objects / entry.object):
                continue
            try:
                _point(self.path / name, self.objects / entry.object, entry)
            except OSError as error:
                messages.append(f"{name} could not be pointed at step {entry.step}: {reason_of(error)}")
        with contextlib.suppress(OSError):
            fsync_directory(self.path)
        return messages

    def _prepare(self, need_bytes: int, keep: int) -> Manifest:
        """Remove the leftovers of crashes, and old epochs if the disk is full; return the manifest to extend."""
        failpoint("ckpt.start")
        make_durable_directory(self.objects)
        for directory in (self.path, self.objects):
            remove_dead_temporaries(directory)
        manifest = self._read_to_replace()
        if not manifest.is_readable:
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.manifest_path, corrupt_name(self.manifest_path))
            manifest.is_readable = True
            return manifest
        remove_unlisted(self.path, self.objects, manifest)
        if free_bytes(self.path) >= _with_margin(need_bytes):
            return manifest
        # Until the new checkpoint is committed, the run has one fewer than usual.
        smaller = manifest.retire(keep, NUM_ALWAYS_KEPT - 1)
        if len(smaller.entries) < len(manifest.entries):
            # First the manifest, which must never list removed files.
            write_manifest(self.manifest_path, smaller)
            remove_unlisted(self.path, self.objects, smaller)
            manifest = smaller
        free = free_bytes(self.path)
        if free < _with_margin(need_bytes):
            raise DiskFullError(
                f"cannot write a checkpoint in {self.path}: it needs {size(_with_margin(need_bytes))}, "
                f"{size(free)} are free: free some space there, or lower checkpoint.keep",
                key="checkpoint.keep",
                value=keep,
                path=self.path,
            )
        return manifest

    def _read_to_replace(self) -> Manifest:
        """Return the manifest; objects that a damaged manifest may have listed become orphans, and are kept."""
        manifest = self.read_manifest()
        if manifest.problems or not manifest.is_readable:
            listed = {entry.object for entry in manifest.entries}
            manifest.orphans = sorted({*manifest.orphans, *object_names(self.objects)} - listed)
        return manifest

    def _write_temporary(self, write: Callable[[HashingFile], object], step: int) -> tuple[Path, str, int]:
        """Write and sync a temporary file; return its path, sha256 and size.

        The file is not read back: its pages may still be in memory, where a fault of the disk does not show. A resume
        compares the hash of the bytes that were written, and uses the checkpoint before a damaged one.
        """
        temporary = self.objects / temporary_name(step)
        try:
            with HashingFile(open_new(temporary), "ckpt.write") as file:
                failpoint("ckpt.opened")
                _write_content(write, file)
                failpoint("ckpt.before_fsync")
                os.fsync(file.fd)
                failpoint("ckpt.after_fsync")
        except BaseException:
            remove_quietly(temporary)
            raise
        return temporary, file.sha256, file.num_bytes

    def _remove_uncommitted(self) -> None:
        """Free the space of a checkpoint that failed before its commit."""
        with contextlib.suppress(OSError, CheckpointError):
            manifest = self.read_manifest()
            if manifest.is_readable and not manifest.problems:
                remove_unlisted(self.path, self.objects, manifest)

    def _publish(self, temporary: Path, entry: CheckpointEntry) -> None:
        try:
            failpoint("ckpt.before_rename")
            os.rename(temporary, self.objects / entry.object)
        except BaseException:
            remove_quietly(temporary)
            raise
        failpoint("ckpt.after_rename")
        fsync_directory(self.objects)


def _write_content(write: Callable[[HashingFile], object], file: HashingFile) -> None:
    """Call `write`; raise the file's own error instead of the writer's."""
    try:
        write(file)
    except Exception as error:
        if file.error is not None and error is not file.error:
            raise file.error from error
        raise


def _with_margin(need_bytes: int) -> int:
    return need_bytes + need_bytes // 20 + 64 * 2**10


def object_names(objects: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(objects) if OBJECT_NAME.fullmatch(name))
    except OSError:
        return []


def restore_objects(folder: Path, objects: Path, manifest: Manifest) -> list[str]:
    """Link each missing committed object to an intact alias of its checkpoint; return the restorations."""
    messages = []
    for entry in manifest.entries:
        path = objects / entry.object
        for name in () if os.path.lexists(path) else manifest.names_of(entry):
            with contextlib.suppress(DamagedError, OSError):
                open_if_intact(folder / name, entry.size_bytes, entry.sha256).close()
                _point(path, folder / name, entry)
                fsync_directory(objects)
                messages.append(f"objects/{entry.object} was missing and is restored from {name}")
                break
    return messages


def _point(alias: Path, source: Path, entry: CheckpointEntry) -> None:
    """Make a path a link to a file, or a copy if hard links are not supported."""
    temporary = alias.parent / temporary_name(entry.step)
    try:
        failpoint("ckpt.before_link")
        try:
            os.link(source, temporary)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            with open(source, "rb") as old, open(open_new(temporary), "wb") as new:
                shutil.copyfileobj(old, new, 2**20)
                new.flush()
                os.fsync(new.fileno())
        failpoint("ckpt.before_name_rename")
        os.rename(temporary, alias)
    except BaseException:
        remove_quietly(temporary)
        raise
    failpoint("ckpt.after_name_rename")


def remove_unlisted(folder: Path, objects: Path, manifest: Manifest) -> list[str]:
    """Remove what the manifest no longer lists: `epoch_*.pt` aliases, then objects; return failures."""
    names = object_names(objects)
    wanted = {entry.object for entry in manifest.entries} | set(manifest.orphans)
    try:
        with open_directory(objects, os.O_NOFOLLOW) as at:
            for path in folder.iterdir():
                is_unlisted = EPOCH_NAME.fullmatch(path.name) and path.name not in manifest.names
                # A file that the user has put there under such a name stays.
                if is_unlisted and any(has_same_bytes(path, objects / name) for name in names):
                    os.unlink(path)
                    failpoint("ckpt.retired_name")
            for name in names:
                if name not in wanted:
                    os.unlink(name, dir_fd=at)
                    failpoint("ckpt.retired_object")
    except OSError as error:
        return [f"old checkpoints could not be removed: {reason_of(error)}"]
    return []
