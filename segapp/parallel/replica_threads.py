"""Run the replicas of a module in one thread each, with exchanges between them, and abort all if one fails.

Inside a replica, `current_replica().exchange(...)` is a barrier with values. The backward pass has no barrier.

A replica that raises, ends early, or reaches another exchange aborts the others: they get an error, and the first cause
is raised as it is, with its replica and device in its notes.

All replicas, including the first, run in threads (`Worker`), so the caller can wait for each with a timeout and abandon
one that hangs. The same thread runs the same device in every step: cuDNN keeps its choice of algorithms per thread, so
in new threads every convolution would be tuned again. The threads live as long as one of their users (`keep_workers`),
such as a model; without users, they end after their call.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar

import torch

from segapp.accelerator import accelerator_of
from segapp.compat.torch import dispatch_modes, next_sequence_number, saved_tensors_hooks

T = TypeVar("T")

Mode = Literal["threads", "lockstep"]

DEFAULT_TIMEOUT_S = 300.0
"""Seconds to wait for a missing replica; longer than the tuning of kernels in a first step."""

_GRACE_S = 1.0
"""Seconds to wait for replicas that may hang, after a timeout or Ctrl-C; their threads are daemons."""

_SAME_LAYERS = "every replica must run the same synchronized layers, whatever its samples are"


def failed_replica(error: BaseException) -> tuple[int, torch.device] | None:
    """Return the number and the device of the replica that raised an error; None for any other error."""
    return getattr(error, "_replica", None)


class ReplicaDesyncError(RuntimeError):
    """A replica did not reach an exchange: it ended, reached another one, or timed out."""


class _ReleasedError(ReplicaDesyncError):
    """Raised in a waiting replica after the group has failed; never the reported cause."""


@dataclass(frozen=True)
class ReplicaContext:
    """The replica that a thread runs: its group and its index among the running replicas."""

    group: ReplicaThreads[Any]
    index: int

    @property
    def num_replicas(self) -> int:
        """Number of running replicas; devices without samples have none."""
        return len(self.group.devices)

    @property
    def device(self) -> torch.device:
        """The device of this replica."""
        return self.group.devices[self.index]

    @property
    def position(self) -> int:
        """The number of its device among all devices, including devices without samples."""
        return self.group.positions[self.index]

    def exchange(self, key: str, value: T, combine: Callable[[list[T]], Sequence[Any]]) -> Any:
        """Exchange values with the other replicas, and return this one's result; every replica must call it.

        Args:
            key: name of the exchange; different keys among the replicas are an error.
            value: this replica's value.
            combine: gets all values in replica order and returns one result for each; called once, by replica 0.

        Raises:
            ReplicaDesyncError: not every replica reaches this exchange.
        """
        return self.group.exchange(self.index, key, value, combine)


_thread_local = threading.local()


def current_replica() -> ReplicaContext | None:
    """Return the replica that the calling thread runs; None outside of replicas."""
    return getattr(_thread_local, "context", None)


class ReplicaThreads(Generic[T]):
    """Runs one call per replica in threads that take turns at exchanges, once.

    Turns make the exchanges deterministic, and exclude deadlocks. A replica that arrives at an exchange gives up its
    turn. When all have arrived, replica 0 gets a turn and combines the values; then the others get theirs. So one
    thread makes the autograd nodes of an exchange, in replica order, and every sum is rounded in the same way in each
    run, whichever replica is faster. A replica waits only for its turn, and while one waits, another has a turn: if
    that one ends, raises, or keeps its turn for longer than the timeout, the group fails, and all may run to raise.

    In mode "threads", all replicas have a turn between exchanges. In mode "lockstep", one at a time has it, in replica
    order: random numbers are drawn in a fixed order, and dispatch modes such as `FakeTensorMode`, which are not
    thread-safe, work. If a dispatch mode is active, the group runs in lockstep.

    The order in which autograd adds gradients must also not depend on threads. Autograd numbers the nodes of each
    thread and runs nodes with larger *sequence numbers* first, and in long-lived threads, the numbers depend on all
    earlier steps. So all threads begin a call at the same number (`_advance_sequence_number`), far above the number
    in the caller's thread. Whatever was computed before, the nodes of replicas come first, unless the caller has made
    `MAX_FILLER_NODES` more than they have.

    There is one device per replica; `positions` are their numbers among all `num_devices`, by default 0, 1, and so on.
    The group waits at most `timeout_s` for a missing replica, at an exchange or at the end.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        mode: Mode = "threads",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        positions: Sequence[int] = (),
        num_devices: int | None = None,
    ) -> None:
        if mode not in ("threads", "lockstep"):
            raise ValueError(f"mode={mode!r} is not known: use 'threads' or 'lockstep'")
        self.devices = tuple(devices)
        self.positions = tuple(positions) or tuple(range(len(self.devices)))
        self.num_devices = num_devices or len(self.devices)
        self.timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        # A single call runs in the caller's thread, which already has these states.
        self._entered = _caller_states(self.devices) if len(self.devices) > 1 else _make_current
        self.is_lockstep: bool = mode == "lockstep" or bool(dispatch_modes())
        self._turns = [threading.Event() for _ in self.devices]
        """Set while the replica may run; one event each, so that only threads that can continue are woken."""
        for turn in self._turns[: 1 if self.is_lockstep else None]:
            turn.set()
        self._changed = threading.Condition(threading.Lock())
        """Guards the attributes below; it notifies the caller when a replica ends or fails."""
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._answers: Sequence[Any] = ()
        self._results: dict[int, T] = {}
        self._ended: dict[int, int] = {}
        """Replicas that have ended, and the next sequence numbers of their threads."""
        self._first_end_s = 0.0
        self._failure: tuple[int | None, BaseException] | None = None
        self._late_s = timeout_s
        """Seconds to wait for late replicas after a failure."""
        self.cache: dict[Any, Any] = {}
        """Values that the exchanges of this forward pass share; only their `combine` functions use it."""

    @property
    def is_running(self) -> bool:
        """True until every replica has ended."""
        return len(self._ended) < len(self.devices)

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls, one per device, and return their results in replica order.

        Raises:
            BaseException: the first error of a call; its notes name the replica.
            ReplicaDesyncError: a replica did not reach an exchange in time, or cannot.
        """
        if len(calls) == 1:
            self._work(0, calls[0])
        else:
            workers: list[Worker] = []
            try:
                for i, device in enumerate(self.devices):
                    workers.append(_take_worker((device, self.devices[:i].count(device))))
                self._start(workers, calls)
                self._join()
            finally:
                with self._changed:  # a late replica may end just now
                    sequence_numbers = dict(self._ended)
                _give_back(workers, sequence_numbers)
        if self._failure is not None:
            # Late replicas still see a failure; the error is released, with the tensors in its traceback.
            failure, self._failure = self._failure, (None, _ReleasedError("the group has failed"))
            try:
                raise self._with_notes(*failure)
            finally:
                del failure  # the traceback has this frame
        return [self._results[i] for i in range(len(calls))]

    def exchange(self, index: int, key: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        if len(self.devices) == 1:
            return combine([value])[0]
        with self._changed:
            self._raise_if_failed()
            self._arrived[index] = key, value
            # Cleared first, because the turn that is given next may be this replica's own.
            self._turns[index].clear()
            if self.is_lockstep or len(self._arrived) == len(self.devices):
                self._turns[(index + 1) % len(self.devices) if self.is_lockstep else 0].set()
            self._fail_if_unreachable()
        self._wait_for_turn(index, repr(key), self.timeout_s)
        if index:
            return self._answers[index]
        with self._changed:
            values = self._take_values()
        answers = combine(values)  # without the lock, so that others notice if it hangs
        with self._changed:
            self._raise_if_failed()
            self._answers = answers
            if not self.is_lockstep:
                for turn in self._turns:
                    turn.set()
        return answers[0]

    def _start(self, workers: Sequence[Worker], calls: Sequence[Callable[[], T]]) -> None:
        """Start the calls at one sequence number; new threads, which begin at 0, replace threads that are far apart.

        The caller's own nodes of this step, which include second derivatives, have smaller numbers.
        """
        first = max(worker.sequence_number for worker in workers)
        if first - min(worker.sequence_number for worker in workers) > MAX_FILLER_NODES:
            first = 0
            for worker in workers:
                worker.replace_thread()
        ahead = next_sequence_number() + AHEAD_OF_CALLER
        if torch.is_grad_enabled() and not dispatch_modes() and ahead - first <= MAX_FILLER_NODES:
            first = max(first, ahead)
        for i, (worker, call) in enumerate(zip(workers, calls, strict=True)):
            worker.start(partial(self._work, i, call, first))

    def _work(self, index: int, call: Callable[[], T], first_number: int = 0) -> None:
        if len(self.devices) > 1:
            _advance_sequence_number(first_number)
        outer = current_replica()
        _thread_local.context = ReplicaContext(self, index)
        try:
            if self.is_lockstep:
                self._wait_for_turn(index, "the start", timeout_s=None)
            with self._entered(self.devices[index]):
                try:
                    self._results[index] = call()
                except BaseException as error:  # contextlib would set attributes, which a frozen error refuses
                    with self._changed:
                        self._fail(index, error)
        except BaseException as error:
            with self._changed:
                self._fail(index, error)
        finally:
            _thread_local.context = outer
            with self._changed:
                self._first_end_s = self._first_end_s or time.monotonic()
                # After the call, so that no node of this thread follows.
                self._ended[index] = next_sequence_number()
                self._fail_if_unreachable()
                if self.is_lockstep:
                    self._turns[(index + 1) % len(self.devices)].set()
                self._changed.notify()

    def _join(self) -> None:
        """Wait for all replicas, even after a failure, because a late one may still update the model's buffers."""
        try:
            with self._changed:
                while len(self._ended) < len(self.devices) and self._failure is None:
                    left = self._first_end_s + self.timeout_s - time.monotonic() if self._ended else _GRACE_S
                    if left <= 0:
                        self._time_out("the end")
                    # Short waits, because a signal handled by another thread does not interrupt a wait.
                    self._changed.wait(min(max(left, 0.0), _GRACE_S))
                deadline = time.monotonic() + self._late_s
                while len(self._ended) < len(self.devices) and time.monotonic() < deadline:
                    self._changed.wait(min(_GRACE_S, max(0.0, deadline - time.monotonic())))
        except BaseException as error:  # Ctrl-C in the caller's thread also stops the replicas
            with self._changed:
                self._fail(None, error)
            raise

    def _take_values(self) -> list[Any]:
        arrived, self._arrived = self._arrived, {}
        keys, values = zip(*(arrived[i] for i in range(len(self.devices))), strict=True)
        if len(set(keys)) > 1:
            where = ", ".join(f"replica {i} at {key!r}" for i, key in enumerate(keys))
            self._fail(None, ReplicaDesyncError(f"replicas are at different exchanges: {where}: {_SAME_LAYERS}"))
            self._raise_if_failed()
        return list(values)

    def _wait_for_turn(self, index: int, place: str, timeout_s: float | None) -> None:
        while not self._turns[index].wait(timeout_s):
            with self._changed:
                if not self._turns[index].is_set():
                    self._time_out(place)
        self._raise_if_failed()

    def _fail_if_unreachable(self) -> None:
        """Fail if replicas wait at an exchange and another one has ended."""
        if self._arrived and self._ended:
            key = next(iter(self._arrived.values()))[0]
            self._fail(
                None,
                ReplicaDesyncError(
                    f"replicas {sorted(self._arrived)} wait at {key!r} and replicas {sorted(self._ended)} have ended:"
                    f" {_SAME_LAYERS}"
                ),
            )

    def _fail(self, index: int | None, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (index, error)
        # Every replica may run now, in order to raise.
        for turn in self._turns:
            turn.set()
        self._changed.notify()

    def _time_out(self, place: str) -> None:
        """Fail, and name the replicas that have a turn, for which all others wait."""
        self._late_s = _GRACE_S  # a replica hangs; the timeout has passed
        missing = ", ".join(
            f"{i} on {device}"
            for i, (device, turn) in enumerate(zip(self.devices, self._turns, strict=True))
            if turn.is_set() and i not in self._ended
        )
        message = f"replica {missing} did not come to {place} within {self.timeout_s:g} s"
        self._fail(
            None, ReplicaDesyncError(f"{message}: look for a stuck device or operation there, or raise timeout_s")
        )

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise _ReleasedError("another replica failed")

    def _with_notes(self, index: int | None, error: BaseException) -> BaseException:
        """Return the error with notes about its replica, in a form that also a frozen error allows."""
        if index is None or isinstance(error, KeyboardInterrupt):
            return error
        if isinstance(error, torch.OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # frees the tensors in its local variables
        position, device = error.__dict__["_replica"] = self.positions[index], self.devices[index]
        notes = [f"raised in replica {position} on {device}"]
        if len(self.devices) > 1 and "more than 1 value per channel" in str(error):
            notes.append("use convert_sync_batchnorm(model), or a split that leaves no device a single sample")
        known = error.__dict__.setdefault("__notes__", [])
        known.extend(note for note in notes if note not in known)  # an error may be raised again and again
        return error


def _make_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return accelerator_of(device).current(device)


def _caller_states(
    devices: Sequence[torch.device],
) -> Callable[[torch.device], contextlib.AbstractContextManager[Any]]:
    """Return a function that sets torch's present thread-local states in another thread, on a replica's device.

    A new thread does not inherit them.
    """
    is_grad_enabled, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = [kind for kind in {"cpu", "cuda", *(device.type for device in devices)} if torch.is_autocast_enabled(kind)]
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds)]
    is_autocast_cached = torch.is_autocast_cache_enabled()
    default_device, num_threads = torch.get_default_device(), torch.get_num_threads()
    cuda_devices = sorted({device for device in devices if device.type == "cuda"}, key=str)
    streams = [torch.cuda.current_stream(device) for device in cuda_devices]
    streams = [stream for stream in streams if stream != torch.cuda.default_stream(stream.device)]
    hooks, modes = saved_tensors_hooks(), tuple(dispatch_modes())

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(is_grad_enabled))
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=is_autocast_cached))
            for stream in streams:  # of all devices, because replica 0 combines the others' tensors
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(_make_current(device))
            if default_device.type != "cpu":
                stack.enter_context(device if default_device == devices[0] else default_device)
            if hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            for mode in modes:
                stack.enter_context(mode)
            yield

    return entered


_Slot = tuple[torch.device, int]
"""A device, and the number of its earlier occurrences in the list of devices."""

AHEAD_OF_CALLER = 2_000
"""Larger than the usual number of nodes that the caller's thread makes in one step."""
MAX_FILLER_NODES = 100_000
"""Maximum number of nodes that a thread makes to catch up, at about 1 us each; above it, new threads are cheaper."""


class Worker:
    """A thread that runs one call after the other, for the replica in one slot of a device list."""

    def __init__(self, slot: _Slot) -> None:
        self.slot = slot
        self._start_thread()

    def _start_thread(self) -> None:
        self.sequence_number = 0  # of the thread's next autograd node, after its last call
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: if it hangs in a device's call, it does not keep the process from ending.
        name = f"replica {self.slot[0]} {self.slot[1]}"
        threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True).start()

    def start(self, call: Callable[[], None]) -> None:
        """Run a call after the present one; the call must not raise."""
        self._calls.put(call)

    def end(self) -> None:
        """End the thread after its present call."""
        self._calls.put(None)

    def replace_thread(self) -> None:
        """Continue with a new thread."""
        self.end()
        self._start_thread()


def _run_calls(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # a waiting worker holds no tensors


# A finalizer may run within any other function here, and several threads may run models, so these are changed by single
# operations that are atomic, with and without the interpreter's lock. `defaultdict` is not: it may make two values.
_idle: dict[_Slot, deque[Worker]] = {}
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


def _take_worker(slot: _Slot) -> Worker:
    """Return the idle worker of a slot, or a new one, such as for a worker that is busy or hangs."""
    try:
        return _idle.setdefault(slot, deque()).pop()
    except IndexError:
        return Worker(slot)


def _give_back(workers: Sequence[Worker], sequence_numbers: Mapping[int, int]) -> None:
    """Keep the workers with a sequence number (by index) for the next call; the others end after their late calls."""
    for i, worker in enumerate(workers):
        if i in sequence_numbers:
            worker.sequence_number = sequence_numbers[i]
            _idle.setdefault(worker.slot, deque()).append(worker)
        else:
            worker.end()
    _end_unused()


def _advance_sequence_number(target: int) -> None:
    """Make filler nodes in this thread until the next one has the target's number; call it without dispatch modes."""
    source = torch.empty(0, requires_grad=True)
    for _ in range(target - next_sequence_number()):
        source.view(0)
