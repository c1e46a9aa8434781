"""Which panes are on the screen: a pure function of its size and of what the person has chosen."""

from __future__ import annotations

from dataclasses import dataclass

from segapp.tui.panes.header import MIN_HEIGHT, MIN_WIDTH

WIDE = 100
PANES = ("loss", "gpu", "classes", "events", "pictures")
"""In the order of their digits."""

_LEFT = frozenset({"loss", "pictures", "events"})


@dataclass(frozen=True)
class Layout:
    """What is shown.

    Attributes:
        panes: names of `PANES`, and `gpu0`; empty where nothing fits but a notice.
        is_wide: two columns.
        right_width: cells of the right column.
        has_throughput: whether the line about speed is shown.
        num_summary_rows: rows that stand for the panes that are not shown.
    """

    panes: frozenset[str]
    is_wide: bool = False
    right_width: int = 0
    has_throughput: bool = False
    num_summary_rows: int = 0

    @property
    def is_notice(self) -> bool:
        """Whether the screen is too small for panes."""
        return not self.panes

    @property
    def has_left(self) -> bool:
        """Whether the left column has something in it."""
        return bool(self.panes & _LEFT)

    @property
    def has_right(self) -> bool:
        """Whether the right column has something in it."""
        return bool(self.panes - _LEFT)


def plan_layout(
    width: int, height: int, pane: str = "loss", *, is_zoomed: bool = False, is_editing: bool = False
) -> Layout:
    """The layout for a screen.

    Args:
        width: cells.
        height: rows.
        pane: the one the person chose, of `PANES`.
        is_zoomed: show it alone.
        is_editing: the editor of `gpu0_bsz` is open.
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return Layout(frozenset())
    if width < WIDE or is_zoomed:
        shown = {"gpu", "gpu0"} if is_editing or pane == "gpu" else {pane}
        if is_editing and height < 24:
            shown = {"gpu0"}
        rows = 0 if is_zoomed else 3 if height >= 20 else 1
        return Layout(
            frozenset(shown),
            width >= WIDE,
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
    return Layout(frozenset(left | right), True, right_width, has_throughput=height >= 22)
