"""The visible part of the steps of a run: zoom and pan. Pure."""

from __future__ import annotations

from typing import NamedTuple

MIN_SPAN = 10.0
"""Smallest number of visible steps."""


class Viewport(NamedTuple):
    """The visible steps."""

    span: float | None = None
    """Number of visible steps; None: all."""
    end: float | None = None
    """The last visible step; None: the newest one, which is followed."""

    def visible(self, first: float, last: float) -> tuple[float, float]:
        """Return the first and the last visible step of a run that has the steps `first` to `last`."""
        right = last if self.end is None else min(self.end, last)
        left = first if self.span is None else max(first, right - self.span)
        return left, max(right, left + 1)

    def zoomed(self, factor: float, at: float, first: float, last: float) -> Viewport:
        """Return a part that is `factor` times as long; the step at a fraction `at` of the width keeps its place."""
        left, right = self.visible(first, last)
        span = max((right - left) * factor, min(MIN_SPAN, last - first))
        if span >= last - first:
            return Viewport()
        middle = left + at * (right - left)
        return self._part(middle - at * span + span, span, first, last)

    def panned(self, frac: float, first: float, last: float) -> Viewport:
        """Return the part moved by a fraction of its width; positive is towards the newest step."""
        if self.span is None:
            return self
        left, right = self.visible(first, last)
        return self._part(right + frac * (right - left), right - left, first, last)

    def jumped(self, first: float, last: float, *, to_end: bool) -> Viewport:
        """Return the part at the first or at the newest steps; the newest are followed."""
        if self.span is None or to_end:
            return Viewport(self.span, None)
        left, right = self.visible(first, last)
        return Viewport(right - left, first + right - left)

    @staticmethod
    def _part(end: float, span: float, first: float, last: float) -> Viewport:
        end = max(end, first + span)
        return Viewport(span, None if end >= last else end)
