"""Emits the events of a training: into events.jsonl, and to listeners in the same process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from segapp.run.events import Event, EventWriter


class EventListener(Protocol):
    """Shows or forwards events; never changes the training."""

    def handle(self, event: Event) -> None:
        """Handle one event."""

    def close(self) -> None:
        """Flush and release files and connections."""


class EventLog:
    """Writes each event and passes it to the listeners.

    Args:
        writer: Appends to events.jsonl; None on ranks that do not write.
        listeners: Called with each event, in order (console, trackers).
    """

    def __init__(self, writer: EventWriter | None, listeners: Iterable[EventListener] = ()) -> None:
        self.writer = writer
        self._listeners = list(listeners)

    def add_listeners(self, listeners: Iterable[EventListener]) -> None:
        """Add listeners, which get the events from now on."""
        self._listeners += listeners

    def emit(self, event: Event) -> None:
        """Write one event and pass it to the listeners."""
        if self.writer is not None:
            self.writer.write(event)
        for listener in self._listeners:
            listener.handle(event)

    def sync(self) -> None:
        """Make the events written so far survive a power cut."""
        if self.writer is not None:
            self.writer.sync()

    def close(self) -> None:
        """Write pending events; close the file and the listeners."""
        if self.writer is not None:
            self.writer.close()
        for listener in self._listeners:
            listener.close()
