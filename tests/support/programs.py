"""Starts the real program as processes forked from one that has done the imports (see `fork_server`)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from tests.support import ROOT


class Program:
    """A running `segapp`, the leader of a session and process group of its own."""

    def __init__(self, pid: int, words: list[str], out: Path, err: Path) -> None:
        self.pid, self.words = pid, words
        self._out, self._err = out, err
        self._status: int | None = None
        self.is_sigkilled = False
        """True after SIGKILL was sent to it."""
        self._has_ended = threading.Event()

    def note_end(self, status: int) -> None:
        """Records the end of the process: its exit code, or minus the number of the signal."""
        self._status = status
        self._has_ended.set()

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal; None while it runs."""
        return self._status

    @property
    def stdout(self) -> str:
        """The standard output so far."""
        return _text(self._out)

    @property
    def stderr(self) -> str:
        """The standard error so far."""
        return _text(self._err)

    def send(self, number: int, *, to_group: bool = False) -> None:
        """Sends a signal to the process or its whole group, which must not have ended: the test would show nothing."""
        assert self._status is None, f"it had ended with {self._status} before signal {number}:\n{self.stderr}"
        self.is_sigkilled |= number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):  # ends at this moment: its exit code tells
            (os.killpg if to_group else os.kill)(self.pid, number)

    def kill(self) -> None:
        """Kills the process unless it has ended, when a test is over."""
        if self._status is None:
            self.send(signal.SIGKILL)

    def wait(self, timeout_s: float = 240) -> int | None:
        """Waits for the end and returns the exit code; None if it still runs after `timeout_s`."""
        self._has_ended.wait(timeout_s)
        return self._status

    def finish(self, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Waits for the end and returns exit code and output; after `timeout_s` the whole group is killed."""
        if self.wait(timeout_s) is None:
            self.send(signal.SIGKILL, to_group=True)
            self.wait(60)
        assert self._status is not None
        return subprocess.CompletedProcess(self.words, self._status, self.stdout, self.stderr)


def start(
    *arguments: str | Path,
    cwd: Path,
    logs: Path,
    is_stopped: bool = False,
    machine: int | None = None,
    uid: int | None = None,
    umask: int | None = None,
    terminal: str | None = None,
    root: Path = ROOT,
    code: str | None = None,
    **env: str | None,
) -> Program:
    """Starts the real program in the folder `cwd`; its output goes to files in `logs`, `env` has variables to set.

    With `is_stopped` it waits for SIGCONT before the command begins. `machine` is the first process of the machine
    (`machines`) on which it runs; the pid of the program is then that of a process outside, which ends as it does.
    `uid` is another user, whose program it is; it reads the files of the package, so `root` has a `readable_copy`.
    With a `terminal` it reads and writes there in place of the files. It does not have the variables that are None.
    With `code`, the process runs that instead of the program.
    """
    words = [str(argument) for argument in arguments]
    streams = [_new_file(logs, kind) for kind in (".out", ".err")] if terminal is None else [Path(terminal)] * 2
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    command = {
        "argv": words,
        "cwd": str(cwd),
        "env": {name: value for name, value in variables.items() if value is not None},
        "out": str(streams[0]),
        "err": str(streams[1]),
        "is_stopped": is_stopped,
        "in": terminal,
        "machine": machine,
        "uid": uid,
        "umask": umask,
    }
    if code is not None:
        command["code"] = code
    program = _fork_server(root).start(command, words, *streams)
    if program is None:
        warnings.warn("the fork server had ended; another one is started", stacklevel=2)
        _fork_server.cache_clear()
        program = _fork_server(root).start(command, words, *streams)
    assert program is not None, "the fork server ended again"
    return program


def segapp(
    *arguments: str | Path, cwd: Path, timeout_s: float = 240, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs the real program to its end; `options` are those of `start`."""
    with tempfile.TemporaryDirectory() as logs:
        return start(*arguments, cwd=cwd, logs=Path(logs), **options).finish(timeout_s)


def _text(path: Path) -> str:
    """Returns the text as subprocess with text=True does."""
    return path.read_bytes().decode(errors="surrogateescape").replace("\r\n", "\n")


class _ForkServer:
    """The connection to the process that forks, and the thread that reads its answers."""

    def __init__(self, root: Path) -> None:
        name = fork_server_name()
        self._socket = connection_to(name if root == ROOT else f"{name}-{root}", root)
        self._running: dict[int, Program] = {}
        self._asked: list[tuple[Any, ...]] = []
        self._news = threading.Condition()
        self._begun: list[Program] = []
        self._has_ended = False
        threading.Thread(target=self._listen, name="fork server", daemon=True).start()

    def start(self, command: dict[str, Any], words: list[str], out: Path, err: Path) -> Program | None:
        """Returns the program; None if the server has ended."""
        with self._news:
            self._asked.append((words, out, err))
            with contextlib.suppress(OSError):
                self._socket.sendall(json.dumps(command).encode() + b"\n")
            # Its imports take that long on a busy machine.
            if not self._news.wait_for(lambda: self._begun or self._has_ended, 240):
                raise AssertionError("the fork server does not answer")
            return self._begun.pop() if self._begun else None

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("r") as answers:
            for line in answers:
                self._note(json.loads(line))
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def _note(self, answer: dict[str, int]) -> None:
        with self._news:
            if "status" in answer:
                self._running.pop(answer["pid"]).note_end(answer["status"])
            else:
                program = Program(answer["pid"], *self._asked.pop())
                self._running[program.pid] = program
                self._begun.append(program)
                self._news.notify()


def fork_server_name() -> str:
    """Returns the name of the socket of the server of this run of the tests."""
    return f"segapp-fork-server-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"


def readable_copy(folder: Path) -> Path:
    """Copies the code into a folder that every user can enter, and returns the root: the clone may be private."""
    for name in ("segapp", "configs", "tests/support"):
        shutil.copytree(ROOT / name, folder / name)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    return folder


def connection_to(name: str, root: Path = ROOT) -> socket.socket:
    """Returns a connection to a server, which is started if it does not run."""
    deadline_s = time.monotonic() + 60
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{name}")
            return connection
        except ConnectionRefusedError:
            connection.close()
            assert time.monotonic() < deadline_s, "the fork server does not start"
        # It goes into the background once it listens, or finds that another one does.
        command = [sys.executable, "-m", "tests.support.fork_server", name]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "cwd": root, "check": True}
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)


@functools.cache
def _fork_server(root: Path) -> _ForkServer:
    return _ForkServer(root)


def _new_file(folder: Path, suffix: str) -> Path:
    descriptor, name = tempfile.mkstemp(suffix=suffix, dir=folder)
    os.close(descriptor)
    return Path(name)
