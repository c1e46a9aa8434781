"""Start the trainer as a separate process that outlives its parent. No torch.

The trainer is a session leader without standard input; its output goes to `trainer.log` in the run folder. So it is not
affected by a closed terminal, a killed tmux, or Ctrl-C in the viewer.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from segapp.errors import SegappError
from segapp.run.events import EventReader
from segapp.run.files import append_to_run, open_of_run, storage_errors_of
from segapp.run.folder import RunFolder, remove_failed_start
from segapp.run.words import printable
from segapp.session.request import TrainRequest, open_folder
from segapp.training.signals import EXIT_STOPPED_AND_SAVED
from segapp.view.runs import run_state
from segapp.waiting import lines_while

DETACH_AFTER_S = 120.0
"""Maximum time that `--detach` waits for the start of the training."""

_POLL_S = 0.05
_EXIT_S = 30.0
"""Maximum wait until a trainer that has written `run_end` exits."""


def is_interactive() -> bool:
    """Return True if stdin and stderr are a terminal that can show the TUI, and this is not a rank of torchrun."""
    if os.environ.get("TERM", "") in ("", "dumb", "unknown") or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return False
    try:
        return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
    except ValueError:  # closed
        return False


class TrainerProcess:
    """A trainer that runs as a session leader."""

    def __init__(
        self, folder: RunFolder, process: subprocess.Popen[bytes], log_start: int, events: EventReader
    ) -> None:
        self.folder, self.process = folder, process
        self._log_start, self._events, self._has_begun = log_start, events, False

    @property
    def exit_code(self) -> int | None:
        """Exit code as a shell reports it; None while the process runs."""
        status = self.process.poll()
        return None if status is None else 128 - status if status < 0 else status

    def wait_until_started(self, timeout_s: float) -> bool:
        """Wait for the event `run_start`, or the end of the trainer; return True if the training has started.

        Ctrl-C is passed on to the trainer, which has nothing to save yet.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            while self.process.poll() is None and time.monotonic() < deadline_s and not self.has_begun():
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            self.process.send_signal(signal.SIGINT)
            self.process.wait()
        return self.has_begun()

    def has_begun(self) -> bool:
        self._has_begun |= any(raw["type"] == "run_start" for raw in self._events.read_raw())
        return self._has_begun

    def after_screen(self) -> int:
        """Return the exit code after the user has left the TUI: the trainer's if it has ended, else 0."""
        if self.exit_code is None and run_state(self.folder.path) not in ("finished", "stopped", "failed"):
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S)
        return self.print_end() if self.exit_code or not self.has_begun() else 0

    def print_end(self) -> int:
        """Print the trainer's error on stderr, or its last line, and return its exit code.

        The folder of a start that failed is removed, unless the error refers to the trainer's log.
        """
        code = self.exit_code or 0
        lines = self._lines()
        if code in (0, EXIT_STOPPED_AND_SAVED):  # ranks that restarted may have failed before
            if lines:
                print(printable(lines[-1]), flush=True)
            return code
        ended = f"error: the trainer ended with exit code {code}: see {self.folder.log}"
        error = self.error_lines() or [ended]
        again = [] if self.has_begun() else [f"to start again: {shlex.join(['segapp', *sys.argv[1:]])}"]
        print("\n".join(map(printable, [*error, *again])), file=sys.stderr, flush=True)
        if self.folder.is_made and not any(str(self.folder.log) in line for line in error):
            remove_failed_start(self.folder)
        return code

    def error_lines(self) -> list[str]:
        lines = self._lines()
        first = next((i for i, line in enumerate(lines) if line.startswith("error: ")), len(lines))
        return lines[first:]

    def _lines(self) -> list[str]:
        try:
            with open(open_of_run(self.folder.log), "rb") as file:
                file.seek(self._log_start)
                return file.read(2**20).decode(errors="replace").splitlines()
        except OSError:
            return []


def spawn_trainer(
    request: TrainRequest,
    *,
    config: str | None,
    resume: str | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> TrainerProcess:
    """Start the requested training as a separate process, with additional environment variables.

    Raises:
        ConfigError: the folder already contains a run.
        RunBusyError: another trainer holds the folder.
        StorageError: the folder cannot be created.
    """
    folder = open_folder(request)
    folder.acquire(print)  # raises if another process holds it; the trainer locks it itself
    folder.release()
    run = request.run if request.folder is not None else folder.path
    arguments = ["--plain", *(["--config", config] if config is not None else [])]
    arguments += ["--run", str(run)] if run is not None else []
    arguments += ["--resume", resume] if resume is not None else []
    arguments += ["--debug"] if "--debug" in sys.argv else []
    events = EventReader(folder.events, last_bytes=0)
    with storage_errors_of("open", folder.log), append_to_run(folder.log) as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "segapp", "train", *arguments, *overrides],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", **(environ or {})},
        )
    return TrainerProcess(folder, process, log_start, events)


def wait_for_start(trainer: TrainerProcess) -> int:
    """Wait for a trainer to start, leave it running, print how to view it, and return the exit code."""
    with lines_while(lambda: "waiting for the training to start"):
        has_started = trainer.wait_until_started(DETACH_AFTER_S)
    if trainer.exit_code is not None:
        return trainer.print_end()
    name = printable(trainer.folder.argument)
    state = "training" if has_started else "starting"
    print(f"run folder: {printable(str(trainer.folder.path))}")
    print(f"{state}, process {trainer.process.pid}; show it: segapp attach {name}; stop it: segapp ctl {name} stop")
    return 0


def show_training(trainer: TrainerProcess) -> int:
    """Open the TUI of a trainer, even while it is starting; return the exit code after the user has left.

    A trainer that ends before it has begun to train closes the TUI, and its error is printed.
    """
    from segapp.tui.app import run_ui

    try:
        run_ui(trainer.folder, has_trainer_ended=lambda: trainer.exit_code is not None)
    except SegappError as error:
        if trainer.exit_code is not None:
            return trainer.print_end()
        name = printable(trainer.folder.argument)
        where = f"process {trainer.process.pid} trains; show it: segapp attach {name}; stop it: segapp ctl {name} stop"
        raise error.reworded(f"{error}; {where}") from None
    return trainer.after_screen()
