"""A process that imports once what trainings need, and forks for each run of a sweep. No torch outside that process.

A new trainer spends seconds with imports; a fork of a process that has them begins at once. The trainer is otherwise
the same: leader of a session of its own, output in the log of its run, the environment of its slot, signals as in a new
process. The process that forks computes nothing and never touches CUDA: a fork has neither the threads nor the CUDA
context of its parent.

Commands come as JSON lines on its standard input, `{"words", "environ", "log"}`; the answer to each is `{"pid"}`, and
once that trainer has ended `{"pid", "status"}`. The trainers get SIGTERM, and so save and end, when it is gone; it ends
with the sweep, whose end closes its standard input.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from segapp.commands.spawn import end_with
from segapp.config import RunConfig

_ANSWER_S = 300.0
"""Longest wait for the first answer: the imports take that long on a very busy machine."""
_POLL_S = 0.05
_LOST = -signal.SIGKILL
"""Status of trainers whose process that forks is gone: nobody knows theirs."""
_LIBRARIES = {"smp": "segmentation_models_pytorch", "torchvision": "torchvision.models.segmentation"}


class WarmError(Exception):
    """The process that forks has ended, or does not answer."""


class WarmTrainer:
    """A trainer that the warm process has forked; with the methods of `subprocess.Popen` that a sweep uses."""

    def __init__(self, pid: int, owner: WarmProcess) -> None:
        self.pid = pid
        self._owner = owner

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal; None while it runs."""
        return self._owner.status_of(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return what `poll` does.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("segapp train", timeout or 0.0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal unless the trainer has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)


class WarmProcess:
    """The process that forks, as the sweep sees it.

    Args:
        modules: to import in addition to those of every training.
        environ: variables of all trainers; OMP_NUM_THREADS counts only if it is set before the imports.
    """

    def __init__(self, modules: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "segapp.commands.sweep.warm", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the sweep, which asks its trainers to stop
            env={**os.environ, **(environ or {})},
        )
        self._text = b""
        self._begun: list[int] = []
        self._ended: dict[int, int] = {}
        self.is_gone = False

    def start(self, words: Sequence[str], environ: Mapping[str, str], log: str) -> WarmTrainer:
        """Fork a trainer.

        Args:
            words: `segapp`'s arguments.
            environ: all of its variables.
            log: the file to which its output is appended.

        Raises:
            WarmError: there is no answer.
        """
        assert self._process.stdin is not None
        command = {"words": list(words), "environ": dict(environ), "log": log}
        if not self.is_gone:
            try:
                self._process.stdin.write(json.dumps(command).encode() + b"\n")
                self._process.stdin.flush()
            except OSError:
                self.is_gone = True
        deadline_s = time.monotonic() + _ANSWER_S
        while not self._begun:
            if self.is_gone or time.monotonic() > deadline_s:
                self.close()
                raise WarmError(f"the process that starts trainings has ended with {self._process.poll()}")
            self._read(_POLL_S)
        return WarmTrainer(self._begun.pop(), self)

    def status_of(self, pid: int) -> int | None:
        """Return how a trainer has ended; None while it runs."""
        self._read(0.0)
        return self._ended.get(pid, _LOST if self.is_gone else None)

    def close(self) -> None:
        """End the process; trainers that still run save and end."""
        self.is_gone = True
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.kill()
        self._process.wait()

    def _read(self, timeout_s: float) -> None:
        if self.is_gone or self._process.stdout is None:
            return
        fd = self._process.stdout.fileno()
        if not select.select([fd], [], [], timeout_s)[0]:
            return
        block = os.read(fd, 2**16)
        self.is_gone = not block
        *lines, self._text = (self._text + block).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "status" in answer:
                self._ended[answer["pid"]] = answer["status"]
            else:
                self._begun.append(answer["pid"])


def can_fork() -> bool:
    """Return True if trainings may be forked here: on Linux; the libraries of macOS do not outlive a fork."""
    return sys.platform == "linux"


def modules_of(configs: Sequence[RunConfig]) -> list[str]:
    """Return the libraries that trainings with these configs import late."""
    modules = {_LIBRARIES[config.model.library] for config in configs if config.model.library in _LIBRARIES}
    if any(config.log.tensorboard for config in configs):
        modules.add("torch.utils.tensorboard")
    return sorted(modules)


def serve(modules: Sequence[str]) -> None:
    """Import, then read commands and fork until standard input ends; a fork returns from here with `SystemExit`."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what an import prints is no answer
    gc.disable()
    for name in ("segapp.cli", "segapp.training.session", *modules):
        with contextlib.suppress(ImportError):  # the trainings report it
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    text = b""
    while True:
        if select.select([0], [], [], _POLL_S)[0]:
            block = os.read(0, 2**16)
            if not block:
                return
            *lines, text = (text + block).split(b"\n")
            for line in lines:
                parent = os.getpid()
                if (pid := os.fork()) == 0:
                    os.close(answers)
                    _train(json.loads(line), parent)
                _answer(answers, pid=pid)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                _answer(answers, pid=ended[0], status=os.waitstatus_to_exitcode(ended[1]))


def _answer(fd: int, **words: int) -> None:
    os.write(fd, json.dumps(words).encode() + b"\n")


def _train(command: dict[str, Any], parent_pid: int) -> None:
    """Become the process of a trainer, and end as one."""
    from segapp import failpoints
    from segapp.accelerator import GPUS

    assert not any(gpu.is_initialized() for gpu in GPUS), "a GPU's context does not outlive a fork"
    os.setsid()
    if (ask_for_signal := end_with(parent_pid)) is not None:
        ask_for_signal()
    os.environ.clear()
    os.environ.update(command["environ"])
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    log = os.open(command["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, closefd=False, buffering=1, errors=errors)  # noqa: SIM115
        for fd, mode, errors in ((0, "r", None), (1, "w", None), (2, "w", "backslashreplace"))
    )
    atexit.register(gc.unfreeze)  # the end of the interpreter frees what is not frozen; libraries report the rest
    sys.argv = ["segapp", *command["words"]]
    runpy.run_module("segapp", run_name="__main__", alter_sys=True)  # as `python -m segapp` does
    sys.exit(0)


if __name__ == "__main__":
    serve(sys.argv[1:])
