"""A process that imports the program once and forks for every command: real processes without the time of the imports.

Commands come as JSON lines on standard input, `{"argv", "cwd", "env", "out", "err"}`; the answer to each is `{"pid"}`,
and once that process has ended `{"pid", "status"}`. With `"is_stopped"` the process waits for SIGCONT before it begins,
so that a tracer can be attached. Nothing is computed before a fork, so torch has no threads that a child would miss.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import traceback
from typing import Any


def run(command: dict[str, Any]) -> int:
    """Runs `segapp ARGV` in the forked child and returns its exit code."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["env"])
    streams = [(0, os.devnull, os.O_RDONLY), (1, command["out"], os.O_WRONLY), (2, command["err"], os.O_WRONLY)]
    for fd, path, flags in streams:
        source = os.open(path, flags)
        os.dup2(source, fd)
        os.close(source)
    faulthandler.enable(2)  # SIGABRT prints the stacks
    if command.get("is_stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    from segapp import failpoints
    from segapp.__main__ import main

    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    sys.argv = ["segapp", *command["argv"]]
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


def serve() -> None:
    """Reads commands and forks until standard input ends."""
    import segmentation_models_pytorch  # noqa: F401
    import torchvision  # noqa: F401

    import segapp.cli
    import segapp.commands.check
    import segapp.commands.predict
    import segapp.train.session  # noqa: F401

    news, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = b""
    while True:
        ready, _, _ = select.select([0, news], [], [])
        if news in ready:
            os.read(news, 4096)
            _report_ended()
        if 0 in ready:
            block = os.read(0, 2**16)
            if not block:
                return
            *lines, waiting = (waiting + block).split(b"\n")
            for line in lines:
                _fork(json.loads(line), (news, wakeup))


def _fork(command: dict[str, Any], own_fds: tuple[int, ...]) -> None:
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for fd in own_fds:
            os.close(fd)
        os._exit(run(command))
    _answer(pid=pid)


def _report_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _answer(pid=ended[0], status=os.waitstatus_to_exitcode(ended[1]))


def _answer(**words: int) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


if __name__ == "__main__":
    serve()
