"""Composes the picture of a screen; of an update only the lines that it covers are rendered."""

from __future__ import annotations

from itertools import pairwise

from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip

Chops = list[dict[int, Strip | None]]
"""For each row the strips between its cuts, by the column where they begin."""


class PartialCompositor(Compositor):
    """Renders, of an update, the lines of those widgets that it shows.

    Textual's own compositor renders all lines of all widgets in the rectangle around the changed regions: the whole
    screen where its first and its last line have changed.
    """

    def render_partial_update(self) -> ChopsUpdate | None:
        """Return the strips of the changed regions; None if nothing has changed."""
        regions = self._dirty_regions.copy()
        self._dirty_regions.clear()
        if not regions:
            return None
        spans = list(self._regions_to_spans(regions))
        wanted: dict[int, set[int]] = {}
        for y, left, right in spans:
            wanted.setdefault(y, set()).update(x for x, end in pairwise(self.cuts[y]) if x < right and end > left)
        return ChopsUpdate(self._render_wanted(wanted), spans, [row[1:] for row in self.cuts])

    def _render_wanted(self, wanted: dict[int, set[int]]) -> Chops:
        """Return the strips that begin at the wanted columns of some rows; the set of columns is used up."""
        chops: Chops = [dict.fromkeys(row[:-1]) for row in self.cuts]
        for widget, (region, clip) in self.visible_widgets.items():  # those in front come first
            x, y, width, height = region.intersection(clip)
            columns = range(x, x + width)
            rows = [row for row in wanted if y <= row < y + height and not wanted[row].isdisjoint(columns)]
            if not rows:
                continue
            first, last = min(rows), max(rows)
            strips = widget.render_lines(Region(x - region.x, first - region.y, width, last - first + 1))
            for row in rows:
                cuts = [cut for cut in self.cuts[row] if x <= cut <= x + width]
                for cut, strip in zip(cuts, strips[row - first].divide([cut - x for cut in cuts[1:]]), strict=False):
                    if cut in wanted[row]:
                        chops[row][cut] = strip
                        wanted[row].remove(cut)
        return chops


class PartialScreen(Screen[object]):
    """A screen of which only the changed lines are rendered."""

    def __init__(self) -> None:
        super().__init__(id="_default")
        self._compositor = PartialCompositor()
