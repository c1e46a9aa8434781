"""A progress bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, label: str, unit: str = "image") -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal; yields a function to call with the number of units done."""
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit=unit, disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int) -> None:
            bar.update(done - bar.n)

        yield progress
