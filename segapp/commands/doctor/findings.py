"""Pure functions from the facts of a machine to findings about training on it.

A finding is ok, a warning (it works, with less), or missing; if it is also required, training with default settings
fails without it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from segapp.commands.doctor.facts import Disk, Facts, ImportResult, Package

GIB = 2**30
MIN_RUN_DISK_BYTES = 5 * GIB
"""Checkpoints of 100 to 700 MiB; five of them are kept or being written."""
MIN_TEMPORARY_BYTES = GIB // 2
MIN_SHARED_BYTES = GIB
"""Two batches for each data worker; containers get 64 MiB if nobody asks for more."""
MIN_MEMORY_BYTES = 4 * GIB
MIN_OPEN_FILES = 1024
MIN_COLUMNS, MIN_LINES = 60, 15
"""As `segapp.tui.panes.header`, which needs textual."""

State = Literal["ok", "warning", "missing"]

_COMPILER_PACKAGES = {
    "apt-get": "apt-get install -y gcc",
    "dnf": "dnf install -y gcc",
    "yum": "yum install -y gcc",
    "zypper": "zypper install -y gcc",
    "pacman": "pacman -S --noconfirm gcc",
    "apk": "apk add build-base",
    "brew": "xcode-select --install",
}
_EXTRAS = {
    "export": "segapp export; segapp predict with .onnx files",
    "wandb": "log.wandb",
    "mlflow": "log.mlflow",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: of the thing.
        state: ok, warning or missing.
        found: what is there, or what is wrong with it.
        is_required: True if training with default settings fails without it.
        needed_for: the feature that is affected; empty where nothing is.
        fix: what to do: a command, or a sentence; empty where nothing is to be done.
    """

    name: str
    state: State
    found: str
    is_required: bool = False
    needed_for: str = ""
    fix: str = ""


def can_train(findings: Sequence[Finding]) -> bool:
    """True if nothing that is required is missing."""
    return not any(finding.is_required and finding.state == "missing" for finding in findings)


def evaluate_machine(facts: Facts) -> list[Finding]:
    """All findings, in the order in which they are shown."""
    return [
        *_software(facts),
        *_packages(facts),
        *_gpus(facts),
        *_triton(facts),
        *_machine(facts),
        _terminal(facts),
    ]


def install_command(facts: Facts, packages: Sequence[str], *, extra: str | None = None, again: bool = False) -> str:
    """The command that installs packages into this environment.

    Args:
        facts: with the installer and the interpreter.
        packages: requirements as pip takes them.
        extra: the optional extra that they make up.
        again: replace what is installed under these names.
    """
    python = shlex.quote(facts.executable)
    if facts.installer == "uv-project":
        options = f" --inexact --extra {extra}" if extra else ""
        names = [_name(package) for package in packages] if again else []
        return f"cd {shlex.quote(facts.folder.rpartition('/')[0])} && uv sync{options}" + "".join(
            f" --reinstall-package {name}" for name in names
        )
    words = " ".join(shlex.quote(package) for package in packages)
    if facts.installer == "uv":
        return f"uv pip install --python {python} {'--reinstall ' if again else ''}{words}"
    return f"{python} -m pip install {'--force-reinstall ' if again else ''}{words}"


def _name(requirement: str) -> str:
    return requirement.partition("!")[0].partition(">")[0].partition("<")[0].partition("=")[0].strip()


def _software(facts: Facts) -> Iterator[Finding]:
    if facts.segapp is None:
        yield Finding(
            "segapp", "warning", f"runs from {facts.folder}, not installed as a package", needed_for="version checks",
            fix=f"{shlex.quote(facts.executable)} -m pip install -e {shlex.quote(facts.folder.rpartition('/')[0])}",
        )  # fmt: skip
    else:
        yield Finding("segapp", "ok", f"{facts.segapp} ({facts.folder})")
    found = f"{facts.python} ({facts.executable})"
    if facts.is_python_in_range is False:
        fix = f"make an environment with Python {facts.requires_python}: uv venv --python 3.12"
        yield Finding("python", "missing", f"{found}, {facts.requires_python} is needed", True, "everything", fix)
    else:
        yield Finding("python", "ok", found, True)
    yield _torch(facts)
    yield _torchvision(facts)
    trainer = facts.imports["trainer"]
    if trainer.status != "skipped":
        yield _imported(trainer, "trainer", "all its modules can be imported", fix="install what this error names")


def _torch(facts: Facts) -> Finding:
    result, package = facts.imports["torch"], _package(facts, "torch")
    build = result.facts.get("cuda_build")
    found = f"{result.facts.get('version')}, " + (f"built for CUDA {build}" if build else "built without CUDA")
    pair = [_requirement(facts, "torch"), _requirement(facts, "torchvision")]
    is_broken = package is None or package.version is not None
    finding = _imported(result, "torch", found, fix=install_command(facts, pair, again=is_broken))
    if finding.state == "ok" and package is not None and package.is_in_range is False:
        return _out_of_range(facts, package)
    return finding


def _torchvision(facts: Facts) -> Finding:
    torch, result = facts.imports["torch"], facts.imports["torchvision"]
    pair = [_requirement(facts, "torch"), _requirement(facts, "torchvision")]
    fix = install_command(facts, pair, again=True)
    if torch.status != "ok":
        package = _package(facts, "torchvision")
        version = package.version if package else None
        if version is None:
            return Finding("torchvision", "missing", "not installed", True, "every model", fix)
        return Finding("torchvision", "warning", f"{version}, not tried: it needs torch", True, "every model")
    if result.status == "failed" and "torchvision::" in result.error:
        found = f"does not match torch {torch.facts.get('version')}: {result.error}"
        return Finding("torchvision", "missing", found, True, "every model", fix)
    return _imported(result, "torchvision", f"{result.facts.get('version')}, matches torch", fix=fix)


def _imported(result: ImportResult, name: str, found: str, *, fix: str) -> Finding:
    if result.status == "ok":
        return Finding(name, "ok", found, True)
    how = {"failed": "cannot be imported", "crashed": "its import crashes", "hung": "its import hangs"}
    problem = f"{how.get(result.status, 'not tried')}: {result.error}"
    return Finding(name, "missing", problem, True, "training", fix)


def _package(facts: Facts, name: str) -> Package | None:
    return next((package for package in facts.packages if package.name.lower() == name), None)


def _requirement(facts: Facts, name: str) -> str:
    package = _package(facts, name)
    return package.requirement if package else name


def _out_of_range(facts: Facts, package: Package) -> Finding:
    found = f"{package.version}, {package.requirement} is asked for"
    fix = install_command(facts, [package.requirement])
    return Finding(package.name, "warning", found, package.extra is None, "a tested combination", fix)


def _packages(facts: Facts) -> Iterator[Finding]:
    for package in facts.packages:
        if package.extra is not None or package.name in ("torch", "torchvision"):
            continue
        if package.version is None:
            fix = install_command(facts, [package.requirement])
            yield Finding(package.name, "missing", "not installed", True, "training", fix)
        elif package.is_in_range is False:
            yield _out_of_range(facts, package)
        else:
            yield Finding(package.name, "ok", package.version, True)
    for extra, needed_for in _EXTRAS.items():
        packages = [package for package in facts.packages if package.extra == extra]
        absent = [package.requirement for package in packages if package.version is None]
        if absent:
            fix = install_command(facts, absent, extra=extra)
            yield Finding(extra, "missing", f"{', '.join(map(_name, absent))} not installed", False, needed_for, fix)
            continue
        for package in packages:
            if package.is_in_range is False:
                yield _out_of_range(facts, package)
        if packages:
            yield Finding(extra, "ok", ", ".join(f"{package.name} {package.version}" for package in packages))


def _gpus(facts: Facts) -> Iterator[Finding]:
    smi, cuda = facts.nvidia_smi, facts.imports["cuda"]
    devices = cuda.facts.get("devices", [])
    use = "free memory in parallel.devices: auto and on the screen"
    if smi.status == "ok":
        drivers = ", ".join(sorted({gpu.driver for gpu in smi.gpus}))
        yield Finding("nvidia-smi", "ok", f"lists {_count(len(smi.gpus), 'GPU')}, driver {drivers}")
    elif smi.status == "absent":
        fix = "install the NVIDIA driver's tools, or start the container with --gpus all" if devices else ""
        yield Finding("nvidia-smi", "missing", "not on PATH", False, use, fix)
    else:
        state: State = "missing" if smi.status == "hung" else "warning"
        fix = "restart the machine to reset the driver" if smi.status == "hung" else "see nvidia-smi -q"
        yield Finding("nvidia-smi", state, smi.error, False, use, fix)
    yield _cuda(facts)
    by_uuid = {gpu.uuid: gpu for gpu in smi.gpus}
    for device in devices:
        status = by_uuid.get(device["uuid"])
        used_mib = None if status is None else status.used_mib
        memory = f"{device['total_mib'] / 1024:.1f} GiB" if used_mib is None else (
            f"{used_mib / 1024:.1f} of {device['total_mib'] / 1024:.1f} GiB used"
        )  # fmt: skip
        found = f"{device['name']}, {memory}, compute capability {device['capability']}"
        yield _device(f"cuda:{device['index']}", found, device["error"], device["capability"], cuda.facts["kernels"])
    if not devices:
        for gpu in smi.gpus:
            total = "memory unknown" if gpu.total_mib is None else f"{gpu.total_mib / 1024:.1f} GiB"
            capability = f", compute capability {gpu.capability}" if gpu.capability else ""
            found = f"{gpu.name}, {total}{capability}; torch does not see it"
            yield Finding(f"gpu {gpu.index}", "warning", found, False, "training on this GPU", "see cuda above")


def _cuda(facts: Facts) -> Finding:
    torch, result, has_gpus = facts.imports["torch"], facts.imports["cuda"], bool(facts.nvidia_smi.gpus)
    use = "training on GPUs"
    devices = result.facts.get("devices", [])
    if result.status == "skipped":
        return Finding("cuda", "missing", result.error, False, use, "")
    if result.status != "ok":
        fix = "restart the machine; nvidia-smi -q and dmesg name the GPU in trouble"
        return Finding("cuda", "missing", f"does not answer: {result.error}", False, use, fix)
    if devices:
        return Finding("cuda", "ok", f"torch sees {_count(len(devices), 'GPU')}")
    if torch.facts.get("cuda_build") is None:
        fix = ""
        if has_gpus:
            pair = [_requirement(facts, "torch"), _requirement(facts, "torchvision")]
            fix = install_command(facts, pair, again=True)
        return Finding("cuda", "missing", "this torch is built without CUDA", False, use, fix)
    if facts.visible_devices is not None and facts.visible_devices.strip() in ("", "-1"):
        found = f"CUDA_VISIBLE_DEVICES={facts.visible_devices!r} hides every GPU"
        return Finding("cuda", "missing", found, False, use, "unset CUDA_VISIBLE_DEVICES" if has_gpus else "")
    found = result.facts.get("reason") or "no GPU: training runs on the CPU"
    fix = "install a newer NVIDIA driver, or a torch built for this driver's CUDA" if has_gpus else ""
    return Finding("cuda", "missing", found, False, use, fix)


def _device(name: str, found: str, error: str, capability: str, kernels: Sequence[str]) -> Finding:
    if not runs_on(capability, kernels):
        fix = "install a torch built for this GPU: https://pytorch.org/get-started/previous-versions"
        found = f"{found}; this torch has no kernels for it ({' '.join(kernels)})"
        return Finding(name, "missing", found, False, "training on this GPU", fix)
    if error:
        fix = "nvidia-smi shows the processes on it and its compute mode"
        return Finding(name, "warning", f"{found}; {error}", False, "training on this GPU", fix)
    if int(capability.partition(".")[0]) < 8:
        return Finding(name, "ok", f"{found}; no bfloat16 in hardware: use train.precision: amp-fp16")
    return Finding(name, "ok", found)


def runs_on(capability: str, kernels: Sequence[str]) -> bool:
    """True if a torch with these kernels runs on a GPU: binaries hold within a major version, PTX for all later ones.

    >>> runs_on("8.9", ["sm_80"]), runs_on("6.1", ["sm_70", "sm_80"]), runs_on("12.0", ["sm_90", "compute_90"])
    (True, False, True)
    """
    major, _, minor = capability.partition(".")
    gpu = (int(major), int(minor))
    for kernel in kernels:
        kind, _, number = kernel.partition("_")
        digits = "".join(each for each in number if each.isdigit())
        built = (int(digits[:-1]), int(digits[-1])) if len(digits) > 1 else (0, 0)
        if built <= gpu and (kind == "compute" or built[0] == gpu[0]):
            return True
    return not kernels


def _triton(facts: Facts) -> Iterator[Finding]:
    result, has_gpu = facts.imports["triton"], bool(facts.imports["cuda"].facts.get("devices"))
    use = "the fast loss on GPUs"
    if result.status == "ok":
        yield Finding("triton", "ok", str(result.facts["version"]))
    elif result.status != "skipped":
        fix = install_command(facts, ["triton"], again=result.status != "failed") if has_gpu else ""
        yield Finding("triton", "missing", result.error, False, use, fix)
    if facts.compiler is not None:
        yield Finding("c compiler", "ok", facts.compiler)
        return
    manager, sudo = facts.machine.package_manager, "" if facts.machine.is_root else "sudo "
    command = _COMPILER_PACKAGES.get(manager or "")
    fix = f"{'' if manager == 'brew' else sudo}{command}" if command else "install gcc, or set CC to a C compiler"
    found = "no C compiler in CC, and neither gcc nor clang on PATH"
    needed = has_gpu and result.status == "ok"  # loss.implementation: auto takes Triton then
    fix += "; without one: loss.implementation: reference" if needed else ""
    yield Finding("c compiler", "missing", found, needed, "Triton: the loss on GPUs", fix)


def _machine(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    cores = f"{machine.usable_cores:g} usable of {machine.num_cores}, {machine.system}"
    if machine.usable_cores < 2:
        yield Finding("cpu", "warning", cores, False, "data workers beside the training", "use data.workers: 0 or 1")
    else:
        yield Finding("cpu", "ok", cores)
    if machine.memory_bytes is not None:
        free = machine.available_bytes or 0
        found = f"{_size(free)} free of {_size(machine.memory_bytes)}"
        if free < MIN_MEMORY_BYTES:
            fix = "end other programs, or lower train.batch_size and data.workers"
            yield Finding("memory", "warning", found, False, "the trainer and its data workers", fix)
        else:
            yield Finding("memory", "ok", found)
    yield _disk("run disk", machine.run_disk, MIN_RUN_DISK_BYTES, "checkpoints", "choose another folder with --run")
    if machine.temporary_disk is None:
        fix = "export TMPDIR=/a/folder/that/can/be/written"
        yield Finding("temporary disk", "missing", "no temporary folder can be written", True, "training", fix)
    else:
        fix = "free space there, or set TMPDIR to another folder"
        yield _disk("temporary disk", machine.temporary_disk, MIN_TEMPORARY_BYTES, "compiled kernels", fix)
    if machine.shared_memory is not None:
        yield shared_memory_finding(machine.shared_memory)
    if machine.max_open_files is None or machine.max_open_files >= MIN_OPEN_FILES:
        yield Finding("open files", "ok", f"{machine.max_open_files or 'no limit'}")
    else:
        found = f"at most {machine.max_open_files}"
        yield Finding("open files", "warning", found, False, "data workers", f"ulimit -n {4 * MIN_OPEN_FILES}")


def _disk(name: str, disk: Disk, least_bytes: int, needed_for: str, fix: str) -> Finding:
    found = f"{_size(disk.free_bytes)} free of {_size(disk.total_bytes)} ({disk.path})"
    if not disk.is_writable:
        return Finding(name, "missing", f"{disk.path} cannot be written", True, needed_for, fix)
    if disk.free_bytes < least_bytes:
        return Finding(name, "warning", f"{found}, {_size(least_bytes)} are advised", False, needed_for, fix)
    return Finding(name, "ok", found)


def shared_memory_finding(disk: Disk) -> Finding:
    """The finding about /dev/shm."""
    found = f"{_size(disk.free_bytes)} free of {_size(disk.total_bytes)} ({disk.path})"
    if disk.is_writable and disk.free_bytes >= MIN_SHARED_BYTES:
        return Finding("shared memory", "ok", found)
    if disk.is_writable and disk.total_bytes >= MIN_SHARED_BYTES:
        fix = f"remove what fills it: ls -l {disk.path}"
    else:
        fix = "start the container with --shm-size=8g (or --ipc=host), or set data.workers: 0"
    found = found if disk.is_writable else f"{disk.path} cannot be written"
    return Finding("shared memory", "warning", found, False, "data workers", fix)


def _terminal(facts: Facts) -> Finding:
    terminal, use = facts.terminal, "the screen of segapp train and segapp attach"
    inside = [name for name, is_in in (("tmux or screen", terminal.is_tmux), ("ssh", terminal.is_ssh)) if is_in]
    where = f" in {' over '.join(inside)}" if inside else ""
    if not terminal.is_terminal:
        found = f"none{where}: stdin or stderr is redirected; training prints lines"
        return Finding("terminal", "warning", found, False, use, "")
    colors = {0: "no colours", 1 << 24: "true colour"}.get(terminal.num_colors, f"{terminal.num_colors} colours")
    found = (
        f"{terminal.columns} x {terminal.lines}, TERM={terminal.term or '(nothing)'}, {colors}, "
        f"{'Unicode' if terminal.has_unicode else 'no Unicode'}{where}"
    )
    if terminal.term in ("", "dumb", "unknown"):
        return Finding("terminal", "missing", found, False, use, "export TERM=xterm-256color")
    if (terminal.columns or 0) < MIN_COLUMNS or (terminal.lines or 0) < MIN_LINES:
        return Finding("terminal", "warning", found, False, use, f"make it at least {MIN_COLUMNS} x {MIN_LINES}")
    if not terminal.has_unicode:
        return Finding("terminal", "warning", found, False, "curves and pictures", "export LC_ALL=C.UTF-8")
    return Finding("terminal", "ok", found)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"
