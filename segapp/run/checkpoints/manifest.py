"""The manifest of a checkpoint folder: committed checkpoints, their aliases, and the entries to keep."""

import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from segapp.errors import CheckpointError
from segapp.run.files import read_of_run, reason_of, write_json

FORMAT = 1
"""Format of the manifest and of checkpoints; a higher one is refused."""

LAST, BEST = "last.pt", "best.pt"
EPOCH_NAME = re.compile(r"epoch_\d{4,}\.pt")
OBJECT_NAME = re.compile(r"\d{8,}-[0-9a-f]{16}\.pt")
_ALIAS_NAME = re.compile(r"[A-Za-z0-9][\w-]*\.pt")
NUM_ALWAYS_KEPT = 2


class DamagedError(Exception):
    """The bytes of a file are not the committed ones; the message is the end of a sentence after the file's name."""


class CheckpointFacts(BaseModel):
    """The position of a checkpoint in its training, and the program that wrote it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    """Number of finished optimizer updates."""
    epoch: int
    """The epoch in which training continues, from 1."""
    position: int = 0
    """Number of batches of that epoch that were already used."""
    metric: float | None = None
    """The score by which the best checkpoint is chosen."""
    config_hash: str = ""
    """Hash of the resolved config."""
    torch_version: str = ""

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
    saved_s: float = 0.0
    """Time of the commit, Unix seconds."""


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
    """Parts of the manifest that could not be read."""
    is_readable: bool = True

    def names_of(self, entry: CheckpointEntry) -> list[str]:
        """Return the aliases of a checkpoint, `last.pt` first."""
        return sorted((name for name, sha in self.names.items() if sha == entry.sha256), key=last_first)

    def entry_named(self, name: str) -> CheckpointEntry | None:
        """Return the checkpoint of an alias."""
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
    """Return the aliases of a new checkpoint."""
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
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    file = open(path, "rb", opener=lambda name, _: os.open(name, flags))  # noqa: SIM115
    try:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedError("is not a file")
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
