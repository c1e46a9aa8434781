"""Training as a process of its own: started here, living on without whoever started it. No torch here.

The trainer gets a session of its own, no standard input, and the run folder's `trainer.log` for what it prints. So
neither a closed terminal nor a killed tmux nor a Ctrl-C in the viewer reaches it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from segapp.run.events import EventReader
from segapp.run.folder import RunFolder
from segapp.run.state import run_state
from segapp.run.text import printable
from segapp.train.control.signals import EXIT_STOPPED_AND_SAVED
from segapp.train.request import TrainRequest

ATTACH_AFTER_S = 15.0
"""The UI opens after this long at the latest: it shows a trainer that still begins as just that."""

DETACH_AFTER_S = 120.0
"""`--detach` waits at most this long to see the training begin."""

_POLL_S = 0.05
_LEAVE_S = 30.0


def is_interactive(
    stdin: TextIO | None = None, stderr: TextIO | None = None, environ: Mapping[str, str] | None = None
) -> bool:
    """Whether a screen can be shown here: a terminal at both ends that can do more than print, and no torchrun."""
    environ = os.environ if environ is None else environ
    streams = (sys.stdin if stdin is None else stdin, sys.stderr if stderr is None else stderr)
    if environ.get("TERM", "") in ("", "dumb", "unknown") or ("RANK" in environ and "WORLD_SIZE" in environ):
        return False
    try:
        return all(stream is not None and stream.isatty() for stream in streams)
    except ValueError:  # closed
        return False


class TrainerProcess:
    """A trainer in a session of its own.

    Args:
        folder: of the run.
        process: the trainer, or what launches its ranks.
        log_start: where its lines begin in `trainer.log`, bytes.
        seen: reads the events that it writes.
    """

    def __init__(self, folder: RunFolder, process: subprocess.Popen[bytes], log_start: int, seen: EventReader) -> None:
        self.folder, self.process = folder, process
        self._log_start, self._seen = log_start, seen

    @property
    def exit_code(self) -> int | None:
        """As a shell would say it; None while it runs."""
        status = self.process.poll()
        return None if status is None else 128 - status if status < 0 else status

    def wait_until_begun(self, timeout_s: float) -> bool:
        """Waits for the first step's announcement (`run_start`), or the trainer's end.

        Ctrl-C goes on to the trainer, which has nothing to save yet.

        Returns:
            Whether it began.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            while self.process.poll() is None and time.monotonic() < deadline_s:
                if any(raw["type"] == "run_start" for raw in self._seen.read_raw()):
                    return True
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            self.process.send_signal(signal.SIGINT)
            self.process.wait()
        return any(raw["type"] == "run_start" for raw in self._seen.read_raw())

    def after_screen(self) -> int:
        """What this program exits with when the screen is left: the trainer's code if it has ended, else 0."""
        if self.exit_code is None and run_state(self.folder.path) not in ("finished", "stopped", "failed"):
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_LEAVE_S)  # it has said that it is done, and puts its things away
        return 0 if self.exit_code is None else self.tell_end()

    def tell_end(self) -> int:
        """Repeats what the trainer said at its end, its error on stderr; gives its exit code."""
        code = self.exit_code or 0
        lines = self._lines()
        first = next((i for i, line in enumerate(lines) if line.startswith("error: ")), None)
        if first is not None:
            print("\n".join(map(printable, lines[first:])), file=sys.stderr, flush=True)
        elif lines and code in (0, EXIT_STOPPED_AND_SAVED):
            print(printable(lines[-1]), flush=True)
        elif code:
            print(f"error: the trainer ended with exit code {code}: see {self.folder.log}", file=sys.stderr, flush=True)
        return code

    def _lines(self) -> list[str]:
        try:
            with self.folder.log.open("rb") as file:
                file.seek(self._log_start)
                return file.read(2**20).decode(errors="replace").splitlines()
        except OSError:
            return []


def spawn_trainer(
    plan: TrainRequest, *, config: str | None, resume: str | None, overrides: Sequence[str]
) -> TrainerProcess:
    """Starts the training of a plan in a process of its own.

    Args:
        plan: what the command line means; checked already.
        config: `--config`, as given.
        resume: `--resume`, as given.
        overrides: KEY=VALUE words.

    Raises:
        ConfigError: the folder holds a run already.
        RunBusyError: another trainer has the folder.
        StorageError: the folder cannot be made.
    """
    folder = plan.folder or RunFolder.create(plan.config.name, path=plan.run)
    folder.acquire()  # says who holds it, if somebody does; the trainer takes it itself
    folder.release()
    run = plan.run if plan.folder is not None else folder.path
    arguments = ["--plain", *(["--config", config] if config is not None else [])]
    arguments += ["--run", str(run)] if run is not None else []
    arguments += ["--resume", resume] if resume is not None else []
    arguments += ["--debug"] if "--debug" in sys.argv else []
    seen = EventReader(folder.events, from_end=True)
    with folder.log.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "segapp", "train", *arguments, *overrides],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    return TrainerProcess(folder, process, log_start, seen)


def run_name(folder: RunFolder) -> str:
    """What to call a run on the command line, from here."""
    return folder.name if Path("runs", folder.name).exists() else str(folder.path)


def wait_for_start(trainer: TrainerProcess, *, is_detached: bool) -> int | None:
    """Waits until a trainer has begun, or for long enough.

    Args:
        trainer: as `spawn_trainer` gave it.
        is_detached: leave it then, and say how to come back.

    Returns:
        The exit code; None where the training goes on and is to be shown.
    """
    has_begun = trainer.wait_until_begun(DETACH_AFTER_S if is_detached else ATTACH_AFTER_S)
    if trainer.exit_code is not None and not (has_begun and not is_detached):
        return trainer.tell_end()
    if not is_detached:
        return None
    name = printable(run_name(trainer.folder))
    state = "training" if has_begun else "it still prepares"
    print(f"run folder: {printable(str(trainer.folder.path))}")
    print(f"{state}, process {trainer.process.pid}; watch it: segapp attach {name}; stop it: segapp ctl {name} stop")
    return 0
