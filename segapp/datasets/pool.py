"""Batches loaded in this process or in worker processes that live as long as the pool.

Workers load a batch together, each a part of it. In a training on the CPU they write their samples into a ring of
batches, which the trainer reads in place; otherwise they pass their parts on in shared memory, and the trainer joins
them. They continue with the batches that follow a pass, so the next pass does not wait for its first ones.

Every failure (an exception of any kind, a second killed worker, a worker that hangs) raises one error that names the
file. No global random generator is used.

Shapes: N images per batch, B bands, H, W height and width in pixels.
"""

import logging
import math
import mmap
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing import parent_process
from multiprocessing.connection import wait
from multiprocessing.sharedctypes import RawArray
from types import TracebackType
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from segapp.compat.torch import loader_workers, replace_done_event, set_within, shut_down_workers
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import shown
from segapp.datasets.resources import BATCHES_AHEAD, available_bytes, num_slots
from segapp.datasets.sampling import SampleKey
from segapp.errors import DataError, SegappError, WorkerError
from segapp.failpoints import failpoint
from segapp.parallel.launch import signal_when_parent_dies
from segapp.run.words import first_line

_POLL_S = 1.0

logger = logging.getLogger("segapp")


@dataclass(frozen=True)
class LoadOptions:
    """How batches are loaded."""

    workers: int = 0  # processes that load; 0 loads in this one
    timeout_s: float = 120.0  # maximum wait for a batch from the workers; 0: no limit
    pin_memory: bool = False  # return batches in page-locked memory
    accumulate: int = 1  # batches that are in use at the same time


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


def collate(parts: Sequence[Batch], *, shared: bool = False, pinned: bool = False, out: Batch | None = None) -> Batch:
    """Return batches of images of one size as one batch, or write them to `out`.

    With `shared`, the main process maps its memory instead of copying it; with `pinned`, it is page-locked.

    Raises:
        DataError: The images differ in size.
        WorkerError: There is not enough shared memory.
    """
    first, num_images = parts[0], sum(len(part) for part in parts)
    every = parts if out is None else [*parts, out]
    sizes = dict.fromkeys(f"{each.images.shape[3]}x{each.images.shape[2]}" for each in every)
    if len(sizes) > 1:
        raise DataError(
            f"images of {' and '.join(list(sizes)[:2])} pixels cannot share a batch: "
            "set data.crop_px or data.resize_px, or a batch size of 1",
            key="data.crop_px",
        )
    if out is None:
        images = _allocate((num_images, *first.images.shape[1:]), first.images.dtype, shared=shared, pinned=pinned)
        target = _allocate((num_images, *first.target.shape[1:]), first.target.dtype, shared=shared, pinned=pinned)
        out = Batch(images, target, tuple(index for part in parts for index in part.indices))
    assert (out.images.dtype, out.target.dtype) == (first.images.dtype, first.target.dtype)  # `cat` would convert
    torch.cat([part.images for part in parts], out=out.images)
    torch.cat([part.target for part in parts], out=out.target)
    return out


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


class _BatchPart(NamedTuple):
    """A part of a batch, which one worker loads."""

    batch: int  # number of the batch in its ring
    first: int  # position of the first sample in the batch
    keys: list[SampleKey]


class _Ring:
    """Batches in memory that a process shares with its workers, which write samples where the process reads them.

    Batch number i is in slot i modulo the number of slots. A slot has room for the batch of all ranks, because shares
    change; pages without samples take no memory. The memory has no name and no descriptor, ends with its processes,
    and is not limited by the size of /dev/shm.

    Raises:
        OSError: There is too little memory.
    """

    def __init__(self, dataset: SegmentationDataset, batch_size: int, options: LoadOptions) -> None:
        self._num_slots = num_slots(options.accumulate)
        slots, size = (self._num_slots, batch_size), getattr(dataset.transform, "crop_px", ())
        images = (*slots, dataset.pixels.num_bands, *size), dataset.pixels.numpy_dtype
        target = (*slots, *size), dataset.scheme.dtype
        needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in (images, target))
        free = available_bytes()
        if free is not None and needed > free // 2:
            raise OSError(f"{needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB of memory are free")
        self._images, self._target = _forked(*images), _forked(*target)

    def place(self, part: _BatchPart) -> Batch:
        """Return the place of a part, or of a whole batch."""
        slot, rows = part.batch % self._num_slots, slice(part.first, part.first + len(part.keys))
        indices = tuple(key.image for key in part.keys)
        return Batch(self._images[slot, rows], self._target[slot, rows], indices)


def _forked(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    """Return a tensor whose memory is shared with processes that are forked later."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype).reshape(shape))


class _GuardedDataset(Dataset["Batch | SegappError | None"]):
    """Data set of parts of batches that records in shared memory which sample each worker is loading."""

    def __init__(self, dataset: SegmentationDataset, num_workers: int) -> None:
        self.dataset = dataset
        self.ring: _Ring | None = None
        self.slots: Any = RawArray("q", max(1, num_workers))

    def __getitem__(self, part: _BatchPart) -> "Batch | SegappError | None":
        """Return the samples; None if they are in the ring."""
        info = get_worker_info()
        slot = info.id if info is not None else 0
        try:
            samples, place = [], None if self.ring is None else self.ring.place(part)
            for key in part.keys:
                self.slots[slot] = key.image + 1
                failpoint("data.item")
                sample = self.dataset[key]
                samples.append(Batch(sample.image[None], sample.target[None], (sample.index,)))
            joined = collate(samples, shared=info is not None, out=place) if samples else self._no_samples()
            return joined if place is None else None
        except BaseException as error:  # every error of a worker must reach the trainer in a form it can unpickle
            if info is None and not isinstance(error, Exception):
                raise
            return _portable(error, shown(self.dataset.pairs[self.slots[slot] - 1].image))
        finally:
            self.slots[slot] = 0

    def _no_samples(self) -> Batch:
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
    """The parts of batches for torch's DataLoader, which asks for one whenever it has returned another.

    It asks again after a StopIteration, with which parts are held back if enough batches are begun.
    """

    def __init__(self, part_size: int) -> None:
        self._part_size = part_size  # largest number of samples
        self.source: Iterator[list[SampleKey]] = iter(())  # batches that no worker has been given
        self.begun: deque[list[SampleKey]] = deque()  # batches that were given to workers and not returned yet
        self.most_begun: int | None = None
        self.number = 0  # of the next batch to be returned
        self._parts: Iterator[_BatchPart] = iter(())

    def __iter__(self) -> Iterator[_BatchPart]:
        self._parts = iter(())
        return self

    def __next__(self) -> _BatchPart:
        part = next(self._parts, None)
        if part is None:
            if self.most_begun is not None and len(self.begun) >= self.most_begun:
                raise StopIteration
            batch = next(self.source)
            self._parts = iter(self.parts(batch, self.number + len(self.begun)))
            self.begun.append(batch)
            part = next(self._parts)
        return part

    def parts(self, batch: list[SampleKey], number: int) -> list[_BatchPart]:
        """Return a batch in parts; an empty batch is one part."""
        starts = range(0, max(1, len(batch)), self._part_size)
        return [_BatchPart(number, first, batch[first : first + self._part_size]) for first in starts]


class _RestartError(Exception):
    """A worker was killed, for the first time in an epoch."""


class BatchPool:
    """Loads lists of batches, in order, in worker processes that are reused for the next list.

    A batch is cut into as many equal parts as there are workers, or into the next smaller number that divides it. Then
    no worker has more to do than another, and no batch takes as long as one worker needs for all of it. If one of the
    workers is killed, all are started again and load the same samples, once in an epoch.

    Args:
        dataset: The samples.
        options: How batches are loaded.
        batch_size: Samples of a batch, over which its parts are equal.
        ring_size: Most samples of a batch, for a ring that the workers write to; None: they pass their parts on.

    Attributes:
        tell: Called with each sentence for the user.
    """

    def __init__(
        self, dataset: SegmentationDataset, options: LoadOptions, batch_size: int, ring_size: int | None = None
    ) -> None:
        self._dataset = dataset
        self.options = options
        self.tell: Callable[[str], None] = lambda message: None
        self._workers, self._ring_size = options.workers, ring_size
        num_parts = max(n for n in range(1, max(1, self._workers) + 1) if batch_size % n == 0)
        part_size = batch_size // num_parts
        if self._workers > BATCHES_AHEAD * num_parts:  # then not all of them would have a part
            part_size = -(-batch_size // self._workers)
        self._num_parts = -(-batch_size // part_size)
        self._work = _Work(part_size)
        self._guarded = _GuardedDataset(dataset, options.workers)
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._pass = 0
        self._epoch: int | None = None
        self._was_restarted = False  # in this epoch

    def prepare(self, batches: list[list[SampleKey]], at: int = 0, following: Iterable[list[SampleKey]] = ()) -> None:
        """Let the workers load the batches from number `at` on, and then `following`, unless they do so already."""
        begun = self._work.begun
        if self._workers and batches and not (begun and begun[0] == batches[at]):
            self._start(chain(batches[at:], following))

    def run(
        self, batches: list[list[SampleKey]], following: Iterable[list[SampleKey]] = (), epoch: int | None = None
    ) -> Iterator[Batch]:
        """Yield the batches in order; a later call ends this pass.

        The workers continue with `following`, and the next pass takes from it whatever batches it asks for. In all
        passes with the same `epoch`, killed workers are started again once.
        """
        self._pass += 1
        self._was_restarted &= epoch is not None and epoch == self._epoch
        self._epoch = epoch
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
        number, ring = self._work.number, self._guarded.ring
        if self._workers:
            self._work.begun.popleft()
            self._work.number += 1
        try:
            loaded = [self._next(part) for part in self._work.parts(batch, number)]
            if ring is not None:
                return ring.place(_BatchPart(number, 0, batch))
            is_pinned = self.options.pin_memory
            joined = loaded[0] if len(loaded) == 1 else collate(loaded, pinned=is_pinned)
            return joined.pin_memory() if is_pinned and not self._workers else joined
        except _RestartError:
            batches = chain([batch, *self._work.begun], self._work.source)
            self._kill(range(self._workers))  # what they are loading is loaded again
            self._stop()
            self._start(batches)
            return self._load(batch)
        except BaseException:  # the workers may still send parts of this batch
            self.close()
            raise

    def _say(self, message: str) -> None:
        logger.warning(message)
        self.tell(message)

    def _start(self, batches: Iterator[list[SampleKey]]) -> None:
        """Load other batches, with the present workers if they still respond."""
        self._work.source = batches
        self._work.begun.clear()
        if self._iterator is not None and self._loader is not None:
            try:
                self._iterator = iter(self._loader)
                return
            except RuntimeError as error:  # a worker is dead, or busy with an abandoned pass
                if "timed out" not in str(error):
                    failure = self._death_error(error)
                    if self._was_restarted:
                        self._stop()
                        raise failure from error
                    self._was_restarted = True
                    self._say(f"{failure}; the workers start again")
                self._stop()
        self._guarded.ring = self._new_ring()
        self._work.most_begun = None if self._guarded.ring is None else BATCHES_AHEAD
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

    def _new_ring(self) -> _Ring | None:
        """Return a ring for new workers; None if they pass their parts on, as for a GPU, whose batches are pinned."""
        if self._ring_size is None or self.options.pin_memory or not hasattr(self._dataset.transform, "crop_px"):
            return None
        try:
            return _Ring(self._dataset, self._ring_size, self.options)
        except OSError as error:
            self._say(f"no ring of shared batches ({error}): the data workers pass batches on, which takes more time")
            return None

    def _build(self) -> "DataLoader[Any]":
        ahead = 2 * self._num_parts  # two batches per worker, in parts
        if self._guarded.ring is not None:  # 4 to 6 batches of all workers
            ahead = max(1, BATCHES_AHEAD * self._num_parts // self._workers)
        return DataLoader(
            self._guarded,
            batch_size=None,  # the guarded data set returns whole parts
            sampler=self._work,
            collate_fn=_unchanged,
            num_workers=self._workers,
            pin_memory=self.options.pin_memory,  # parts, to join them then without page faults
            prefetch_factor=ahead,
            timeout=_POLL_S,
            worker_init_fn=start_worker,
            multiprocessing_context="fork",
            generator=torch.Generator(),  # otherwise the workers' seed would be drawn from the global generator
            persistent_workers=True,
        )

    def _next(self, part: _BatchPart) -> Any:
        """Return the next part of a batch; None if it is in the ring."""
        loaded = self._received(part) if self._workers else self._guarded[part]
        if isinstance(loaded, SegappError):
            raise loaded
        return loaded

    def _received(self, part: _BatchPart) -> Any:
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
                failure = self._timeout_error(part.keys) if timed_out else self._death_error(error)
                is_killed = any(process.exitcode == -signal.SIGKILL for process in loader_workers(self._iterator))
                if is_killed and not self._was_restarted:
                    self._was_restarted = True
                    self._say(f"{failure}; the workers start again with the same samples")
                    raise _RestartError from failure
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
        self._loader = self._iterator = self._guarded.ring = None
        self._guarded.slots[:] = [0] * len(self._guarded.slots)  # killed workers leave their samples there
        self._work.begun.clear()

    def _kill(self, numbers: Iterable[int]) -> None:
        """Kill some workers; they hold no state."""
        processes = loader_workers(self._iterator)
        for process in (processes[number] for number in numbers if number < len(processes)):
            if process.is_alive():
                process.kill()
                process.join(_POLL_S)
