"""Run replicas in one thread each, synchronized at exchanges, with an abort if a replica fails.

A *group* runs one call per replica. Inside a call, `current_replica().exchange(...)` is a barrier with values: every
replica passes a value, replica 0 combines all of them in replica order, and each gets its result. So the autograd
graph, and with it every rounding, is the same in each run. The backward pass has no barrier.

A replica that raises, ends early, or reaches another exchange aborts the group: the others get an error, and the first
cause is raised with its replica and device.

All replicas, including the first, run in threads of `workers`, so the caller can wait for each with a timeout and
abandon one that hangs.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch

from segapp.accelerator import accelerator_of
from segapp.compat.torch import dispatch_modes, next_sequence_number, saved_tensors_hooks
from segapp.parallel.workers import equal_numbers, give_back, skip_numbers, take_workers

T = TypeVar("T")

Mode = Literal["threads", "lockstep"]

DEFAULT_TIMEOUT_S = 300.0
"""Seconds to wait for a missing replica; longer than the tuning of kernels in a first step."""

_GRACE_S = 1.0
"""Seconds to wait for replicas that may hang, after a timeout or Ctrl-C; their threads are daemons."""

_SAME_LAYERS = "every replica must run the same synchronized layers, whatever its samples are"


class ReplicaError(RuntimeError):
    """A replica raised an error: `__cause__`. `replica` and `device` identify it."""

    def __init__(self, replica: int, device: torch.device, message: str) -> None:
        super().__init__(f"replica {replica} on {device}: {message}")
        self.replica = replica
        self.device = device
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.replica, self.device, self._message)


class ReplicaOutOfMemoryError(ReplicaError, torch.OutOfMemoryError):
    """A replica ran out of memory; also caught as `torch.OutOfMemoryError`, like the error of a single device."""


class ReplicaDesyncError(RuntimeError):
    """A replica did not reach an exchange: it ended, reached another one, or timed out."""


class _ReleasedError(ReplicaDesyncError):
    """Raised in a waiting replica after the group has failed; never the reported cause."""


@dataclass(frozen=True)
class ReplicaContext:
    """The replica that a thread runs: its group and its index among the running replicas."""

    group: ReplicaGroup[Any]
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
        """Exchange values with the other replicas; every replica must call it.

        Args:
            key: name of the exchange; different keys among the replicas are an error.
            value: this replica's value.
            combine: gets all values in replica order and returns one result for each; called once, by replica 0.

        Returns:
            This replica's result.

        Raises:
            ReplicaDesyncError: not every replica reaches this exchange.
        """
        return self.group.exchange(self.index, key, value, combine)


_thread_local = threading.local()


def current_replica() -> ReplicaContext | None:
    """Return the replica that the calling thread runs; None outside of replicas."""
    return getattr(_thread_local, "context", None)


class ReplicaGroup(Generic[T]):
    """Runs one call per replica, once.

    In mode "threads", the calls run at the same time. In mode "lockstep", one runs at a time, in replica order,
    switching only at exchanges: random numbers are drawn in a fixed order, and dispatch modes such as `FakeTensorMode`,
    which are not thread-safe, work. If a dispatch mode is active, the group runs in lockstep.

    There is one device per replica; `positions` are their numbers among all devices, by default 0, 1, and so on. The
    group waits at most `timeout_s` for a missing replica, at an exchange or at the end.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        mode: Mode = "threads",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        positions: Sequence[int] = (),
    ) -> None:
        if mode not in ("threads", "lockstep"):
            raise ValueError(f"mode={mode!r} is not known: use 'threads' or 'lockstep'")
        self.devices = tuple(devices)
        self.positions = tuple(positions) or tuple(range(len(self.devices)))
        self.timeout_s = timeout_s
        # A single call runs in the caller's thread, which already has these states.
        self._entered = _caller_states(self.devices) if len(self.devices) > 1 else _made_current
        self.takes_turns = len(self.devices) > 1 and (mode == "lockstep" or bool(dispatch_modes()))
        """True in mode lockstep."""
        lock = threading.Lock()
        # One condition per replica and one for the caller, so that only the thread that can continue is woken.
        self._changed = [threading.Condition(lock) for _ in self.devices]
        self._ending = threading.Condition(lock)
        self._turn = 0
        self._round = 0
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._answers: Sequence[Any] = ()
        self._results: dict[int, T] = {}
        self._ended: set[int] = set()
        self._next_numbers: dict[int, int] = {}
        self._first_end_s = 0.0
        self._failure: tuple[int | None, BaseException] | None = None
        self._late_s = timeout_s
        """Seconds to wait for late replicas after a failure."""
        self.common: dict[Any, Any] = {}
        """State that the exchanges of this pass share; only their `combine` functions use it."""

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls and return their results in replica order.

        Args:
            calls: one per device.

        Raises:
            ReplicaError: a call raised; the first error is the cause.
            ReplicaOutOfMemoryError: a call ran out of memory.
            ReplicaDesyncError: a replica did not reach an exchange in time, or cannot.
        """
        if len(calls) != len(self.devices):
            raise ValueError(f"{len(calls)} calls for {len(self.devices)} devices: give one call per device")
        if len(calls) == 1:
            self._work(0, calls[0])
        else:
            workers, first_number = equal_numbers(take_workers(self.devices))
            try:
                for i, (worker, call) in enumerate(zip(workers, calls, strict=True)):
                    worker.start(partial(self._work, i, call, first_number))
                self._join()
            finally:
                with self._ending:  # a late replica may end just now
                    ended = dict(self._next_numbers)
                for i, number in ended.items():
                    workers[i].next_number = number
                give_back(workers, ended)
        if self._failure is not None:
            # Late replicas still see a failure; the error is released, with the tensors in its traceback.
            failure, self._failure = self._failure, (None, _ReleasedError("the group has failed"))
            raise self._as_error(*failure)
        return [self._results[i] for i in range(len(calls))]

    def exchange(self, index: int, key: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """See `ReplicaContext.exchange`."""
        if len(self.devices) == 1:
            return combine([value])[0]
        with self._ending:
            self._raise_if_failed()
            this_round = self._round
            self._arrived[index] = (key, value)
            self._fail_if_unreachable()
            self._pass_turn(index)
            if index:
                if len(self._arrived) == len(self.devices):
                    self._changed[0].notify()
                self._wait(index, lambda: self._round != this_round and self._is_turn(index), key, self.timeout_s)
                return self._answers[index]
            self._wait(0, lambda: len(self._arrived) == len(self.devices) and self._is_turn(0), key, self.timeout_s)
            values = self._take_values()
        answers = combine(values)  # without the lock, so that others and the caller notice if it hangs
        with self._ending:
            self._raise_if_failed()
            self._give_answers(answers)
        return answers[0]

    def _work(self, index: int, call: Callable[[], T], first_number: int | None = None) -> None:
        if first_number is not None:
            skip_numbers(first_number)
        outer = current_replica()
        _thread_local.context = ReplicaContext(self, index)
        try:
            if self.takes_turns:
                with self._ending:
                    self._wait(index, lambda: self._is_turn(index), "the start", timeout_s=None)
            with self._entered(self.devices[index]):
                self._results[index] = call()
        except BaseException as error:
            with self._ending:
                self._fail(index, error)
        finally:
            _thread_local.context = outer
            with self._ending:
                self._first_end_s = self._first_end_s or time.monotonic()
                self._next_numbers[index] = next_sequence_number()
                self._ended.add(index)
                self._fail_if_unreachable()
                self._pass_turn(index)
                self._ending.notify()

    def _join(self) -> None:
        """Wait for all replicas, even after a failure, because a late one may still update the model's buffers."""
        try:
            with self._ending:
                while len(self._ended) < len(self.devices) and self._failure is None:
                    left = _GRACE_S
                    if self._ended:
                        left = self._first_end_s + self.timeout_s - time.monotonic()
                        if left <= 0:
                            self._time_out("the end", self._ended)
                            break
                    # Short waits, because a signal handled by another thread does not interrupt a wait.
                    self._ending.wait(min(left, _GRACE_S))
                deadline = time.monotonic() + self._late_s
                while len(self._ended) < len(self.devices) and time.monotonic() < deadline:
                    self._ending.wait(min(_GRACE_S, max(0.0, deadline - time.monotonic())))
        except BaseException as error:  # Ctrl-C in the caller's thread also stops the replicas
            with self._ending:
                self._fail(None, error)
            raise

    def _take_values(self) -> list[Any]:
        keys = [self._arrived[i][0] for i in range(len(self.devices))]
        if len(set(keys)) > 1:
            where = ", ".join(f"replica {i} at {key!r}" for i, key in enumerate(keys))
            self._fail(None, ReplicaDesyncError(f"replicas are at different exchanges: {where}: {_SAME_LAYERS}"))
            self._raise_if_failed()
        values = [self._arrived[i][1] for i in range(len(self.devices))]
        del self._arrived[0]
        return values

    def _give_answers(self, answers: Sequence[Any]) -> None:
        self._answers = answers
        self._arrived.clear()
        self._round += 1
        if not self.takes_turns:
            for condition in self._changed[1:]:
                condition.notify()

    def _wait(self, index: int, is_met: Callable[[], bool], key: str, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_met():
            self._raise_if_failed()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._time_out(repr(key), self._arrived)
                continue
            self._changed[index].wait(left)
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

    def _is_turn(self, index: int) -> bool:
        return not self.takes_turns or self._turn == index

    def _pass_turn(self, index: int) -> None:
        if self.takes_turns and self._turn == index:
            self._turn = (index + 1) % len(self.devices)
            self._changed[self._turn].notify()

    def _fail(self, index: int | None, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (index, error)
        for condition in (self._ending, *self._changed):
            condition.notify_all()

    def _time_out(self, place: str, present: Collection[int]) -> None:
        self._late_s = _GRACE_S  # a replica hangs; the timeout has passed
        missing = ", ".join(f"{i} on {device}" for i, device in enumerate(self.devices) if i not in present)
        message = f"replica {missing} did not come to {place} within {self.timeout_s:g} s"
        self._fail(
            None, ReplicaDesyncError(f"{message}: look for a stuck device or operation there, or raise timeout_s")
        )

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise _ReleasedError("another replica failed")

    def _as_error(self, index: int | None, error: BaseException) -> BaseException:
        if index is None or isinstance(error, KeyboardInterrupt):
            return error
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if out_of_memory:
            traceback.clear_frames(error.__traceback__)  # frees the tensors in its local variables
        message = f"{type(error).__name__}: {error}"
        if "more than 1 value per channel" in message:
            message += ": use convert_sync_batchnorm(model), or a gpu0_bsz that leaves no device a single sample"
        wrapped = (ReplicaOutOfMemoryError if out_of_memory else ReplicaError)(index, self.devices[index], message)
        wrapped.__cause__ = error
        return wrapped


def _made_current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
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
            stack.enter_context(_made_current(device))
            if default_device.type != "cpu":
                stack.enter_context(device if default_device == devices[0] else default_device)
            if hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            for mode in modes:
                stack.enter_context(mode)
            yield

    return entered
