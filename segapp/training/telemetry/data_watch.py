"""Alerts about the data of a training: the state of `data.cache`, and waits of the device for data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from segapp.datasets.cache import CacheState, PixelCache
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.loader import TrainLoader
from segapp.datasets.resources import cores_of_rank
from segapp.datasets.workers import wait_advice
from segapp.run.words import size

MIN_WAIT_S = 10.0
"""Time that must be lost before advice is given, because every run waits for its first batches."""


class DataWatch:
    """Watches the data sets of a training and reports each thing once."""

    def __init__(self, train_loader: TrainLoader, val_set: SegmentationDataset, *, cores: float | None = None) -> None:
        self._train_loader = train_loader
        self._datasets = {"training": train_loader.dataset, "validation": val_set}
        self._caches = [
            CacheWatch(name, each.cache, has_filler=bool(each.cache_part))
            for name, each in self._datasets.items()
            if each.cache is not None
        ]
        self._cores = cores_of_rank() if cores is None else cores
        self._wait_s = self._elapsed_s = 0.0
        self._has_advised = False

    def at_start(self) -> list[str]:
        """Return the locations of the caches and their future sizes, and why a cache cannot be used."""
        notes = [note for dataset in self._datasets.values() for note in dataset.notes]
        num_train, batch_size = len(self._train_loader.dataset), self._train_loader.batch_size
        if num_train < batch_size:
            notes.append(
                f"train.batch_size = {batch_size} is more than the {num_train} training images: each step takes "
                f"{num_train}: lower train.batch_size, or lower optim.lr to suit the smaller batch"
            )
        return notes + [note for cache in self._caches for note in cache.at_start()]

    def after_interval(self, wait_s: float, elapsed_s: float) -> list[str]:
        """Return new messages after some steps, which took `elapsed_s` seconds and waited `wait_s` of them for data."""
        return [note for cache in self._caches for note in cache.poll()] + self._advice(wait_s, elapsed_s)

    def _advice(self, wait_s: float, elapsed_s: float) -> list[str]:
        self._wait_s += wait_s
        self._elapsed_s += elapsed_s
        if self._has_advised or self._wait_s < MIN_WAIT_S:
            return []
        cache = self._train_loader.dataset.cache
        state = None if cache is None else cache.state()
        advice = wait_advice(
            self._wait_s / self._elapsed_s,
            self._train_loader.workers,
            self._cores,
            "none" if cache is None else cache.files.kind,
            is_filling=state is not None and state.stopped is None and state.num_stored < state.num_images,
        )
        self._has_advised = advice is not None
        return [advice] if advice is not None else []


class CacheWatch:
    """Watches a cache: its location and progress if it is on a disk, and problems in any case.

    Args:
        name: Name of the split.
        cache: The cache.
        has_filler: True if each machine has its own cache, which its ranks fill in the background.
    """

    def __init__(self, name: str, cache: PixelCache, *, has_filler: bool = False) -> None:
        self._name, self._cache = name, cache
        self._when = "by the ranks of each machine in the background" if has_filler else "when they are first read"
        self._quarters = 0
        self._num_damaged = 0
        self._is_stopped = False

    def at_start(self) -> list[str]:
        """Return the location and the future size of a cache that is not full, or why it stores no more."""
        state, files = self._cache.state(), self._cache.files
        self._quarters = _quarters(state)
        if state.stopped is not None or state.num_stored == state.num_images or files.kind == "ram":
            return [*self._stopped(state)]
        free = files.free_bytes()
        return [
            f"data.cache = disk: {state.num_stored} of {state.num_images} {self._name} images are in {files.place} "
            f"({size(state.stored_bytes)}); the others are stored {self._when}, {size(state.missing_bytes)}"
            + ("" if free is None else f" of {size(free)} that are free")
        ]

    def poll(self) -> Iterator[str]:
        """Yield new messages since the last call."""
        new = self._cache.num_damaged - self._num_damaged
        if self._quarters == 4 and not new:
            return
        state = self._cache.state()
        if new:
            self._num_damaged += new
            yield (
                f"data.cache: {new} damaged {self._name} images in {self._cache.files.place} were decoded again: "
                "check the disk if this happens again"
            )
        yield from self._stopped(state)
        if _quarters(state) > self._quarters:
            self._quarters = _quarters(state)
            if self._cache.files.kind == "disk":
                yield f"data.cache: {state.num_stored} of {state.num_images} {self._name} images are stored"

    def _stopped(self, state: CacheState) -> Sequence[str]:
        if state.stopped is None or self._is_stopped or state.num_stored == state.num_images:
            return ()
        self._is_stopped = True
        move = (
            "free some of it, or name a folder on another disk in XDG_CACHE_HOME"
            if self._cache.files.kind == "disk"
            else "free memory, or set data.cache to disk"
        )
        return (
            f"data.cache = {self._cache.files.kind} has no room in {self._cache.files.place} for "
            f"{state.num_images - state.num_stored} of {state.num_images} {self._name} images, "
            f"{size(state.missing_bytes)} ({state.stopped}): they are decoded each time they are read; {move}",
        )


def _quarters(state: CacheState) -> int:
    return 4 * state.num_stored // max(1, state.num_images)
