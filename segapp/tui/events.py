"""The events pane: the log of the run, filtered by a text."""

import time

from textual import events
from textual.containers import Vertical
from textual.content import Content

from segapp.run.words import clock_time
from segapp.tui.widgets import SearchLine, SelectableList, drawable, set_title
from segapp.view.view import View
from segapp.view.wording import LogLine

KIND_STYLES = {
    "val": "$text-success",
    "best": "$text-success bold",
    "saved": "$text-primary",
    "ctl": "$text-accent",
    "gpu0": "$text-accent bold",
    "mem": "$text-accent",
    "alert": "$text-error bold",
    "oom": "$text-error bold",
    "end": "$text-warning bold",
    "start": "$text-warning",
    "model": "$text-accent",
}


class EventsPane(Vertical):
    """The log of events, latest last, with an input line for a search."""

    def __init__(self) -> None:
        self.search = SearchLine("text in an event", id="search", lines="event-lines")
        self._list = _EventList(id="event-lines", compact=True)
        super().__init__(self.search, self._list, id="events", classes="pane")
        self._lines: list[LogLine] = []
        self._wanted = ""

    def show(self, view: View) -> Content:
        """Show the lines of a view that match the search text; return the title."""
        wanted = self.search.text
        text = wanted.casefold()
        lines = [line for line in view.log if text in f"{line.kind} {line.text}".casefold()]
        if wanted != self._wanted:
            self._list.is_following = True
        selected, is_following = self.selected, self._list.is_following
        # Only the lines that differ are replaced, because an empty list loses its cursor and its position.
        differing = (at for at, (a, b) in enumerate(zip(self._lines, lines, strict=False)) if a[:3] != b[:3])
        num_kept = next(differing, min(len(self._lines), len(lines)))
        if num_kept == 0:
            self._list.clear_options()
        for at in reversed(range(num_kept, self._list.option_count)):
            self._list.remove_option_at_index(at)
        is_changed = num_kept < max(len(self._lines), len(lines))
        self._wanted, self._lines, self._list.is_following = wanted, lines, is_following
        if is_changed:
            self._list.add_options([drawable(self, log_content(line)) for line in lines[num_kept:]])
            same = (at for at, line in enumerate(lines) if selected and line[:3] == selected[:3])
            self._list.show_newest_or(next(same, None))
        below = 0 if self._list.is_following else len(lines) - self._list.scroll_offset.y - self._list.size.height
        set_title(self, Content(f"{below} newer, End" if below > 0 else ""), "border_subtitle")
        shown = f" /{wanted} {len(lines)} of {len(view.log)}" if wanted else ""
        return Content.assemble(("4 Events", "bold"), (shown, "$text-warning"))

    @property
    def selected(self) -> LogLine | None:
        at = self._list.highlighted
        return self._lines[at] if at is not None and at < len(self._lines) else None


class _EventList(SelectableList):
    """Keeps the newest line visible unless the cursor or the wheel has left it."""

    is_following = True

    def show_newest_or(self, at: int | None) -> None:
        """Move to the newest line if the list follows it, else to the given line, if any."""
        if self.is_following:
            self.highlighted = self.option_count - 1
        elif at is not None:
            self.highlighted = at

    def watch_highlighted(self, highlighted: int | None) -> None:
        """Follow the newest line from now on if the user has moved the cursor to it."""
        super().watch_highlighted(highlighted)
        if highlighted is not None:
            self.is_following = highlighted == self.option_count - 1

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.is_following = False

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.is_following = self.max_scroll_y - self.scroll_y <= 3


def log_content(line: LogLine, now_s: float | None = None) -> Content:
    """Return a line of the log; with its date if older than a day."""
    now_s = time.time() if now_s is None else now_s
    clock = f"{clock_time(line.t, now_s, '%H:%M:%S')} "
    return Content.assemble((clock, "$text-muted"), (f"{line.kind:<6}", KIND_STYLES.get(line.kind, "")), line.text)
