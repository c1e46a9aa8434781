"""Where a trainer says what happened: into events.jsonl, and to whoever listens in the same process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from segapp.run.events import EventWriter, parse_event

Listener = Callable[[dict[str, Any]], None]


class EventLog:
    """Emits events.

    Args:
        writer: appends them to events.jsonl; None on ranks that do not write.
        listeners: called with each event as a dict (plain lines, TensorBoard); they only read.
    """

    def __init__(self, writer: EventWriter | None, listeners: Sequence[Listener] = ()) -> None:
        self.writer = writer
        self.listeners = list(listeners)

    def emit(self, event_type: str, /, **fields: Any) -> None:
        """Emits one event.

        Args:
            event_type: its type.
            fields: its fields; checked.
        """
        event = parse_event({"type": event_type, **fields})
        if self.writer is not None:
            self.writer.write(event)
        for listener in self.listeners:
            listener(event.model_dump())

    def close(self) -> None:
        """Writes what waits and lets the file and the listeners go."""
        if self.writer is not None:
            self.writer.close()
        for listener in self.listeners:
            close = getattr(listener, "close", None)
            if close is not None:
                close()
