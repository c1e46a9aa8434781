"""Activation checkpointing of a network's blocks, exact in every parallel mode.

A block keeps only its inputs and recomputes its activations in the backward pass, with torch's non-reentrant
`checkpoint`. Everything that a second forward pass could change is kept from the first one:

- Random numbers: the second pass begins with the generator's state of the first.
- BatchNorm: running statistics are updated once, and the statistics of the whole batch come from the first pass
  (`SyncBatchNorm`), so replicas and ranks do not exchange them a second time.
- Inputs and buffers that change in between would give other activations: torch, or this module, raises an error.

A block becomes an instance of a subclass of its own class, which copies of the module for other devices keep.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from segapp.accelerator import gpu_of, random_states, set_random_states
from segapp.compat.torch import (
    BatchOrInstanceNorm,
    FakeTensor,
    buffer_slots,
    is_compiled,
    storage_key,
    tree_iter,
    version_of,
)
from segapp.parallel.replica_threads import current_replica
from segapp.parallel.replicas import check_module
from segapp.parallel.scatter_gather import map_tensors

BlockSets: TypeAlias = tuple[tuple[str, ...], ...]
"""Names of blocks for each device."""

T = TypeVar("T")

_thread_local = threading.local()


class _Tape:
    """Values that layers of a block save in the first pass for the second, in the order of their calls.

    Replicas that take turns on one device share its generator, which others use while a layer waits for them. So the
    random states of `shared` devices after each of these layers are also saved.
    """

    def __init__(self, shared: Sequence[torch.device]) -> None:
        self._shared = shared
        self._kept: list[tuple[Any, dict[torch.device, Tensor]]] = []
        self._next: Iterator[tuple[Any, dict[torch.device, Tensor]]] | None = None

    def once(self, compute: Callable[[], T]) -> T:
        """Return a value that is computed in the first pass, and saved for the second."""
        if self._next is None:
            value = compute()
            self._kept.append((value, random_states(self._shared)))
            return value
        value, states = next(self._next)
        set_random_states(states)
        return value

    @contextlib.contextmanager
    def running(self, *, again: bool) -> Iterator[None]:
        """Make it the tape of this thread, for the first or for another pass."""
        outer = getattr(_thread_local, "tape", None)
        self._next = iter(self._kept) if again else None
        _thread_local.tape = self
        try:
            yield
        finally:
            _thread_local.tape = outer


def computed_once(compute: Callable[[], T]) -> T:
    """Return a value; if the calling thread recomputes a block, the value that the same call had in the first pass."""
    tape: _Tape | None = getattr(_thread_local, "tape", None)
    return compute() if tape is None else tape.once(compute)


class _BlockPass:
    """One forward pass of a block, and the context of its recomputation in each backward pass."""

    def __init__(self, block: RecomputedBlock, inputs: Any) -> None:
        replica = current_replica()
        tensors = [tensor for tensor in tree_iter(inputs) if isinstance(tensor, Tensor)]
        is_simulated = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        gpus = {tensor.device for tensor in tensors if gpu_of(tensor.device)}
        # Replicas on GPUs have separate threads, which share the CPU's generator, so they must not set it.
        generators = gpus if replica is not None and gpus else {torch.device("cpu"), *gpus}
        self._block, self._stack = block, contextlib.ExitStack()
        self._generators = () if is_simulated else tuple(generators)
        self._tape = _Tape(self._generators if replica is not None and replica.group.is_lockstep else ())

    def __enter__(self) -> None:
        self._stack.enter_context(self._again())

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Return the context of the first pass."""
        self._rng = random_states(self._generators)
        before = None if self._block.recompute_plan.is_checked else _versions_of_buffers(self._block)
        with self._tape.running(again=False):
            yield
        if before is not None:
            self._check_buffers(before)
            self._block.recompute_plan.is_checked = True

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        present = random_states(self._generators)
        set_random_states(self._rng)
        try:
            with _counted_once(self._block), self._tape.running(again=True):
                yield
        finally:
            set_random_states(present)

    def _check_buffers(self, before: dict[str, tuple[int, int]]) -> None:
        for name, state in _versions_of_buffers(self._block).items():
            if before.get(name) != state:
                raise RuntimeError(
                    f"{self._block.recompute_plan.name}.{name} is a buffer that each forward pass changes, so the "
                    "activations cannot be recomputed: leave the block out of train.recompute"
                )


def _versions_of_buffers(block: nn.Module) -> dict[str, tuple[int, int]]:
    """Return storage and version of each buffer that is not a running statistic."""
    return {
        f"{path}.{name}" if path else name: (storage_key(buffer), version_of(buffer))
        for path, part in block.named_modules()
        if not isinstance(part, BatchOrInstanceNorm)
        for name, buffer in buffer_slots(part).items()
        if buffer is not None
    }


@contextlib.contextmanager
def _counted_once(block: nn.Module) -> Iterator[None]:
    """Keep normalization layers from changing their running statistics during one pass.

    They are still used as arguments, because autograd must save as many tensors as in the first pass, and they are
    updated with a momentum of 0. The counter is replaced during the pass, because a checkpoint may be written
    meanwhile.
    """
    layers: list[tuple[Any, Any, Tensor]] = []
    counters: dict[torch.device, Tensor] = {}
    for layer in block.modules():
        counter = buffer_slots(layer).get("num_batches_tracked") if isinstance(layer, BatchOrInstanceNorm) else None
        if counter is not None and layer.training:
            layers.append((layer, layer.momentum, counter))
    for layer, _, counter in layers:
        if counter.device not in counters:
            counters[counter.device] = torch.zeros_like(counter)
        # With a momentum of 0 the statistics keep their values, and a spare counter is raised.
        layer.momentum, buffer_slots(layer)["num_batches_tracked"] = 0.0, counters[counter.device]
    try:
        yield
    finally:
        for layer, momentum, counter in layers:
            layer.momentum, buffer_slots(layer)["num_batches_tracked"] = momentum, counter


class RecomputedBlock(nn.Module):
    """Base class of the classes that `set_recompute` gives to blocks."""

    recompute_plan: SimpleNamespace
    """What copies for other devices share: the block's name, `num_sets`, the numbers of the sets with the block, and
    `is_checked` after a pass that has changed no buffer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output; see its own class."""
        replica, run, plan = current_replica(), super().forward, self.recompute_plan
        if getattr(_thread_local, "is_off", False) or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if replica is not None and plan.num_sets not in (1, replica.group.num_devices):
            raise ValueError(
                f"set_recompute got {plan.num_sets} sets for a model on {replica.group.num_devices} devices: give one"
                " set for all devices, or one for each"
            )
        if not _is_in_set(plan, 0 if replica is None else replica.position):
            return run(*args, **kwargs)
        args, kwargs = map_tensors(lambda tensor: tensor, (args, kwargs))  # a list may grow later, as in DenseNet
        block_pass = _BlockPass(self, (args, kwargs))
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(run, *args, context_fn=lambda: (block_pass.first(), block_pass), **options, **kwargs)


@contextlib.contextmanager
def activations_kept() -> Iterator[None]:
    """Let all blocks keep their activations in the `with` statement, in this thread."""
    _thread_local.is_off = True
    try:
        yield
    finally:
        _thread_local.is_off = False


@functools.cache
def with_base(base: type[nn.Module], kind: type[nn.Module], **attributes: Any) -> Any:
    """Return the subclass of a class of layers and of a base before it, under the same name."""
    copied = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (base, kind), {**copied, **attributes})


def set_recompute(network: nn.Module, sets: Iterable[Iterable[str]]) -> None:
    """Choose the blocks of a network whose activations are recomputed in the backward pass, in place.

    A later call replaces the choice; empty sets undo it. Call it between two steps. Parameters, buffers, state-dict
    keys and references stay valid.

    Args:
        network: any module.
        sets: names of submodules, none within another: one set for all devices, or one per device of the (innermost)
            `DataParallelModel`. Ranks may differ.

    Raises:
        TypeError: a set is a string, or no iterable.
        ValueError: the network has no block of this name, or a block lies within another, is compiled, or has a
            `forward` that its class does not have; in a later forward pass, the model has another number of devices
            than there are sets.
        RuntimeError: in a later step, a block's inputs or buffers change so that it cannot be recomputed.

    Example:
        >>> from torch import nn
        >>> from segapp.parallel import recomputed_blocks, set_recompute
        >>> network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> set_recompute(network, [["1"]])
        >>> recomputed_blocks(network)
        (('1',),)
    """
    check_module(network)
    if isinstance(sets, str) or not isinstance(sets, Iterable):
        sets = [sets]
    plan = [each if isinstance(each, str) or not isinstance(each, Iterable) else list(each) for each in sets]
    if wrong := [each for each in plan if not isinstance(each, list)]:
        raise TypeError(f"set_recompute got {wrong[0]!r} instead of a set of names: write [['layer1']], or [[]]")
    # A shared block may be named by any of its paths.
    parts = dict(network.named_modules(remove_duplicate=False))
    names = list(dict.fromkeys(name for blocks in plan for name in blocks))
    for name in names:
        if name not in parts:
            nearest = difflib.get_close_matches(str(name), parts, n=1, cutoff=0)[0]
            raise ValueError(f"{type(network).__name__} has no block {name!r}: the nearest name is {nearest!r}")
        if outer := [each or "the model" for each in names if each != name and name.startswith(each and f"{each}.")]:
            raise ValueError(f"{name} lies within {outer[0]}: name one of them")
        if not is_recomputable(parts[name]):
            raise ValueError(f"{name} is compiled, or has a forward pass of its own: leave it out")
    for block in network.modules():
        if isinstance(block, RecomputedBlock):
            # `with_base` put itself and `RecomputedBlock` before the class that the block had.
            block.__class__ = type(block).__mro__[2]
            del block.__dict__["recompute_plan"]
    for name in sorted(names):
        block = parts[name]
        kind: Any = type(block)
        block.__class__ = with_base(RecomputedBlock, kind)
        devices = {i for i, blocks in enumerate(plan) if name in blocks}
        block.__dict__["recompute_plan"] = SimpleNamespace(
            name=name, devices=devices, num_sets=len(plan), is_checked=False
        )


def is_recomputable(block: nn.Module) -> bool:
    """Return False for a block that is compiled, or has a `forward` that its class does not have."""
    return not is_compiled(block) and "forward" not in block.__dict__


def recomputed_blocks(network: nn.Module, *, num_devices: int = 1) -> BlockSets:
    """Return the names that `set_recompute` chose for each device, in the order of the network."""
    plans = [part.recompute_plan for part in network.modules() if isinstance(part, RecomputedBlock)]
    return tuple(tuple(plan.name for plan in plans if _is_in_set(plan, i)) for i in range(num_devices))


def _is_in_set(plan: SimpleNamespace, position: int) -> bool:
    """Return True if the set of a device, or the set of all devices, has the block."""
    return (position if plan.num_sets > 1 else 0) in plan.devices
