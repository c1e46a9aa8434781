"""What a manifest keeps and calls its checkpoints, by hand, and what a full disk gives up before a save."""

from __future__ import annotations

from pathlib import Path

import pytest

from segapp.errors import StorageError
from segapp.run import checkpoints as module
from segapp.run.checkpoints import CheckpointEntry, CheckpointFacts, CheckpointFolder, Manifest, alias_names


def entry(seq: int) -> CheckpointEntry:
    sha256 = f"{seq:064x}"
    return CheckpointEntry(
        step=seq, epoch=1, seq=seq, object=f"{seq:08d}-{sha256[:16]}.pt", sha256=sha256, size_bytes=1
    )


@pytest.mark.parametrize(("epoch", "position", "last_epoch"), [(1, 0, 0), (1, 3, 1), (7, 0, 6), (7, 1, 7)])
def test_last_epoch_is_the_epoch_of_the_last_step(epoch: int, position: int, last_epoch: int) -> None:
    assert CheckpointFacts(step=9, epoch=epoch, position=position).last_epoch == last_epoch


def manifest_of(aliases: dict[str, int], *others: int) -> Manifest:
    """The manifest of the entries that these aliases name, and of others, newest first."""
    entries = [entry(seq) for seq in sorted({*aliases.values(), *others}, reverse=True)]
    return Manifest(entries, {name: entry(seq).sha256 for name, seq in aliases.items()}, ["orphan"])


def aliases_of(manifest: Manifest) -> dict[str, int]:
    seq_of = {each.sha256: each.seq for each in manifest.entries}
    return {name: seq_of[sha256] for name, sha256 in manifest.names.items()}


EPOCHS = {3: "epoch_0006.pt", 5: "epoch_10000.pt", 7: "epoch_0004.pt", 9: "epoch_0005.pt"}
"""By number of the commit: after the epochs 6 and 10000, an earlier checkpoint was resumed."""


def named(*seqs: int) -> dict[str, int]:
    return {EPOCHS[seq]: seq for seq in seqs}


@pytest.mark.parametrize(
    ("keep", "num_newest", "epochs", "kept"),
    [
        (3, 2, [3, 5, 7], [9, 8, 7, 5, 3, 1]),
        (2, 2, [5, 7], [9, 8, 7, 5, 1]),
        (1, 1, [7], [9, 7, 1]),
        (0, 2, [], [9, 8, 1]),
        (-1, 0, [], [9, 1]),
    ],
)
def test_newest_epochs_other_aliases_and_newest_entries_stay(
    keep: int, num_newest: int, epochs: list[int], kept: list[int]
) -> None:
    found = manifest_of({"last.pt": 9, "best.pt": 1, **named(3, 5, 7)}, 8, 2).retire(keep, num_newest)
    assert aliases_of(found) == {"last.pt": 9, "best.pt": 1, **named(*epochs)}
    assert [each.seq for each in found.entries] == kept
    assert found.orphans == ["orphan"]


@pytest.mark.parametrize(("keep", "epochs"), [(0, [9]), (1, [9]), (2, [7, 9])])
def test_new_checkpoint_comes_first_and_takes_its_aliases(keep: int, epochs: list[int]) -> None:
    before = manifest_of({"last.pt": 8, "best.pt": 1, **named(3, 5, 7)}, 2)
    found = before.with_entry(entry(9), ["last.pt", EPOCHS[9]], keep)
    assert aliases_of(found) == {"last.pt": 9, "best.pt": 1, **named(*epochs)}
    assert [each.seq for each in found.entries] == sorted({9, 8, 1, *epochs}, reverse=True)
    assert found.describe(entry(9)) == "last.pt (epoch 0, step 9)"
    assert found.describe(entry(8)) == f"objects/{entry(8).object} (epoch 0, step 8)"
    assert found.names_of(entry(9)) == ["last.pt", EPOCHS[9]]
    assert found.entry_named("best.pt") == entry(1)
    assert found.entry_named(EPOCHS[3]) is None


def test_equal_content_is_one_entry() -> None:
    before = manifest_of({"last.pt": 8, "best.pt": 7})
    found = before.with_entry(entry(7), ["last.pt"], 3)
    assert [each.seq for each in found.entries] == [7, 8]
    assert aliases_of(found) == {"last.pt": 7, "best.pt": 7}


@pytest.mark.parametrize(
    ("finished_epoch", "is_best", "names"),
    [
        (None, False, ["last.pt"]),
        (0, False, ["last.pt", "epoch_0000.pt"]),
        (12345, True, ["last.pt", "epoch_12345.pt", "best.pt"]),
    ],
)
def test_aliases_of_a_new_checkpoint(finished_epoch: int | None, is_best: bool, names: list[str]) -> None:
    assert alias_names(finished_epoch, is_best) == names


def commit(folder: CheckpointFolder, epoch: int, need_bytes: int = 0) -> list[str]:
    """Save the end of an epoch; return the files that were there when it was written."""
    there: list[str] = []

    def write(file: module.HashingFile) -> None:
        there.extend(sorted(path.name for path in folder.path.glob("*.pt")))
        file.write(b"%d" % epoch)

    facts = CheckpointFacts(step=epoch, epoch=epoch + 1)
    _, problems = folder.commit(write, facts, finished_epoch=epoch, keep=3, need_bytes=need_bytes)
    assert problems == []
    return there


def test_old_epochs_are_given_up_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of 1 MB needs a twentieth and 64 KiB more, 1115536 bytes: one byte less is too little."""
    folder = CheckpointFolder(tmp_path)
    for epoch in (1, 2, 3, 4):
        commit(folder, epoch)
    free: list[int] = []
    monkeypatch.setattr(module, "free_bytes", lambda path: free.pop(0))
    free[:] = [1115535, 1115535]
    with pytest.raises(StorageError, match=r"it needs 1\.1 MiB, 1\.1 MiB are free: free some space"):
        commit(folder, 5, 1000000)
    assert [status.problem for status in folder.verify()] == [None, None]
    free[:] = [1115536]
    assert commit(folder, 6, 1000000) == ["epoch_0003.pt", "epoch_0004.pt", "last.pt"]
    free[:] = [1115535, 1115536]
    assert commit(folder, 7, 1000000) == ["epoch_0004.pt", "epoch_0006.pt", "last.pt"]
    assert free == []


def test_newest_intact_checkpoint_is_last_and_orphans_stay(tmp_path: Path) -> None:
    """The manifest of two is damaged, then the two newest of four further checkpoints."""
    folder = CheckpointFolder(tmp_path)
    commit(folder, 9)
    commit(folder, 1)
    orphans = sorted(folder.objects.iterdir())
    folder.manifest_path.write_text("{")
    for epoch in (2, 4, 3, 5):
        commit(folder, epoch)
    assert folder.read_manifest().orphans == [path.name for path in orphans]
    assert folder.quarantine(folder.read_manifest().entries[:2]) == []
    assert (tmp_path / "last.pt").read_bytes() == b"4"
    commit(folder, 6)
    assert [path.read_bytes() for path in orphans] == [b"1", b"9"]


def test_file_that_cannot_be_read_outranks_a_damaged_one(tmp_path: Path) -> None:
    """Its content is unknown: the checkpoint may be intact."""
    folder = CheckpointFolder(tmp_path)
    commit(folder, 3)
    [entry] = folder.read_manifest().entries
    (folder.objects / entry.object).unlink()
    (folder.objects / entry.object).write_bytes(b"4")
    with folder.open_verified(entry) as file:
        assert file.read() == b"3", "an alias has the bytes"
    for name in ("last.pt", "epoch_0003.pt"):
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to(name)
    with pytest.raises(OSError, match="symbolic links"):
        folder.open_verified(entry)
