"""Fill the cache of a machine in the background (`data.cache`) if a training runs on several machines.

Each machine has its own cache, and a rank reads other images in every epoch: on M machines it would take about M epochs
until every image is in every cache. So the ranks of a machine divide all images among them, and a process per rank
stores its part while the training runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.pool import start_worker

_STOP_S = 1.0


class CacheFiller:
    """A process of low priority that stores images in the cache of a data set.

    The training does not depend on it: an image that it cannot read or store is read by the training, which reports the
    error. It ends with the process that started it.

    Args:
        dataset: The data set, with a cache.
        part: The indices to store.
    """

    def __init__(self, dataset: SegmentationDataset, part: Sequence[int]) -> None:
        self._dataset, self._part = dataset, part
        self._process: BaseProcess | None = None

    def start(self) -> None:
        """Start the process if there is something to store; a second call does nothing."""
        if self._process is None and self._part:
            method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
            context = multiprocessing.get_context(method)
            self._process = context.Process(target=self._fill, name="cache-filler", daemon=True)  # type: ignore[attr-defined]
            self._process.start()

    def _fill(self) -> None:
        start_worker(0)
        os.nice(19)
        cache = self._dataset.cache
        assert cache is not None
        for index in self._part:
            if cache.is_full:
                return
            if not cache.is_stored(index):
                with contextlib.suppress(Exception):
                    self._dataset.read(index)

    def close(self) -> None:
        """End the process; what it stored stays."""
        if self._process is not None:
            self._process.kill()  # a record that is half written is never read
            self._process.join(_STOP_S)
            self._process = None
