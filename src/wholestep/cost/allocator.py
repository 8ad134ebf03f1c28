"""What torch's caching allocator of a GPU reserves for a sequence of allocations: its blocks, segments and pools."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_ROUND, _SMALL, _MIDDLE = 512, 1 << 20, 10 << 20
_SMALL_SEGMENT, _LARGE_SEGMENT, _PAGE = 2 << 20, 20 << 20, 2 << 20
"""Figures of c10/cuda/CUDACachingAllocator: sizes are rounded to 512 bytes; up to 1 MiB comes from segments of 2 MiB,
up to 10 MiB from segments of 20 MiB, and what is larger has a segment of its own, in whole steps of 2 MiB."""


@dataclass(eq=False)
class Block:
    """A range of a segment, with its neighbours."""

    size: int
    at: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class _Pool:
    """Blocks of one stream and one class of sizes. `free` is ordered by size, then by address."""

    small: bool
    grows: bool
    reserved: int = 0
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    blocks: dict[int, Block] = field(default_factory=dict[int, Block])
    last: Block | None = None
    next: int = 0

    def take(self, size: int) -> Block:
        place = bisect_left(self.free, (size, -1))
        end = self.last if self.grows and self.last is not None and self.last.free else None
        if place < len(self.free) and end is not None and self.free[place][1] == end.at:
            place += 1  # the end can grow, so that it counts as the largest
        if place < len(self.free):
            block = self.blocks[self.free.pop(place)[1]]
        elif end is not None:
            self._forget(end)
            block = end
            self._grow(max(size - end.size, 0))
        else:
            block = self._segment(size)
        block.free = False
        self._split(block, size)
        return block

    def give(self, block: Block) -> None:
        block.free = True
        for other, first in ((block.before, True), (block.after, False)):
            if other is not None and other.free:
                self._forget(other)
                block = self._joined(other, block) if first else self._joined(block, other)
        block.free = True
        self.blocks[block.at] = block
        insort(self.free, (block.size, block.at))

    def _forget(self, block: Block) -> None:
        self.free.pop(bisect_left(self.free, (block.size, block.at)))

    def _joined(self, lower: Block, upper: Block) -> Block:
        lower.size += upper.size
        lower.after = upper.after
        if upper.after is not None:
            upper.after.before = lower
        if self.last is upper:
            self.last = lower
        self.blocks.pop(upper.at, None)
        return lower

    def _segment(self, size: int) -> Block:
        if self.grows:
            block = Block(0, self.next, before=self.last)
            if self.last is not None:
                self.last.after = block
            self.last = block
            self._grow(size)
            return block
        reserved = _SMALL_SEGMENT if self.small else _LARGE_SEGMENT if size < _MIDDLE else -(-size // _PAGE) * _PAGE
        block = Block(reserved, self.next)
        self.reserved, self.next = self.reserved + reserved, self.next + reserved + 1
        return block

    def _grow(self, size: int) -> None:
        assert self.last is not None, "there is an end"
        page = _SMALL_SEGMENT if self.small else _LARGE_SEGMENT
        added = -(-size // page) * page
        self.last.size += added
        self.reserved, self.next = self.reserved + added, self.next + added

    def _split(self, block: Block, size: int) -> None:
        spare = block.size - size
        if spare < _ROUND or (not self.grows and not self.small and spare <= _SMALL):
            return
        rest = Block(spare, block.at + size, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        if self.last is block:
            self.last = rest
        self.blocks[rest.at] = rest
        insort(self.free, (rest.size, rest.at))


@dataclass
class Allocator:
    """Torch's caching allocator of one GPU. `grows`: with `expandable_segments:True`, where each pool is one range that
    grows by pages. It returns nothing to the device while there is enough.

    Example:
        >>> allocator = Allocator()
        >>> block = allocator.take(3 << 20)
        >>> allocator.give(block)
        >>> allocator.reserved_bytes == 20 << 20
    """

    grows: bool = False
    pools: dict[tuple[str, bool], _Pool] = field(default_factory=dict[tuple[str, bool], _Pool])
    owners: dict[int, _Pool] = field(default_factory=dict[int, _Pool])

    def take(self, size_bytes: int, stream: str = "") -> Block:
        """A block for a tensor of a stream."""
        size = max(-(-size_bytes // _ROUND) * _ROUND, _ROUND)
        small = size <= _SMALL
        pool = self.pools.setdefault((stream, small), _Pool(small, self.grows))
        block = pool.take(size)
        self.owners[id(block)] = pool
        return block

    def give(self, block: Block) -> None:
        """Free a block, which a later tensor of the same stream may take."""
        self.owners.pop(id(block)).give(block)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments: `torch.cuda.max_memory_reserved`."""
        return sum(pool.reserved for pool in self.pools.values())
