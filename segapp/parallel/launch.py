"""Ranks on this machine: started through torchrun's agent, and never left behind.

kill -9 of torchrun's agent leaves its ranks running. So every process here asks the kernel for a signal when its parent
dies (`PR_SET_PDEATHSIG`, Linux) and looks for itself as well, and one that does not end then is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

_PARENT_PID = "SEGAPP_PARENT_PID"
"""Tells the agent, and each rank, who its parent should be, in case that one dies while Python still starts."""

_PR_SET_PDEATHSIG = 1
_watched: set[int] = set()


def launch_local(
    command: Sequence[str],
    num_ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    shutdown_s: float = 60.0,
) -> int:
    """Runs a Python program as several ranks of one job on this machine, and waits for it.

    The ranks run under torchrun's agent, which ends all of them when one fails. SIGINT and SIGTERM to this process are
    passed on, once; if this process is killed, agent and ranks end as well.

    Args:
        command: what stands after `python`: `["-m", "package", ...]` or `["script.py", ...]`.
        num_ranks: processes, 1 or more.
        env: variables to set or override.
        shutdown_s: seconds that ranks get to save after a signal, before they are killed.

    Returns:
        0, or the exit status of the first rank that did not end with 0; 128 + n where signal n ended it.

    Raises:
        ValueError: no rank, or nothing to run.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} starts nothing: use 1 or more")
    if not command:
        raise ValueError('command is empty: give ["-m", package, ...] or [script, ...]')
    environ = {**os.environ, **(env or {})}
    environ[_PARENT_PID] = str(os.getpid())
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(shutdown_s))
    # The loopback address, because a machine's own name need not resolve.
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}"]
    agent = [sys.executable, "-m", "segapp.parallel.launch", *options]
    # In a session of its own, so that a Ctrl-C reaches the ranks once, through this process.
    # Behind "--", or argparse takes the program's own `--run` for an abbreviation of torchrun's `--run-path`.
    flag, program = (["-m"], command[1:]) if command[0] == "-m" else ([], command)
    process = subprocess.Popen([*agent, *flag, "--", *program], env=environ, start_new_session=True)
    with _passing_signals_to(process):
        status = process.wait()
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def _passing_signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGINT and SIGTERM go to the process; only the main thread can arrange that."""
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


def signal_when_parent_dies(number: int) -> None:
    """Asks the kernel (of Linux) to send this process a signal when the thread that made it ends."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def die_with_parent(poll_s: float = 1.0, grace_s: float = 30.0) -> None:
    """Ends this process when its parent has died: SIGTERM first, so that it may save, and SIGKILL after a while.

    Args:
        poll_s: seconds between looks, for systems and cases that the kernel's own signal does not cover.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    if os.getpid() in _watched:
        return
    parent = os.getppid()
    maker = int(os.environ.get(_PARENT_PID, parent))
    if maker != parent and not _is_alive(maker):
        parent = maker  # it died while this process started: the watch ends this one at once
    _watched.add(os.getpid())
    signal_when_parent_dies(signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def run_agent(arguments: Sequence[str]) -> int:
    """The agent of torchrun, but it dies with its parent and exits with the status of the rank that failed.

    SIGINT and SIGTERM go to the ranks, which end when they have saved.

    Args:
        arguments: torchrun's own.

    Returns:
        The exit status for this process.
    """
    # Before the imports, which take seconds.
    die_with_parent(grace_s=float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) + 5)
    os.environ[_PARENT_PID] = str(os.getpid())
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # the ranks say themselves what happened
    options = run.parse_args(list(arguments))  # type: ignore[no-untyped-call]
    if sys.platform == "linux" and hasattr(options, "signals_to_handle"):
        # torchrun's own handling forgets with which status the ranks end: here a rank that was stopped and has saved
        # says so.
        options.signals_to_handle = "SIGQUIT"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _pass_on_to_children)
    try:
        run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {rank} was ended by {name}; the others were stopped", file=sys.stderr, flush=True)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _pass_on_to_children(number: int, _frame: FrameType | None) -> None:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as listed:
            for pid in listed.read().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)


if __name__ == "__main__":
    sys.exit(run_agent(sys.argv[1:]))
