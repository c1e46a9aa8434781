"""The heap of a training on the CPU: freed memory is kept, not given back to the system after every tensor.

glibc maps every large block anew and unmaps it when it is freed, so that each activation of each step is paid for with
page faults: over a third of a LR-ASPP step on two cores. Here the process keeps what it has once had; its peak grows by
what fragmentation costs (1 to 10 % measured).
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3). The threshold for mapping cannot be raised beyond 32 MiB; mapping nothing at all can."""


def keep_freed_memory() -> bool:
    """Makes glibc's malloc of this process, and of those forked from it, keep freed memory.

    Returns:
        Whether it could be done: only with glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, -1))
