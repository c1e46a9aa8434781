"""One batch over several devices in one process, exact for any split.

`DataParallelModel` leaves each chunk's output on its device and `DataParallelCriterion` computes the loss there, so
device 0 never holds the whole batch's logits. `BalancedDataParallel` gathers, like `torch.nn.DataParallel`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Never, SupportsIndex, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from segapp.accelerator import random_states
from segapp.chunks import Split, SplitRequest, check_positive
from segapp.compat.torch import STATE_DICT_METADATA, dispatch_modes
from segapp.parallel.dropout import with_masks
from segapp.parallel.replica_threads import DEFAULT_TIMEOUT_S, Mode, ReplicaThreads, current_replica, keep_workers
from segapp.parallel.replicas import check_module, check_replicable, replicate, write_back
from segapp.parallel.scatter_gather import (
    DeviceLike,
    ReplicaOutputs,
    batch_size,
    map_tensors,
    reduce_add,
    resolve_devices,
    scatter,
    tensors_in,
    to_device,
)

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _runs_uncompiled(method: _Method) -> _Method:
    """Decorate a method that runs replicas: `torch.compile` breaks its graph there, because it cannot trace threads."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            raise TypeError(f"{type(self).__name__} runs in threads and cannot be exported: export its module")
        if torch.compiler.is_compiling():
            reason = "segapp.parallel runs replicas in threads, which cannot be part of a graph: leave out fullgraph"
            disabled = torch.compiler.disable(method, reason=reason)  # type: ignore[no-untyped-call]
            return disabled(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(_Method, run)


def _resolve_any(device_ids: Iterable[DeviceLike] | None) -> tuple[torch.device, ...]:
    """Return the devices like `resolve_devices`; none for an empty list."""
    return () if isinstance(device_ids, list | tuple) and not device_ids else resolve_devices(device_ids)


_MEAN_OF_MEANS = (
    "forward() of {} returned a scalar for chunks of {} samples, and a mean of means is not the mean of the batch:"
    " compute the loss with DataParallelCriterion, or return criterion.statistics(outputs, target), add these sums over"
    " the chunks, and call criterion.finalize"
)


_SPLIT = ("gpu0_bsz", "shares", "full_batch")
"""Arguments that are checked together."""


class DataParallelModel(nn.Module):
    """Run a module on several devices; each output stays on the device that computed it.

    State dicts have keys with `module.`, as in `torch.nn.DataParallel`; keys without it are loaded, too.

    Args:
        module: the module, its parameters on device 0.
        device_ids: CUDA indices, strings or `torch.device`s, repetitions allowed; None takes all CUDA devices, or the
            CPU if there is none. An empty list runs the module itself, wherever it is.
        gpu0_bsz: samples of device 0 in a full batch; see `plan_chunks`.
        dim: the dimension of the samples in inputs and outputs.
        shares: samples of every device in a full batch; excludes `gpu0_bsz`.
        full_batch: samples of a full batch; a shorter batch scales `gpu0_bsz` down, and a larger `gpu0_bsz` is an
            error.
        mode: "threads", or "lockstep" for one replica at a time in a fixed order.
        timeout_s: seconds to wait for a missing replica.

    The keyword arguments are also attributes. A new value is checked, and takes effect at the next forward pass.

    Attributes:
        last_split: samples per device in the last forward pass, with zeros.

    Raises:
        TypeError: an argument is of the wrong kind, or a part of the module is compiled.
        ValueError: a device does not exist, the split is impossible, or `mode` or `timeout_s` has no meaning.
        AttributeError: the devices are set later.

    Example:
        >>> from torch import nn, zeros
        >>> from segapp.parallel import DataParallelModel
        >>> model = DataParallelModel(nn.Linear(2, 1), ["cpu", "cpu", "cpu"], gpu0_bsz=1)
        >>> [tuple(output.shape) for output in model(zeros(5, 2))]
        [(1, 1), (2, 1), (2, 1)]
    """

    split: SplitRequest
    gpu0_bsz: int | None
    shares: list[int] | None
    full_batch: int | None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Iterable[DeviceLike] | None = None,
        *positional: Never,
        gpu0_bsz: int | None = None,
        dim: int = 0,
        shares: Sequence[int] | None = None,
        full_batch: int | None = None,
        mode: Mode = "threads",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if positional:
            raise TypeError(
                f"DataParallelModel(module, device_ids, {', '.join(map(repr, positional))}): write gpu0_bsz=... or"
                " dim=...; there is no output_device, because each output stays on its device"
            )
        nn.Module.__init__(self)  # not the next class, which may be nn.DataParallel
        check_module(module)
        self.devices = _resolve_any(device_ids)
        self.device_ids = list(self.devices)  # as `torch.nn.DataParallel` names them
        if len(self.devices) > 1:
            check_replicable(module)
        self.module = module
        self.divide(SplitRequest(gpu0_bsz, shares), full_batch)
        self.dim, self.timeout_s = dim, timeout_s
        self.mode: Mode = mode
        self._warnings: list[str] = []  # a list, which copies of this module in replicas share
        self._draws: dict[tuple[bool, int], bool] = {}
        """Whether forward passes draw random numbers, by grad mode and number of parts in training mode."""
        self.last_split: Split = (0,) * (len(self.devices) or 1)

    def __setattr__(self, name: str, value: Any) -> None:
        """Check an argument, in the constructor and later."""
        if name in _SPLIT:
            # Each part of a split is valid only together with the others.
            *request, full_batch = (value if name == each else getattr(self, each) for each in _SPLIT)
            self.divide(SplitRequest(*request), full_batch)
            return
        if name == "dim" and (isinstance(value, bool) or not isinstance(value, SupportsIndex)):
            raise TypeError(f"dim={value!r} is not a whole number: use the dimension of the samples, such as 0")
        if name == "mode" and value not in get_args(Mode):
            raise ValueError(f"mode={value!r} is not known: use 'threads' or 'lockstep'")
        if name == "timeout_s":
            check_positive(name, value)
        elif name == "output_device" and value is not None:
            value = resolve_devices([value])[0]
        elif name in ("devices", "device_ids") and name in vars(self):
            raise AttributeError(f"the {name} of a {type(self).__name__} cannot be set later: wrap the module again")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return the arguments other than the module."""
        names = ("device_ids", *_SPLIT, "dim", "mode", "timeout_s", "output_device")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name))

    def divide(self, split: SplitRequest, full_batch: int | None) -> None:
        """Set `gpu0_bsz`, `shares` and `full_batch` together, from the next forward pass on."""
        full_batch = split.check_devices(len(self.devices) or 1, full_batch)
        shares = None if split.shares is None else list(split.shares)
        vars(self).update(split=split, gpu0_bsz=split.gpu0_bsz, shares=shares, full_batch=full_batch)

    def plan(self, num_samples: int) -> Split:
        """Return the samples per device for a batch of this size, with zeros."""
        return self.split.plan(num_samples, len(self.devices) or 1, self.full_batch)

    def scatter(self, batch: Any) -> ReplicaOutputs:
        """Return a batch's chunks, each on its device, as `forward` makes them; `forward` also takes the result.

        The batch may have any nesting; tensors next to `ReplicaOutputs`, which are chunks already, are cut like these.
        """
        given = next(tensors_in(batch, ReplicaOutputs), None)
        if not self.devices:
            if given is not None:
                batch = map_tensors(ReplicaOutputs.gather, batch, ReplicaOutputs)
            home = next((tensor.device for tensor in tensors_in(batch)), torch.device("cpu"))
            sizes = [batch_size(batch, self.dim) or 0]
            return ReplicaOutputs([batch], sizes=sizes, devices=[home], dim=self.dim, mode=self.mode)
        if given is None:
            split = self.plan(batch_size(batch, self.dim) or 0)
            # A batch without samples is one empty chunk, whose outputs have the usual structure.
            used: Sequence[int] = [i for i, size in enumerate(split) if size] or [0]
            sizes = [split[i] for i in used]
        else:
            used, sizes = self._positions_of(given), list(given.sizes)
        devices = [self.devices[i] for i in used]
        chunks = scatter(batch, devices, sizes, self.dim)
        placed: Any = {"main_device": self.devices[0], "dim": self.dim, "mode": self.mode, "positions": used}
        return ReplicaOutputs(chunks, sizes=sizes, devices=devices, **placed)

    def _positions_of(self, chunks: ReplicaOutputs) -> list[int]:
        """Return the positions of the devices of chunks; chunks on other devices will be copied."""
        if len(chunks) > len(self.devices):
            raise ValueError(
                f"the input has chunks for {len(chunks)} devices, and the model has {len(self.devices)}:"
                " pass outputs.gather()"
            )
        free, found = list(range(len(self.devices))), []
        for wanted in zip(chunks.devices, chunks.positions, strict=True):
            found.append(max(free, key=lambda i: (self.devices[i] == wanted[0], i == wanted[1], -i)))
            free.remove(found[-1])
        return found

    @_runs_uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chunks of a batch, given as positional or keyword arguments in any nesting.

        Tuples, lists, mappings and dataclasses are searched for tensors; objects of other classes are passed
        to every replica as they are, with the tensors in them. Devices without samples are skipped. A call without
        samples, without tensors, or with only 0-d tensors runs once on device 0.

        Returns:
            `ReplicaOutputs`: one output per device with samples, even for a single device.

        Raises:
            ValueError: no tensor has the dimension of the samples, or the tensors' sizes differ.
            TypeError: a PackedSequence, or a nested or sparse tensor, would have to be cut.
        """
        outputs = self.scatter((args, kwargs))
        splits = dict(zip(outputs.positions, outputs.sizes, strict=True))
        self.last_split = tuple(splits.get(i, 0) for i in range(len(self.devices) or 1))
        outputs[:] = self._run_chunks(outputs)
        if not self._warnings and len(set(outputs.sizes)) > 1 and any(map(_may_be_mean, tensors_in(outputs[0]))):
            self._warnings.append(_MEAN_OF_MEANS.format(type(self.module).__name__, list(outputs.sizes)))
            warnings.warn(self._warnings[0], stacklevel=1)
        return outputs

    def _run_chunks(self, chunks: ReplicaOutputs) -> list[Any]:
        """Run chunks of positional and keyword arguments where they are."""
        if len(self.devices) < 2:
            self._check_placement(itertools.islice(self.module.parameters(), 1))  # torch checks the others itself
            ((args, kwargs),) = chunks
            return [call() for call in with_masks([partial(self.module, *args, **kwargs)], chunks.sizes, self.module)]
        if current_replica() is not None:
            raise RuntimeError(
                f"{type(self).__name__} runs in a replica of another one: wrap only the outermost module"
            )
        keep_workers(self)
        self._check_placement(self.module.parameters())
        devices = chunks.devices
        is_home = devices == self.devices[:1]  # a short batch only on device 0 needs no copy
        replicas = [self.module] if is_home else replicate(self.module, devices)
        calls = [partial(replica, *args, **kwargs) for replica, (args, kwargs) in zip(replicas, chunks, strict=True)]
        with self._suited_mode(devices) as mode:
            threads = ReplicaThreads[Any](devices, mode, self.timeout_s, chunks.positions, len(self.devices))
            outputs = threads.run(with_masks(calls, chunks.sizes, self.module))
        if not is_home:
            write_back(self.module, replicas[0])
        return outputs

    @contextlib.contextmanager
    def _suited_mode(self, devices: Sequence[torch.device]) -> Iterator[Mode]:
        """Yield the mode of a forward pass: "lockstep" if logical devices share a generator, and replicas use it.

        If several threads draw from one generator, masks of dropout differ from run to run, and a recomputed block,
        also one of `torch.utils.checkpoint`, draws others than in its first pass. So passes run in lockstep until one
        has drawn nothing.
        """
        shared = {device for device in devices if devices.count(device) > 1}
        if not shared or self.mode != "threads" or dispatch_modes():
            yield self.mode
            return
        kind = torch.is_grad_enabled(), sum(part.training for part in self.module.modules())
        mode: Mode = "lockstep" if self._draws.get(kind, True) else "threads"
        # A module does not say if it draws random numbers; only the generators show it.
        before = random_states(shared)
        yield mode
        draws = any(not torch.equal(before[device], state) for device, state in random_states(shared).items())
        if draws and mode == "threads" and kind[0]:
            warnings.warn(
                f"{type(self.module).__name__} drew its first random numbers, in several replicas on one device at the"
                " same time: if a block of this step is recomputed, its gradient is wrong. The next steps are not"
                " affected, because their replicas run one after the other",
                stacklevel=1,
            )
        self._draws[kind] = draws or self._draws.get(kind, False)

    def _check_placement(self, parameters: Iterable[Tensor]) -> None:
        for parameter, home in zip(parameters, itertools.cycle(self.devices[:1]), strict=False):
            if parameter.device != home:
                name = next(name for name, other in self.module.named_parameters() if other is parameter)
                raise ValueError(
                    f"{name} of {type(self.module).__name__} is on {parameter.device} and device 0 is {home}:"
                    f" call module.to({str(home)!r}) first"
                )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of this module, of `DataParallel` or DDP, or of the bare module."""
        if isinstance(state_dict, Mapping) and self._lack_prefix(state_dict):
            metadata = getattr(state_dict, STATE_DICT_METADATA, {})
            state_dict = OrderedDict((f"module.{key}", value) for key, value in state_dict.items())
            renamed = {f"module.{path}".rstrip("."): versions for path, versions in metadata.items()}
            setattr(state_dict, STATE_DICT_METADATA, renamed)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load from the state dict of an outer module, which may have contained the bare module."""
        keys = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        if prefix and self._lack_prefix(keys):
            # All are taken out first, because the new name of one may be the old name of another.
            state_dict |= {f"{prefix}module.{key}": state_dict.pop(prefix + key) for key in keys}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _lack_prefix(self, keys: Iterable[str]) -> bool:
        """Return True for keys of the bare module, which may itself have a child `module`."""
        own = {name for name, _ in itertools.chain(self.named_parameters(), self.named_buffers())}
        num_own, num_bare = len({*keys} & own), len({f"module.{key}" for key in keys} & own)
        return num_bare > num_own or (num_bare == num_own and not all(key.startswith("module.") for key in keys))


_PARTS = ("scatter", "replicate", "parallel_apply", "gather")
"""Methods of `nn.DataParallel` that `BalancedDataParallel` does not call."""


def _refuse_part(owner: Any, *_: Any, **__: Any) -> Never:
    raise TypeError(
        f"{getattr(owner, '__name__', type(owner).__name__)}: BalancedDataParallel does not call nn.DataParallel's"
        f" {', '.join(_PARTS)}: override forward around super().forward(), or use the outputs of a DataParallelModel"
    )


class BalancedDataParallel(DataParallelModel, nn.DataParallel[nn.Module]):  # type: ignore[misc]  # devices, not indices
    """`torch.nn.DataParallel` with a given share for device 0: the outputs are gathered on one device.

    Gathering puts the whole batch's outputs on `output_device`; `DataParallelModel` with `DataParallelCriterion` does
    not. The name and the order of the arguments come from transformer-xl's class. Unlike that class, this one accepts
    every `gpu0_bsz` from 0 to the batch size, short batches and keyword arguments.

    It is an `nn.DataParallel` in `isinstance`, but does not call its `scatter`, `replicate`, `parallel_apply` and
    `gather`, so a subclass cannot override them; `scatter` is the method of `DataParallelModel`.

    Args:
        gpu0_bsz: samples of device 0 in a full batch, or None for an even split; see `plan_chunks`.
        module: the module, its parameters on device 0.
        device_ids: as for `DataParallelModel`.
        output_device: device of the gathered outputs; device 0 by default.
        dim: the dimension of the samples.
        shares, full_batch, mode, timeout_s: as for `DataParallelModel`.

    Example:
        >>> from torch import nn, zeros
        >>> from segapp.parallel import BalancedDataParallel
        >>> model = BalancedDataParallel(1, nn.Linear(2, 1), ["cpu", "cpu"])
        >>> tuple(model(zeros(5, 2)).shape), model.last_split
        ((5, 1), (1, 4))
    """

    def __init__(
        self,
        gpu0_bsz: int | None,
        module: nn.Module,
        device_ids: Iterable[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        shares: Sequence[int] | None = None,
        full_batch: int | None = None,
        mode: Mode = "threads",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        options: dict[str, Any] = {"shares": shares, "full_batch": full_batch, "mode": mode, "timeout_s": timeout_s}
        super().__init__(module, device_ids, gpu0_bsz=gpu0_bsz, dim=dim, **options)
        home: Any = next(iter(self.devices), None)  # a device, not an index
        target: Any = home if output_device is None else output_device
        self.src_device_obj, self.output_device = home, target

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _PARTS:
            if getattr(cls, name) is not getattr(BalancedDataParallel, name):
                _refuse_part(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PARTS:
            _refuse_part(self)
        super().__setattr__(name, value)

    replicate = parallel_apply = gather = _refuse_part

    @_runs_uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chunks of a batch and return their joined outputs, like the bare module."""
        outputs = super().forward(*args, **kwargs)
        return outputs.gather(device=self.output_device) if self.devices or len(outputs) > 1 else outputs[0]


class DataParallelCriterion(nn.Module):
    """Loss of the whole batch from outputs that stay on their devices.

    The criterion returns sums per chunk; they are added on device 0 in replica order and divided once. So the loss does
    not depend on the split, however ignored pixels are distributed, unlike a mean of the chunks' means.

    Args:
        criterion: has `statistics(outputs, target) -> tuple of tensors`, the differentiable sums over one chunk, and
            `finalize(totals) -> scalar`. If it is an `nn.Module` with weights, every device gets a copy.
        device_ids: the model's devices, for outputs that are not `ReplicaOutputs`; the sums are added on the first.

    Raises:
        TypeError: the criterion has no `statistics` or no `finalize`.
    """

    def __init__(self, criterion: Any, device_ids: Iterable[DeviceLike] | None = None) -> None:
        super().__init__()
        if isinstance(criterion, type):
            raise TypeError(f"{criterion.__name__} is a class: give an object, such as {criterion.__name__}()")
        for method in ("statistics", "finalize"):
            if not callable(getattr(criterion, method, None)):
                raise TypeError(
                    f"{type(criterion).__name__} has no {method}(): means of chunks cannot be combined exactly: use a"
                    " criterion of segapp.losses, or give yours statistics(outputs, target) -> tuple of sums and"
                    " finalize(totals) -> scalar"
                )
        self.criterion = criterion
        self.devices = () if device_ids is None else _resolve_any(device_ids)

    def extra_repr(self) -> str:
        """Return the devices."""
        return f"device_ids={list(self.devices)}"

    def forward(self, outputs: Any, target: Any) -> Tensor:
        """Return the scalar loss on device 0; see `statistics` for the arguments."""
        return self.finalize(self.statistics(outputs, target))

    def finalize(self, totals: Sequence[Tensor]) -> Tensor:
        """Return the scalar loss from statistics, which may also be summed over micro-batches and ranks."""
        return cast(Tensor, self.criterion.finalize(tuple(totals)))

    @_runs_uncompiled
    def statistics(self, outputs: Any, target: Any) -> tuple[Tensor, ...]:
        """Return the whole batch's sums on device 0, differentiable.

        Args:
            outputs: the result of a `DataParallelModel`, a list with one output per device, or the gathered output of
                the whole batch, a tensor or a tuple.
            target: the whole batch's target, on any device; it is split as the outputs were. A list with one tensor per
                output, with the same number of samples, is treated as already split.

        Raises:
            ValueError: outputs and target do not fit together.
            TypeError: the criterion's statistics are not tensors in a tuple.
        """
        if not isinstance(outputs, ReplicaOutputs):
            parts = outputs if isinstance(outputs, list) else [outputs]
            outputs = ReplicaOutputs(parts, main_device=next(iter(self.devices), None))
        chunks: ReplicaOutputs = outputs
        targets = _split_target(target, chunks)
        keep_workers(self)
        copies = replicate(self.criterion, chunks.devices) if self._needs_copies(chunks.devices) else []
        criteria: list[Any] = copies or [self.criterion] * len(chunks)
        rows = ReplicaThreads[Any](chunks.devices, chunks.mode, positions=chunks.positions).run(
            [partial(copy.statistics, *pair) for copy, *pair in zip(criteria, chunks, targets, strict=True)]
        )
        # Buffers that a criterion changes were changed in its copies.
        if copies:
            write_back(self.criterion, copies[0])
        for row in rows:
            if not isinstance(row, tuple) or not all(isinstance(value, Tensor) for value in row):
                raise TypeError(
                    f"{type(self.criterion).__name__}.statistics() returned {type(row).__name__}: return a tuple of"
                    " tensors that may be added"
                )
        return tuple(reduce_add(column, chunks.main_device) for column in zip(*rows, strict=True))

    def _needs_copies(self, devices: Sequence[torch.device]) -> bool:
        """Return False if the criterion has no tensors, or all are on the only device."""
        if not isinstance(self.criterion, nn.Module):
            return False
        tensors = [*self.criterion.parameters(), *self.criterion.buffers()]
        return bool(tensors) and list(devices) != [tensors[0].device]


def _may_be_mean(tensor: Tensor) -> bool:
    """Return True for a scalar that is not marked as a sum, as `segapp.losses` marks statistics."""
    return tensor.is_floating_point() and not tensor.dim() and not getattr(tensor, "is_sum", False)


def _split_target(target: Any, outputs: ReplicaOutputs) -> list[Any]:
    """Return the target's chunks, each on its output's device."""
    if next(tensors_in(target, ReplicaOutputs), None) is None:
        if isinstance(target, list | tuple) and len(target) == len(outputs):
            sizes = [chunk.size(outputs.dim) if isinstance(chunk, Tensor) and chunk.dim() else None for chunk in target]
            # A list may also be one batch, so only the sizes show that it has a part for each output.
            if sizes == list(outputs.sizes):
                return [to_device(chunk, device) for chunk, device in zip(target, outputs.devices, strict=True)]
        num_samples = batch_size(target, outputs.dim)
        if num_samples != sum(outputs.sizes):
            given = "has no tensor with samples" if num_samples is None else f"has {num_samples} samples"
            raise ValueError(
                f"the target {given} and the outputs have {list(outputs.sizes)}: pass the target of the model's batch,"
                " or one part per output"
            )
    return scatter(target, outputs.devices, outputs.sizes, outputs.dim)
