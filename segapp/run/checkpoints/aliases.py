"""Checks the aliases of a checkpoint folder (`last.pt`, `best.pt`, `epoch_0007.pt`), repairs and removes them.

An object that is gone is restored from an alias, which is a link to the same bytes.
"""

import contextlib
import os
import stat
from pathlib import Path

from segapp.failpoints import failpoint
from segapp.run.checkpoints.files import (
    DamagedError,
    copy_durably,
    has_same_bytes,
    is_same_file,
    open_if_intact,
    reason_of,
)
from segapp.run.checkpoints.manifest import EPOCH_NAME, OBJECT_NAME, CheckpointEntry, Manifest, last_first
from segapp.run.files import fsync_directory, hash_file, remove_quietly, temporary_name


def object_names(objects: Path) -> list[str]:
    """Return the names of the objects on disk, sorted; none if the folder cannot be read."""
    try:
        return sorted(name for name in os.listdir(objects) if OBJECT_NAME.fullmatch(name))
    except OSError:
        return []


def is_mismatched(alias: Path, objects: Path, manifest: Manifest, *, hashes: bool) -> bool:
    """Return True if an alias exists and holds the bytes of no committed checkpoint.

    Args:
        alias: Path of the alias.
        objects: Folder of the objects.
        manifest: The manifest.
        hashes: Read every byte if the alias is not a link to an object; otherwise compare only the size.
    """
    names = object_names(objects)
    if not os.path.lexists(alias) or any(is_same_file(alias, objects / name) for name in names):
        return False
    try:
        if not stat.S_ISREG(alias.lstat().st_mode):
            return True
        if not hashes:
            return alias.stat().st_size not in {entry.size_bytes for entry in manifest.entries}
        sha256, _ = hash_file(alias)
    except OSError:
        return True
    is_committed = any(entry.sha256 == sha256 for entry in manifest.entries)
    return not is_committed and not any(name.endswith(f"-{sha256[:16]}.pt") for name in names)


def restore_objects(folder: Path, objects: Path, manifest: Manifest) -> list[str]:
    """Link each committed object that is gone to an intact alias of its checkpoint.

    Returns:
        What was restored, in sentences.
    """
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


def repair_aliases(folder: Path, objects: Path, manifest: Manifest) -> list[str]:
    """Point every alias at its checkpoint, where a crash or a user changed that.

    Returns:
        What could not be done, in sentences.
    """
    problems = []
    for name in sorted(manifest.names, key=last_first):
        entry = manifest.entry_named(name)
        if entry is None or is_same_file(folder / name, objects / entry.object):
            continue
        try:
            _point(folder / name, objects / entry.object, entry)
        except OSError as error:
            problems.append(f"{name} could not be pointed at step {entry.step}: {reason_of(error)}")
    with contextlib.suppress(OSError):
        fsync_directory(folder)
    return problems


def _point(alias: Path, source: Path, entry: CheckpointEntry) -> None:
    """Make a path a link to a file, or a copy where there are no hard links."""
    temporary = alias.parent / temporary_name(entry.step)
    try:
        failpoint("ckpt.before_link")
        try:
            os.link(source, temporary)
        except FileNotFoundError:
            raise
        except OSError:
            copy_durably(source, temporary)
        failpoint("ckpt.before_name_rename")
        os.rename(temporary, alias)
    except BaseException:
        remove_quietly(temporary)
        raise
    failpoint("ckpt.after_name_rename")


def remove_unlisted(folder: Path, objects: Path, manifest: Manifest) -> list[str]:
    """Remove what the manifest no longer lists: first `epoch_*.pt` aliases, then objects.

    Returns:
        What could not be done, in sentences.
    """
    names = object_names(objects)
    wanted = {entry.object for entry in manifest.entries} | set(manifest.orphans)
    try:
        for path in folder.iterdir():
            is_unlisted = EPOCH_NAME.fullmatch(path.name) and path.name not in manifest.names
            if is_unlisted and any(has_same_bytes(path, objects / name) for name in names):
                os.unlink(path)
                failpoint("ckpt.retired_name")
        for name in names:
            if name not in wanted:
                os.unlink(objects / name)
                failpoint("ckpt.retired_object")
    except OSError as error:
        return [f"old checkpoints could not be removed: {reason_of(error)}"]
    return []
