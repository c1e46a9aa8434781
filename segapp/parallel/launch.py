"""Start the ranks of one machine, such that they end if their parent does.

The ranks of one machine meet in a file that only their user can read, so they open no port for that, and their
collectives use the loopback interface. kill -9 of a process leaves its children running. So every rank requests a
signal from the kernel for the death of its parent (`PR_SET_PDEATHSIG`, Linux), also polls for it, and is killed if it
does not end then.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType

STORE_VARIABLE = "SEGAPP_RANK_STORE"
"""The file in which the ranks of one machine meet; without it, they meet at MASTER_ADDR and MASTER_PORT."""
_PARENT_PID = "SEGAPP_PARENT_PID"
"""Process id of the parent, for each rank: the parent may die while Python still starts."""
_LAST_REPORT_S = 5.0
"""Maximum time for the last report of a process that ends, because its disk may have failed too."""
_POLL_S = 0.05

_watched: set[int] = set()


def launch_local(
    command: Sequence[str],
    num_ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    shutdown_s: float = 60.0,
    signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
) -> int:
    """Run a Python program as several ranks on this machine and wait for it.

    If one rank fails, all are ended. Signals to this process are passed on, once; if this process is killed, the ranks
    also end.

    Args:
        command: the arguments of `python`: `["-m", "package", ...]` or `["script.py", ...]`.
        num_ranks: number of processes, at least 1.
        env: environment variables to set or override.
        shutdown_s: seconds between SIGTERM and SIGKILL for the ranks that run after another one has failed.
        signals: signals to this process that are passed on to the ranks.

    Returns:
        0, or the exit status of the first rank that failed; 128 + n if signal n ended it.

    Raises:
        ValueError: num_ranks is below 1, or command is empty.
    """
    if not command:
        raise ValueError('command is empty: give ["-m", package, ...] or [script, ...]')
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} starts nothing: use 1 or more")
    environ = _environ_of(num_ranks, env or {})
    ranks: list[subprocess.Popen[bytes]] = []
    with _rank_store() as store, _passing_signals_on(ranks, signals) as received:
        try:
            for rank in range(num_ranks):  # each in its own session, so that Ctrl-C reaches it once, through here
                own = {**environ, STORE_VARIABLE: store, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen([sys.executable, "-P", *command], env=own, start_new_session=True))
            for number in received:  # some may have come before all ranks were started
                _send(ranks, number)
            return _wait(ranks, received)
        finally:
            _end(ranks, shutdown_s)


@contextlib.contextmanager
def _rank_store() -> Iterator[str]:
    """Return a context with the name of a file in a new folder, in which the ranks meet."""
    with tempfile.TemporaryDirectory(prefix="segapp-ranks-", ignore_cleanup_errors=True) as folder:
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)  # systemd-tmpfiles deletes old folders unless they are locked
        try:
            yield f"{folder}/store"
        finally:
            os.close(handle)


@contextlib.contextmanager
def _passing_signals_on(ranks: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> Iterator[list[int]]:
    """Pass signals on to the ranks, and list them; handlers can be set only in the main thread."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        _send(ranks, number)

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(ranks: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        process.send_signal(number)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> int:
    """Wait until all ranks have succeeded or one has failed, and return its exit code."""
    while not any(codes := [process.poll() for process in ranks]) and None in codes:
        time.sleep(_POLL_S)
    failed = [(code, rank) for rank, code in enumerate(codes) if code]
    if not failed:
        return 0
    code, rank = min(failed)  # of ranks that failed at the same time, one that was killed is the cause
    if code < 0 and not received:
        name = signal.Signals(-code).name
        print(f"error: rank {rank} was ended by {name}; the others were stopped", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


def _end(ranks: Sequence[subprocess.Popen[bytes]], shutdown_s: float) -> None:
    """End the ranks that still run: SIGTERM first, so that they can save, then SIGKILL."""
    _send(ranks, signal.SIGTERM)
    deadline_s = time.monotonic() + shutdown_s
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environ_of(num_ranks: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that the ranks of this machine share."""
    environ = {**os.environ, **env}
    environ["WORLD_SIZE"] = environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    environ[_PARENT_PID] = str(os.getpid())
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    environ["NCCL_RAS_ENABLE"] = "0"  # NCCL's status service listens on a port that every user of the machine can reach
    if "lo" in (name for _, name in socket.if_nameindex()):
        # The ranks listen for each other on the loopback interface: another may be down, filtered, or the internet's.
        environ["GLOO_SOCKET_IFNAME"] = environ["NCCL_SOCKET_IFNAME"] = "lo"
    return environ


def signal_when_parent_dies(number: int, parent: int | None = None) -> None:
    """Ask the Linux kernel to send this process a signal when the thread that created it ends.

    If the process `parent`, which created this one, is already dead, the signal is sent immediately.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(1, int(number), 0, 0, 0)  # PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def die_with_parent(poll_s: float = 1.0, grace_s: float = 30.0) -> None:
    """End this process when its parent dies: SIGTERM first, so that it can save, then SIGKILL.

    Args:
        poll_s: seconds between polls, for cases in which the kernel sends no signal.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    if os.getpid() in _watched:
        return
    parent = os.getppid()
    expected = int(os.environ.get(_PARENT_PID, parent))
    if expected != parent and not _is_alive(expected):
        parent = expected  # it died while this process started: the thread below ends this one immediately
    _watched.add(os.getpid())
    signal_when_parent_dies(signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_with_peers(
    pids: Iterable[int], exit_code: int, before: Callable[[], None] = lambda: None, *, grace_s: float = 10.0
) -> Callable[[], None]:
    """End this process when another rank on this machine is gone, because it may wait for that rank forever.

    A collective operation on a GPU does not notice that a peer has died, and a thread that waits for it handles no
    signals. If the operation fails on its own, as with gloo, this process ends earlier.

    Args:
        pids: process ids of the other ranks.
        exit_code: exit code of this process.
        before: called before it ends.
        grace_s: seconds after the end of the peer in which this process may end on its own.

    Returns:
        A function that ends the watch; call it when no rank waits for another any more.
    """
    watched, is_over = tuple(pids), threading.Event()

    def watch() -> None:
        while all(_is_alive(pid) for pid in watched):
            if is_over.wait(min(1.0, grace_s / 4)):
                return
        if not is_over.wait(grace_s):
            end_process(exit_code, before)

    threading.Thread(target=watch, name="peer-watch", daemon=True).start()
    return is_over.set


def end_process(exit_code: int, before: Callable[[], object]) -> None:
    """End this process and its children, from any thread, after at most `_LAST_REPORT_S` for `before`."""
    report = threading.Thread(target=before, name="last-report", daemon=True)
    report.start()
    report.join(_LAST_REPORT_S)
    signal_children(signal.SIGKILL)
    os._exit(exit_code)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def signal_children(number: int) -> None:
    """Send a signal to every child of this process (Linux only)."""
    for task in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as listed:
            for pid in listed.read().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)
