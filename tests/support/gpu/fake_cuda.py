"""Networks on CUDA without a GPU: fake tensors have the dtypes that CUDA's autocast gives, and no values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


@contextlib.contextmanager
def fake_cuda(dtype: torch.dtype | None) -> Iterator[None]:
    """Make all tensors on a CUDA device that does not exist, with autocast in a dtype; None: without autocast.

    `torch.autocast` itself would switch itself off on a machine without CUDA. A backward pass needs the device.
    """
    was = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode(), torch.device("cuda"):
        torch.set_autocast_enabled("cuda", dtype is not None)
        torch.set_autocast_dtype("cuda", dtype or was[1])
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", was[0])
            torch.set_autocast_dtype("cuda", was[1])
            torch.clear_autocast_cache()
