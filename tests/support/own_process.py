"""Runs functions in another process: torch knows the simulated devices for the rest of a process."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support import ROOT
from tests.support.programs import segapp


def in_own_process(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what a function of a module returns, on one thread of a process that is forked for the call."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, args, options)))
        code = f"from tests.support.own_process import answer; answer({folder!r})"
        done = segapp(cwd=ROOT, code=code, timeout_s=1200)
        assert done.returncode == 0, done.stderr
        return pickle.loads(Path(folder, "answer").read_bytes())


def printed_json(main: Callable[[], None]) -> Any:
    """Return the JSON that a function prints there."""
    return json.loads(in_own_process(_printed, main))


def _printed(main: Callable[[], None]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main()
    return out.getvalue()


def answer(folder: str) -> None:
    """Call the function that lies in the folder, and leave its result there."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    function, args, options = pickle.loads(Path(folder, "call").read_bytes())
    Path(folder, "answer").write_bytes(pickle.dumps(function(*args, **options)))
