"""Run a sweep: trainers as processes in slots, each watched until its end. torch is imported only to count GPUs.

A trainer is a normal `segapp train` in the run's folder. If this process is killed, the trainer gets SIGTERM, saves and
ends; the next `segapp sweep` resumes it.

Its GPUs are set by CUDA_VISIBLE_DEVICES, not by `parallel.devices`: a process that sees only one GPU makes no context
on the others, and the run's config does not contain a GPU's number on this machine, so the run can be resumed,
evaluated and compared anywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from segapp.commands.spawn import TrainerProcess, spawn_trainer
from segapp.commands.sweep.overview import Overview
from segapp.errors import ConfigError, RunBusyError, SegappError
from segapp.run.events import EventReader
from segapp.run.folder import is_run
from segapp.run.sweep import SweepFolder, SweepRun
from segapp.run.words import first_line
from segapp.training.request import plan_request
from segapp.training.signals import EXIT_STOPPED_AND_SAVED, StopSignals

_POLL_S = 0.1
_LOOK_S = 1.0
"""Interval at which events of the running trainers are read and locks of other trainers are checked."""
_SIGNALLED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Slot:
    """A place for one training at a time.

    Attributes:
        name: the devices, for the user; empty: the devices in each config.
        environ: environment variables of its trainers.
    """

    name: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Running:
    run: SweepRun
    slot: Slot
    trainer: TrainerProcess
    events: EventReader
    began_s: float
    has_started: bool = False
    is_told: bool = False


class SweepRunner:
    """Trains the runs of a locked sweep in slots, until all have ended or a signal asks to stop."""

    def __init__(self, sweep: SweepFolder, slots: Sequence[Slot], overview: Overview) -> None:
        self.sweep, self.overview = sweep, overview
        self._free = list(slots)
        self._running: list[_Running] = []
        self._next_look_s = 0.0

    def carry_out(self, runs: Sequence[SweepRun]) -> bool:
        """Train runs in their order; return False if a signal has stopped the sweep."""
        waiting = list(runs)
        with StopSignals() as signals:
            signals.forward_checkpoint_requests(lambda: self._signal_all(signal.SIGUSR1))
            while self._running or (waiting and not signals.is_set):
                if not signals.is_set:
                    self._start_from(waiting)
                else:
                    self._stop_all()
                is_time = time.monotonic() >= self._next_look_s
                for each in list(self._running):
                    self._follow(each, is_time=is_time)
                if is_time:
                    self._next_look_s = time.monotonic() + _LOOK_S
                time.sleep(_POLL_S)
            return not signals.is_set

    def _start_from(self, waiting: list[SweepRun]) -> None:
        """Start the next runs in the free slots."""
        for run in list(waiting):
            if not self._free:
                return
            if self.sweep.folder_of(run.name).is_locked():
                self.overview.held(run)
                continue
            waiting.remove(run)
            if self.sweep.state_of(run) == "finished":  # by the trainer that held it
                self.overview.ended(run, 0.0, 0)
                continue
            self._start(run, self._free.pop(0))

    def _start(self, run: SweepRun, slot: Slot) -> None:
        folder = self.sweep.folder_of(run.name)
        config, resume = start_of(self.sweep, run)
        try:
            request = plan_request(config, [], folder.path if resume is None else None, resume)
            trainer = spawn_trainer(request, config=config, resume=resume, environ=slot.environ, ends_with_parent=True)
        except RunBusyError:  # by a trainer that has just begun
            self._free.append(slot)
            return
        except SegappError as error:
            self._free.append(slot)
            reason = first_line(error)
            self.sweep.note_end(run.name, error.exit_code, reason)
            self.overview.failed(run, error.exit_code, reason)
            return
        self.overview.started(run, slot.name, is_resumed=resume is not None)
        events = EventReader(folder.events, last_bytes=None if resume is None else 0)
        self._running.append(_Running(run, slot, trainer, events, time.monotonic()))

    def _follow(self, each: _Running, *, is_time: bool) -> None:
        """Print a trainer's progress; if it has ended, record how and free its slot."""
        code = each.trainer.exit_code
        if is_time or code is not None:
            for raw in each.events.read_raw():
                each.has_started |= raw["type"] == "run_start"
                self.overview.event(each.run, raw)
        if code is None:
            return
        self._running.remove(each)
        self._free.append(each.slot)
        each.events.close()
        seconds = time.monotonic() - each.began_s
        if code in (0, EXIT_STOPPED_AND_SAVED) or (each.is_told and code in _SIGNALLED):
            self.sweep.note_end(each.run.name, None, None)
            self.overview.ended(each.run, seconds, code)
        else:
            lines = each.trainer.error_lines()
            reason = lines[0].removeprefix("error: ") if lines else f"see {each.trainer.folder.log}"
            if code < 128:  # else it was killed, and the next command tries it again
                self.sweep.note_end(each.run.name, code, reason)
            self.overview.failed(each.run, code, reason)

    def _stop_all(self) -> None:
        for each in self._running:
            if not each.is_told:
                each.is_told = True
                self._signal(each, signal.SIGINT)

    def _signal_all(self, number: int) -> None:
        for each in self._running:
            if each.has_started:  # before that, the signal would end the process
                self._signal(each, number)

    @staticmethod
    def _signal(each: _Running, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.trainer.process.pid, number)


def start_of(sweep: SweepFolder, run: SweepRun) -> tuple[str | None, str | None]:
    """Return the config and the folder to resume of a run; the folder is None for a new run."""
    folder = sweep.folder_of(run.name)
    is_new = not is_run(folder.path) or folder.is_failed_start()
    # A run that was killed before it wrote its config begins with the sweep's, too.
    has_config = not is_new and folder.config_yaml.is_file()
    return None if has_config else str(sweep.config_of(run.name)), None if is_new else str(folder.path)


def parse_slots(text: str | None, environ: Mapping[str, str]) -> list[Slot]:
    """Return the slots of `--devices`: `0,1` one GPU each, `0+1,2+3` two each, `cpu,cpu` two CPU trainings.

    Without the option there is one slot, with the devices of each config. Numbers are positions in CUDA_VISIBLE_DEVICES
    of `environ`.
    """
    if text is None:
        return [Slot()]
    words = [word.strip() for word in text.split(",")]
    numbers = {number for word in words if word != "cpu" for number in word.split("+")}
    wrong = sorted(number for number in numbers if not number.strip().isdecimal())
    if wrong:
        raise ConfigError(f"--devices {text}: {wrong[0]!r} is not a device: name GPUs as 0,1 or 0+1,2+3, or cpu,cpu")
    visible = _visible_gpus(environ) if numbers else []
    missing = sorted(int(number) for number in numbers if int(number) >= len(visible))
    if missing:
        there = f"there are {len(visible)}, numbered from 0" if visible else "no GPU is visible here"
        raise ConfigError(f"--devices {text}: there is no GPU {missing[0]}: {there}")
    # Without a limit, each trainer would use one thread per core.
    threads = {} if len(words) == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(words)))}
    threads = {name: environ.get(name, value) for name, value in threads.items()}
    gpus = [",".join(visible[int(number)] for number in word.split("+") if word != "cpu") for word in words]
    return [Slot(word, {**threads, "CUDA_VISIBLE_DEVICES": own}) for word, own in zip(words, gpus, strict=True)]


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES of the GPUs that torch sees; counting them makes no CUDA context."""
    import torch

    count = torch.cuda.device_count()
    named = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
