"""Tiles of scenes: images that touch by their georeferences show parts of the same place.

Shapes: N images; corners (N, 4, 2) are x and y on the map, and sides (N, 2) width and height in pixels.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.images.raster import read_corners
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES, has_rasterio

_GAP_PX = 1.5
"""Tiles with a smaller gap touch: programs round the corners of a tile to pixels."""


@dataclass(frozen=True)
class Tiles:
    """The places of images on one map; NaN for an image without a georeference."""

    corners: NDArray[np.float64]  # (N, 4, 2), around each image, the first two along its upper side
    sides_px: NDArray[np.float64]  # (N, 2)

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Tiles:
        """Return the places of images; only the headers of TIFFs are read."""
        tiffs = [at for at, path in enumerate(paths) if path.suffix.lower() in TIFF_SUFFIXES] if has_rasterio() else []
        corners, sides_px = np.full((len(paths), 4, 2), np.nan), np.ones((len(paths), 2))
        if tiffs:
            corners[tiffs], sides_px[tiffs] = read_corners([paths[at] for at in tiffs])
        return cls(corners, sides_px)

    def neighbors(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield images, from left to right, each with the ones further right that it touches or overlaps."""
        low, high = self.corners.min(1), self.corners.max(1)
        margin = _GAP_PX * ((high - low) / self.sides_px.min(1, keepdims=True)).max(1, keepdims=True)
        low, high = low - margin, high + margin
        order = np.argsort(low[:, 0])[: int(np.isfinite(low[:, 0]).sum())]
        last = np.searchsorted(low[order, 0], high[order, 0], side="right")
        for at, one in enumerate(order):
            others = order[at + 1 : last[at]]
            others = others[(low[others, 1] <= high[one, 1]) & (high[others, 1] >= low[one, 1])]
            each = np.full_like(others, one)
            gap_px = np.maximum(self._gap_px(each, others), self._gap_px(others, each))
            yield int(one), others[gap_px <= _GAP_PX]

    def _gap_px(self, own: NDArray[np.intp], other: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the largest gap between two images across a side of the first, in its pixels (separating axes)."""
        edges = self.corners[own][:, [1, 3]] - self.corners[own][:, :1]
        normals = edges[..., ::-1] * (-1, 1)
        a, b = (np.einsum("pcx,pnx->pnc", self.corners[each], normals) for each in (own, other))
        gap = np.maximum(b.min(2) - a.max(2), a.min(2) - b.max(2))
        return np.asarray((gap / np.ptp(a, axis=2) * self.sides_px[own][:, ::-1]).max(1))

    def joined(self, groups: Sequence[str]) -> tuple[list[str], int]:
        """Return the groups of the images after groups whose images touch were joined, and how many images touch."""
        first = {group: group for group in groups}
        touching = np.zeros(len(groups), bool)

        def root(group: str) -> str:
            while first[group] != group:
                first[group] = group = first[first[group]]
            return group

        for one, others in self.neighbors():
            touching[others] = True
            touching[one] |= len(others) > 0
            for group in {root(groups[other]) for other in others}:
                low, high = sorted((root(groups[one]), root(group)))
                first[high] = low
        return [root(group) for group in groups], int(touching.sum())

    def across(self, sides: Sequence[Hashable]) -> set[int]:
        """Return the images that touch images on other sides."""
        across = set[int]()
        for one, others in self.neighbors():
            for other in others:
                if sides[other] != sides[one]:
                    across.update((one, int(other)))
        return across
