"""A model of torch's caching allocator for CUDA (c10/cuda/CUDACachingAllocator.cpp), without the memory.

Only the sizes of segments and blocks are followed: rounding, pools, best fit, splitting, merging, expandable segments,
a limit, and the release of unused memory when it is reached. One stream is the normal case; each has its own blocks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

MIB = 2**20
_SMALL, _LARGE, _ROUND = 2 * MIB, 20 * MIB, 2 * MIB
_ADDRESSES = 2**42


class OutOfMemory(Exception):  # noqa: N818 - as torch calls it
    """The limit is too low for an allocation, also without the unused memory."""


class Block:
    """A part of a segment; `mapped` is False for addresses of an expandable segment without memory."""

    def __init__(self, start: int, size: int, place: tuple[int, int], base: int, *, mapped: bool = True) -> None:
        self.start, self.size, self.place, self.base, self.mapped = start, size, place, base, mapped
        self.is_free = True
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def unit(self) -> int:
        """Bytes that an expandable segment maps at a time."""
        return _LARGE if self.place[1] else _SMALL

    def cut(self, size: int) -> Block:
        """Keep the first bytes; return the rest as a new block behind this one."""
        rest = Block(self.start + size, self.size - size, self.place, self.base, mapped=self.mapped)
        rest.prev, rest.next = self, self.next
        if rest.next is not None:
            rest.next.prev = rest
        self.next, self.size = rest, size
        return rest


class CachingAllocator:
    """The allocator of one device.

    Args:
        expandable: `expandable_segments` of its configuration.
        limit: bytes that it may take, as `set_per_process_memory_fraction` sets them.
    """

    def __init__(self, *, expandable: bool, limit: float = math.inf) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocated = self.peak_allocated = self.reserved = self.peak_reserved = 0
        self.segments: list[int] = []
        """Sizes of the segments that were taken, in order; empty with expandable segments."""
        self._free: dict[tuple[tuple[int, int], bool], list[tuple[tuple[int, ...], Block]]] = {}
        self._top = _ADDRESSES

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Return a block for a tensor; raise `OutOfMemory` if it does not fit into the limit."""
        size = max(512, -(-num_bytes // 512) * 512)
        place = stream, int(size > MIB)
        block = self._best_fit(size, place) or self._take(size, place)
        if block is None:
            self._release()
            block = self._take(size, place)
        if block is None:
            raise OutOfMemory
        rest = block.size - size
        if rest >= 512 if self.expandable or not place[1] else rest > MIB:
            self._add(block.cut(size))
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool."""
        self.allocated -= block.size
        block.is_free = True
        self._add(self._merged(block))

    def _pool(self, block: Block) -> tuple[list[tuple[tuple[int, ...], Block]], tuple[int, ...]]:
        key = (block.size, block.start) if block.mapped else (block.start,)
        return self._free.setdefault((block.place, block.mapped), []), key

    def _add(self, block: Block) -> None:
        pool, key = self._pool(block)
        bisect.insort(pool, (key, block), key=lambda item: item[0])

    def _remove(self, block: Block) -> None:
        pool, key = self._pool(block)
        del pool[bisect.bisect_left(pool, key, key=lambda item: item[0])]

    def _best_fit(self, size: int, place: tuple[int, int]) -> Block | None:
        pool = self._free.get((place, True), [])
        at = bisect.bisect_left(pool, (size, 0), key=lambda item: item[0])
        if at == len(pool):
            return None
        found = pool[at][1]
        for _, other in pool[at + 1 :] if self.expandable else ():  # the block that can grow least
            if (found.prev is None and found.next is None) or _possible(other) >= _possible(found):
                break
            found = other
        self._remove(found)
        return found

    def _take(self, size: int, place: tuple[int, int]) -> Block | None:
        """Return a block of new memory; None if the limit is too low."""
        segment = (size if size >= _LARGE // 2 else _LARGE) if place[1] else _SMALL
        segment = -(-segment // _ROUND) * _ROUND
        if self.reserved + segment > self.limit:
            return None
        if self.expandable:
            return self._grow(size, place)
        self._reserve(segment)
        self.segments.append(segment)
        return Block(self._address(), segment, place, 0)

    def _address(self) -> int:
        self._top += _ADDRESSES
        return self._top

    def _reserve(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _grow(self, size: int, place: tuple[int, int]) -> Block | None:
        """Map memory behind the first free block with enough free addresses behind it."""
        start = None
        for _, gap in self._free.get((place, False), ()):
            before = gap if gap.prev is None or not gap.prev.is_free else gap.prev
            if _free_bytes(before, size) >= size:
                start = before
                break
        if start is None:
            address = self._address()
            start = Block(address, _ADDRESSES // 2, place, address, mapped=False)
            self._add(start)
        block: Block | None = start if start.mapped else self._map(start, size)
        while block is not None and block.size < size:
            assert block.next is not None
            block = self._map(block.next, size - block.size)
        if block is not None:
            self._remove(block)
        return block

    def _map(self, gap: Block, size: int) -> Block | None:
        """Give memory to the first bytes of a gap, in whole units, and merge them with the free blocks beside it."""
        more = -(-min(size, gap.size) // gap.unit) * gap.unit
        if self.reserved + more > self.limit:
            return None
        self._remove(gap)
        self._reserve(more)
        if gap.size > more:
            self._add(gap.cut(more))
        gap.mapped = True
        block = self._merged(gap)
        self._add(block)
        return block

    def _merged(self, block: Block) -> Block:
        for other in (block.prev, block.next):
            if other is not None and other.is_free and other.mapped == block.mapped:
                self._remove(other)
                first, last = (other, block) if other is block.prev else (block, other)
                block.start, block.size = first.start, block.size + other.size
                block.prev, block.next = first.prev, last.next
                if block.prev is not None:
                    block.prev.next = block
                if block.next is not None:
                    block.next.prev = block
        return block

    def _release(self) -> None:
        """Return unused memory: whole segments, or the whole units of expandable segments."""
        unused = [block for (_, mapped), pool in self._free.items() if mapped for _, block in pool]
        for block in unused:
            if not self.expandable:
                if block.prev is None and block.next is None:
                    self._remove(block)
                    self.reserved -= block.size
                continue
            offset = block.start - block.base
            low, high = -(-offset // block.unit) * block.unit, (offset + block.size) // block.unit * block.unit
            if low >= high:
                continue
            self._remove(block)
            self.reserved -= high - low
            if low > offset:
                front, block = block, block.cut(low - offset)
                self._add(front)
            if block.size > high - low:
                self._add(block.cut(high - low))
            block.mapped = False
            self._add(self._merged(block))


def _possible(block: Block) -> int:
    """Return the size to which a block can grow."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _free_bytes(block: Block | None, wanted: int) -> int:
    """Return the free bytes from a block on, up to the first block in use; it stops at `wanted`."""
    total = 0
    while total < wanted and block is not None and block.is_free:
        total, block = total + block.size, block.next
    return total


Event = tuple[int, int]
"""(number of the allocation, bytes); 0 bytes free it."""


def replayed(
    events: Iterable[Event], *, expandable: bool, limit: float = math.inf, held: Iterable[int] = ()
) -> CachingAllocator:
    """Return the allocator after some events.

    Args:
        events: allocations and frees.
        expandable: of `CachingAllocator`.
        limit: of `CachingAllocator`.
        held: bytes of allocations before them that stay.

    Raises:
        OutOfMemory: the limit is too low.
    """
    allocator = CachingAllocator(expandable=expandable, limit=limit)
    for num_bytes in held:
        allocator.allocate(num_bytes)
    blocks: dict[int, Block] = {}
    for number, num_bytes in events:
        if num_bytes:
            blocks[number] = allocator.allocate(num_bytes)
        else:
            allocator.free(blocks.pop(number))
    return allocator


def least_bytes(events: list[Event], *, expandable: bool, held: Iterable[int] = (), exact_to: int = 2 * MIB) -> int:
    """Return the lowest limit with which the events fit, to a precision."""
    high = replayed(events, expandable=expandable, held=held).peak_reserved
    low = high // 2
    while high - low > exact_to:
        middle = (low + high) // 2
        try:
            replayed(events, expandable=expandable, limit=middle, held=held)
        except OutOfMemory:
            low = middle
        else:
            high = middle
    return high
