"""Imports tried in a child process, because a wrongly installed torch may raise, crash or hang.

One child tries them all. If it dies or does not answer, the next child goes on behind the import that ended it. Each
answer is one line on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segapp.commands.doctor.facts import ImportResult

TIMEOUT_S = 90.0
"""For each child. The first import of torch from a slow disk takes tens of seconds."""

_MARK = "segapp-doctor "
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from segapp.commands.doctor.imports import run_imports; run_imports(sys.argv[2:])"
)
_NEEDS = {"torchvision": "torch", "triton": "torch", "trainer": "torch", "cuda": "torch"}


def _torch() -> dict[str, Any]:
    import torch

    float(torch.ones(2).sum())
    return {"version": str(torch.__version__), "cuda_build": torch.version.cuda}


def _torchvision() -> dict[str, Any]:
    import torch
    import torchvision

    torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    return {"version": str(torchvision.__version__)}


def _triton() -> dict[str, Any]:
    import triton

    return {"version": str(triton.__version__)}


def _trainer() -> dict[str, Any]:
    import segapp.train.session  # noqa: F401

    return {}


def _cuda() -> dict[str, Any]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = " ".join(str(caught[0].message).split()) if caught else ""
    return {
        "reason": reason[:300],
        "kernels": list(torch.cuda.get_arch_list()) if count else [],
        "devices": [_device(index) for index in range(count)],
    }


def _device(index: int) -> dict[str, Any]:
    """Properties of a CUDA device, and the error of a small computation on it."""
    import torch

    error = ""
    try:
        float(torch.ones(2, device=f"cuda:{index}").sum())
    except Exception as raised:  # whatever the driver makes of a busy, broken or too old GPU
        error = _one_line(raised)
    found = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "uuid": str(getattr(found, "uuid", "")).removeprefix("GPU-"),
        "name": str(found.name),
        "total_mib": found.total_memory / 2**20,
        "capability": f"{found.major}.{found.minor}",
        "error": error,
    }


IMPORTS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "torchvision": _torchvision,
    "triton": _triton,
    "trainer": _trainer,
    "cuda": _cuda,  # last: a broken driver hangs here
}


def run_imports(names: Sequence[str]) -> None:
    """Try imports in this process, the child, and print a line for each as soon as its result is known."""
    failed: set[str] = set()
    for name in names:
        if _NEEDS.get(name) in failed:
            answer = {"status": "skipped", "error": f"{_NEEDS[name]} cannot be imported", "facts": {}}
        else:
            try:
                answer = {"status": "ok", "error": "", "facts": IMPORTS[name]()}
            except Exception as error:  # an import may raise anything
                failed.add(name)
                answer = {"status": "failed", "error": _one_line(error), "facts": {}}
        print(f"\n{_MARK}{json.dumps([name, answer])}", flush=True)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def try_imports(timeout_s: float = TIMEOUT_S) -> dict[str, ImportResult]:
    """Return the result of each import, tried in children with this process's module path.

    Args:
        timeout_s: for each child; the one that takes longer is killed.
    """
    found: dict[str, ImportResult] = {}
    names = list(IMPORTS)
    while names:
        child = [sys.executable, "-c", _CHILD, json.dumps(sys.path), *names]
        answer = run_bounded(child, timeout_s)
        found |= parse_answers(answer.output)
        left = [name for name in names if name not in found]
        if left:  # the child ended in this one
            found[left[0]] = ImportResult("hung" if answer.is_late else "crashed", _end(answer, timeout_s), {})
        if found["torch"].status != "ok":
            skipped = ImportResult("skipped", "torch cannot be imported", {})
            return {name: found.get(name, skipped) for name in IMPORTS}
        names = left[1:]
    return found


def parse_answers(output: str) -> dict[str, ImportResult]:
    """The answers among the lines that a child has printed."""
    found = {}
    for line in output.splitlines():
        if line.startswith(_MARK):
            name, answer = json.loads(line.removeprefix(_MARK))
            found[name] = ImportResult(**answer)
    return found


@dataclass(frozen=True)
class Answer:
    """How a program ended.

    Attributes:
        status: exit status, minus the signal's number; None where it did not end in time.
        output: standard output.
        errors: standard error.
    """

    status: int | None
    output: str
    errors: str

    @property
    def is_late(self) -> bool:
        """True if the program was killed because it took too long."""
        return self.status is None


def run_bounded(command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Answer:
    """Run a program and its children for a limited time, also if killing it has no effect (a process in a driver call).

    Raises:
        OSError: it cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, env=env
        )
        status: int | None = None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(1.0)
        return Answer(status, *(_text(file) for file in (out, err)))


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read(1 << 20).decode(errors="replace"))


def _end(answer: Answer, timeout_s: float) -> str:
    if answer.status is None:
        return f"no answer within {timeout_s:g} s"
    last = (answer.errors.strip().splitlines() or [""])[-1][:300]
    how = signal.strsignal(-answer.status) if answer.status < 0 else f"exit status {answer.status}"
    return f"the process ended: {how}" + (f": {last}" if last else "")
