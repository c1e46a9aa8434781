"""Copies of the source files of own parts, for the folder of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from segapp.custom.names import find_source, is_file_name, is_installed, sha256_of_source, split_name

MAX_SOURCE_BYTES = 1 << 20


def keep_parts(names: Iterable[str], folder: Path) -> None:
    """Copy the source files of parts, `package/module.py` or `file.py`; a copy that exists is never overwritten.

    A file that has changed since goes beside it, with the beginning of its SHA-256 in its name. Files of installed
    packages are left out. A copy is a service: an error of the disk is not reported here.

    Args:
        names: of the parts.
        folder: of the copies; made if there is something to copy.
    """
    for name in names:
        source = find_source(name)
        if source is None or is_installed(source) or source.stat().st_size > MAX_SOURCE_BYTES:
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
