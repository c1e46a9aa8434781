"""Private names of torch, as of torch 2.11 and 2.15, and of the multiprocessing events that its loader uses."""

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr as next_sequence_number
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.fx.experimental import _config as _symbolic_shapes
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as BatchOrInstanceNorm
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import tree_iter, tree_leaves

# These names are imported here for other modules.
__all__ = [
    "BatchNorm",
    "BatchOrInstanceNorm",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "dispatch_modes",
    "next_sequence_number",
    "tree_iter",
    "tree_leaves",
    "without_dispatch_modes",
]

# Operators that torch's own optimizers, clip_grad_norm_ and GradScaler call; they have no public form.
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
fused_sgd_ = torch._fused_sgd_
amp_update_scale_ = torch._amp_update_scale_

# Attention implementations that `scaled_dot_product_attention` chooses from; they have no public form.
attention_math = torch.ops.aten._scaled_dot_product_attention_math.default
attention_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
attention_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default

STATE_DICT_METADATA = "_metadata"
"""Attribute of the OrderedDict of `Module.state_dict`: the versions of the modules, which loading converts from."""


def storage_key(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object, unique among living storages, also for fake tensors."""
    key: int = tensor.untyped_storage()._cdata
    return key


def is_added_in_place(first: Tensor, second: Any) -> bool:
    """Return True in a dispatch mode if autograd adds two gradients, and without the mode would write to the first.

    It does so if nothing else uses the first (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp).
    """
    is_running = torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()
    if not is_running or not isinstance(second, Tensor) or first.shape != second.shape:
        return False
    if isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction):
        return False  # a function in Python calls the operator
    storage_uses: int = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return storage_uses == 2 and first._use_count() <= second._use_count()  # 2: the tensor, and the object in Python


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place, as counted by autograd."""
    return tensor._version


def operator_name(operator: Any) -> str:
    """Return the name of an operator in `__torch_dispatch__`, without namespace and overload: "add_"."""
    return str(operator._schema.name).rpartition("::")[2]


def named_arguments(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = operator._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return defaults | dict(zip((each.name for each in arguments), args, strict=False)) | kwargs


@cache
def lacks_fake_rule(operator: Any) -> bool:
    """Return True for an in-place operator that fake tensors cannot run, such as steps of fused optimizers."""
    if not str(operator._schema.name).endswith("_"):
        return False
    rules = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return not any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), rule) for rule in rules)


def is_traced_or_transformed() -> bool:
    """Return True within `torch.jit.trace`, a transform of `torch.func`, such as vmap, or a `dual_level`."""
    is_traced = torch._C._get_tracing_state() is not None
    return is_traced or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Return True for a tensor with a hidden dimension, in vmap or in `torch.autograd.grad(is_grads_batched=True)`."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost active pair of `torch.autograd.graph.saved_tensors_hooks`."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of collectives in a process group, by default the default one; `dist.set_timeout` is newer."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group or dist.group.WORLD)


def bucket_assignment(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return which tensors, in the order of their gradients, share each bucket of DDP's reducer."""
    first_bytes, order = dist._DEFAULT_FIRST_BUCKET_BYTES, list(range(len(tensors)))  # type: ignore[attr-defined]
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    # 25 MiB is DDP's default for all buckets after the first.
    buckets, _ = assign(list(tensors), [first_bytes, 25 * 2**20], [False] * len(order), order)
    return buckets


def group_store() -> Any:
    """Return a clone of the default process group's store with its own connection, because the first may be waiting."""
    return dist.distributed_c10d._get_default_store().clone()


def rendezvous_store(handler: Any) -> Any:
    """Return the store in which torchrun's agents meet in all rounds; None if the handler has none yet."""
    return getattr(handler, "_store", None)


class _StateByArrival(dynamic_rendezvous._BackendRendezvousStateHolder):
    """The state of a rendezvous, whose times are judged by this process's clock.

    Agents write their heartbeats, and the deadline for further machines, with their own clocks. Here a heartbeat counts
    from its arrival, and the deadline of a round from its first sight.
    """

    def __init__(self, backend: Any, settings: Any, node: Any) -> None:
        super().__init__(backend, settings)
        self._node, self._last_call = node, settings.timeout.last_call
        self._arrivals = dict[Any, tuple[datetime, float]]()
        self._deadline: tuple[int, float] | None = None

    def _sanitize(self) -> None:
        state, now, now_s = self._state, datetime.now(UTC), time.monotonic()
        sent = dict(state.last_heartbeats)
        known = self._arrivals
        self._arrivals = {
            node: known[node] if known.get(node, (None,))[0] == beat else (beat, now_s) for node, beat in sent.items()
        }
        for node, (_, arrival_s) in self._arrivals.items():
            state.last_heartbeats[node] = now - timedelta(seconds=now_s - arrival_s)
        if state.deadline is None:
            self._deadline = None
        else:
            if self._deadline is None or self._deadline[0] != state.round:
                self._deadline = state.round, now_s + self._last_call.total_seconds()
            state.deadline = now + timedelta(seconds=self._deadline[1] - now_s)
        super()._sanitize()
        # The others compare what they read with what they read before: a heartbeat that is written back must be equal.
        for node in state.last_heartbeats.keys() - {self._node}:
            state.last_heartbeats[node] = sent[node]


def rendezvous_handler(store: Any, backend: Any, parameters: Any) -> Any:
    """Return a handler through which torchrun's agents meet, whose machines may have different clocks."""
    handler: Any = dynamic_rendezvous.create_handler(store, backend, parameters)
    node = handler._this_node
    handler._state_holder = _StateByArrival(backend, handler.settings, node)
    handler._op_executor = type(handler._op_executor)(node, handler._state_holder, handler.settings)
    return handler


def rendezvous_members(handler: Any) -> list[str]:
    """Return the addresses of the machines that have come to the present round of a rendezvous."""
    return sorted(node.addr for node in handler._state_holder.state.participants)


def rendezvous_round(handler: Any) -> int:
    return int(handler._state_holder.state.round)


def is_tcp_store(connection: socket.socket) -> bool:
    """Return True if a `TCPStore` answers, within the connection's timeout, the question for its number of keys.

    Its constructor waits without a limit for what accepts connections and does not answer.
    """
    # Two queries and the validation number of the protocol, from TCPStoreBackend.hpp.
    validate, magic, num_keys = 0, 0x3C85F7CE, 7
    try:
        connection.sendall(struct.pack("=BIB", validate, magic, num_keys))
        return len(connection.recv(9)) == 8
    except OSError:
        return False


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's step reads `found_inf` on the device, as torch's fused optimizers do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def schema_names(func: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in func._schema.arguments)


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers


def module_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def apply_to_own_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change a module's own parameters, their gradients and its buffers as `module.to` does, but not its children's."""
    module._apply(change, recurse=False)  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Return True after `torch.compile(module)` or `module.compile()`, and for a module of `torch.jit`."""
    is_jit = isinstance(module, torch.jit.ScriptModule)
    return (
        is_jit or type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    )


def shallow_replica(module: nn.Module) -> nn.Module:
    """Return a copy for one forward pass that shares everything but the dictionary of its parameters.

    A class that overrides the method with which `DataParallel` copies modules is copied by that method.
    """
    kind = type(module)
    if kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        return module._replicate_for_data_parallel()  # type: ignore[no-any-return, no-untyped-call]
    replica = kind.__new__(kind)
    replica.__dict__.update(module.__dict__, _parameters={}, _is_replica=True)  # assigning it calls Module.__setattr__
    return replica


def is_replica(module: nn.Module) -> bool:
    """Return True for a copy of `shallow_replica` or of `DataParallel`."""
    return getattr(module, "_is_replica", False)


def loader_workers(iterator: Any) -> Sequence[Any]:
    """Return the worker processes of a `DataLoader`'s iterator; none for one without workers, or None."""
    return getattr(iterator, "_workers", [])


def replace_done_event(iterator: Any, make: Callable[[Any, Sequence[Any]], Any]) -> None:
    iterator._workers_done_event = make(iterator._workers_done_event, iterator._workers)


def shut_down_workers(iterator: Any) -> bool:
    """End the workers of a `DataLoader`'s iterator; return False if it has none."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
    return shut_down is not None


def size_oblivious_export() -> AbstractContextManager[Any]:
    """Return a context in which `torch.export` does not turn the sizes of the example into constraints."""
    patch = _symbolic_shapes.patch  # type: ignore[attr-defined]
    made: AbstractContextManager[Any] = patch(backed_size_oblivious=True)
    return made


def onnx_opsets() -> range:
    """Return the opsets that `torch.onnx.export` writes; a lower one becomes its lowest, without an error."""
    from torch.onnx._constants import ONNX_MAX_OPSET
    from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET

    return range(TORCHLIB_OPSET, ONNX_MAX_OPSET + 1)


def rename_dynamic_axes(program: torch.onnx.ONNXProgram, names: dict[int, str]) -> None:
    """Rename the dynamic dimensions of the first input; `torch.onnx.export` names them s0, s1, ... itself."""
    program._rename_dynamic_axes((names,))


class PythonBackend(backend_registration._DummyBackendModule):
    """A device module for `register_python_backend`, with autocast to both half types."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def autocast_operators() -> frozenset[str]:
    """Return torch's operators that CUDA's autocast changes, such as "pow.Scalar"; no GPU is needed."""
    listed = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return frozenset(name.removeprefix("aten::") for name in listed if name.startswith("aten::"))


def register_python_backend(name: str) -> None:
    """Register a device type whose operators are computed in Python; it stays registered until the process ends."""
    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=PythonBackend())


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable autocast of the registered device for operators within the block."""
    key = getattr(torch._C.DispatchKey, "AutocastPrivateUse1")  # noqa: B009  # not in its stubs
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        yield


def release_compiled_graphs() -> None:
    """Free the memory of CUDA graphs that `torch.compile` has recorded; a later call records them again."""
    if trees := sys.modules.get("torch._inductor.cudagraph_trees"):
        trees.reset_cudagraph_trees()


def keep_inductor_in(folder: str) -> None:
    """Make a folder the default of Inductor's caches: some, such as precompiled headers, do not follow its variable."""
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    default, headers = {"default_cache_dir": lambda: folder}, os.path.join(folder, "precompiled_headers")
    for module in (cache_dir_utils, runtime_utils):
        vars(module).update(default)
    from torch._inductor import codecache  # it reads the default when it is imported, perhaps before this call

    vars(codecache).update(default, _HEADER_DIR=headers, _HEADER_LOCK_DIR=os.path.join(headers, "locks"))


def set_within(event: Any, timeout_s: float) -> bool:
    """Set a `multiprocessing.Event`, and do not wait forever for a lock that a killed process holds.

    Processes that wait for the event are not notified; the workers of torch's DataLoader check it between batches.

    Returns:
        True if the lock was free within `timeout_s` seconds.
    """
    if not event._cond.acquire(timeout=timeout_s):
        return False
    event._flag.release()
    event._cond.release()
    return True
