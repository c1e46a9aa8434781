"""A checkpoint on every rank: each maps the file that the main rank chose, so no state is sent or held twice.

The main rank reads the file once to verify its hash. The other ranks on its machine map the same file. On another
machine, the first rank reads it once and verifies the hash too. A machine that does not see the file, or sees other
bytes, receives it over gloo, block by block, in a temporary file that its ranks map. So a rank holds only its own
weights and optimizer state, and the pages of the file are in the page cache, once per machine.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from segapp.checkpoint.training_state import LoadedCheckpoint, read_state
from segapp.errors import CheckpointError, SegappError
from segapp.models.weights import load_mapped_tensors
from segapp.parallel.distributed import Ranks
from segapp.run.checkpoints import DamagedError, open_if_intact
from segapp.run.files import HashingFile, machine_id, open_new, remove_quietly, storage_error, temporary_name

T = TypeVar("T")


def on_main(ranks: Ranks, make: Callable[[], T]) -> T:
    """Return on every rank the result of `make` on the main rank, or raise its SegappError on every rank."""
    found: tuple[T | None, SegappError | None] = None, None
    if ranks.is_main:
        try:
            found = make(), None
        except SegappError as error:
            found = None, error
    made, problem = ranks.from_main(found)
    if problem is not None:
        raise problem
    return made  # type: ignore[no-any-return]


def load_on_every_rank(ranks: Ranks, load: Callable[[], LoadedCheckpoint | None]) -> LoadedCheckpoint | None:
    """Return on every rank the checkpoint that `load` returns on the main rank, with tensors mapped from its file.

    Raises:
        SegappError: `load` raised it, or a rank could not read its file; on every rank.
    """
    loaded: list[LoadedCheckpoint] = []

    def facts() -> tuple[LoadedCheckpoint, int] | None:
        found = load()
        if found is None:
            return None
        loaded.append(found)
        return replace(found, state={}), found.file.stat().st_size

    found = on_main(ranks, facts)
    if found is None or ranks.world_size == 1:
        return loaded[0] if loaded else None
    checkpoint, num_bytes = found
    problem: SegappError | None = None
    try:
        with _open_here(ranks, checkpoint, num_bytes) as file:
            if not loaded:
                loaded.append(
                    replace(checkpoint, state=read_state(file, checkpoint.path, file.name, load_mapped_tensors))
                )
    except SegappError as error:
        problem = error
    if problem := ranks.first_of(problem):
        raise problem
    return loaded[0]


def _open_here(ranks: Ranks, checkpoint: LoadedCheckpoint, num_bytes: int) -> BinaryIO:
    """Open the file of a checkpoint, or a copy of it on this machine; every rank must call it."""
    machines = ranks.gather(machine_id())
    firsts = [machines.index(machine) for machine in machines]
    first = firsts[ranks.rank]
    file: BinaryIO | None = None
    with contextlib.suppress(DamagedError, OSError):
        sha256 = checkpoint.sha256 if ranks.rank == first != 0 else None  # the main rank has verified it
        file = open_if_intact(checkpoint.file.resolve(), num_bytes, sha256)
    inodes = ranks.gather(None if file is None else os.fstat(file.fileno())[1:3])
    blind = {at for inode, at in zip(inodes, firsts, strict=True) if inode is None or inode != inodes[at]}
    if not blind:
        return cast("BinaryIO", file)
    copies = ranks.gather(_copied_from_main(ranks, file, num_bytes, checkpoint.sha256, blind))
    if problem := next((each for each in copies if isinstance(each, SegappError)), None):
        raise problem
    failure: OSError | None = None
    if first in blind:
        try:
            file = copies[first].open("rb")
        except OSError as error:
            failure = error
    ranks.any_of(False)  # every rank of the machine has opened the copy: it needs no name from here on
    if ranks.rank in blind:
        remove_quietly(copies[first])
    if failure is not None:
        raise storage_error("open the copy of a checkpoint in", copies[first], failure)
    return cast("BinaryIO", file)


def _copied_from_main(
    ranks: Ranks, file: BinaryIO | None, num_bytes: int, sha256: str, receivers: Collection[int]
) -> Path | SegappError | None:
    """Send a file of the main rank to some ranks; return the copy there, or the error."""
    path, copy = Path(tempfile.gettempdir(), temporary_name()), HashingFile(-1)
    if ranks.rank in receivers:
        try:
            copy.fd = open_new(path)
        except OSError as error:
            copy.error = error
    for block in ranks.blocks_from_main(file if ranks.is_main else None, num_bytes, receivers):
        with contextlib.suppress(OSError):
            copy.write(block)
    if copy.fd >= 0:
        os.close(copy.fd)
    if ranks.rank not in receivers or (copy.error is None and copy.sha256 == sha256):
        return path
    remove_quietly(path)
    if copy.error is not None:
        return storage_error("copy a checkpoint to", path, copy.error)
    return CheckpointError(
        f"{path}: the received copy differs from the checkpoint that was sent: start again", path=path
    )
