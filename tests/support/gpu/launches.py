"""Kernel launches that a step would make on CUDA, counted on the CPU by a dispatch mode.

An operator that is no view counts as one launch. A `_foreach_` or `_fused_` operator takes lists: on CUDA it goes over
them in chunks of 65536 elements, with a limited number of tensors and blocks in each launch, if all tensors of a list
have one dtype and device and corresponding tensors equal layouts; else it launches once for each tensor
(ATen/native/cuda/MultiTensorApply.cuh and ForeachFunctors.cuh).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CHUNK = 65536
MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
MAX_BLOCKS = 320

NOT_LAUNCHED = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "detach", "alias", "lift_fresh",
    "_local_scalar_dense", "is_same_size", "resize_", "_reshape_alias", "_unsafe_view", "is_pinned", "sym_size",
    "profiler::_record_function_enter_new", "profiler::_record_function_exit", "scalar_tensor",
}  # fmt: skip


def launches_of_lists(lists: Sequence[Sequence[Tensor]]) -> int:
    """Return the launches of one operator over lists of tensors."""
    rows = list(zip(*lists, strict=True))
    kinds = [{(t.dtype, t.device) for t in tensors} for tensors in lists]
    is_fast = all(len(kind) == 1 for kind in kinds) and all(len({_layout(t) for t in row}) == 1 for row in rows)
    if not is_fast:
        return len(rows)
    launches = tensors = blocks = 0
    for row in rows:
        tensors += 1
        num_chunks = -(-row[0].numel() // CHUNK)
        for chunk in range(1, num_chunks + 1):
            blocks += 1
            is_full = tensors == MAX_TENSORS[len(lists)] and chunk == num_chunks
            if is_full or blocks == MAX_BLOCKS:
                launches, blocks = launches + 1, 0
                tensors = 0 if chunk == num_chunks else 1  # the rest of this tensor goes on in the next launch
    return launches + (blocks > 0)


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1)


class LaunchCounter(TorchDispatchMode):
    """Counts launches by operator, of replicas and of backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Launches so far."""
        return self.by_operator.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(("_foreach_", "_fused_")):
            lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
            self.by_operator[name] += launches_of_lists(lists) if lists else 0
        elif name not in NOT_LAUNCHED and not _is_view(func):
            self.by_operator[name] += 1
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Return True for an operator whose every result is a view of an argument."""
    results = func._schema.returns
    aliases = [result.alias_info for result in results]
    return bool(results) and all(alias is not None and not alias.is_write for alias in aliases)
