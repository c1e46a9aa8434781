"""Facts about a machine, as plain values that `segapp doctor --json` prints. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Package:
    """A distribution that segapp's metadata asks for.

    Attributes:
        name: of the distribution.
        requirement: with its range, as pip takes it.
        extra: the optional extra that needs it; None for a required one.
        version: the installed one; None where it is not installed.
        is_in_range: None where the range could not be compared.
    """

    name: str
    requirement: str
    extra: str | None
    version: str | None
    is_in_range: bool | None


@dataclass(frozen=True)
class ImportResult:
    """The result of one import in a process of its own.

    Attributes:
        status: skipped means that something it needs had failed before.
        error: one line; empty where it worked.
        facts: values that the import gave.
    """

    status: Literal["ok", "failed", "crashed", "hung", "skipped"]
    error: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it; None where it gives no value."""

    index: int
    uuid: str
    name: str
    driver: str
    total_mib: float | None
    used_mib: float | None
    capability: str | None


@dataclass(frozen=True)
class NvidiaSmi:
    """The answer of nvidia-smi."""

    status: Literal["ok", "absent", "failed", "hung"]
    error: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Disk:
    """A file system.

    Attributes:
        path: the folder that was asked about, or the nearest one above it that exists.
    """

    path: str
    total_bytes: int
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True)
class Machine:
    """Processors, memory, disks and limits; None where the system does not say.

    Attributes:
        num_cores: processors of the machine.
        usable_cores: after CPU affinity and the limit of the control group; may be fractional.
        memory_bytes: of the machine, or the limit of the control group.
        available_bytes: memory that can be had without swapping, within that limit.
        run_disk: where runs/ lies or would lie.
        temporary_disk: None where no temporary folder can be written.
        shared_memory: /dev/shm, through which data workers send batches.
        max_open_files: the soft limit.
        package_manager: apt-get, dnf, ...; None if none of the known ones is there.
        is_root: True if commands need no sudo.
    """

    system: str
    num_cores: int
    usable_cores: float
    memory_bytes: int | None
    available_bytes: int | None
    run_disk: Disk
    temporary_disk: Disk | None
    shared_memory: Disk | None
    max_open_files: int | None
    package_manager: str | None
    is_root: bool


@dataclass(frozen=True)
class Terminal:
    """The terminal that `segapp doctor` runs in.

    Attributes:
        is_terminal: standard input and standard error are a terminal.
        columns: None without a terminal.
        num_colors: 0 with NO_COLOR or for a terminal without colours.
    """

    is_terminal: bool
    columns: int | None
    lines: int | None
    term: str
    num_colors: int
    has_unicode: bool
    is_tmux: bool
    is_ssh: bool


@dataclass(frozen=True)
class Facts:
    """All that was found.

    Attributes:
        segapp: version; None where it is not installed as a package.
        folder: of the package segapp.
        python: version.
        executable: the Python interpreter.
        requires_python: the range in segapp's metadata.
        installer: what installs packages into this environment.
        packages: required and optional ones.
        imports: by name: torch, torchvision, triton, trainer, cuda.
        compiler: path or value of CC; None where there is none.
        visible_devices: CUDA_VISIBLE_DEVICES; None where it is not set.
    """

    segapp: str | None
    folder: str
    python: str
    executable: str
    requires_python: str
    is_python_in_range: bool | None
    installer: Literal["uv-project", "uv", "pip"]
    packages: tuple[Package, ...]
    imports: Mapping[str, ImportResult]
    nvidia_smi: NvidiaSmi
    compiler: str | None
    visible_devices: str | None
    machine: Machine
    terminal: Terminal
