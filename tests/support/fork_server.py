"""A process that imports the program once and forks for every command: real processes without the time of the imports.

All workers of a run of the tests use the same one: it listens on an abstract Unix socket whose name is its argument,
and ends when nobody is connected any more. It is nobody's child, so what ends the children of a worker spares it.

Commands come as JSON lines on a connection, `{"argv", "cwd", "env", "out", "err"}`; the answer to each is `{"pid"}`,
and once that process has ended `{"pid", "status"}`. With `"is_stopped"` the process waits for SIGCONT before it begins,
so that a tracer can be attached; with `"in"`, it reads from there, and a terminal becomes that of its session; with
`"machine"`, the pid of the first process of a machine of `machines`, it runs there; with `"uid"` it is another user,
and with `"umask"` it has that mask. With `"code"` in place of `"argv"` it runs this code, as a worker of pytest-xdist,
at the three streams that come with the line.
With SEGAPP_TEST_FORK in its environment, a command forks its trainers and its ranks too; with SEGAPP_TEST_GPUS, the
monitor of a training asks nvidia-smi, as on a machine with a GPU.

Nothing is computed before a fork, so torch has no threads that a child would miss.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.support import network


def run(command: dict[str, Any]) -> int:
    """Runs `segapp ARGV` in the forked child and returns its exit code."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if command.get("machine"):
        enter_machine(command["machine"])
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["env"])
    tempfile.tempdir = None  # the folder of the server; the command may have a TMPDIR
    streams = command.get("fds") or [
        os.open(command.get("in") or os.devnull, os.O_RDONLY),
        os.open(command["out"], os.O_WRONLY),
        os.open(command["err"], os.O_WRONLY),
    ]
    for fd, source in enumerate(streams):
        os.dup2(source, fd)
        os.close(source)
    if command.get("in") or command.get("fds"):  # those of the server are of files
        for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
            stream = os.fdopen(fd, mode, buffering=1, closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    if "code" in command:
        exec(command["code"], {"__name__": "__main__"})
        # As at the end of Python: the processes of pools end, too.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        return 0
    faulthandler.enable(2)  # SIGABRT prints the stacks
    network.note_requests()
    if command.get("umask") is not None:
        os.umask(command["umask"])
    if command.get("uid") is not None:
        become(command["uid"])
    if command.get("is_stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    from segapp import failpoints

    if "SEGAPP_TEST_FORK" in os.environ:
        import segapp.commands.spawn
        import segapp.parallel.launch

        forking = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkedTrainer})
        segapp.commands.spawn.subprocess = forking  # type: ignore[attr-defined]
        segapp.parallel.launch.subprocess = forking  # type: ignore[attr-defined]
    if "SEGAPP_TEST_GPUS" in os.environ:
        import segapp.session.session
        from segapp.memory.gpus import GpuPoller

        sampler = segapp.session.session.MemorySampler
        polling = functools.partial(sampler, gpus=GpuPoller())
        segapp.session.session.MemorySampler = polling  # type: ignore[misc, assignment]
    if ":clock:" in os.environ.get(failpoints.VARIABLE, ""):
        make_clock_jump()
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    sys.argv = ["segapp", *command["argv"]]
    return run_main()


def enter_machine(pid: int) -> None:
    """Continues as a child in the namespaces of a process; this process waits for it, and ends as it does."""
    libc, fd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    namespaces = 0x40000000 | 0x04000000 | 0x08000000 | 0x00020000 | 0x20000000  # net, uts, ipc, mount, pid
    if os.geteuid() != 0:
        namespaces |= 0x10000000  # user
    if libc.setns(fd, namespaces) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)
    if (child := os.fork()) == 0:
        return
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def become(uid: int) -> None:
    """Continues as another user, who may be unable to read Python and its packages: root reads them."""
    lock, depth = threading.RLock(), 0

    def as_root(function: Callable[..., Any]) -> Callable[..., Any]:
        def act(*words: Any) -> Any:
            nonlocal depth
            with lock:
                depth += 1
                os.seteuid(0)
            try:
                return function(*words)
            finally:
                with lock:
                    depth -= 1
                    if not depth:
                        os.seteuid(uid)

        return act

    for place, name in (
        (importlib._bootstrap, "_find_and_load"),  # type: ignore[attr-defined]
        (importlib.util, "_find_spec"),
        (importlib.metadata.Distribution, "from_name"),
        (importlib.metadata.PathDistribution, "read_text"),
        (inspect, "findsource"),
    ):
        setattr(place, name, as_root(getattr(place, name)))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, 0)


def make_clock_jump() -> None:
    """Gives failpoints one more action, `clock:SECONDS`: the time of day jumps, as when somebody sets the clock."""
    from segapp import failpoints

    act, now_s, shift_s = failpoints._act, time.time, [0.0]

    def act_or_jump(name: str, point: Any) -> str | None:
        if point.action != "clock":
            return act(name, point)
        shift_s[0] += float(point.argument)
        return None

    failpoints._act = act_or_jump
    time.time = lambda: now_s() + shift_s[0]


def run_main() -> int:
    """Runs the program with `sys.argv` and returns its exit code."""
    from segapp.__main__ import main

    try:
        main()
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


class ForkedTrainer:
    """Stands for `subprocess.Popen([python, "-P", "-m", "segapp", ...])`: a fork of this process with its imports."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: Any = None,
        stderr: int | None = None,
        start_new_session: bool,
        env: dict[str, str],
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        assert (list(words[1:4]), start_new_session) == (["-P", "-m", "segapp"], True)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._train(words[4:], stdout, env, preexec_fn))

    @staticmethod
    def _train(words: Sequence[str], out: Any, env: dict[str, str], preexec_fn: Callable[[], None] | None) -> int:
        os.setsid()
        if preexec_fn is not None:
            preexec_fn()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if out is not None:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        sys.argv = ["segapp", *words]
        return run_main()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        deadline_s = time.monotonic() + (60 if timeout_s is None else timeout_s)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("segapp", 0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclasses.dataclass(eq=False)
class Client:
    """A connection, and what has come of a command that is not whole yet."""

    connection: socket.socket
    waiting: bytes = b""
    fds: list[int] = dataclasses.field(default_factory=list)

    def commands(self) -> list[dict[str, Any]] | None:
        """Read what has come and return the whole commands; None if the client has gone."""
        with contextlib.suppress(ConnectionError):
            block, fds, *_ = socket.recv_fds(self.connection, 2**16, 3)
            self.fds += fds
            if block:
                *lines, self.waiting = (self.waiting + block).split(b"\n")
                return [json.loads(line) for line in lines]
        return None

    def answer(self, **words: int) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(words).encode() + b"\n")


def serve(listener: socket.socket) -> None:
    """Reads commands and forks until the last client has gone, or none has come for a minute."""
    import segmentation_models_pytorch  # noqa: F401
    import torchvision  # noqa: F401

    import segapp.cli
    import segapp.commands.check
    import segapp.commands.evaluate
    import segapp.commands.predict
    import segapp.commands.runs
    import segapp.datasets.augment.pipeline
    import segapp.session.build
    import segapp.session.session  # noqa: F401

    _measure_model()
    gc.collect()
    gc.freeze()  # a child's first full collection would visit 500,000 objects and copy their pages: half a second
    news, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, Client] = {}
    running: dict[int, Client] = {}
    had_client = False
    while clients or not had_client:
        ready, _, _ = select.select([listener, news, *clients], [], [], None if clients else 60)
        if not ready and not clients:
            return
        if news in ready:
            os.read(news, 4096)
            _report_ended(running)
        if listener in ready:
            connection = listener.accept()[0]
            clients[connection.fileno()] = Client(connection)
            had_client = True
        for fd in clients.keys() & set(ready):
            commands = clients[fd].commands()
            if commands is None:
                clients.pop(fd).connection.close()
            for command in commands or ():
                own_fds = (news, wakeup, listener.fileno(), *clients)
                command["fds"], clients[fd].fds = clients[fd].fds, []
                running[pid := _fork(command, own_fds)] = clients[fd]
                for own in command["fds"]:
                    os.close(own)
                clients[fd].answer(pid=pid)


def _measure_model() -> None:
    """Keep what a training measures of the model of most runs; a child measures it, because autograd forbids forks."""
    from segapp.models import build_model, inspection
    from tests.support.runs import MODEL

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        named = {name: MODEL[name] for name in ("library", "name", "encoder", "options")}
        build_model(**named, num_classes=3)
        with open(writing, "wb") as file:
            pickle.dump(inspection._MEASURED, file)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        inspection._MEASURED.update(pickle.load(file))
    os.waitpid(child, 0)


def _fork(command: dict[str, Any], own_fds: Iterable[int]) -> int:
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for fd in own_fds:
            os.close(fd)
        os._exit(run(command))
    return pid


def _report_ended(running: dict[int, Client]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            running.pop(ended[0]).answer(pid=ended[0], status=os.waitstatus_to_exitcode(ended[1]))


def main(name: str) -> None:
    """Listen, and serve in the background; end at once if another server listens."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return
    listener.listen(64)
    if os.fork():
        os._exit(0)
    os.setsid()
    serve(listener)


if __name__ == "__main__":
    main(sys.argv[1])
