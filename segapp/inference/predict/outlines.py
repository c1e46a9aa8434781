"""Outlines of the regions of a label map, traced row by row: a map of any height needs little memory and has no seams.

A region is a set of pixels with one value that are connected by their sides. Its rings run along the sides of the
pixels, clockwise (y downwards) around the region, counterclockwise around a hole. A vertex where three or more sides
meet is a junction. Only the part of a ring between two junctions is simplified, in a direction that does not depend on
the region, so neighbors keep a common border. Memory: the rings of the unfinished regions, 12 bytes per vertex.

Shapes: H x W pixels of a map, R rows of a block, V vertices of a ring.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

Ring = NDArray[np.int32]
"""Columns x and y in pixels, (V, 2), or (V, 3) with a third number: 0 for ordinary vertices, not 0 for vertices that
simplification keeps, 2 where four sides meet. (0, 0) is the top left corner of the map. The first vertex follows the
last."""

_BLOCK_PX = 2**21
_OUTSIDE = -1
_SOUTHEAST, _SOUTHWEST, _NORTHWEST, _NORTHEAST, _INNER = range(5)


@dataclass(frozen=True)
class Region:
    """A connected region: its value, its outline, and its holes."""

    value: int
    outline: Ring
    holes: tuple[Ring, ...] = ()

    @property
    def area_px(self) -> int:
        """Number of pixels, if the rings are exact."""
        return round(area(self.outline) + sum(map(area, self.holes)))


def area(ring: NDArray[Any]) -> float:
    """Return the area of a ring (V, 2 or more) in square pixels; negative if it is counterclockwise (y downwards)."""
    x, y = (ring[:, :2] - ring[0, :2]).astype(np.float64).T  # near zero: coordinates of a map have large offsets
    return float(np.dot(x[:-1], y[1:]) - np.dot(x[1:], y[:-1])) / 2  # the last vertex and the first add nothing


class OutlineTracer:
    """Finds the regions with requested values in a label map whose rows are added from top to bottom."""

    def __init__(self, size_px: tuple[int, int], wanted: Container[int]) -> None:
        self._height, self._width = size_px
        self._wanted = wanted
        self._row = 0
        self._last = np.full(self._width + 2, _OUTSIDE, np.int32)  # last row of the labels, and of the region ids
        self._last_ids = np.zeros(self._width + 2, np.int64)
        self._num_ids = 1
        self._rings: defaultdict[int, list[Ring]] = defaultdict(list)  # closed rings of incomplete regions, by id
        self._values: dict[int, int] = {}  # value of each incomplete region, by id
        # Each open chain of vertices ends at the right side of a region and begins at a left side, in these columns.
        self._chains: list[list[Ring]] = []
        self._ends = self._begins = np.zeros(0, np.int64)

    def add(self, labels_RW: NDArray[Any]) -> Iterator[Region]:
        """Yield the regions that these rows complete; after the last row of the map, all of them."""
        step = max(1, _BLOCK_PX // self._width)
        for first in range(0, len(labels_RW), step):
            yield from self._add_block(labels_RW[first : first + step])

    def _add_block(self, labels_RW: NDArray[Any]) -> Iterator[Region]:
        is_last = self._row + len(labels_RW) == self._height
        values = np.full((1 + len(labels_RW) + is_last, self._width + 2), _OUTSIDE, np.int32)
        values[0] = self._last
        values[1 : 1 + len(labels_RW), 1:-1] = labels_RW
        ids = self._region_ids(values)
        for at, value, ring in self._trace(values, ids):
            self._rings[at].append(ring)
            self._values[at] = value
        alive = set() if is_last else set(np.unique(ids[-1]).tolist())
        for at in sorted(self._rings.keys() - alive):
            yield _region(self._values.pop(at), self._rings.pop(at))
        self._last, self._last_ids = values[-1], ids[-1]
        self._row += len(labels_RW)

    def _region_ids(self, values: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the region id of each pixel of a block; the ids in its first row are given, and may be merged."""
        is_start = np.ones(values.shape, bool)
        is_start[:, 1:] = values[:, 1:] != values[:, :-1]
        runs = np.cumsum(is_start.ravel(), dtype=np.int32).reshape(values.shape) - 1
        upper, lower = np.nonzero((is_start[1:] | is_start[:-1]) & (values[1:] == values[:-1]))
        firsts = runs[0, is_start[0]]
        old_ids, first, same = np.unique(self._last_ids[is_start[0]], return_index=True, return_inverse=True)
        above = np.concatenate([runs[upper, lower], firsts[first][same]])  # earlier connections remain
        below = np.concatenate([runs[upper + 1, lower], firsts])
        num_runs = int(runs[-1, -1]) + 1
        graph = coo_array((np.ones(len(above), bool), (above, below)), (num_runs, num_runs))
        count, found = connected_components(graph, directed=False)
        ids = np.arange(self._num_ids, self._num_ids + count)
        parts = found[firsts[first]]
        ids[parts[::-1]] = old_ids[::-1]  # a region that continues keeps its id; if several meet, the first one's
        for kept, old in zip(ids[parts].tolist(), old_ids.tolist(), strict=True):
            if kept != old and old in self._rings:
                self._rings[kept] += self._rings.pop(old)
                self._values[kept] = self._values.pop(old)
        self._num_ids += count
        return np.asarray(ids[found][runs])

    def _trace(self, values: NDArray[np.int32], ids: NDArray[np.int64]) -> list[tuple[int, int, Ring]]:
        """Return id and value of the regions and the rings that a block closes; keep the open chains."""
        columns, rows = values[:, 1:] != values[:, :-1], values[1:] != values[:-1]
        y, x = np.nonzero((columns[:-1] | columns[1:]) & (rows[:, :-1] | rows[:, 1:]))
        north, south, west, east = columns[y, x], columns[y + 1, x], rows[y, x], rows[y, x + 1]
        degree = north.astype(np.int8) + south + west + east
        is_turn, is_through = degree == 2, degree == 3

        # Up to five nodes per vertex: a corner of each of its four pixels, and `_INNER`, if the vertex is on a straight
        # side of a region, or the region fills all but a quarter around it. It belongs to this pixel:
        inner = y + (north & (west | ~south)), x + (west & (north | ~east))
        pixels = [(y + 1, x + 1), (y + 1, x), (y, x), (y, x + 1), inner]
        is_kept = [value in self._wanted for value in range(_OUTSIDE, values.max() + 1)]
        kept = np.array(is_kept)[np.array([values[pixel] for pixel in pixels]) - _OUTSIDE]
        num_chains = len(self._chains)

        def nodes(corner: tuple[NDArray[Any], NDArray[Any], int], turn: Any, missing: Any) -> NDArray[np.int64]:
            """Return the nodes at the corners of a pixel, at one kind of turn, and on the straight side."""
            is_corner = corner[0] & corner[1] & kept[corner[2]]
            is_inner = ((is_turn & turn) | (is_through & ~missing)) & kept[_INNER]
            where = np.flatnonzero(is_corner | is_inner)
            return num_chains + 5 * where + np.where(is_corner[where], corner[2], _INNER)

        def at(nodes: NDArray[np.int64]) -> NDArray[np.int64]:
            return (nodes - num_chains) // 5

        follow = np.full(num_chains + 5 * len(x), -1, np.int64)
        se, sw = (south, east, _SOUTHEAST), (south, west, _SOUTHWEST)
        nw, ne = (north, west, _NORTHWEST), (north, east, _NORTHEAST)
        follow[nodes(se, north & east, south)] = nodes(sw, north & west, south)  # to the right, above the region
        follow[nodes(nw, south & west, north)] = nodes(ne, south & east, north)  # to the left, below it
        chains = np.arange(num_chains)
        key = 2 * (x * (len(values) + 1) + y + 1)  # by column, then row, after the chains of earlier blocks

        def pairs(top: NDArray[np.int64], bottom: NDArray[np.int64], open_x: NDArray[np.int64]) -> tuple[Any, ...]:
            """Return the upper and lower ends of sides, and the upper ends that have no lower end yet."""
            both = np.concatenate([bottom, chains, top])
            keys = np.concatenate([key[at(bottom)], 2 * open_x * (len(values) + 1) + 1, key[at(top)] + 1])
            column = np.concatenate([x[at(bottom)], open_x, x[at(top)]])
            order = np.argsort(keys)
            is_top = order >= len(bottom)
            has_bottom = is_top[:-1] & ~is_top[1:] & (column[order][:-1] == column[order][1:])
            first = np.flatnonzero(has_bottom)
            is_open = is_top & ~np.append(has_bottom, False)[: len(order)]
            return both[order[first]], both[order[first + 1]], both[order[is_open]], column[order[is_open]]

        upper, lower, open_ends, end_x = pairs(nodes(sw, south & east, west), nodes(nw, north & east, west), self._ends)
        follow[upper] = lower
        upper, lower, open_begins, begin_x = pairs(
            nodes(se, south & west, east), nodes(ne, north & west, east), self._begins
        )
        follow[lower] = upper
        is_corner_of_map = ((x == 0) | (x == self._width)) & np.isin(y + self._row, (0, self._height))
        kinds = np.maximum(degree - 2, is_corner_of_map)
        vertices = np.stack([x, y + self._row, kinds], 1).astype(np.int32)
        open_paths, closed = _paths(follow.tolist(), open_begins.tolist())

        def pieces(path: list[int]) -> list[Ring]:
            found, first = [], 0
            steps = np.array(path)
            for chain in [*np.flatnonzero(steps < num_chains).tolist(), len(path)]:
                if first < chain:
                    found.append(vertices[at(steps[first:chain])])
                if chain < len(path):
                    found += self._chains[path[chain]]
                first = chain + 1
            return found

        rings = []
        for path in closed:
            vertex, corner = divmod(next(node for node in path if node >= num_chains) - num_chains, 5)
            row, column = pixels[corner][0][vertex], pixels[corner][1][vertex]
            rings.append((int(ids[row, column]), int(values[row, column]), np.concatenate(pieces(path))))
        self._chains = [pieces(path) for path in open_paths]
        self._begins = begin_x
        column_of = dict(zip(open_ends.tolist(), end_x.tolist(), strict=True))
        self._ends = np.array([column_of[path[-1]] for path in open_paths], np.int64)
        return rings


def _paths(follow: list[int], begins: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the open paths of nodes that begin at `begins`, and the closed ones; `follow` is modified."""

    def path(node: int) -> list[int]:
        found = [node]
        after, follow[node] = follow[node], -1
        while after >= 0 and after != found[0]:
            found.append(after)
            follow[after], after = -1, follow[after]
        return found

    opened = [path(node) for node in begins]
    return opened, [path(node) for node in range(len(follow)) if follow[node] >= 0]


def _region(value: int, rings: list[Ring]) -> Region:
    """Return the region of some rings, which may touch themselves, with the outline first."""
    simple = [part for ring in rings for part in _split(ring)]
    outline = max(simple, key=area) if len(simple) > 1 else simple[0]
    return Region(value, outline, tuple(ring for ring in simple if ring is not outline))


def _split(ring: Ring) -> list[Ring]:
    """Return the simple rings of a ring that touches itself at vertices, as it does if two pixels touch at a corner."""
    if (ring[:, 2] == 2).sum() < 2:
        return [ring]
    points = ring[:, 0].astype(np.int64) << 32 | ring[:, 1]
    found, path, place = [], list[int](), dict[int, int]()
    for number, point in enumerate(points.tolist()):
        if point in place:  # back at a vertex: the part in between is a separate ring
            first = place[point]
            found.append(ring[path[first:]])
            for old in path[first:]:
                del place[int(points[old])]
            del path[first:]
        place[point] = len(path)
        path.append(number)
    return [*found, ring[path]]


def simplified(ring: Ring, tolerance_px: float) -> Ring:
    """Return a ring (V, 2) with some of the vertices of a ring (V, 3), at most about `tolerance_px` away from it.

    Junctions are kept (Douglas and Peucker 1973 is applied between them). A ring without junctions that would collapse
    is kept unchanged; a ring with junctions may become a ring of less than three vertices.
    """
    if not tolerance_px:
        return ring[:, :2]
    fixed = np.flatnonzero(ring[:, 2])
    points = np.ascontiguousarray(ring[:, :2])
    if not len(fixed):
        loop = _simplified_loop(np.roll(points, -np.lexsort(points.T[::-1])[0], axis=0), tolerance_px)
        return loop if len(loop) > 2 else points
    points = np.roll(points, -fixed[0], axis=0)
    stops = [*(fixed - fixed[0]).tolist(), len(points)]
    points = np.concatenate([points, points[:1]])
    if len(fixed) == 1:
        return _simplified_loop(points[:-1], tolerance_px)
    arcs = [points[first : last + 1] for first, last in itertools.pairwise(stops)]
    return np.concatenate([_simplified_arc(arc, tolerance_px)[:-1] for arc in arcs])


def _simplified_loop(loop: Ring, tolerance_px: float) -> Ring:
    """Return a simplified ring; its first vertex and the one farthest from it are kept, so there are two arcs."""
    distance = ((loop - loop[0]).astype(np.int64) ** 2).sum(1)
    far = min(np.flatnonzero(distance == distance.max()).tolist(), key=lambda at: loop[at].tolist())
    arcs = loop[: far + 1], np.concatenate([loop[far:], loop[:1]])
    return np.concatenate([_simplified_arc(arc, tolerance_px)[:-1] for arc in arcs])


def _simplified_arc(arc: Ring, tolerance_px: float) -> Ring:
    """Return an arc simplified between its ends, with the same vertices in either direction."""
    if len(arc) < 3:
        return arc
    if arc[0].tolist() > arc[-1].tolist():
        return _simplified_arc(arc[::-1], tolerance_px)[::-1]
    return np.asarray(cv2.approxPolyDP(np.ascontiguousarray(arc)[:, None], tolerance_px, False)).reshape(-1, 2)
