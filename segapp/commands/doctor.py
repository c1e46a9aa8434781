"""`segapp doctor`: check what this machine supports, what is missing, and which command installs it.

A finding is ok, a warning (it works with limits), or missing. If a required thing is missing, training with default
settings fails. Only the standard library is needed, so the command also works in a broken installation, as long as
typer starts. torch and what needs it are tried in a child process: a wrongly installed torch may raise, crash or hang.
"""

import importlib.metadata
import json
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from segapp.memory.gpus import run_program, visible_gpus
from segapp.places import keep_compiled_code
from segapp.run.words import announce_on_terminal, plural, printable, size

GIB = 2**30
_EXTRAS = {"export": "segapp export", "png": "PNG files in half the time", "wandb": "log.wandb", "mlflow": "log.mlflow"}
_MARK = "segapp-doctor "  # begins the lines of a child that hold findings
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import segapp.commands.doctor as d; d.try_imports()"


class Diagnosis(NamedTuple):
    """A line of the report: what is there or wrong, the affected feature, and a command or sentence to fix it."""

    name: str
    state: Literal["ok", "warning", "missing"]
    found: str
    is_required: bool = False
    needed_for: str = ""
    fix: str = ""


def print_doctor(*, as_json: bool) -> int:
    """Print the findings; return 0 if training can run here, 1 if something that it requires is missing."""
    announce_on_terminal("looking at this machine")
    findings = [
        Diagnosis("python", "ok", f"{sys.version.split()[0]} ({sys.executable})", True),
        *check_packages(),
        *check_imports(),
        check_nvidia_smi(),
        *check_disks(),
    ]
    trains = not missing(findings)
    if as_json:
        print(json.dumps({"v": 1, "can_train": trains, "findings": [each._asdict() for each in findings]}, indent=2))
    else:
        print("\n".join(report_lines(findings)))
    return 0 if trains else 1


def missing(findings: Sequence[Diagnosis]) -> list[str]:
    return [finding.name for finding in findings if finding.is_required and finding.state == "missing"]


def report_lines(findings: Sequence[Diagnosis]) -> list[str]:
    width = max(len(finding.name) for finding in findings)
    lines, to_do = [], []
    for name, state, found, is_required, needed_for, fix in findings:
        # With a fix, the list below says what it is needed for.
        affected = f" (affects {needed_for})" if needed_for and not fix else ""
        lines.append(printable(f"{name:<{width}}  {state:<7}  {found}{affected}"))
        if fix:
            label = "required" if is_required and state == "missing" else f"for {needed_for}"
            to_do += [printable(f"  {name} ({label}):"), printable(f"    {fix}")]
    if to_do:
        lines += ["", "to do:", *to_do]
    if absent := ", ".join(missing(findings)):
        return [*lines, "", f"training cannot run here: {absent} missing"]
    num_gpus = sum(finding.name.startswith("cuda:") and finding.state == "ok" for finding in findings)
    return [*lines, "", f"training can run here, on {plural(num_gpus, 'GPU') if num_gpus else 'the CPU'}"]


def _install(*requirements: str, again: bool = False) -> str:
    words = " ".join(map(shlex.quote, requirements))
    return f"uv pip install --python {shlex.quote(sys.executable)} {'--reinstall ' if again else ''}{words}"


def check_packages() -> Iterator[Diagnosis]:
    """Yield a finding for each package of segapp's requirements that is missing, and one for the others."""
    try:
        from packaging.requirements import Requirement

        version = importlib.metadata.version("segapp")
        requirements = [Requirement(text) for text in importlib.metadata.requires("segapp") or []]
    except (ImportError, importlib.metadata.PackageNotFoundError):
        yield Diagnosis("segapp", "warning", "not installed as a package", False, "version checks", "uv sync")
        return
    num_ok = 0
    for needed in requirements:
        extra = next((each for each in _EXTRAS if f'"{each}"' in str(needed.marker)), "")
        if needed.marker and not needed.marker.evaluate({"extra": extra}):
            continue
        try:
            num_ok += importlib.metadata.version(needed.name) is not None
        except importlib.metadata.PackageNotFoundError:
            fix = _install(f"{needed.name}{needed.specifier}")
            yield Diagnosis(needed.name, "missing", "not installed", not extra, _EXTRAS.get(extra, "training"), fix)
    yield Diagnosis("segapp", "ok", f"{version}, with {num_ok} packages")


def _torch() -> Iterator[Diagnosis]:
    import torch

    float(torch.ones(2).sum())
    cuda, rocm = torch.version.cuda, torch.version.hip
    build = f"built for ROCm {rocm}" if rocm else f"built for CUDA {cuda}" if cuda else "built without CUDA"
    yield Diagnosis("torch", "ok", f"{torch.__version__}, {build}", True)
    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    threads = f"{torch.get_num_threads()} for a training on the CPU; OMP_WAIT_POLICY: {policy} (segapp docs speed)"
    yield Diagnosis("threads", "ok", threads)


def _torchvision() -> Iterator[Diagnosis]:
    import torch
    import torchvision

    torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    yield Diagnosis("torchvision", "ok", f"{torchvision.__version__}, matches torch", True)


def _trainer() -> Iterator[Diagnosis]:
    import segapp.session.session  # noqa: F401

    yield Diagnosis("trainer", "ok", "all its modules can be imported", True)


def _triton() -> Iterator[Diagnosis]:
    import torch
    import triton

    yield Diagnosis("triton", "ok", triton.__version__)
    compiler = shutil.which(os.environ.get("CC", "gcc").split()[0]) or shutil.which("clang")
    if compiler is None and torch.cuda.is_available():  # loss.options.implementation: auto takes Triton then, and fails
        fix = "install gcc, or set CC to a C compiler; without one: loss.options.implementation: reference"
        yield Diagnosis("c compiler", "missing", "no CC, gcc or clang on PATH", True, "the fast loss on GPUs", fix)


def _cuda() -> Iterator[Diagnosis]:
    import torch

    from segapp.accelerator import CUDA, GPUS

    # torch only warns about a driver that is broken or too old, and then counts no GPU.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        seen = visible_gpus()
        found, fix = "no GPU: training runs on the CPU", seen.cure
        if torch.version.cuda is None and torch.version.hip is None:
            found = "this torch is built without CUDA"
            fix = _install("torch", "torchvision", again=True) if seen.listed else ""
        elif seen.cure and not seen.gpus:
            found = seen.problem
        elif caught:
            found = " ".join(str(caught[0].message).split())[:300]
            newer = "install a newer NVIDIA driver, or a torch built for this driver's CUDA"
            fix = newer if "too old" in found else seen.cure or "see nvidia-smi -q and dmesg; restart the machine"
        yield Diagnosis("cuda", "missing", found, False, "training on GPUs", fix)
    yield from map(_device, range(count))
    for device in (each for gpu in GPUS if gpu is not CUDA for each in gpu.devices()):
        yield Diagnosis(str(device), "ok", f"use it with parallel.devices: [{device.type}]")


def _device(index: int) -> Diagnosis:
    import torch

    facts = torch.cuda.get_device_properties(index)
    found = f"{facts.name}, {facts.total_memory / GIB:.1f} GiB, compute capability {facts.major}.{facts.minor}"
    try:
        float(torch.ones(2, device=f"cuda:{index}").sum())
    except Exception as error:  # a busy, broken or old GPU may raise anything
        fix = "nvidia-smi shows the processes on it; no kernel image: install a torch built for this GPU"
        return Diagnosis(f"cuda:{index}", "warning", f"{found}; {error}", False, "training on this GPU", fix)
    return Diagnosis(f"cuda:{index}", "ok", found)


IMPORTS = {"torch": _torch, "torchvision": _torchvision, "trainer": _trainer, "triton": _triton, "cuda": _cuda}
# A broken driver hangs in the last one.


def try_imports() -> None:
    """Try everything in this (child) process; print the findings of each, and its name, as soon as they are known."""
    for name, check in IMPORTS.items():
        try:
            findings = list(check())
        except Exception as error:  # an import may raise anything
            findings = [_failed(name, f"cannot be imported: {type(error).__name__}: {str(error)[:300]}")]
        print(f"\n{_MARK}{json.dumps(findings)}", flush=True)
        if name == "torch" and findings[0].state == "missing":
            return  # the others need it


def _failed(name: str, found: str) -> Diagnosis:
    if name in ("torch", "torchvision"):
        return Diagnosis(name, "missing", found, True, "training", _install("torch", "torchvision", again=True))
    # libGL is needed by opencv-python, which another package can have put over opencv-python-headless.
    opencv = _install("opencv-python-headless", again=True) if "libGL" in found else ""
    fixes = {"trainer": opencv or "install what this error names", "triton": _install("triton", again=True)}
    fix = fixes.get(name, "see nvidia-smi -q and dmesg; restart the machine")
    is_required = name == "trainer"
    return Diagnosis(name, "missing", found, is_required, "training" if is_required else "training on GPUs", fix)


def check_imports(timeout_s: float = 240.0) -> list[Diagnosis]:
    """Return the findings of a child with this process's module path; the first without an answer crashed or hung."""
    keep_compiled_code()
    status, output = run_program([sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path)], timeout_s)
    lines = output.splitlines()
    answers = [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
    findings = [Diagnosis(*values) for rows in answers for values in rows]
    if len(answers) < len(IMPORTS) and "torch" not in missing(findings):
        how = f"no answer within {timeout_s:g} s" if status is None else f"exit status {status}: {lines[-1][:300]}"
        findings.append(_failed(list(IMPORTS)[len(answers)], f"its import crashes or hangs: {how}"))
    return findings


def check_nvidia_smi(timeout_s: float = 10.0) -> Diagnosis:
    """Return the number of GPUs and the driver that nvidia-smi lists, how many CUDA shows, and what is wrong."""
    seen = visible_gpus(timeout_s=timeout_s)
    problem = seen.problem.removeprefix("nvidia-smi: ")
    needed_for = "free memory for parallel.devices: auto and in the TUI"
    if not seen.listed:
        return Diagnosis("nvidia-smi", "missing", problem, False, needed_for, seen.cure)
    shown = f", of which a process sees {len(seen.gpus)}" if len(seen.gpus) < len(seen.listed) else ""
    found = f"lists {plural(len(seen.listed), 'GPU')}, driver {seen.listed[0].driver}{shown}"
    if not problem:
        return Diagnosis("nvidia-smi", "ok", found)
    return Diagnosis("nvidia-smi", "warning", f"{found}; {problem}", False, needed_for, seen.cure)


def check_disks() -> Iterator[Diagnosis]:
    yield _space("run disk", "runs", 5 * GIB, "checkpoints", "choose another folder with --run")
    yield _space(
        "temporary disk",
        os.environ.get("TMPDIR", "/tmp"),
        GIB // 2,
        "compiled kernels",
        "free space there, or set TMPDIR",
    )
    if os.path.isdir("/dev/shm"):  # other systems have none
        fix = "start the container with --shm-size=8g (or --ipc=host), or set data.workers: 0; ls -l /dev/shm"
        shared = _space("shared memory", "/dev/shm", GIB, "data workers", fix)
        # 1 GiB holds two batches per data worker. Without any, a training with data.workers: 0 is possible.
        yield shared if shared.state == "ok" else shared._replace(state="warning", is_required=False)


def _space(name: str, path: str, least_bytes: int, needed_for: str, fix: str) -> Diagnosis:
    """Return the finding of the file system of a folder, or of the nearest existing folder above it."""
    whole = Path(path).absolute()
    there = next(each for each in (whole, *whole.parents) if os.path.exists(each))
    if not os.access(there, os.W_OK | os.X_OK):
        return Diagnosis(name, "missing", f"{there} cannot be written", True, needed_for, fix)
    total, _, free = shutil.disk_usage(there)
    found = f"{size(free)} free of {size(total)} ({there})"
    if free < least_bytes:
        return Diagnosis(name, "warning", f"{found}, {size(least_bytes)} are advised", False, needed_for, fix)
    return Diagnosis(name, "ok", found)
