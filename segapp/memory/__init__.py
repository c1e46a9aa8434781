"""Memory of a training: peaks per device, the check of batch splits, the memory plan, counters, out-of-memory reports.

`DeviceMemoryTracker` is for your own loop. `peaks`, `split_check`, `plan` and `report` are arithmetic and text, without
torch: the TUI and `segapp ctl` import `split_check`. `ledger` and `simulated_devices` record the tensors of a training
step; they import torch.
"""

from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker

__all__ = ["DeviceInfo", "DeviceMemoryTracker"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> _Any:  # torch is loaded when a name is used
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from segapp.memory import counters

    return getattr(counters, name)
