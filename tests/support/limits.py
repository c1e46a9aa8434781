"""Runs functions in processes with a limit of memory and of time, as a small machine would end them."""

from __future__ import annotations

import multiprocessing
import resource
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from segapp.errors import SegappError

LIMIT_BYTES = 2**30
LIMIT_S = 20.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "segapp.commands.predict",
        "segapp.onboarding.init",
        "segapp.assembly.trained",
        "tests.support.limits",
        "tests.support.drawn_annotations",
    ]
)


def outcome(function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> tuple[str, Any]:
    """Returns ("done", result), ("refused", message) for an error that names the problem, or ("failed", traceback).

    The function runs in a new process, which may take 1 GiB more than the imports take, and `limit_s`.
    """
    here, there = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(there, function, args))
    process.start()
    there.close()
    try:
        here.recv()  # the imports are done
        if not here.poll(limit_s):
            return "failed", f"longer than {limit_s:g} s"
        return here.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return "failed", f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _run(there: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    words = Path("/proc/self/status").read_text().split()
    limit = int(words[words.index("VmData:") + 1]) * 1024 + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    there.send("started")
    found: tuple[str, Any]
    try:
        found = "done", function(*args)
    except SegappError as error:
        found = "refused", str(error)
    except BaseException:
        found = "failed", traceback.format_exc()
    there.send(found)
