"""Trial of the Triton kernels on a device."""

import importlib
import importlib.util
import threading
import warnings
from types import ModuleType

import torch

from segapp.accelerator import accelerator_of
from segapp.losses.fused.block_sizes import NEEDS, KernelError
from segapp.places import keep_compiled_code

_IS_INSTALLED = importlib.util.find_spec("triton") is not None

_lock = threading.Lock()
"""Replicas run in threads, but each device is tried only once."""
_results: dict[torch.device, str | None] = {}
"""Why the kernels cannot run on a device; None if they can."""
_warned: set[str] = set()


def has_kernels(device: torch.device) -> bool:
    """Return True if the Triton kernels run on a device; the first call launches a small one and waits for it.

    While a graph is captured or compiled, nothing is tried, and a device without a result is assumed to have kernels.
    """
    if not _IS_INSTALLED:
        return False
    if torch.compiler.is_compiling():
        return True
    if device not in _results:
        if accelerator_of(device).is_capturing():
            return True
        with _lock:
            # Another thread may have tried the device while this one waited.
            if device not in _results:
                try:
                    _try(device)
                    _results[device] = None
                except KernelError as error:
                    _results[device] = error.reason
                    _warn(error)
    return _results[device] is None


def note_failure(device: torch.device, error: KernelError) -> None:
    """Record that the kernels cannot run on a device after all; warn the first time that a reason occurs."""
    with _lock:
        _results[device] = error.reason
        _warn(error)


def _warn(error: KernelError) -> None:
    if error.reason not in _warned:
        _warned.add(error.reason)
        warnings.warn(
            f"the loss uses torch's operators instead of its Triton kernels, which is slower: {error.reason}. {NEEDS}",
            RuntimeWarning,
            stacklevel=2,
        )


def load_kernels(device: torch.device) -> ModuleType:
    """Return `triton_cross_entropy`, which imports Triton.

    Raises:
        KernelError: Triton cannot be imported.
    """
    try:
        keep_compiled_code()
        return importlib.import_module("segapp.losses.fused.triton_cross_entropy")
    except Exception as error:  # Triton's import runs code of its back ends
        raise KernelError(device, error) from error


def _try(device: torch.device) -> None:
    """Launch the smallest kernel and check its result, on a separate stream, so that it waits for no other work.

    Raises:
        KernelError: it could not be launched, or its result is wrong.
    """
    kernels = load_kernels(device)
    with accelerator_of(device).new_stream(device), kernels.launching(device):
        ids = torch.tensor([[[0, 7, 255, -3]]], device=device)
        bounds = kernels.bounds_of_bad_ids(torch.ones((), dtype=torch.int64, device=device), ids, 5, 255).tolist()
        if bounds != [-3, 7]:
            raise RuntimeError(f"a kernel returned {bounds} instead of [-3, 7]")
