"""Start the ranks of one machine, such that they end if their parent, another rank or another machine does.

The ranks of one machine meet in a file that only their user can read, so they open no port for that, and their
collectives use the loopback interface. kill -9 of a process leaves its children running. So every rank requests a
signal from the kernel for the death of its parent (`PR_SET_PDEATHSIG`, Linux), also polls for it, and is killed if it
does not end then.

A machine that loses its power or its network sends no packet about it, and an exchange waits for it until a timeout of
many minutes. So one rank of each machine increments a counter in the store of the process group, and reads the counters
of the others (`PeerWatch`). A machine whose counter does not change is lost. Only this process's clock is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from segapp.waiting import is_pid_alive

STORE_VARIABLE = "SEGAPP_RANK_STORE"
"""The file in which the ranks of one machine meet; without it, they meet at MASTER_ADDR and MASTER_PORT."""
ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The file in which a rank leaves its error for its launcher, in a folder of its own; torchrun sets it, too."""
_PARENT_PID = "SEGAPP_PARENT_PID"
"""Process id of the parent, for each rank: the parent may die while Python still starts."""
_POLL_S = 0.05
LIMIT_VARIABLE = "SEGAPP_PEER_TIMEOUT_S"
LIMIT_S = 30.0
"""Seconds without a sign of life after which a machine is lost, unless the variable sets another value."""

_LEFT = 2**40
"""Added to the counter of a machine whose ranks no longer need the others."""

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
        env: environment variables that are set for them.
        shutdown_s: seconds between SIGTERM and SIGKILL for the ranks that run after another one has failed.
        signals: signals to this process that are passed on to the ranks.

    Returns:
        0, or the exit status of the rank whose error was the first; 128 + n if signal n ended it.
    """
    environ = _environ_of(num_ranks, env or {})
    ranks: list[subprocess.Popen[bytes]] = []
    with _rank_store() as store, _passing_signals_on(ranks, signals) as received:
        try:
            errors = [Path(store).with_name(str(rank)) / "error.json" for rank in range(num_ranks)]
            for rank, error in enumerate(errors):  # each in its own session: Ctrl-C reaches it once, through here
                error.parent.mkdir()
                variables = {**environ, STORE_VARIABLE: store, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                variables[ERROR_VARIABLE] = str(error)
                ranks.append(subprocess.Popen([sys.executable, "-P", *command], env=variables, start_new_session=True))
            for number in received:  # some may have come before all ranks were started
                _send(ranks, number)
            return _wait(ranks, received, errors)
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


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int], errors: Iterable[Path]) -> int:
    """Wait until all ranks have succeeded or one has failed, and return the exit code of the first error.

    A rank that was killed, or left an error, has ended the others, which may be noticed earlier.
    """
    while not any(codes := [process.poll() for process in ranks]) and None in codes:
        time.sleep(_POLL_S)
    failed = [(code, rank) for rank, code in enumerate(codes) if code]
    if not failed:
        return 0
    # Codes of signals are negative: a rank that was killed comes before the ranks that only lost it.
    code, rank = min(failed)
    if code > 0 and (error := first_error(errors)) is not None:
        return error.code
    if code < 0 and not received:
        name = signal.Signals(-code).name
        print(f"error: rank {rank} was ended by {name}; the others were stopped", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


class RankError(NamedTuple):
    """An error by which a rank has ended, other than the loss of another rank."""

    code: int
    """Exit code of the rank."""
    message: str
    at_s: float = math.inf
    """When it happened, by the monotonic clock of its machine."""

    def sent_by(self, machine: str) -> str:
        """Return a text for other machines."""
        return json.dumps([machine, self.code, self.message])

    @classmethod
    def from_sent(cls, text: str) -> tuple[str, RankError]:
        """Return the machine of an error in a text of `sent_by`, and the error."""
        machine, code, message = json.loads(text)
        return machine, cls(int(code), message)


def leave_error(code: int, message: str, *, is_own: bool) -> bool:
    """Leave the error by which this rank ends for its launcher, and return True if this rank is to print it.

    The ranks of a machine print a message that they share once. If not `is_own`, the rank lost another one, which is
    never the cause. The file has the form of torchrun's error files.
    """
    name = os.environ.get(ERROR_VARIABLE)
    if not name:
        return True
    path, digest = Path(name), hashlib.sha256(message.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        if is_own:
            words = {"message": message, "timestamp": int(time.time()), "code": code, "at_s": time.monotonic()}
            path.with_suffix(".part").write_text(json.dumps(words))
            # Renamed when it is complete, because the launcher may read it at any time.
            path.with_suffix(".part").replace(path)
        try:
            # The rank that makes this file first prints the message.
            (path.parent.parent / f"said-{digest}").touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def first_error(paths: Iterable[str | Path]) -> RankError | None:
    """Return the first of the errors that ranks of this machine have left; None if none has."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            words = json.loads(Path(path).read_text())
            found.append(RankError(int(words["code"]), str(words["message"]), float(words["at_s"])))
    return min(found, key=lambda error: error.at_s, default=None)


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
    """End this process when its parent dies: SIGTERM first, so that it can save, then SIGKILL after `grace_s`.

    It looks every `poll_s` for cases in which the kernel sends no signal.
    """
    if os.getpid() in _watched:
        return
    parent = os.getppid()
    expected = int(os.environ.get(_PARENT_PID, parent))
    if expected != parent and not is_pid_alive(expected):
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

    `pids` name the other ranks. After the end of one, this process may end on its own for `grace_s`. Then
    `before` is called, and it ends with the exit code.

    Returns:
        A function that ends the watch; call it when no rank waits for another any more.
    """
    watched, is_over = tuple(pids), threading.Event()

    def watch() -> None:
        while all(is_pid_alive(pid) for pid in watched):
            if is_over.wait(min(1.0, grace_s / 4)):
                return
        if not is_over.wait(grace_s):
            end_process(exit_code, before)

    threading.Thread(target=watch, name="peer-watch", daemon=True).start()
    return is_over.set


def end_process(exit_code: int, before: Callable[[], object] = lambda: None, report_s: float = 5.0) -> None:
    """End this process and its children, from any thread, after `before`, which has `report_s`: its disk may fail."""

    def guarded() -> None:
        try:
            before()
        except Exception:
            logging.getLogger("segapp").exception("last report")

    report = threading.Thread(target=guarded, name="last-report", daemon=True)
    report.start()
    report.join(report_s)
    # `os._exit` would leave them running.
    signal_children(signal.SIGKILL)
    os._exit(exit_code)


def signal_children(number: int) -> None:
    """Send a signal to every child of this process (Linux only)."""
    # The kernel lists the children of each thread separately.
    for task in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as listed:
            for pid in listed.read().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), number)


class PeerWatch:
    """A watch over the other machines of a job, in two threads, because a lost store may never answer.

    Time in which this process is stopped or its machine is suspended does not count.

    Args:
        store: store of the process group, with a separate connection.
        others: names of the other machines in error messages, by key; `key` belongs to this one.
        end: ends this process; called in a thread, with the reason.
        limit_s: seconds of silence after which a machine, or the store, is lost.
        needs_store: treat a store that does not answer as lost, too.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        others: Mapping[str, str],
        end: Callable[[str], None],
        *,
        limit_s: float = LIMIT_S,
        needs_store: bool = True,
    ) -> None:
        self._store, self._key, self._others, self._end, self._limit_s = store, key, dict(others), end, limit_s
        self._beat_s = limit_s / 6
        self._is_over, self._has_left = threading.Event(), False
        self._num_answers = 0
        self._beating = threading.Thread(target=self._beat, name="peer-beat", daemon=True)
        self._beating.start()
        if needs_store:
            threading.Thread(target=self._await_answers, name="peer-watch", daemon=True).start()

    def stop(self, *, has_left: bool) -> None:
        """End the watch; with `has_left`, this machine ends regularly, and the others must not report it."""
        self._has_left = has_left
        self._is_over.set()
        self._beating.join(self._beat_s)

    def _beat(self) -> None:
        """Increment the counter and read the others, until the watch is over or the store is gone."""
        silence = Silence(2 * self._beat_s)
        with contextlib.suppress(RuntimeError):  # torch's DistError: no answer any more
            for key in self._others:
                self._store.add(key, 0)  # so that it exists: reading a missing key would wait for it
            while True:
                self._store.add(self._key, 1)
                counts = self._store.multi_get([*self._others])
                self._num_answers += 1
                silence.note(
                    {key: count for key, count in zip(self._others, counts, strict=True) if int(count) < _LEFT}
                )
                if lost := silence.longer_than(self._limit_s):
                    self._end(
                        f"{', '.join(self._others[key] for key in lost)} has not answered for {self._limit_s:g} s"
                    )
                    return
                if self._is_over.wait(self._beat_s):
                    break
            if self._has_left:
                self._store.add(self._key, _LEFT)

    def _await_answers(self) -> None:
        look_s = min(1.0, self._beat_s)
        silence = Silence(2 * look_s)
        while not self._is_over.wait(look_s):
            silence.note({"store": self._num_answers})
            if silence.longer_than(self._limit_s):
                self._end(f"the machine of rank 0, whose store all ranks use, has not answered for {self._limit_s:g} s")
                return


class Silence:
    """Measures how long values have not changed, by this process's clock; times between reads count up to a limit."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._looked_s = longest_s, time.monotonic()
        self._values: dict[str, object] = {}
        self.silent_s: dict[str, float] = {}

    def note(self, values: Mapping[str, object]) -> None:
        """Process the values of a read; a key that is left out is no longer watched."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, self._longest_s), now_s
        self.silent_s = {
            key: self.silent_s.get(key, 0.0) + passed_s if self._values.get(key) == value else 0.0
            for key, value in values.items()
        }
        self._values = dict(values)

    def longer_than(self, limit_s: float) -> list[str]:
        """Return the keys whose values have not changed for this time."""
        return [key for key, silent_s in self.silent_s.items() if silent_s >= limit_s]


class Peers:
    """The ranks of a job and, on one rank per machine, the watch over the other machines, which starts here.

    Args:
        peers: (machine, process id, host name) of every rank.
        store: returns the store of the process group, with a separate connection.
        exit_code: exit code of this process if it ends because another one is gone.
        limit_s: seconds of silence after which a machine is lost; 0: they are not watched.

    Attributes:
        pids: (machine, process id) of every rank.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[tuple[str, int, str]],
        store: Callable[[], Any],
        exit_code: int,
        limit_s: float,
    ) -> None:
        self.pids = [(machine, pid) for machine, pid, _ in peers]
        self._exit_code = exit_code
        self._report: Callable[[str], None] = logging.getLogger("segapp").error
        self._watch: PeerWatch | None = None
        here = peers[rank][0]
        self._pids_here = [pid for number, (machine, pid) in enumerate(self.pids) if machine == here and number != rank]
        ranks_of: dict[str, list[int]] = {}
        for number, (machine, _, _) in enumerate(peers):
            ranks_of.setdefault(machine, []).append(number)
        if limit_s > 0 and len(ranks_of) > 1 and ranks_of[here][0] == rank:
            job = f"segapp/alive/{peers[0][0]}/{peers[0][1]}"  # of this round, because all rounds may share the store
            others = {f"{job}/{name}": _label(peers, ranks) for name, ranks in ranks_of.items() if name != here}
            self._watch = PeerWatch(store(), f"{job}/{here}", others, self._lose, limit_s=limit_s)

    def _lose(self, reason: str) -> None:
        message = f"{reason}: its power or network connection failed, or it hangs"
        end_process(self._exit_code, lambda: self._announce(message))

    def _announce(self, message: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {message}; --resume continues from the newest checkpoint\n".encode())
        self._report(message)

    @contextlib.contextmanager
    def watched(self, report: Callable[[str], None]) -> Iterator[None]:
        """Run the body; report and end this process soon after a rank of this machine, or another machine, is gone."""
        gone, self._report = "another rank ended while this rank waited for it: read the other rank's output", report
        pids, code = self._pids_here, self._exit_code
        end_watch = end_with_peers(pids, code, lambda: self._announce(gone)) if pids else lambda: None
        try:
            yield
            self.close(has_left=True)
        finally:
            end_watch()

    def close(self, *, has_left: bool = False) -> None:
        """End the watch over the other machines; with `has_left`, machines that still watch do not report this one."""
        if self._watch is not None:
            self._watch.stop(has_left=has_left)
            self._watch = None


def _label(peers: Sequence[tuple[str, int, str]], ranks: Sequence[int]) -> str:
    """Return "machine node2 (ranks 2 to 3)"; ranks that another launcher has dealt out in turn are listed."""
    is_row = ranks[-1] - ranks[0] == len(ranks) - 1 > 0
    numbers = f"{ranks[0]} to {ranks[-1]}" if is_row else ", ".join(map(str, ranks))
    return f"machine {peers[ranks[0]][2]} (rank{'s' * (len(ranks) > 1)} {numbers})"


def peer_limit_s() -> float:
    """Return the seconds after which a machine is considered lost; 0: no watch.

    Raises:
        ValueError: the variable is no number of seconds.
    """
    text = os.environ.get(LIMIT_VARIABLE) or str(LIMIT_S)
    with contextlib.suppress(ValueError):
        if 0 <= (limit_s := float(text)) < float("inf"):
            return limit_s
    raise ValueError(f"{LIMIT_VARIABLE}={text!r} is not a number of seconds: use 30, or 0 for no watch")
