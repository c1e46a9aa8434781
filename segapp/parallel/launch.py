"""Start ranks on this machine with torchrun's agent, such that they end if their parent does.

kill -9 of torchrun's agent leaves its ranks running. So every process here requests a signal from the kernel for the
death of its parent (`PR_SET_PDEATHSIG`, Linux), also polls for it, and is killed if it does not end then.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType

_PARENT_PID = "SEGAPP_PARENT_PID"
"""Process id of the parent, for the agent and each rank: the parent may die while Python still starts."""
_LAST_REPORT_S = 5.0
"""Maximum time for the last report of a process that ends, because its disk may have failed too."""

AGENT = "import sys; from segapp.parallel.launch import run_agent; sys.exit(run_agent(sys.argv[1:]))"
"""The program of torchrun's agent; `-m` would run this module a second time, since the package has imported it."""

_watched: set[int] = set()


def launch_local(
    command: Sequence[str],
    num_ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    shutdown_s: float = 60.0,
) -> int:
    """Run a Python program as several ranks on this machine and wait for it.

    The ranks run under torchrun's agent, which ends all of them if one fails. SIGINT and SIGTERM to this process are
    passed on, once; if this process is killed, agent and ranks also end.

    Args:
        command: the arguments of `python`: `["-m", "package", ...]` or `["script.py", ...]`.
        num_ranks: number of processes, at least 1.
        env: environment variables to set or override.
        shutdown_s: seconds between a signal and SIGKILL, in which ranks save.

    Returns:
        0, or the exit status of the first rank that failed; 128 + n if signal n ended it.

    Raises:
        ValueError: num_ranks is below 1, or command is empty.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} starts nothing: use 1 or more")
    if not command:
        raise ValueError('command is empty: give ["-m", package, ...] or [script, ...]')
    environ = {**os.environ, **(env or {})}
    environ[_PARENT_PID] = str(os.getpid())
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(shutdown_s))
    if "lo" in (name for _, name in socket.if_nameindex()):
        # The ranks of one machine meet on its loopback interface: another may be down, filtered, or a VPN's.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # The loopback address, because the machine's host name may not resolve.
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}"]
    agent = [sys.executable, "-P", "-c", AGENT, *options]
    # A new session, so that Ctrl-C reaches the ranks once, through this process.
    # "--", because argparse would treat the program's `--run` as an abbreviation of torchrun's `--run-path`.
    flag, program = (["-m"], command[1:]) if command[0] == "-m" else ([], command)
    process = subprocess.Popen([*agent, *flag, "--", *program], env=environ, start_new_session=True)
    with _passing_signals_to(process):
        status = process.wait()
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def _passing_signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the process; handlers can be set only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def run_agent(arguments: Sequence[str]) -> int:
    """Run the agent with torchrun's arguments; it ends with its parent and returns the status of the failed rank.

    SIGINT and SIGTERM are passed on to the ranks, which save and end.
    """
    shutdown_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    die_with_parent(grace_s=shutdown_s + 5)  # before the imports, which take seconds
    os.environ[_PARENT_PID] = str(os.getpid())
    from torch.distributed import run

    from segapp.parallel.agent import run_job

    logging.disable(logging.ERROR)  # the ranks print their errors themselves
    return run_job(run.parse_args(list(arguments)), shutdown_s=shutdown_s)  # type: ignore[no-untyped-call]


def signal_children(number: int) -> None:
    """Send a signal to every child of this process (Linux only)."""
    for task in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as listed:
            for pid in listed.read().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)
