"""Long-lived threads for replicas: the same thread runs the same device in every step.

cuDNN keeps its choice of algorithms per thread, so in new threads every convolution would be tuned again in every step.
The threads live as long as one of their users (`keep_workers`), such as a model; without users, they end after their
call.

Autograd numbers the nodes of each thread and runs the later ones of all threads first. In long-lived threads, the
numbers would depend on all earlier steps, and so would the order in which gradients are added. So all threads of a call
begin at the same number (`equal_numbers`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue

import torch

from segapp.compat.torch import next_sequence_number

_Call = Callable[[], None]
_Place = tuple[torch.device, int]
"""A device, and the number of its earlier occurrences in the list of devices."""


MAX_SKIPPED_NUMBERS = 100_000
"""Maximum number of nodes that a thread makes to catch up, at about 1 us each; above it, new threads are cheaper."""


class Worker:
    """A thread that runs one call after the other, for the replica at one place of a device list."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.next_number = 0  # next autograd node number of this thread, after its last call
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # A daemon: if it hangs in a device's call, it does not keep the process from ending.
        name = f"replica {place[0]} {place[1]}"
        threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()

    def start(self, call: _Call) -> None:
        """Run a call after the present one; the call must not raise."""
        self._calls.put(call)

    def end(self) -> None:
        """End the thread after its present call."""
        self._calls.put(None)


def _work(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # a waiting worker holds no tensors


# A finalizer may run within any other function here, and several threads may run models, so these are changed by single
# operations that are atomic, with and without the interpreter's lock. `defaultdict` is not: it may make two values.
_idle: dict[_Place, deque[Worker]] = {}
_users: set[int] = set()

os.register_at_fork(after_in_child=_idle.clear)  # a forked process has no threads except the one that forked


def keep_workers(user: object) -> None:
    """Keep idle threads until this user, and every other user, is garbage-collected."""
    if id(user) not in _users:
        _users.add(id(user))
        weakref.finalize(user, _leave, id(user)).atexit = False


def _leave(user_id: int) -> None:
    _users.discard(user_id)
    _end_unused()


def _end_unused() -> None:
    if not _users:
        for workers in list(_idle.values()):
            with contextlib.suppress(IndexError):
                while True:
                    workers.pop().end()


def take_workers(devices: Sequence[torch.device]) -> list[Worker]:
    """Return a worker per device: the same for the same devices, new ones for workers that are busy or hang."""
    taken: list[Worker] = []
    seen: Counter[torch.device] = Counter()
    try:
        for device in devices:
            place = device, seen[device]
            seen[device] += 1
            try:
                taken.append(_idle.setdefault(place, deque()).pop())
            except IndexError:
                taken.append(Worker(place))
    except BaseException:
        give_back(taken, range(len(taken)))
        raise
    return taken


def equal_numbers(workers: Sequence[Worker]) -> tuple[list[Worker], int]:
    """Return workers, and the number at which the nodes of each must begin (`skip_numbers`).

    If one of them is too far behind, such as a worker that has not been used for long, all are replaced.
    """
    numbers = [worker.next_number for worker in workers]
    if max(numbers) - min(numbers) <= MAX_SKIPPED_NUMBERS:
        return list(workers), max(numbers)
    for worker in workers:
        worker.end()
    return [Worker(worker.place) for worker in workers], 0


def skip_numbers(first: int) -> None:
    """Make nodes in this thread until the next one has the given number; call it without dispatch modes."""
    source = torch.empty(0, requires_grad=True)
    for _ in range(first - next_sequence_number()):
        source.view(0)


def give_back(workers: Sequence[Worker], ended: Collection[int]) -> None:
    """Keep workers whose calls have ended (by index) for the next call; the others end after their late calls."""
    for i, worker in enumerate(workers):
        if i in ended:
            _idle.setdefault(worker.place, deque()).append(worker)
        else:
            worker.end()
    _end_unused()
