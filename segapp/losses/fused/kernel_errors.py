"""Failures of the Triton kernels: one error for all their reasons."""

from __future__ import annotations

import torch

NEXT_MOVE = (
    "Triton needs a C compiler, Python's headers and a cache folder that can be written (TRITON_CACHE_DIR); "
    "`segapp doctor` says what is missing"
)


class KernelError(RuntimeError):
    """The Triton kernels could not be imported, compiled or launched.

    Args:
        device: where they were to run.
        cause: what was raised instead.

    Attributes:
        reason: the cause in one line.
    """

    def __init__(self, device: torch.device, cause: BaseException) -> None:
        lines = str(cause).strip().splitlines() or ["no message"]
        # A compiler's error ends with its cause.
        message = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        self.reason = f"{type(cause).__name__}: {message[:300]}"
        super().__init__(
            f"the Triton kernels of the loss cannot run on {device}: {self.reason}. {NEXT_MOVE}; "
            'or give implementation="auto", which uses torch\'s operators then'
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of a device: a smaller batch helps, another implementation does not."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
