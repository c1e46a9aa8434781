"""Records every storage that torch code creates, on simulated or real devices, and the memory contents at a peak.

A storage is alive from the operation that returns it until its last reference is gone, as in torch's allocator. Memory
that a kernel allocates and frees within one call is recorded if `workspaces` lists it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from segapp.compat.torch import (
    TorchDispatchMode,
    is_added_in_place,
    operator_name,
    storage_key,
    tree_iter,
)

CUDA_ALLOC_UNIT_BYTES = 512
"""Sizes in torch's CUDA allocator are multiples of this (its `kMinBlockSize`)."""

_MOVED, _PACKED, _ADDED = "_to_copy", "cat", "add"
_COPIES = "replicas"
_PARTS_OF_A_MODEL = ("weights", "buffers")


@dataclass
class Allocation:
    """One storage."""

    device: str
    num_bytes: int
    """Size, rounded up as the device's allocator does."""
    kind: str
    """Its use, such as "weights" or "activations"; the phase of its creation unless it has been tagged."""
    what: str
    """The operation that created it, and the shape and dtype of the first tensor in it."""


class StorageLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records when storages are created and freed.

    `mark` begins a phase; a `StepEngine` can use it as its `mark`. The kind of a storage is the phase of its creation
    unless `tag` sets another one.

    Args:
        alloc_unit_bytes: sizes are rounded up to a multiple of this, as the device's allocator does.
        is_skipped: returns True for in-place operators that must not be executed; their first argument is returned.
        workspaces: operator -> function of its arguments that returns tensors as large as those that the operator
            allocates and frees within one call.
    """

    def __init__(
        self,
        alloc_unit_bytes: int = CUDA_ALLOC_UNIT_BYTES,
        is_skipped: Callable[[Any], bool] = lambda _: False,
        workspaces: Mapping[Any, Callable[..., Sequence[Tensor]]] = MappingProxyType({}),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alloc_unit_bytes = alloc_unit_bytes
        self.is_skipped, self.workspaces = is_skipped, workspaces
        self.allocations: list[Allocation] = []
        self.modules: list[str] = [""]
        """The modules that run, the innermost last; hooks of the model keep it."""
        self._events: list[int] = []  # a storage's number at its creation, the complement (~number) when it is freed
        self._marks: list[tuple[int, str]] = [(0, "build")]
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}

    @property
    def phase(self) -> str:
        return self._marks[-1][1]

    def mark(self, phase: str) -> None:
        self._marks.append((len(self._events), phase))

    def tag(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Set the kind of tensors; unrecorded tensors are recorded."""
        for tensor in tensors:
            if tensor is None:
                continue
            self._record(tensor, kind)
            self.allocations[self._alive[storage_key(tensor)][0]].kind = kind

    def kind_of(self, tensor: Tensor) -> str | None:
        number, _ = self._alive.get(storage_key(tensor), (None, None))
        return None if number is None else self.allocations[number].kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_skipped(func):
            return args[0] if isinstance(args[0], Tensor) else None
        workspace = self.workspaces[func](*args) if func in self.workspaces else ()
        for tensor in workspace:
            self._record(tensor, None, operator_name(func))
        if operator_name(func) == _ADDED and is_added_in_place(*args[:2]):
            key = storage_key(args[0])
            self._record_free(key, self._alive.get(key, (-1,))[0])
        out = func(*args, **(kwargs or {}))
        kind = None
        if operator_name(func) == _MOVED and self.kind_of(args[0]) in (*_PARTS_OF_A_MODEL, _COPIES):
            kind = _COPIES if out.device != args[0].device else None
        elif operator_name(func) == _PACKED and not self.modules[-1] and self.kind_of(args[0][0]) in _PARTS_OF_A_MODEL:
            kind = _COPIES  # a bucket of weights on its way to other devices
        for tensor in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if isinstance(tensor, Tensor):
                self._record(tensor, kind, operator_name(func))
        return out

    def _record(self, tensor: Tensor, kind: str | None, operator: str = "") -> None:
        key = storage_key(tensor)
        if key in self._alive:
            return
        storage, unit = tensor.untyped_storage(), self.alloc_unit_bytes
        size = -(-storage.nbytes() // unit) * unit
        number = len(self.allocations)
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        what = f"{operator} {shape} {str(tensor.dtype).removeprefix('torch.')}".strip()
        self.allocations.append(Allocation(str(tensor.device), size, kind or self.phase, what))
        self._alive[key] = number, weakref.ref(storage, lambda _: self._record_free(key, number))
        self._events.append(number)

    def _record_free(self, key: int, number: int) -> None:
        if self._alive.get(key, (None, None))[0] == number:  # else the key already belongs to a newer storage
            del self._alive[key]
            self._events.append(~number)

    def peaks(self, first_mark: int = 0) -> dict[str, dict[str, Counter[str]]]:
        """Return device -> phase -> kind -> bytes at the peak, for the phases from a mark on (`num_marks` then)."""
        peak_events = self._peak_events(first_mark)
        wanted = {at for by_phase in peak_events.values() for at, _ in by_phase.values()}
        alive: set[int] = set()
        alive_after: dict[int, set[int]] = {-1: set()}
        for at, event in enumerate(self._events):
            alive ^= {max(event, ~event)}  # created, or freed
            if at in wanted:
                alive_after[at] = set(alive)
        return {
            device: {phase: self._by_kind(device, alive_after[at]) for phase, (at, _) in by_phase.items()}
            for device, by_phase in peak_events.items()
        }

    @property
    def num_marks(self) -> int:
        return len(self._marks)

    def _peak_events(self, first_mark: int) -> dict[str, dict[str, tuple[int, int]]]:
        """Return device -> phase -> (event after which the most bytes were alive, those bytes)."""
        live: Counter[str] = Counter()
        peak_events: dict[str, dict[str, tuple[int, int]]] = {a.device: {} for a in self.allocations}

        def note(phase: str, device: str, at: int) -> None:
            if phase not in peak_events[device] or live[device] > peak_events[device][phase][1]:
                peak_events[device][phase] = at, live[device]

        ends = [*(at for at, _ in self._marks[1:]), len(self._events)]
        for number, ((start, phase), end) in enumerate(zip(self._marks, ends, strict=True)):
            if number >= first_mark:
                for device in peak_events:
                    # A phase that only frees memory has its peak at its beginning.
                    note(phase, device, start - 1)
            for at in range(start, end):
                event = self._events[at]
                allocation = self.allocations[max(event, ~event)]
                live[allocation.device] += allocation.num_bytes if event >= 0 else -allocation.num_bytes
                if number >= first_mark:
                    note(phase, allocation.device, at)
        return peak_events

    def _by_kind(self, device: str, alive: set[int]) -> Counter[str]:
        by_kind: Counter[str] = Counter()
        for allocation in (self.allocations[number] for number in alive):
            if allocation.device == device:
                by_kind[allocation.kind] += allocation.num_bytes
        return by_kind
