"""The facts of this machine as plain values: the "facts" of `segapp doctor --json`. Standard library only.

torch and the packages that depend on it are imported in a child process, because a wrongly installed torch may raise,
crash or hang. One child tries all imports; if it dies or does not answer, another child tries the remaining ones. No
function here raises for a missing or broken component; an unknown value is None.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

IMPORTS_S = 90.0
"""Maximum wait for each child. The first import of torch from a slow disk takes tens of seconds."""
NVIDIA_SMI_S = 10.0
"""Maximum wait for nvidia-smi, which hangs if the driver has a problem."""

_SMI_QUERY = "--query-gpu=index,uuid,driver_version,memory.total,memory.used,name"
_MARK = "segapp-doctor "
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from segapp.commands.machine import run_imports; run_imports(sys.argv[2:])"
)


def collect_facts() -> Facts:
    """Return all facts of this machine; takes as long as the imports of torch and the trainer."""
    return {
        "segapp": _version("segapp"),
        "folder": str(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "installer": "pip" if importlib.util.find_spec("pip") is not None else "uv",
        "packages": list(_packages()),
        "imports": try_imports(),
        "nvidia_smi": ask_nvidia_smi(),
        "amd_smi": shutil.which("amd-smi"),
        "compiler": find_compiler(os.environ),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "disks": _disks(),
    }


def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str, str]:
    """Run a program and its children for a limited time, even if it cannot be killed (a process in a driver call).

    Returns:
        The exit status (minus the number of a signal; None: it ran out of time), its output, its errors.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        status: int | None = None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(1.0)
        for file in (out, err):
            file.seek(0)
        return status, out.read().decode(errors="replace"), err.read().decode(errors="replace")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except Exception:  # not installed, or its metadata is damaged
        return None


def _packages() -> Iterator[Facts]:
    """Yield the distributions in segapp's requirements for this platform, with the installed versions."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in importlib.metadata.requires("segapp") or []]
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return
    for needed in requirements:
        extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)""", str(needed.marker))
        if extra is None and needed.marker is not None and not needed.marker.evaluate():
            continue
        version = _version(needed.name)
        yield {
            "name": needed.name,
            "requirement": f"{needed.name}{needed.specifier}",
            "extra": extra[1] if extra else None,
            "version": version,
            "is_in_range": None if version is None else needed.specifier.contains(version, prereleases=True),
        }


def _torch() -> Facts:
    import torch

    float(torch.ones(2).sum())
    return {"version": str(torch.__version__), "cuda_build": torch.version.cuda, "rocm_build": torch.version.hip}


def _torchvision() -> Facts:
    import torch
    import torchvision

    torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    return {"version": str(torchvision.__version__)}


def _triton() -> Facts:
    import triton

    return {"version": str(triton.__version__)}


def _trainer() -> Facts:
    import segapp.training.session  # noqa: F401

    return {}


def _cuda() -> Facts:
    import torch

    from segapp.accelerator import CUDA, GPUS

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = " ".join(str(caught[0].message).split()) if caught else ""
    others = {gpu.kind: [gpu.facts(each).name for each in gpu.devices()] for gpu in GPUS if gpu is not CUDA}
    return {"reason": reason[:300], "devices": [_device(index) for index in range(count)], "others": others}


def _device(index: int) -> Facts:
    """Return the properties of a CUDA device, and the error of a small computation on it."""
    import torch

    error = ""
    try:
        float(torch.ones(2, device=f"cuda:{index}").sum())
    except Exception as raised:  # a busy, broken or old GPU may raise anything
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


IMPORTS: dict[str, Callable[[], Facts]] = {
    "torch": _torch,
    "torchvision": _torchvision,
    "triton": _triton,
    "trainer": _trainer,
    "cuda": _cuda,  # last: a broken driver hangs here
}


def _result(status: str, error: str = "", facts: Facts | None = None) -> Facts:
    """Return the result of an import: ok, failed, crashed, hung, or skipped because torch had failed before."""
    return {"status": status, "error": error, "facts": facts or {}}


def run_imports(names: Sequence[str]) -> None:
    """Try imports in this (child) process, and print a line for each as soon as its result is known."""
    for name in names:
        try:
            result = _result("ok", facts=IMPORTS[name]())
        except Exception as error:  # an import may raise anything
            result = _result("failed", _one_line(error))
        print(f"\n{_MARK}{json.dumps([name, result])}", flush=True)
        if name == "torch" and result["status"] == "failed":
            return  # the others need it


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def try_imports(timeout_s: float = IMPORTS_S) -> dict[str, Facts]:
    """Return the result of each import, tried for a limited time in children with this process's module path."""
    found: dict[str, Facts] = {}
    names = list(IMPORTS)
    while names:
        status, output, errors = _run([sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path), *names], timeout_s)
        lines = [line for line in output.splitlines() if line.startswith(_MARK)]
        found |= dict(json.loads(line.removeprefix(_MARK)) for line in lines)
        left = [name for name in names if name not in found]
        if left and found.get("torch", {}).get("status") != "failed":  # the child ended during this import
            found[left[0]] = _unanswered(status, errors, timeout_s)
        if found["torch"]["status"] != "ok":
            return {name: found.get(name, _result("skipped", "torch cannot be imported")) for name in IMPORTS}
        names = left[1:]
    return found


def _unanswered(status: int | None, errors: str, timeout_s: float) -> Facts:
    """Return the result of an import during which the process ended or stopped answering."""
    if status is None:
        return _result("hung", f"no answer within {timeout_s:g} s")
    last = (errors.strip().splitlines() or [""])[-1][:300]
    how = signal.strsignal(-status) if status < 0 else f"exit status {status}"
    return _result("crashed", f"the process ended: {how}" + (f": {last}" if last else ""))


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """Return the C compiler that Triton uses: CC, gcc or clang."""
    path = environ.get("PATH")
    if given := environ.get("CC"):
        return given if shutil.which(given.split()[0], path=path) else None
    return shutil.which("gcc", path=path) or shutil.which("clang", path=path)


def ask_nvidia_smi(timeout_s: float = NVIDIA_SMI_S) -> Facts:
    """Return the GPUs that nvidia-smi lists, or why it lists none: ok, absent, failed or hung."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"status": "absent", "error": "", "gpus": []}
    try:
        status, output, errors = _run([program, _SMI_QUERY, "--format=csv,noheader,nounits"], timeout_s)
    except OSError as raised:
        return {"status": "failed", "error": raised.strerror or str(raised), "gpus": []}
    if status is None:
        return {"status": "hung", "error": f"no answer within {timeout_s:g} s", "gpus": []}
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    gpus = [_gpu(*row) for row in rows if len(row) == _SMI_QUERY.count(",") + 1]
    if status == 0 and gpus:
        return {"status": "ok", "error": "", "gpus": gpus}
    error = ((output + errors).strip().splitlines() or [f"exit status {status}"])[0][:300]
    return {"status": "failed", "error": error, "gpus": []}


def _gpu(index: str, uuid: str, driver: str, total_mib: str, used_mib: str, name: str) -> Facts:
    total, used = (float(text) if text.isdecimal() else None for text in (total_mib, used_mib))
    return {
        "index": int(index),
        "uuid": uuid.removeprefix("GPU-"),
        "driver": driver,
        "total_mib": total,
        "used_mib": used,
        "name": name,
    }


def _disks() -> Facts:
    """Return the file systems of runs, temporary files and shared memory; None for one that this machine lacks."""
    temporary = None
    with contextlib.suppress(OSError):  # none of the usual folders can be written
        temporary = _disk(Path(tempfile.gettempdir()))
    shared = Path("/dev/shm")
    return {
        "run": _disk(Path("runs")),
        "temporary": temporary,
        "shared_memory": _disk(shared) if shared.is_dir() else None,
    }


def _disk(path: Path) -> Facts:
    """Return the file system of a folder, or of the nearest existing folder above it."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # unlike Path.exists, also below a folder without access
        path = path.parent
    total = free = 0
    with contextlib.suppress(OSError):
        total, _, free = shutil.disk_usage(path)
    is_writable = os.access(path, os.W_OK | os.X_OK)
    return {"path": str(path), "total_bytes": total, "free_bytes": free, "is_writable": is_writable}
