"""Numbers of the `step` events beside the loss, read from the file when the chart asks for them."""

from __future__ import annotations

from pathlib import Path

from segapp.run.events import EventReader, step_column
from segapp.view.history import History

_SLICE_BYTES = 4 * 2**20


class SeriesReader:
    """Follows one number of the `step` events.

    Args:
        path: The events file.
        field: Name of the field, or `terms.NAME`.
    """

    def __init__(self, path: Path, field: str) -> None:
        self.history = History()
        self._reader, self._pattern = EventReader(path), step_column(field)
        self._generation = self._reader.generation

    def poll(self) -> bool:
        """Read at most four megabytes; return True if more is waiting."""
        rows = self._reader.read_column(self._pattern, _SLICE_BYTES)
        if self._reader.generation != self._generation:
            self._generation, self.history = self._reader.generation, History()
        if rows:
            t, step, value = zip(*rows, strict=True)
            if self.history.size and step[0] <= self.history.step[-1]:  # repeated by a resumed training
                self.history.drop_after(step[0] - 1)
            self.history.extend(step, t, value)
        return self._reader.num_bytes_left > _SLICE_BYTES


def series_of(path: Path, field: str) -> History:
    """Return all values of one number of the `step` events; its arguments are those of `SeriesReader`."""
    reader = SeriesReader(path, field)
    while reader.poll():
        pass
    return reader.history
