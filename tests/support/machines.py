"""Machines in Linux namespaces: each has its own network, host name, process ids, /dev/shm, cache folder and boot id.

`with Machines(2, folder) as machines:` starts machines 1 and 2, with the addresses 10.77.0.1 and 10.77.0.2 on a bridge
that no other process sees, so that any number of tests can run at a time. They share the disk, and nothing else. A
machine can lose its cable, get it back, lose its power and boot again.

Needs root or user namespaces; `needs_machines` skips a test with the reason where neither is allowed. All ends with the
process that made the machines, also if that is killed: the first process of each machine ends when its pipe closes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

NETWORK = "10.77.0"
_FIRST_PROCESS = """
set -e
trap '' CHLD  # processes whose parent ended are not left as zombies
hostname "$NAME"
mount -t tmpfs shm /dev/shm
mount --bind "$FOLDER/hosts" /etc/hosts
mount --bind "$FOLDER/boot_id" /proc/sys/kernel/random/boot_id
echo up
exec cat >/dev/null
"""
_OF_RANKS = {"OMP_NUM_THREADS": "1", "NO_ALBUMENTATIONS_UPDATE": "1", "PYTHONUNBUFFERED": "1"}


class MachineError(RuntimeError):
    """A machine could not be made here."""


class Process:
    """A program on a machine: `popen` is of `nsenter`, which waits for it; `log` has its output and errors."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._popen, self.log = popen, log
        self.started_s = time.monotonic()

    @property
    def pid(self) -> int:
        """The process id of the program as the host of the tests sees it."""
        deadline_s = time.monotonic() + 10
        while not (found := children(self._popen.pid)):
            assert self._popen.poll() is None, f"it ended with {self._popen.returncode}:\n{self.text}"
            assert time.monotonic() < deadline_s, "the program did not start"
            time.sleep(0.01)
        return found[0]

    @property
    def text(self) -> str:
        """What the program has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal; None while it runs."""
        return self._popen.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end and return the exit code; None if it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        return self.returncode

    def send(self, number: int) -> None:
        """Send a signal to the program, which must run."""
        assert self.returncode is None, f"it ended with {self.returncode} before signal {number}:\n{self.text}"
        os.kill(self.pid, number)


class Machine:
    """One machine; `Machines` makes it. `bridge` is the process id of the network of the machines."""

    def __init__(self, number: int, name: str, folder: Path, bridge: int) -> None:
        self.number, self.name, self.folder = number, name, folder
        self.address = f"{NETWORK}.{number}"
        self._bridge = bridge
        self._first: subprocess.Popen[bytes] | None = None
        self._first_pid = 0

    def boot(self) -> None:
        """Start the machine, with a new boot id; the disk and the cache folder are as they were."""
        assert self._first is None, f"machine {self.number} runs"
        for name in ("cache", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        own = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        holder = [*_enter(self._bridge, "--net"), "unshare", *own, "bash", "-c", _FIRST_PROCESS]
        self._first = _holder(holder, NAME=self.name, FOLDER=str(self.folder))
        self._first_pid = children(self._first.pid)[0]
        port = f"port{self.number}"
        self._on_bridge(f"link add {port} type veth peer name eth0 netns {self._first_pid}")
        self._on_bridge(f"link set {port} master bridge up")
        for words in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            _command(*_enter(self._first_pid, "--net"), "ip", *words.split())

    @property
    def first_pid(self) -> int:
        """The first process of the machine, whose namespaces are the machine's."""
        return self._first_pid

    @property
    def is_up(self) -> bool:
        """True from `boot` to `power_cut`."""
        return self._first is not None

    def start(
        self, *words: str | Path, log: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a program on the machine; `log` gets its output and errors."""
        assert self.is_up, f"machine {self.number} has no power"
        places = {"XDG_CACHE_HOME": str(self.folder / "cache"), "TMPDIR": str(self.folder / "tmp")}
        enter = _enter(self._first_pid, "--net", "--uts", "--ipc", "--mount", "--pid")
        with log.open("ab") as out:
            popen = subprocess.Popen(
                [*enter, "--", "env", "-C", str(cwd or Path.cwd()), *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_OF_RANKS, **places, **(env or {})},
                start_new_session=True,
            )
        return Process(popen, log)

    def run(self, *words: str | Path) -> str:
        """Run a short command on the machine and return its output."""
        return _command(*_enter(self._first_pid, "--net", "--uts", "--ipc", "--mount", "--pid"), *map(str, words))

    def pids(self) -> list[int]:
        """Return the living processes of the machine, its first one left out, as the host of the tests numbers them."""
        found, own = [], _pid_namespace(self._first_pid)
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and _pid_namespace(int(entry.name)) == own and int(entry.name) != self._first_pid:
                with contextlib.suppress(OSError):
                    if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found.append(int(entry.name))
        return found

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank of torchrun on the machine, by rank; its own children are left out."""
        ranks = {pid: rank for pid in self.pids() if (rank := _rank_of(pid)) is not None}
        return {rank: pid for pid, rank in ranks.items() if _parent(pid) not in ranks}

    def cut(self) -> None:
        """Pull the cable: packets are lost without a word, as those in flight are."""
        self._on_bridge(f"link set port{self.number} down")

    def heal(self) -> None:
        """Put the cable back."""
        self._on_bridge(f"link set port{self.number} up")

    def power_cut(self) -> None:
        """Kill every process at once; no packet says so, because the cable is pulled before."""
        self.cut()
        self._end()
        with contextlib.suppress(MachineError):  # the kernel removes it, too, some time later
            self._on_bridge(f"link del port{self.number}")

    def _end(self) -> None:
        assert self._first is not None, f"machine {self.number} has no power"
        if self._first_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first_pid, signal.SIGKILL)
        _end(self._first)
        self._first, self._first_pid = None, 0

    def _on_bridge(self, words: str) -> None:
        _command(*_enter(self._bridge, "--net"), "ip", *words.split())


class Machines:
    """Machines on one network, for a `with` statement; with `same_name` they have one host name, as some containers."""

    def __init__(self, count: int, folder: Path, *, same_name: bool = False) -> None:
        self._count, self._folder, self._same_name = count, folder, same_name
        self._bridge: subprocess.Popen[bytes] | None = None
        self._machines: list[Machine] = []

    def __enter__(self) -> Machines:
        own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._bridge = _holder(["unshare", *own, "--net", "sh", "-c", "echo up; exec cat >/dev/null"])
        try:
            for words in ("link add bridge type bridge", "link set bridge up", "link set lo up"):
                _command(*_enter(self._bridge.pid, "--net"), "ip", *words.split())
            for number in range(1, self._count + 1):
                self._machines.append(self._new(number))
                self._machines[-1].boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _new(self, number: int) -> Machine:
        assert self._bridge is not None
        folder = self._folder / f"machine{number}"
        folder.mkdir(parents=True)
        name = "node" if self._same_name else f"node{number}"
        others = [f"{NETWORK}.{i} node{i}" for i in range(1, self._count + 1)]
        own = [f"{NETWORK}.{number} {name}"] if self._same_name else []
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *own, *others, ""]))
        return Machine(number, name, folder, self._bridge.pid)

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            if machine.is_up:
                machine._end()
        if self._bridge is not None:
            _end(self._bridge)

    def __getitem__(self, number: int) -> Machine:
        return self._machines[number - 1]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines)

    def __len__(self) -> int:
        return self._count


def needs_machines() -> None:
    """Skip the test, with the reason, where machines cannot be made."""
    if reason := why_not():
        pytest.skip(f"no machines in namespaces here: {reason}")


@functools.cache
def why_not() -> str:
    """Return why machines cannot be made here; empty if they can."""
    for program in ("unshare", "nsenter", "ip", "bash"):
        if shutil.which(program) is None:
            return f"there is no `{program}`"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Machines(2, Path(folder)) as machines:
                machines[1].run("true")
        except (MachineError, OSError) as error:
            return str(error).partition("\n")[0] or type(error).__name__
    return ""


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _holder(words: list[str], **env: str) -> subprocess.Popen[bytes]:
    """Start a process that holds namespaces until its pipe closes, and return it once it says that it is up."""
    pipe = subprocess.PIPE
    environ = {**os.environ, **env}
    holder = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, start_new_session=True)
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != b"up\n":
        reason = holder.stderr.read().decode(errors="replace").strip()
        _end(holder)
        raise MachineError(reason)
    return holder


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.communicate()


def _enter(pid: int, *namespaces: str) -> list[str]:
    """Return the words before a command that runs in namespaces of a process."""
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(pid), *user, *namespaces]


def _command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise MachineError(f"{' '.join(words[3:])}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _pid_namespace(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None


def _rank_of(pid: int) -> int | None:
    """Return the variable RANK of a process; None if it has none, or has ended."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                return int(variable[5:])
    return None


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None
