"""State of the process that a training changes, and restores at its end: random numbers, umask, numerics.

Trainings in several threads of one process share this state.
"""

import contextlib
import os
import random
import threading
from collections.abc import Iterator

import numpy as np

from segapp.accelerator import all_random_states_kept
from segapp.assembly.devices import numerics
from segapp.config import TrainConfig
from segapp.errors import ConfigError
from segapp.losses import AdditiveCriterion
from segapp.models import SegmentationModel
from segapp.models.inspection import draws_numbers
from segapp.run.files import OTHERS_WRITE

_lock = threading.Lock()
_trainings: list[TrainConfig] = []
_trained: list[tuple[SegmentationModel, AdditiveCriterion]] = []
"""The models that the trainings of this process train, and their losses."""
_restoring = contextlib.ExitStack()


@contextlib.contextmanager
def process_state(train: TrainConfig) -> Iterator[None]:
    """Set the state of the process for a training; the last of several trainings in threads restores it.

    Raises:
        ConfigError: another training in this process needs other numerics.
    """
    with _lock:
        for key in ("deterministic", "tf32"):
            if _trainings and getattr(_trainings[0], key) != getattr(train, key):
                raise ConfigError(
                    f"train.{key} = {getattr(train, key)}, but another training in this process has the other value, "
                    "and the switch is one of the process: train one after the other, or in separate processes",
                    key=f"train.{key}",
                ).see("python")
        if not _trainings:
            with contextlib.ExitStack() as stack:
                stack.enter_context(numerics(deterministic=train.deterministic, tf32=train.tf32))
                stack.enter_context(_random_numbers_kept())
                stack.callback(os.umask, before := os.umask(OTHERS_WRITE))
                os.umask(before | OTHERS_WRITE)  # only the owner can write to the files of a run
                _restoring.push(stack.pop_all())
        _trainings.append(train)
    try:
        yield
    finally:
        with _lock:
            _trainings.remove(train)
            if not _trainings:
                _restoring.close()


@contextlib.contextmanager
def sharing_random_numbers(model: SegmentationModel, criterion: AdditiveCriterion) -> Iterator[None]:
    """Refuse a training next to another one of this process if a model or loss of them draws random numbers itself.

    Raises:
        ConfigError: both would draw from the generators of the process, in an order that threads decide.
    """
    with _lock:
        others = [*_trained] and [(model, criterion), *_trained]
        if drawing := next((each for each, loss in others if draws_numbers(each, loss)), None):
            raise ConfigError(
                f"another training runs in this process, and {drawing.name} or its loss draws random numbers in a step "
                "from a generator that both would share: train one after the other, or in separate processes"
            ).see("python")
        _trained.append((model, criterion))
    try:
        yield
    finally:
        with _lock:
            _trained.remove((model, criterion))


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore the process's random numbers at the end: of Python, numpy and torch, on the CPU and on GPUs."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with all_random_states_kept():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
