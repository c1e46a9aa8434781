"""Devices, and batches on several of them: scatter and gather nested containers, and sum tensors.

All functions are differentiable any number of times.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from functools import partial
from typing import Any, Never, SupportsIndex, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from segapp.accelerator import CUDA, gpu_of
from segapp.chunks import check_list
from segapp.parallel.replica_threads import Mode

T = TypeVar("T")
DeviceLike: TypeAlias = int | str | torch.device


def resolve_devices(device_ids: Iterable[DeviceLike] | None = None) -> tuple[torch.device, ...]:
    """Return the devices after checking that each exists.

    Args:
        device_ids: CUDA indices, strings or `torch.device`s, repetitions allowed; None takes all CUDA devices, or the
            CPU if there is none.

    Raises:
        TypeError: an entry has another type.
        ValueError: a device does not exist on this machine, or the list is empty.
    """
    if device_ids is None:
        return tuple(CUDA.devices()) or (torch.device("cpu"),)
    device_ids = check_list("device_ids", device_ids, "one, such as ['cuda:0', 'cuda:1'] or ['cpu']")
    devices = tuple(_resolve_device(device_id) for device_id in device_ids)
    if not devices:
        raise ValueError("device_ids is empty: name at least one device, or use None for all CUDA devices")
    return devices


def parse_device(device_id: DeviceLike) -> torch.device:
    """Return the device of a CUDA index, a string or a `torch.device`, whether it exists or not."""
    if isinstance(device_id, SupportsIndex) and not isinstance(device_id, bool):
        device_id = operator.index(device_id)  # also one of NumPy's integers
    if isinstance(device_id, bool) or not isinstance(device_id, str | int | torch.device):
        raise TypeError(f"device {device_id!r} is not a CUDA index, a string or a torch.device: use e.g. 0 or 'cuda:0'")
    try:
        return torch.device(CUDA.kind, device_id) if isinstance(device_id, int) else torch.device(device_id)
    except RuntimeError as error:
        raise ValueError(f"device {device_id!r} is not known: use 'cpu', 'cuda:0' or a CUDA index like 0") from error


def _resolve_device(device_id: DeviceLike) -> torch.device:
    device = parse_device(device_id)
    if device.type == "meta":
        raise ValueError("device 'meta' holds no values: use 'cpu', 'cuda:0' or a CUDA index like 0")
    if gpu := gpu_of(device):
        count, name = gpu.count(), gpu.kind.upper()
        if count == 0:
            raise ValueError(
                f"device {str(device)!r}: no {name} device is visible here: use ['cpu'], or see {gpu.tool}"
            )
        device = torch.device(gpu.kind, gpu.current_index()) if device.index is None else device
        if device.index >= count:
            raise ValueError(f"device '{device}': only {count} {name} devices are visible: use 0 to {count - 1}")
    return device


def _children(item: Any) -> list[Any] | None:
    """Return the elements of a tuple, list, mapping or dataclass; None for anything else, a leaf."""
    if isinstance(item, tuple | list):
        return list(item)
    if isinstance(item, Mapping):
        return [item[key] for key in item]
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    return None


def _refill(item: Any, children: Sequence[Any]) -> Any:
    """Return a container of the same type with other elements."""
    if isinstance(item, tuple):
        # A named tuple takes its elements one by one.
        return type(item)(*children) if hasattr(item, "_fields") else type(item)(children)
    if isinstance(item, Mapping):
        return _refill_mapping(item, dict(zip(item, children, strict=True)))
    filled = copy.copy(item)
    if dataclasses.is_dataclass(item):
        for field, child in zip(dataclasses.fields(item), children, strict=True):
            if hasattr(item, field.name):
                # The dataclass may be frozen.
                object.__setattr__(filled, field.name, child)
    else:
        filled.clear()
        filled.extend(children)
    return filled


def _refill_mapping(item: Any, values: dict[Any, Any]) -> Any:
    if not isinstance(item, MutableMapping):
        return item if all(item[key] is value for key, value in values.items()) else type(item)(values)
    # A shallow copy of a class of one's own may share its values, or also have them as attributes. So this is a deep
    # copy that takes the new values for the old ones, and shares what holds no tensors.
    attributes: Mapping[str, Any] = {}
    with contextlib.suppress(AttributeError):  # not `getattr`, which a class may redefine to look up keys
        attributes = object.__getattribute__(item, "__dict__")
    shared = [*item, *(value for value in attributes.values() if next(tensors_in(value), None) is None)]
    try:
        filled: Any = copy.deepcopy(
            item, {**{id(x): x for x in shared}, **{id(item[key]): values[key] for key in item}}
        )
    except Exception:  # a class whose attributes are its keys may lack what `copy` asks for
        return cast(Any, type(item))(values)
    if attributes is item:  # its keys are its attributes
        filled.__dict__ = filled
    for key, value in values.items():
        filled[key] = value
    return filled


def tensors_in(item: Any, kinds: Any = Tensor) -> Iterator[Any]:
    """Yield all tensors, or items of other kinds, in nested containers, in order."""
    if isinstance(item, kinds):
        yield item
    else:
        for child in _children(item) or ():
            yield from tensors_in(child, kinds)


def map_tensors(function: Callable[[Any], Any], item: Any, kinds: Any = Tensor) -> Any:
    """Return the same structure with every tensor, or item of other kinds, replaced; other leaves are unchanged."""
    if isinstance(item, kinds):
        return function(item)
    children = _children(item)
    return item if children is None else _refill(item, [map_tensors(function, child, kinds) for child in children])


def to_device(item: Any, device: torch.device) -> Any:
    """Return the same structure with every tensor on one device; copies to an accelerator are asynchronous."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"), item)


def batch_size(item: Any, dim: int = 0) -> int | None:
    """Return the size of `dim` in the first tensor that has it; None if there are no tensors, or only 0-d ones.

    Raises:
        ValueError: no tensor has this dimension.
    """
    tensors = [tensor for tensor in tensors_in(item) if tensor.dim()]
    sizes = [tensor.size(dim) for tensor in tensors if _has_dim(tensor, dim)]
    if tensors and not sizes:
        raise ValueError(
            f"the batch cannot be cut along dim {dim}, which none of its tensors has: their shapes are"
            f" {[tuple(tensor.shape) for tensor in tensors]}"
        )
    return sizes[0] if sizes else None


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


class ReplicaOutputs(list[Any]):
    """The replicas' outputs in replica order, each on its device, with their split.

    They are also inputs: a `DataParallelModel` or `DataParallelCriterion` runs each chunk on its device. To pass other
    chunks in the same way, give only a list of them, such as `ReplicaOutputs([output.detach() for output in outputs])`;
    chunks without samples are left out. An output may be replaced, but their number and order are fixed.

    Attributes:
        sizes: samples per output, as many as there are outputs.
        devices: the device of each output.
        main_device: device 0 of the model, where sums are computed, even if it has no samples.
        dim: the dimension of the samples.
        mode: how the replicas ran.
        positions: number of each output's device among the model's devices.

    Raises:
        ValueError: without `sizes`, an output has no tensor with the dimension of the samples.
        TypeError: the outputs are not a list, or an output is added, removed or moved.
    """

    def __init__(
        self,
        outputs: Iterable[Any],
        *,
        sizes: Sequence[int] | None = None,
        devices: Sequence[torch.device] = (),
        main_device: torch.device | None = None,
        dim: int = 0,
        mode: Mode = "threads",
        positions: Sequence[int] = (),
    ) -> None:
        if isinstance(outputs, Tensor) or not isinstance(outputs, Iterable):
            raise TypeError(f"outputs are a {type(outputs).__name__}: give a list with one output per device")
        super().__init__(outputs)
        positions = positions or range(len(self))
        if sizes is None:
            found = [batch_size(output, dim) for output in self]
            if not found or None in found:
                raise ValueError("outputs hold no tensor with samples: pass the result of the model")
            # At least one output stays, because a loss without samples needs its device, too.
            positions = [i for i, size in enumerate(found) if size] or [0]
            super().__init__([self[i] for i in positions])
            sizes = [found[i] or 0 for i in positions]
            devices = [next(tensors_in(output)).device for output in self]
        if {len(sizes), len(devices), len(positions)} != {len(self)}:
            raise ValueError(f"{len(self)} outputs have {len(sizes)} sizes and {len(devices)} devices: give one each")
        self.sizes, self.devices, self.positions = tuple(sizes), tuple(devices), tuple(positions)
        self.main_device = self.devices[0] if main_device is None else main_device
        self.dim = dim
        self.mode: Mode = mode

    def __reduce__(self) -> Any:
        return partial(type(self), **vars(self)), ([*self],)

    def __repr__(self) -> str:
        shapes = [[tuple(tensor.shape) for tensor in tensors_in(output)] for output in self]
        attributes = (f"{name}={value!r}" for name, value in {"shapes": shapes, **vars(self)}.items())
        return f"{type(self).__name__}({', '.join(attributes)})"

    def _refuse(self, *_: object) -> Never:
        """Refuse arithmetic, of which a list would repeat or append its elements."""
        self.__torch_function__("arithmetic")

    __add__ = __iadd__ = __sub__ = __mul__ = __rmul__ = __imul__ = __truediv__ = __neg__ = _refuse

    def _keep_order(self, *_: object, **__: object) -> Never:
        raise TypeError(
            "the number and order of ReplicaOutputs are fixed, because each output has its device and samples: make"
            " ReplicaOutputs([...]) of another list"
        )

    append = extend = insert = pop = remove = clear = reverse = sort = __delitem__ = _keep_order

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Never:
        """Refuse to be treated as a tensor, and name the class that computes the loss."""
        name = getattr(function, "__name__", str(function))
        raise TypeError(
            f"{name} takes a tensor, and a DataParallelModel returns one output per device (ReplicaOutputs): compute "
            "the loss with DataParallelCriterion(criterion)(outputs, target), or join the outputs with outputs.gather()"
        )

    def gather(self, *, device: DeviceLike | None = None) -> Any:
        """Return all outputs joined on one device, by default device 0."""
        return gather(self, self.main_device if device is None else resolve_devices([device])[0], self.dim)


def scatter(item: T, devices: Sequence[torch.device], sizes: Sequence[int], dim: int = 0) -> list[T]:
    """Cut a batch into chunks, one per device.

    Tensors are cut along `dim`; on its own device, the first chunk is a view, and the chunks of further logical devices
    are copies. A chunk of a contiguous tensor is contiguous. `ReplicaOutputs` of these sizes are the chunks themselves.
    0-d tensors and other values are passed to every device. Containers keep their type. The sizes are the samples of
    each chunk, >= 0. Gradients flow back to the batch.

    Raises:
        ValueError: a tensor's size is not the sum of the sizes, or chunks have other sizes.
        TypeError: the batch has a PackedSequence, or a nested or sparse tensor that must be cut.
    """

    def cut(i: int, part: Any) -> Any:
        if isinstance(part, ReplicaOutputs):
            if (part.sizes, part.dim) != (tuple(sizes), dim):
                raise ValueError(
                    f"chunks of {list(part.sizes)} samples along dim {part.dim} meet chunks of {list(sizes)} along dim"
                    f" {dim}: pass outputs.gather() instead of one of them"
                )
            return to_device(part[i], devices[i])
        size, total = sizes[i], sum(sizes)
        if isinstance(part, PackedSequence) or ((part.is_nested or part.layout != torch.strided) and size < total):
            kind = "PackedSequence" if isinstance(part, tuple) else "nested or sparse tensor"
            raise TypeError(
                f"a {kind} cannot be cut into {list(sizes)}: pass padded tensors, and pack them in forward()"
            )
        chunk = part
        if part.dim():
            if not _has_dim(part, dim) or part.size(dim) != total:
                raise ValueError(
                    f"a tensor of shape {tuple(part.shape)} cannot be cut along dim {dim} into {list(sizes)}:"
                    " every tensor of a batch needs the same number of samples there"
                )
            # narrow, because the several views that split() makes forbid in-place operations
            chunk = part if size == total else part.narrow(dim, sum(sizes[:i]), size)
        if part.device != devices[i]:
            return to_device(chunk, devices[i])
        if part.device in devices[:i]:
            return (
                chunk.clone()
            )  # replicas would change views of one tensor, with one version counter, at the same time
        return chunk.contiguous() if chunk is not part and part.is_contiguous() else chunk

    kinds = (Tensor, ReplicaOutputs, PackedSequence)
    return [map_tensors(partial(cut, i), item, kinds) for i in range(len(sizes))]


def gather(outputs: Sequence[T], device: torch.device, dim: int = 0, name: str = "output") -> T:
    """Return the replicas' outputs joined on one device: the inverse of `scatter`.

    Tensors are concatenated along `dim`, 0-d tensors are stacked. Containers keep their type. Other iterable objects
    with tensors are built as `type(output)(joined elements)`, as by `torch.nn.DataParallel`. Other values must be equal
    from every replica. Errors call the outputs `name`.

    Raises:
        TypeError: replicas returned different structures or different plain values, or what cannot be joined.
        ValueError: tensors do not fit together along `dim`.
    """
    first: Any = outputs[0]
    if isinstance(first, Tensor):
        return cast(T, _join(outputs, device, dim, name))
    if isinstance(first, PackedSequence) and len(outputs) == 1:
        # Its batch sizes stay on the CPU.
        return cast(T, first.to(device))  # type: ignore[arg-type]  # torch declares only dtypes
    children = _children(first)
    if children is None and len(outputs) > 1 and getattr(first, "ndim", None):
        raise TypeError(f"{name} is an array ({type(first).__name__}), and arrays are not joined: return tensors")
    columns = [_elements(output) if children is None else _column(output, first) for output in outputs]
    if children is None and None in columns:
        hidden = next(tensors_in(list(getattr(first, "__dict__", {}).values())), None)  # which may be equal by chance
        if any(output is not first and (hidden is not None or not _is_equal(output, first)) for output in outputs):
            raise TypeError(
                f"replicas returned different values as {name}, such as {first!r}: return tensors, or equal values"
            )
        return cast(T, first)
    lengths = {None if column is None else len(column) for column in columns}
    if len(lengths) > 1 or isinstance(first, PackedSequence):
        raise TypeError(
            f"replicas returned different structures of {type(first).__name__} as {name}, or a PackedSequence, which"
            " cannot be joined: return the same from each"
        )
    places = [f"{name}{place}" for place in _places(first, len(columns[0] or ()))]
    pairs = zip(places, zip(*cast(Any, columns), strict=True), strict=True)
    joined = [gather(column, device, dim, place) for place, column in pairs]
    try:
        return cast(T, type(first)(joined) if children is None else _refill(first, joined))
    except Exception as error:  # of a class that is not ours
        raise TypeError(
            f"{name} is a {type(first).__name__}, which cannot be made from its joined elements ({error}): return"
            " tensors, tuples, lists or mappings"
        ) from error


def _join(tensors: Sequence[Any], device: torch.device, dim: int, name: str) -> Tensor:
    if others := [each for each in tensors if not isinstance(each, Tensor)]:
        raise TypeError(f"one replica returned a tensor as {name} and another {others[0]!r}: return the same from each")
    moved = [to_device(tensor, device) for tensor in tensors]
    if len(moved) == 1 and moved[0].dim():
        return cast(Tensor, moved[0])
    try:
        # Scalars cannot be concatenated; as in torch's DataParallel, they become a vector.
        return torch.cat(moved, dim) if moved[0].dim() else torch.stack(moved)
    except (RuntimeError, IndexError) as error:
        shapes = ["a nested tensor" if each.is_nested else f"{tuple(each.shape)} ({each.layout})" for each in moved]
        kinds = ", ".join(shapes).replace(" (torch.strided)", "")
        raise ValueError(
            f"{name} cannot be joined along dim {dim}, because the replicas returned {kinds}: return the samples along"
            " this dim, or use a DataParallelModel, which joins nothing"
        ) from error


def _elements(output: Any) -> list[Any] | None:
    """Return the elements of an iterable object that holds tensors; None for any other value."""
    if isinstance(output, Iterator | Set):  # it would be used up, or has no order
        return None
    try:
        elements = list(output)
    except Exception:  # not iterable, or not now
        return None
    return None if next(tensors_in(elements), None) is None else elements


def _places(item: Any, count: int) -> list[str]:
    """Return where the elements of a container are, as Python writes it."""
    if isinstance(item, Mapping):
        return [f"[{key!r}]" for key in item]
    if dataclasses.is_dataclass(item):
        return [f".{field.name}" for field in dataclasses.fields(item)]
    return [f".{field}" for field in getattr(item, "_fields", ())] or [f"[{i}]" for i in range(count)]


def _is_equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other or (value != value and other != other))  # nan
    except (ValueError, RuntimeError):  # arrays and tensors compare their elements
        return False


def _column(output: Any, like: Any) -> list[Any] | None:
    """Return the elements of a container in the order of another one; None if their structures differ."""
    if type(output) is not type(like) or len(_children(output) or ()) != len(_children(like) or ()):
        return None
    if isinstance(like, Mapping):
        # Two dicts with the same keys may have them in another order.
        return [output[key] for key in like] if output.keys() == like.keys() else None
    return _children(output)


def reduce_add(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum on one device of tensors of one shape, added in the given order: every run rounds equally."""
    total: Tensor = to_device(tensors[0], device)
    for tensor in tensors[1:]:
        total = total + to_device(tensor, device)
    return total


def buckets(tensors: Sequence[Tensor], max_bytes: float = float("inf")) -> Iterator[list[int]]:
    """Yield lists of indices of tensors of one dtype and device, in order, each as soon as it has `max_bytes`."""
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        bucket, size = kinds.pop((tensor.dtype, tensor.device), ([], 0))
        bucket.append(i)
        size += tensor.numel() * tensor.element_size()
        if size >= max_bytes:
            yield bucket
        else:
            kinds[tensor.dtype, tensor.device] = bucket, size
    for bucket, _ in kinds.values():
        yield bucket
