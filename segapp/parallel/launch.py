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
import itertools
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


class Policy:
    """Decision after the end of a rank: this policy ends the job with the exit code of that rank."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.command = command

    def begin_round(self) -> Sequence[str]:
        """Return Python's arguments for the ranks of the next round."""
        return self.command

    def code_of_job(self, code: int, *, regroups: bool) -> int | None:
        """Return the exit code of the job after one of its ranks has ended with `code`; None: another round follows.

        `regroups`: an agent has stopped its ranks for another round, for example because a machine wants to join.
        """
        return code

    def code_after_signal(self, number: int) -> int:
        """Return the exit code of the job if a signal has stopped it before a rank could save."""
        return 128 + number

    def code_of_stop(self, code: int, number: int) -> int:
        """Return the exit code of the job after signal `number`, when a rank has ended with `code`."""
        is_unsaved = code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        return self.code_after_signal(number) if is_unsaved else code


def launch_local(
    command: Sequence[str],
    num_ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    shutdown_s: float = 60.0,
) -> int:
    """Run a Python program as several ranks on this machine and wait for it.

    If one rank fails, all are ended. SIGINT and SIGTERM to this process are passed on, once; if this process is killed,
    the ranks also end.

    Args:
        command: the arguments of `python`: `["-m", "package", ...]` or `["script.py", ...]`.
        num_ranks: number of processes, at least 1.
        env: environment variables to set or override.
        shutdown_s: seconds between SIGTERM and SIGKILL for the ranks that run after another one has failed.

    Returns:
        0, or the exit status of the first rank that failed; 128 + n if signal n ended it.

    Raises:
        ValueError: num_ranks is below 1, or command is empty.
    """
    if not command:
        raise ValueError('command is empty: give ["-m", package, ...] or [script, ...]')
    return LocalRanks(num_ranks, Policy(command), env=env, shutdown_s=shutdown_s).run()


class LocalRanks:
    """The ranks of a job on this machine, started as children of this process.

    Args:
        num_ranks: number of processes, at least 1.
        policy: the program of the ranks, and the decision after the end of one.
        env: environment variables to set or override.
        shutdown_s: seconds between SIGTERM and SIGKILL for the ranks that run after another one has failed.
        signals: signals to this process that are passed on to the ranks.
    """

    def __init__(
        self,
        num_ranks: int,
        policy: Policy,
        *,
        env: Mapping[str, str] | None = None,
        shutdown_s: float = 60.0,
        signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks} starts nothing: use 1 or more")
        self._policy, self._shutdown_s, self._signals = policy, shutdown_s, signals
        self._environ = _environ_of(num_ranks, env or {})
        self._num_ranks = num_ranks
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._signal: int | None = None

    def run(self) -> int:
        """Run the job to its end and return its exit code."""
        with tempfile.TemporaryDirectory(prefix="segapp-ranks-", ignore_cleanup_errors=True) as folder:
            handle = os.open(folder, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)  # systemd-tmpfiles deletes old folders unless they are locked
            try:
                with self._passing_signals_on():
                    return self._run_rounds(folder)
            finally:
                os.close(handle)

    def _run_rounds(self, folder: str) -> int:
        for number in itertools.count():
            try:
                self._start(folder, number)
                code = self._wait()
            finally:
                self._end()
            if self._signal is not None:
                return self._policy.code_of_stop(code, self._signal)
            of_job = 0 if code == 0 else self._policy.code_of_job(code, regroups=False)
            if of_job is not None:
                return of_job
        raise AssertionError("the rounds have no end")

    def _start(self, folder: str, number: int) -> None:
        """Start the ranks of a round; each is in its own session, so that Ctrl-C reaches it once, through here."""
        command = [sys.executable, "-P", *self._policy.begin_round()]
        environ = {**self._environ, STORE_VARIABLE: f"{folder}/{number}", "TORCHELASTIC_RESTART_COUNT": str(number)}
        self._ranks = []
        for rank in range(self._num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._ranks.append(subprocess.Popen(command, env={**environ, **own}, start_new_session=True))
        if self._signal is not None:  # it came while they were started
            self._pass_on(self._signal)

    def _wait(self) -> int:
        """Wait until all ranks have succeeded or one has failed, and return its exit code."""
        while not any(codes := [process.poll() for process in self._ranks]) and None in codes:
            time.sleep(_POLL_S)
        failed = [(code, rank) for rank, code in enumerate(codes) if code]
        if not failed:
            return 0
        code, rank = min(failed)  # of ranks that failed at the same time, one that was killed is the cause
        if code < 0 and self._signal is None:
            name = signal.Signals(-code).name
            print(f"error: rank {rank} was ended by {name}; the others were stopped", file=sys.stderr, flush=True)
        return 128 - code if code < 0 else code

    def _end(self) -> None:
        """End the ranks that still run: SIGTERM first, so that they can save, then SIGKILL."""
        self._pass_on(signal.SIGTERM)
        deadline_s = time.monotonic() + self._shutdown_s
        while any(process.poll() is None for process in self._ranks) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        for process in self._ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _pass_on(self, number: int) -> None:
        for process in self._ranks:
            process.send_signal(number)

    @contextlib.contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Pass signals on to the ranks; handlers can be set only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _frame: FrameType | None) -> None:
            if number in (signal.SIGINT, signal.SIGTERM):
                self._signal = number
            self._pass_on(number)

        before = {number: signal.signal(number, handle) for number in self._signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


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
