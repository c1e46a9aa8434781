"""Names of custom components and their source files. Nothing is imported here.

`package.module:factory` is a module on the Python path or in the current folder. `file.py:factory` is a file, relative
to the current folder; `./file.py:factory` in a config file is first searched next to the config (`resolved_near`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

_WORDS = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
COMPONENT_PATTERN = rf"^([^:\s]+\.py|{_WORDS}):{_WORDS}$"
"""Regular expression of the name of a custom component."""


def is_component(name: object) -> bool:
    """Return True if a value is the name of a custom component.

    >>> is_component("torch.optim:RMSprop"), is_component("./nets/small.py:Net"), is_component("deeplabv3_resnet50")
    (True, True, False)
    """
    return isinstance(name, str) and re.fullmatch(COMPONENT_PATTERN, name) is not None


def split_name(name: str) -> tuple[str, str]:
    """Return the module or file, and the name inside it.

    >>> split_name("nets/small.py:Net")
    ('nets/small.py', 'Net')
    """
    where, _, attribute = name.rpartition(":")
    return where, attribute


def is_file_name(where: str) -> bool:
    """Return True if a component is in a named file, not in a named module."""
    return where.endswith(".py")


def resolved_near(name: str, folder: Path) -> str:
    """Return `./file.py:factory` with the path from the current folder if the file is in `folder`.

    Names that do not begin with `./` or `../` are returned as they are.
    """
    where, attribute = split_name(name)
    if not (is_file_name(where) and where.startswith(("./", "../"))):
        return name
    path = folder / where
    return f"{os.path.normpath(path if path.is_file() else where)}:{attribute}"


def find_source(name: str) -> Path | None:
    """Return the source file of a component without importing anything; None if it is not found."""
    where, _ = split_name(name)
    if is_file_name(where):
        path = Path(where).expanduser()
        return path.resolve() if path.is_file() else None
    folders: list[str] | None = [*sys.path, os.getcwd()]
    found = None
    parts = where.split(".")
    for depth in range(1, len(parts) + 1):
        try:
            spec = PathFinder.find_spec(".".join(parts[:depth]), folders)
        except (ImportError, ValueError, OSError):
            return None
        if spec is None:
            return None
        found, folders = spec.origin, list(spec.submodule_search_locations or [])
    return Path(found).resolve() if found is not None and os.path.isfile(found) else None


def is_installed(source: Path) -> bool:
    """Return True for a file of Python or of an installed package, whose content is determined by its version."""
    paths = sysconfig.get_paths()
    return any(source.is_relative_to(os.path.realpath(paths[key])) for key in ("stdlib", "purelib", "platlib"))


def sha256_of_source(source: Path | None) -> str | None:
    """Return the SHA-256 of a source file in hexadecimal digits; None if there is no readable file."""
    try:
        return None if source is None else hashlib.sha256(source.read_bytes()).hexdigest()
    except OSError:
        return None


def keep_parts(names: Iterable[str], folder: Path) -> None:
    """Copy the source files of components, `package/module.py` or `file.py`; an existing copy is never overwritten.

    A file that has changed since is stored next to the old copy, with the beginning of its SHA-256 in its name. Files
    of installed packages and files of more than 1 MiB are left out. Disk errors are ignored, because the run does not
    need the copies.
    """
    for name in names:
        source = find_source(name)
        if source is None or is_installed(source) or source.stat().st_size > 2**20:
            continue
        where, _ = split_name(name)
        copy = folder / (source.name if is_file_name(where) else f"{where.replace('.', '/')}.py")
        digest = sha256_of_source(source)
        if copy.is_file() and sha256_of_source(copy) != digest:
            copy = copy.with_name(f"{copy.stem}.{str(digest)[:8]}.py")
        if not copy.exists():
            with contextlib.suppress(OSError):
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(source.read_bytes())
