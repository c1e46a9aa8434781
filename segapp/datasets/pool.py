"""Batches loaded in this process or in worker processes that live as long as the pool.

Workers load a batch together: it is cut into equal parts, which the trainer joins. They continue with the batches that
follow a pass, so the next pass does not wait for its first ones.

Every failure (an exception of any kind, a killed worker, a worker that hangs) raises one error that names the file. No
global random generator is used.

Shapes: N images per batch, B bands, H, W height and width in pixels.
"""

import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_all_start_methods, parent_process
from multiprocessing.connection import wait
from multiprocessing.sharedctypes import RawArray
from types import TracebackType
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from segapp.compat.torch import loader_workers, replace_done_event, set_within, shut_down_workers
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import shown
from segapp.datasets.sampling import SampleKey
from segapp.errors import DataError, SegappError, WorkerError
from segapp.failpoints import failpoint
from segapp.parallel.launch import signal_when_parent_dies
from segapp.run.words import first_line

_POLL_S = 1.0


@dataclass(frozen=True)
class LoadOptions:
    """How batches are loaded."""

    workers: int = 0  # processes that load; 0 loads in this one
    timeout_s: float = 120.0  # maximum wait for a batch from the workers; 0: no limit
    pin_memory: bool = False  # return batches in page-locked memory


@dataclass
class Batch:
    """A batch of images and targets."""

    images: Tensor  # the bands, shape (N, B, H, W), with the dtype of the files, not normalized, contiguous
    # Train ids and `ignore_index`, shape (N, H, W), uint8 or int16
    target: Tensor
    indices: tuple[int, ...]  # in the data set
    epoch: int = 0
    first: int = 0  # position of the first sample in the epoch, over all ranks; the others follow it
    keys: Tensor | None = None  # keys of the dropout masks (segapp.parallel.dropout), int64 (N, layers); in training

    def __len__(self) -> int:
        return len(self.indices)

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; torch's DataLoader calls it in a thread of its own."""
        return Batch(self.images.pin_memory(), self.target.pin_memory(), self.indices)


def collate(parts: Sequence[Batch], *, shared: bool = False, pinned: bool = False) -> Batch:
    """Return batches of images of one size as one batch.

    With `shared`, the main process maps its memory instead of copying it; with `pinned`, it is page-locked.

    Raises:
        DataError: The images differ in size.
        WorkerError: There is not enough shared memory.
    """
    first, num_images = parts[0], sum(len(part) for part in parts)
    sizes = dict.fromkeys(f"{part.images.shape[3]}x{part.images.shape[2]}" for part in parts)
    if len(sizes) > 1:
        raise DataError(
            f"images of {' and '.join(list(sizes)[:2])} pixels cannot share a batch: "
            "set data.crop_px or data.resize_px, or a batch size of 1",
            key="data.crop_px",
        )
    images = _allocate((num_images, *first.images.shape[1:]), first.images.dtype, shared=shared, pinned=pinned)
    target = _allocate((num_images, *first.target.shape[1:]), first.target.dtype, shared=shared, pinned=pinned)
    torch.cat([part.images for part in parts], out=images)
    torch.cat([part.target for part in parts], out=target)
    return Batch(images, target, tuple(index for part in parts for index in part.indices))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, *, shared: bool, pinned: bool) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, pin_memory=pinned)
    if not shared:
        return tensor
    try:
        tensor.untyped_storage().share_memory_()
        return tensor
    except RuntimeError as error:
        raise WorkerError(
            f"a data worker got no shared memory ({first_line(error)}): make /dev/shm larger "
            "(docker run --shm-size=8g), or lower data.workers or train.batch_size",
            key="data.workers",
            path="/dev/shm",
        ) from error


def _portable(error: BaseException, place: str) -> SegappError:
    """Return an error of any kind as one that can be pickled, with its traceback as a note."""
    if not isinstance(error, SegappError):
        error = DataError(f"{place}: loading failed ({type(error).__name__}: {error})", path=place)
    error.add_note(traceback.format_exc())
    return error


class _GuardedDataset(Dataset["Batch | SegappError"]):
    """Data set of batches, or of parts of them, that records in shared memory which sample each worker is loading."""

    def __init__(self, dataset: SegmentationDataset, num_slots: int) -> None:
        self.dataset = dataset
        self.slots: Any = RawArray("q", max(1, num_slots))

    def __getitem__(self, keys: list[SampleKey]) -> "Batch | SegappError":
        info = get_worker_info()
        slot = info.id if info is not None else 0
        try:
            samples = []
            for key in keys:
                self.slots[slot] = key.image + 1
                failpoint("data.item")
                sample = self.dataset[key]
                samples.append(Batch(sample.image[None], sample.target[None], (sample.index,)))
            return collate(samples, shared=info is not None) if samples else self._no_samples()
        except BaseException as error:  # every error of a worker must reach the trainer in a form it can unpickle
            if info is None and not isinstance(error, Exception):
                raise
            return _portable(error, shown(self.dataset.pairs[self.slots[slot] - 1].image))
        finally:
            self.slots[slot] = 0

    def _no_samples(self) -> Batch:
        """Return a batch of 0 images of the transform's size."""
        size = getattr(self.dataset.transform, "crop_px", (0, 0))
        target = torch.from_numpy(np.empty((0, *size), self.dataset.scheme.dtype))
        pixels = self.dataset.pixels
        return Batch(torch.empty((0, pixels.num_bands, *size), dtype=pixels.torch_dtype), target, ())


def _unchanged(batch: Any) -> Any:
    return batch


def start_worker(worker: int) -> None:
    """Set up a worker: one thread, Ctrl-C ignored (the trainer stops workers), the default action for SIGTERM."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    trainer = parent_process()
    sys.excepthook = _report_unless_trainer_left
    # A worker that hangs would outlive a killed trainer.
    signal_when_parent_dies(signal.SIGKILL, parent=None if trainer is None else trainer.pid)


def _report_unless_trainer_left(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of the thread that passes batches on, unless its trainer was killed meanwhile."""
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


class _DoneEvent:
    """The trainer's side of the event with which torch ends its workers.

    Workers check the event between two batches, under its lock. A worker that is killed at that moment holds the lock
    forever, and with torch's own event the trainer would wait for it as soon as torch marks the worker as dead.
    """

    def __init__(self, event: Any, workers: Sequence[Any]) -> None:
        self._event, self._workers = event, workers
        self._is_set = False

    def is_set(self) -> bool:
        """True after `set`, which only the trainer calls."""
        return self._is_set

    def set(self) -> None:
        """Tell the workers to end; kill them if they cannot see the event."""
        self._is_set = True
        if not set_within(self._event, _POLL_S):
            for worker in self._workers:
                worker.kill()


class _Work:
    """The parts of batches for torch's DataLoader, which takes one as soon as a worker may load it."""

    def __init__(self, part_size: int) -> None:
        self._part_size = part_size  # largest number of samples
        self.source: Iterator[list[SampleKey]] = iter(())  # batches that no worker has been given
        self.begun: deque[list[SampleKey]] = deque()  # batches that were given to workers and not returned yet

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for batch in self.source:
            self.begun.append(batch)
            yield from self.parts(batch)

    def parts(self, batch: list[SampleKey]) -> list[list[SampleKey]]:
        """Return a batch in parts; an empty batch is one part."""
        return [batch[at : at + self._part_size] for at in range(0, len(batch), self._part_size)] or [batch]


class BatchPool:
    """Loads lists of batches, in order, in worker processes that are reused for the next list.

    A batch is cut into as many equal parts as there are workers, or into the next smaller number that divides it. Then
    no worker has more to do than another, and no batch takes as long as one worker needs for all of it.

    Args:
        dataset: The samples.
        options: How batches are loaded.
        batch_size: Samples of a batch, over which its parts are equal.
    """

    def __init__(self, dataset: SegmentationDataset, options: LoadOptions, batch_size: int) -> None:
        self._dataset = dataset
        self.options = options
        self._workers = options.workers
        self._num_parts = max(n for n in range(1, max(1, self._workers) + 1) if batch_size % n == 0)
        self._work = _Work(batch_size // self._num_parts)
        self._guarded = _GuardedDataset(dataset, options.workers)
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._pass = 0

    def prepare(self, batches: list[list[SampleKey]], at: int = 0, following: Iterable[list[SampleKey]] = ()) -> None:
        """Let the workers load the batches from number `at` on, and then `following`, unless they do so already."""
        begun = self._work.begun
        if self._workers and batches and not (begun and begun[0] == batches[at]):
            self._start(chain(batches[at:], following))

    def run(self, batches: list[list[SampleKey]], following: Iterable[list[SampleKey]] = ()) -> Iterator[Batch]:
        """Yield the batches in order; a later call ends this pass.

        The workers continue with `following`, and the next pass takes from it whatever batches it asks for.
        """
        self._pass += 1
        return self._run(batches, following, self._pass)

    def _run(
        self, batches: list[list[SampleKey]], following: Iterable[list[SampleKey]], number: int
    ) -> Iterator[Batch]:
        for at, batch in enumerate(batches):
            self._check_current(number)
            self.prepare(batches, at, following)
            yield self._load(batch)
        self._check_current(number)

    def _check_current(self, number: int) -> None:
        if number != self._pass:
            raise RuntimeError("this iterator over the data ended because a later one started")

    def _load(self, batch: list[SampleKey]) -> Batch:
        """Return the next batch."""
        if self._workers:
            self._work.begun.popleft()
        try:
            loaded = [self._next(part) for part in self._work.parts(batch)]
            is_pinned = self.options.pin_memory
            joined = loaded[0] if len(loaded) == 1 else collate(loaded, pinned=is_pinned)
            return joined.pin_memory() if is_pinned and not self._workers else joined
        except BaseException:  # the workers may still send parts of this batch
            self.close()
            raise

    def _start(self, batches: Iterator[list[SampleKey]]) -> None:
        """Load other batches, with the present workers if they still respond."""
        self._work.source = batches
        self._work.begun.clear()
        if self._iterator is not None and self._loader is not None:
            try:
                self._iterator = iter(self._loader)
                return
            except RuntimeError:  # a worker is dead, or busy with an abandoned pass
                self._stop()
        before = signal.getsignal(signal.SIGCHLD)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores are allowed
            self._loader = self._build()
            iterator = iter(self._loader)
        replace_done_event(iterator, _DoneEvent)
        # Torch replaces the SIGCHLD handler with its first workers. Its own raises in the main thread when a worker
        # dies, even while a checkpoint is written, and the pool notices dead workers within a second without it.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)
        self._iterator = iterator

    def _build(self) -> "DataLoader[Any]":
        return DataLoader(
            self._guarded,
            batch_size=None,  # the guarded data set returns whole parts
            sampler=self._work,
            collate_fn=_unchanged,
            num_workers=self._workers,
            pin_memory=self.options.pin_memory,  # parts, too: to join them then copies without page faults
            prefetch_factor=2 * self._num_parts,  # two batches per worker, in parts
            timeout=_POLL_S,
            worker_init_fn=start_worker,
            multiprocessing_context="fork" if "fork" in get_all_start_methods() else None,
            generator=torch.Generator(),  # otherwise the workers' seed would be drawn from the global generator
            persistent_workers=True,
        )

    def _next(self, part: list[SampleKey]) -> Batch:
        """Return the next part of a batch."""
        loaded = self._received(part) if self._workers else self._guarded[part]
        if isinstance(loaded, SegappError):
            raise loaded
        return loaded

    def _received(self, part: list[SampleKey]) -> Any:
        """Return the next part or its error. Waits are short, so the pause of a suspended process is no wait."""
        assert self._iterator is not None
        waited_s = 0.0
        while True:
            try:
                return next(self._iterator)
            except (RuntimeError, ConnectionError, EOFError) as error:  # also if a worker dies while it sends a part
                waited_s += _POLL_S
                timed_out = "timed out" in str(error)
                if timed_out and (not self.options.timeout_s or waited_s < self.options.timeout_s):
                    continue
                failure = self._timeout_error(part) if timed_out else self._death_error(error)
                self._kill([number for number in range(self._workers) if self._guarded.slots[number]])
                raise failure from error

    def _timeout_error(self, batch: list[SampleKey]) -> WorkerError:
        being_read = filter(None, map(self._name_in_slot, range(self._workers)))
        names = list(being_read) or [shown(self._dataset.pairs[key.image].image) for key in batch[:1]]
        return WorkerError(
            f"no batch arrived from the data workers for {self.options.timeout_s:g} s, at {', '.join(names)}: "
            "check that the storage answers, or raise train.hang_timeout_s, of which this is a fifth",
            key="train.hang_timeout_s",
            value=self.options.timeout_s,
        )

    def _death_error(self, error: Exception) -> WorkerError:
        processes = loader_workers(self._iterator)
        if not isinstance(error, RuntimeError):  # torch has not noticed the dead worker yet
            ended = wait([process.sentinel for process in processes], _POLL_S)
            for process in (process for process in processes if process.sentinel in ended):
                process.join(_POLL_S)  # its pipe closes a moment before it is gone
        dead = [(number, process) for number, process in enumerate(processes) if not process.is_alive()]
        if not dead:
            return WorkerError(
                f"the data workers failed ({error}): lower data.workers, or set it to 0 to see the cause",
                key="data.workers",
            )
        number, process = dead[0]
        name, code = self._name_in_slot(number), process.exitcode
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        place = f"while reading {name}" if name else "between two files"
        return WorkerError(
            f"data worker {number} (process {process.pid}) ended by {cause} {place}: if "
            "memory ran out, lower data.workers; if it ends at the same file again, replace that file",
            key="data.workers",
            path=name,
        )

    def _name_in_slot(self, number: int) -> str | None:
        index = self._guarded.slots[number] - 1
        return shown(self._dataset.pairs[index].image) if index >= 0 else None

    def close(self) -> None:
        """Stop the workers and the current pass; a later pass starts new workers."""
        self._pass += 1
        self._stop()

    def _stop(self) -> None:
        """Stop the workers; kill those that do not respond within seconds."""
        if shut_down_workers(self._iterator):
            self._kill(range(self._workers))
        self._loader = self._iterator = None
        self._work.begun.clear()

    def _kill(self, numbers: Iterable[int]) -> None:
        """Kill some workers; they hold no state."""
        processes = loader_workers(self._iterator)
        for process in (processes[number] for number in numbers if number < len(processes)):
            if process.is_alive():
                process.kill()
                process.join(_POLL_S)
