"""A checkpoint on every rank: each maps the file that the main rank chose, so no state is sent or held twice.

The main rank reads the file once to verify its hash. The other ranks on its machine map the same file. On another
machine, the first rank reads it once and verifies the hash too. So a rank holds only its own weights and optimizer
state, and the pages of the file are in the page cache, once per machine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO, TypeVar

from segapp.checkpoint.training_state import LoadedCheckpoint, read_state
from segapp.errors import CheckpointError, SegappError
from segapp.models.weights import load_mapped_tensors
from segapp.parallel.distributed import Ranks
from segapp.run.checkpoints import DamagedError, open_if_intact
from segapp.run.files import machine_id, reason_of

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
    """Open the file of a checkpoint, after the first rank of each machine has compared it; every rank must call it.

    Raises:
        CheckpointError: this machine sees another file, or none.
    """
    machines = ranks.gather(machine_id())
    is_first = machines.index(machines[ranks.rank]) == ranks.rank != 0  # the main rank has verified it
    try:
        return open_if_intact(checkpoint.file.resolve(), num_bytes, checkpoint.sha256 if is_first else None)
    except (DamagedError, OSError) as error:
        raise CheckpointError(
            f"{checkpoint.file}: rank {ranks.rank}, on {socket.gethostname()}, does not see the checkpoint of rank 0 "
            f"({reason_of(error)}): put it on a file system that all machines share",
            path=checkpoint.file,
        ) from error
