"""Memory and processors that this process may use, within the limits of its control group; reader threads."""

import contextlib
import ctypes
import os
import platform
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil

_GROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_END_S = 1.0  # a thread without a Python function ends within milliseconds

READERS, MASK_READERS = 16, 4
"""Threads that read headers, which mostly wait for the storage (5 ms for a file on some network disks), or masks."""

_BLOCK, _TRIED, _SLOW_S = 1024, 4, 1e-3
"""Items of which the first few are timed, their number, and the time of each from which threads are faster."""

BATCHES_AHEAD = 6
"""Most batches that the workers of a training load ahead, in all."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_bytes() -> int | None:
    """Return the memory available without swapping, within the limits of container and job; None if unknown."""
    available: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):  # no Linux
        available.append(_counters(Path("/proc/meminfo"))["MemAvailable:"] * 1024)
    for folder, (limit, used, cached, shared) in _memory_groups():
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or no limit ("max")
            kinds = _counters(folder / "memory.stat")
            page_cache = kinds[cached] - kinds.get(shared, 0)  # shared memory cannot be reclaimed
            available.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + page_cache)
    return max(0, min(available)) if available else None


def total_bytes() -> int:
    """Return the memory of this machine, or the lower limit of its container or job, with swap."""
    totals = [psutil.virtual_memory().total]
    for folder, (limit, *_) in _memory_groups():
        with contextlib.suppress(OSError, ValueError):
            totals.append(int((folder / limit).read_text()))
    return min(totals) + psutil.swap_memory().total


_FILES_2 = ("memory.max", "memory.current", "file", "shmem")
_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
"""Files with limit and use of a control group of version 2 and of version 1, and names in its memory.stat."""


def _memory_groups() -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """Yield the folders of the control groups that may limit this process, each with the names of its files.

    In a container the group of the process is the root. A job of Slurm or systemd has a group below it, and each group
    on the way may have a limit.
    """
    own = {"": "", "memory": ""}
    with contextlib.suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= {name: path.strip("/") for name in controllers.split(",") if name in own}
    for root, path, files in ((_GROUP, own[""], _FILES_2), (_GROUP / "memory", own["memory"], _FILES_1)):
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from ((root.joinpath(*parts[:depth]), files) for depth in range(len(parts) + 1))


def _counters(path: Path) -> dict[str, int]:
    """Return the numbers in a file of "name number" lines."""
    words = (line.split() for line in path.read_text().splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1}


def usable_cores() -> float:
    """Return the processors that this process may use: its affinity, or the quota of its container if that is less."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = (_GROUP / "cpu.max").read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores  # no Linux, no control group, or no limit ("max")


def cores_of_rank() -> float:
    return usable_cores() / _ranks_here()


def shared_bytes_of_rank() -> int | None:
    """Return the free shared memory for this process, divided in the same way; None if there is no /dev/shm."""
    try:
        return shutil.disk_usage("/dev/shm").free // _ranks_here()
    except OSError:
        return None


def num_slots(accumulate: int) -> int:
    """Return the batches of a ring: `BATCHES_AHEAD`, one that is waited for, and the batches of the last step."""
    return BATCHES_AHEAD + 1 + accumulate


def _ranks_here() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks) if ranks.isdecimal() else 1)


class ThreadPool(ThreadPoolExecutor):
    """A thread pool whose threads have also ended for the operating system at the end of its `with` block.

    Python joins a thread before its C++ thread-local data are freed, and OpenCV takes a global lock to free them. A
    process forked in that moment inherits the locked lock, and hangs in its next OpenCV call.
    """

    def __init__(self, num_threads: int, name: str = "") -> None:
        self._ids: set[int] = set()
        super().__init__(num_threads, name, initializer=lambda: self._ids.add(threading.get_native_id()))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads, and wait until Linux no longer lists them, which takes a moment."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        deadline = time.monotonic() + (_END_S if wait else 0)
        while any(Path(f"/proc/self/task/{number}").exists() for number in self._ids) and time.monotonic() < deadline:
            time.sleep(0.0005)


def evenly_spread(items: Sequence[Item], most: int | None) -> Sequence[Item]:
    """Return up to `most` items, evenly spread over the whole sequence; None: all of them."""
    if most is None or len(items) <= most:
        return items
    return [items[number * len(items) // most] for number in range(most)]


def side_by_side(
    function: Callable[[Item], Result], items: Sequence[Item], num_threads: int, num_together: int = 16
) -> Iterator[Result]:
    """Yield the results of a function in the order of the items, which some threads process at the same time.

    Fast items are processed in the calling thread, because threads would mostly wait for the interpreter's lock: with
    images of 32 x 32 pixels, two threads take 1.6 times as long as one. Each thread takes `num_together` items at a
    time, and only a few of these parts are ahead of the caller. After an error, or if the caller stops early, the
    remaining items are not processed.
    """
    for first in range(0, len(items), _BLOCK):
        tried, others = items[first : first + _TRIED], items[first + _TRIED : first + _BLOCK]
        began_s = time.perf_counter()
        results = [function(item) for item in tried]
        is_slow = time.perf_counter() - began_s > _SLOW_S * len(tried)
        yield from results
        yield from _in_threads(function, others, num_threads, num_together) if is_slow else map(function, others)


def _in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], num_threads: int, num_together: int
) -> Iterator[Result]:
    def process(first: int) -> list[Result]:
        return [function(item) for item in items[first : first + num_together]]

    pending: deque[Future[list[Result]]] = deque()
    with ThreadPool(max(1, num_threads)) as pool:
        try:
            for first in range(0, len(items), num_together):
                pending.append(pool.submit(process, first))
                if len(pending) > 2 * num_threads:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # so that Ctrl-C does not wait for all files
            raise


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3). The mmap threshold cannot be raised beyond 32 MiB, but mmap can be disabled entirely."""
_TRIM_THRESHOLD, _MMAP_MAX = 128 << 10, 65536
"""Their defaults."""
_keeping, _num_keeping = threading.Lock(), 0
"""Number of bodies of `freed_memory_kept` that run now, such as an evaluation within a training."""


@contextlib.contextmanager
def freed_memory_kept(on_cpu: bool) -> Iterator[None]:
    """Make glibc's malloc keep freed memory in the body, in this process and in processes forked from it.

    Nothing changes if the body does not compute on the CPU.

    glibc maps every large block and unmaps it when it is freed, so every activation of every step costs page faults:
    over a third of the time of an LR-ASPP step on two cores. With this setting the process keeps its memory; its peak
    grows by the fragmentation (1 to 10 % measured). It needs glibc; otherwise, nothing changes.
    """
    global _num_keeping
    libc = ctypes.CDLL(None) if on_cpu and platform.libc_ver()[0] == "glibc" else None
    with _keeping:
        # Counted, because an evaluation within a training must not end the setting.
        _num_keeping += on_cpu
        if libc is not None and _num_keeping == 1:
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        with _keeping:
            _num_keeping -= on_cpu
            if libc is not None and _num_keeping == 0:
                libc.mallopt(_M_MMAP_MAX, _MMAP_MAX)
                libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
                libc.malloc_trim(0)
