"""Runs functions in another process: torch knows the simulated devices for the rest of a process."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from tests.support import ROOT


def in_own_process(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what a function of a module returns, on one thread of a process that all such calls share."""
    return _pool().submit(function, *args, **options).result()


def printed_json(main: Callable[[], None]) -> Any:
    """Return the JSON that a function prints there."""
    return json.loads(in_own_process(_printed, main))


def _printed(main: Callable[[], None]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main()
    return out.getvalue()


@functools.cache
def _pool() -> ProcessPoolExecutor:
    """The start and the imports of the process take seconds."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    os.chdir(ROOT)  # the folder of the test that started it is removed
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
