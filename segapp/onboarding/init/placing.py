"""Put a config and its lists in place: whole, or not at all.

Everything is written under hidden names and renamed at the end, the config last. A second attempt removes what a killed
one left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from segapp.datasets.files import shown
from segapp.errors import ConfigError, storage_errors
from segapp.run.files import remove_dead_temporaries, write_atomic


def check_place(root: Path, out: Path) -> None:
    """Check that a config and what is beside it would not lie in the data folder.

    Raises:
        ConfigError: they would.
    """
    data, place = Path(os.path.realpath(root)), Path(os.path.realpath(out.parent))
    if place.is_relative_to(data):
        raise ConfigError(
            f"{shown(out)} lies in the data folder {shown(root)}, where nothing is written: name a place outside it, "
            f"such as --out {shown(os.path.relpath(data.parent / out.name))}",
            path=out,
        )


def place(
    lists: Mapping[str, bytes], list_dir: Path, configs: Mapping[Path, str], check: Callable[[Path], None]
) -> None:
    """Write lists and configs.

    Args:
        lists: name -> content of each list; none: no folder is made.
        list_dir: their folder, replaced as a whole.
        configs: path -> content.
        check: raises an error for a config that cannot be used; the lists are in place then.

    Raises:
        SegappError: of `check`; nothing has changed then.
        StorageError: a file cannot be written; nothing has changed then.
    """
    drafts = {path: path.with_name(f".{path.name}.partial") for path in configs}
    first = next(iter(configs))
    with storage_errors(first):
        first.parent.mkdir(parents=True, exist_ok=True)
        remove_dead_temporaries(first.parent)
        with _replaced_folder(lists, list_dir):
            try:
                for path, text in configs.items():
                    write_atomic(drafts[path], text)
                    check(drafts[path])
                for path, draft in drafts.items():
                    os.replace(draft, path)
            finally:
                for draft in drafts.values():
                    draft.unlink(missing_ok=True)


@contextmanager
def _replaced_folder(files: Mapping[str, bytes], folder: Path) -> Iterator[None]:
    """Put a folder of files in place of an older one; on an error in the block the older one comes back."""
    if not files:
        yield
        return
    draft, older = (folder.with_name(f".{folder.name}.{word}") for word in ("partial", "older"))
    for left in (draft, older):
        shutil.rmtree(left, ignore_errors=True)
    is_placed = False
    try:
        draft.mkdir()
        for name, content in files.items():
            write_atomic(draft / name, content)
        if folder.exists():
            folder.rename(older)
        draft.rename(folder)
        is_placed = True
        yield
    except BaseException:
        if is_placed:
            shutil.rmtree(folder, ignore_errors=True)
        if older.exists():
            older.rename(folder)
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(older, ignore_errors=True)
