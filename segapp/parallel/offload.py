"""Activations of a block that are kept in host memory until their backward pass."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from segapp.accelerator import accelerator_of
from segapp.compat.torch import storage_key

SMALLEST_BYTES = 2**18
"""Smaller tensors are not moved: their copies would take longer than the kernels that overlap them."""

_latest = threading.local()


class _Saved:
    """A tensor that a block saves for the backward pass."""

    def __init__(self, offload: Offload, tensor: Tensor) -> None:
        self._offload, self._parked = offload, accelerator_of(tensor.device).parked(tensor)
        self._fetched: Tensor | None = None
        self._given: weakref.ref[Tensor] | None = None

    def prefetch(self) -> None:
        """Begin to copy it back, unless it is already there."""
        if self._fetched is None and (self._given is None or self._given() is None):
            self._fetched = self._parked.fetch()

    def take(self) -> Tensor:
        """Return it on its device, and begin to copy back the tensors that the previous block saved."""
        self._offload.prefetch()
        given = None if self._given is None else self._given()
        if given is None:
            self.prefetch()
            given, self._fetched = self._fetched, None
            assert given is not None
            self._given = weakref.ref(given)
        self._parked.wait()
        if previous := self._offload.previous():
            previous.prefetch()
        return given


class Offload:
    """One forward pass of a block whose saved tensors move to the host, and come back while the next block computes.

    Args:
        kept: tensors that always stay on the device: parameters and buffers.
    """

    def __init__(self, kept: Iterable[Tensor]) -> None:
        self._kept = {storage_key(tensor) for tensor in kept}
        self._saved: list[weakref.ref[_Saved]] = []
        self._known: dict[Any, tuple[weakref.ref[Any], _Saved]] = {}
        self._is_fetched = False
        self.previous: Any = getattr(_latest, "offload", lambda: None)
        """Return the block that this thread ran before, if its backward pass has not ended."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Move the tensors that are saved in the `with` statement."""
        _latest.offload = weakref.ref(self)
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._known.clear()  # it holds tensors that the graph does not need

    def prefetch(self) -> None:
        """Begin to copy back all tensors that the graph still needs."""
        if not self._is_fetched:
            self._is_fetched = True
            for ref in self._saved:
                if saved := ref():
                    saved.prefetch()

    def _pack(self, tensor: Tensor) -> Any:
        key = storage_key(tensor)
        if key in self._kept or tensor.nbytes < SMALLEST_BYTES or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return tensor
        place = key, tensor.dtype, tensor.shape, tensor.stride()
        storage, saved = self._known.get(place, (lambda: None, None))
        if storage() is None or saved is None:  # another storage may have the address of a freed one
            saved = _Saved(self, tensor.detach())
            self._known[place] = weakref.ref(tensor.untyped_storage()), saved
            self._saved.append(weakref.ref(saved))
        return saved


def _unpack(saved: Any) -> Tensor:
    return saved.take() if isinstance(saved, _Saved) else saved
