"""The panes: which are visible, a pure function of the screen size and the user's choices; their widgets and pages."""

from __future__ import annotations

from dataclasses import dataclass

from segapp.tui.panes.header import MIN_HEIGHT, MIN_WIDTH

WIDE = 100
PANES = ("loss", "gpu", "classes", "events", "pictures")
"""In the order of their keys 1 to 5."""

PANE_OF = {"loss": "loss", "pictures": "pictures", "gpu": "gpu", "gpu0": "gpu", "classes": "classes",
           "class-lines": "classes", "filter": "classes", "events": "events", "event-lines": "events",
           "search": "events"}  # fmt: skip
"""Id of a widget that can have the focus -> pane."""
FOCUS_OF = {"classes": "class-lines", "events": "event-lines"}
"""Pane -> id of the part of it that takes the focus, if it is not the pane itself."""
TOPIC_OF = {
    "loss": "screen#the-chart",
    "pictures": "screen#the-sample-pictures",
    "gpu": "screen#the-devices",
    "classes": "screen#the-classes",
    "events": "screen#the-events",
    "runs": "screen#the-list-of-runs",
}
"""Pane, or the list of runs -> page of the documentation, with the heading about it."""

_LEFT = frozenset({"loss", "pictures", "events"})


@dataclass(frozen=True)
class ScreenLayout:
    """The visible parts of the screen.

    Attributes:
        panes: Names of `PANES`, and `gpu0`; empty if only a notice fits.
        right_width: Cells of the right column.
        has_throughput: True if the throughput line is visible.
        num_summary_rows: Rows that summarise the hidden panes.
    """

    panes: frozenset[str]
    right_width: int = 0
    has_throughput: bool = False
    num_summary_rows: int = 0

    @property
    def is_notice(self) -> bool:
        """True if the screen is too small for panes."""
        return not self.panes

    @property
    def has_left(self) -> bool:
        """True if the left column is not empty."""
        return bool(self.panes & _LEFT)

    @property
    def has_right(self) -> bool:
        """True if the right column is not empty."""
        return bool(self.panes - _LEFT)


def plan_layout(
    width: int, height: int, pane: str = "loss", *, is_zoomed: bool = False, is_editing: bool = False
) -> ScreenLayout:
    """Return the layout for a screen."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return ScreenLayout(frozenset())
    if width < WIDE or is_zoomed:
        shown = {"gpu", "gpu0"} if is_editing or pane == "gpu" else {pane}
        if is_editing and height < 24:
            shown = {"gpu0"}
        rows = 0 if is_zoomed else 3 if height >= 20 else 1
        return ScreenLayout(
            frozenset(shown),
            width,
            has_throughput=height >= 20 and bool(shown & _LEFT),
            num_summary_rows=rows,
        )
    left = {"pictures"} if pane == "pictures" else {"loss"}
    if height >= 30:
        left.add("events")
    elif pane == "events":
        left = {"events"}
    right_width = min(68, 48 + max(0, width - 100) // 4)
    right = {"gpu", "gpu0"} if is_editing and height < 30 else {"gpu", "gpu0", "classes"}
    return ScreenLayout(frozenset(left | right), right_width, has_throughput=height >= 22)
