"""The facts of this machine, from the system, the installed packages and nvidia-smi. Standard library only.

Parsers take text; what reads files and starts programs is thin. No function here raises for a missing or broken part.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import locale
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from segapp.commands.doctor.facts import Disk, Facts, Gpu, Machine, NvidiaSmi, Package, Terminal
from segapp.commands.doctor.imports import run_bounded, try_imports

NVIDIA_SMI_S = 10.0
"""Longest wait for nvidia-smi, which hangs with a driver in trouble."""

PACKAGE_MANAGERS = ("apt-get", "dnf", "yum", "zypper", "pacman", "apk", "brew")

_SMI_FIELDS = "index,uuid,driver_version,memory.total,memory.used,compute_cap,name"


def collect_facts(runs: Path = Path("runs")) -> Facts:
    """All facts of this machine; takes as long as the imports of torch and the trainer.

    Args:
        runs: the folder of the runs, which need not exist.
    """
    folder = Path(__file__).resolve().parents[2]
    requires_python = _requires_python()
    return Facts(
        segapp=_version("segapp"),
        folder=str(folder),
        python=platform.python_version(),
        executable=sys.executable,
        requires_python=requires_python,
        is_python_in_range=_is_in_range(platform.python_version(), requires_python),
        installer=_installer(folder.parent),
        packages=tuple(_packages()),
        imports=try_imports(),
        nvidia_smi=ask_nvidia_smi(),
        compiler=find_compiler(os.environ),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        machine=_machine(runs),
        terminal=_terminal(os.environ),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except Exception:  # not installed, or its metadata is damaged
        return None


def _requires_python() -> str:
    try:
        return importlib.metadata.metadata("segapp")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_in_range(version: str, specifiers: str) -> bool | None:
    try:
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(specifiers).contains(version, prereleases=True)
    except (ImportError, ValueError):
        return None


def _packages() -> Iterator[Package]:
    """The distributions that segapp's metadata asks for on this platform, with the versions found."""
    try:
        requirements = importlib.metadata.requires("segapp") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for text in requirements:
        requirement, _, marker = (part.strip() for part in text.partition(";"))
        extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)""", marker)
        if marker and extra is None and not _holds(marker):
            continue
        name = re.match(r"[\w.-]+", requirement)
        if name is not None:
            version = _version(name[0])
            is_in_range = None if version is None else _is_in_range(version, requirement[name.end() :].strip())
            yield Package(name[0], requirement, extra[1] if extra else None, version, is_in_range)


def _holds(marker: str) -> bool:
    """True if an environment marker holds here; without `packaging` none does."""
    try:
        from packaging.markers import Marker

        return Marker(marker).evaluate()
    except (ImportError, ValueError):
        return False


def _installer(checkout: Path) -> Literal["uv-project", "uv", "pip"]:
    """`uv` where the environment is that of a checkout, else pip, or uv where there is no pip."""
    has_uv = shutil.which("uv") is not None
    if has_uv and (checkout / "pyproject.toml").is_file() and Path(sys.prefix).parent == checkout:
        return "uv-project"
    return "uv" if has_uv and importlib.util.find_spec("pip") is None else "pip"


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """The C compiler that Triton uses: CC, gcc or clang; None where there is none."""
    path = environ.get("PATH")
    if given := environ.get("CC"):
        return given if shutil.which(given.split()[0], path=path) else None
    return shutil.which("gcc", path=path) or shutil.which("clang", path=path)


def ask_nvidia_smi(timeout_s: float = NVIDIA_SMI_S) -> NvidiaSmi:
    """The GPUs that nvidia-smi lists, or why it lists none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return NvidiaSmi("absent", "", ())
    for fields in (_SMI_FIELDS, _SMI_FIELDS.replace("compute_cap,", "")):  # drivers before 2021 have no compute_cap
        try:
            answer = run_bounded([program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"], timeout_s)
        except OSError as error:
            return NvidiaSmi("failed", error.strerror or str(error), ())
        if answer.is_late:
            return NvidiaSmi("hung", f"no answer within {timeout_s:g} s", ())
        gpus = parse_nvidia_smi(answer.output, fields)
        if answer.status == 0 and gpus:
            return NvidiaSmi("ok", "", gpus)
        said = (answer.output + answer.errors).strip().splitlines() or [f"exit status {answer.status}"]
        if "compute_cap" not in said[0]:
            break
    return NvidiaSmi("failed", said[0][:300], ())


def parse_nvidia_smi(output: str, fields: str = _SMI_FIELDS) -> tuple[Gpu, ...]:
    """The GPUs in the CSV lines of nvidia-smi; lines of another shape are left out.

    >>> parse_nvidia_smi("0, GPU-ab, 550.54, 24220, [N/A], 8.6, NVIDIA RTX A5000")[0].used_mib is None
    True
    """
    names = fields.split(",")
    gpus = []
    for line in output.splitlines():
        found = dict(zip(names, (cell.strip() for cell in line.split(",", len(names) - 1)), strict=False))
        if len(found) == len(names) and found["index"].isdigit():
            gpus.append(
                Gpu(
                    index=int(found["index"]),
                    uuid=found["uuid"].removeprefix("GPU-"),
                    name=found["name"],
                    driver=found["driver_version"],
                    total_mib=_number(found["memory.total"]),
                    used_mib=_number(found["memory.used"]),
                    capability=found["compute_cap"] if _number(found.get("compute_cap", "")) is not None else None,
                )
            )
    return tuple(gpus)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _machine(runs: Path) -> Machine:
    num_cores = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_cores
    groups = list(_control_groups())
    quotas = [quota for group in groups if (quota := cpu_quota(_read(group / "cpu.max"))) is not None]
    memory, available = parse_meminfo(_read(Path("/proc/meminfo")))
    limits = [int(text) for group in groups if (text := _read(group / "memory.max").strip()).isdigit()]
    if memory is not None and limits and min(limits) < memory:
        memory = min(limits)
        available = min(available or memory, max(0, memory - _used_bytes(groups[0])))
    shared = Path("/dev/shm")
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        num_cores=num_cores,
        usable_cores=min([float(affinity), *quotas]),
        memory_bytes=memory,
        available_bytes=available,
        run_disk=_disk(runs),
        temporary_disk=_temporary_disk(),
        shared_memory=_disk(shared) if shared.is_dir() else None,
        max_open_files=_max_open_files(),
        package_manager=next((name for name in PACKAGE_MANAGERS if shutil.which(name)), None),
        is_root=os.geteuid() == 0,
    )


def _control_groups() -> Iterator[Path]:
    """The control group of this process and those above it (version 2)."""
    root = Path("/sys/fs/cgroup")
    match = re.search(r"^0::/(.*)$", _read(Path("/proc/self/cgroup")), re.MULTILINE)
    group = root / (match[1] if match else "")
    while group.is_relative_to(root):
        yield group
        group = group.parent


def _used_bytes(group: Path) -> int:
    """Memory of a control group without the page cache, which the kernel gives back on demand."""
    used = _read(group / "memory.current").strip()
    cached = re.search(r"^file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
    return int(used) - (int(cached[1]) if cached else 0) if used.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def cpu_quota(cpu_max: str) -> float | None:
    """Processors that a control group may use, from its `cpu.max`; None where there is no limit.

    >>> cpu_quota("150000 100000"), cpu_quota("max 100000")
    (1.5, None)
    """
    words = cpu_max.split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() and int(words[1] or 0) else None


def parse_meminfo(text: str) -> tuple[int | None, int | None]:
    """Bytes of memory, and those available without swapping, from /proc/meminfo."""
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return found.get("MemTotal"), found.get("MemAvailable")


def _disk(path: Path) -> Disk:
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # unlike Path.exists, also below a folder without access
        path = path.parent
    total = free = 0
    with contextlib.suppress(OSError):
        total, _, free = shutil.disk_usage(path)
    return Disk(str(path), total, free, os.access(path, os.W_OK | os.X_OK))


def _temporary_disk() -> Disk | None:
    try:
        return _disk(Path(tempfile.gettempdir()))
    except OSError:  # no folder of the usual ones can be written
        return None


def _max_open_files() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _terminal(environ: Mapping[str, str]) -> Terminal:
    streams = (sys.__stdin__, sys.__stderr__)
    columns = lines = None
    is_terminal = False
    with contextlib.suppress(OSError, ValueError):  # closed streams
        is_terminal = all(stream is not None and stream.isatty() for stream in streams)
        if is_terminal and sys.__stderr__ is not None:
            columns, lines = os.get_terminal_size(sys.__stderr__.fileno())
    return Terminal(
        is_terminal=is_terminal,
        columns=columns,
        lines=lines,
        term=environ.get("TERM", ""),
        num_colors=num_colors(environ),
        has_unicode="utf" in locale.getpreferredencoding(False).lower(),
        is_tmux="TMUX" in environ or environ.get("TERM", "").startswith(("tmux", "screen")),
        is_ssh="SSH_CONNECTION" in environ or "SSH_TTY" in environ,
    )


def num_colors(environ: Mapping[str, str]) -> int:
    """Colours of the terminal, as its variables say.

    >>> num_colors({"TERM": "xterm-256color"}), num_colors({"TERM": "xterm", "COLORTERM": "truecolor"})
    (256, 16777216)
    """
    term = environ.get("TERM", "")
    if environ.get("NO_COLOR") or term in ("", "dumb", "unknown"):
        return 0
    if environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return 1 << 24
    return 256 if "256" in term else 8
