"""What an allocator reserves while a rank repeats its program: the tensors of `cost.memory` in blocks and segments."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from ..graph.graph import LocalGraph, Role
from ..graph.loop import loop_of
from ..graph.nodes import is_wait
from ..graph.op_kinds import collective_kind
from ..graph.region import Region, region_of
from ..graph.storage import PIECES, Storage, storages
from ..hardware.hardware import Hardware
from .memory import storages_here
from .software import OWN, Software

_STEPS = 3
"""Optimizer state takes what the first step freed, so that the second cannot be packed alike; then nothing changes."""
_BESIDE = "gather"


@dataclass(frozen=True)
class Reserved:
    """Bytes of a rank at their peak: `reserved_bytes` of segments, as `torch.cuda.max_memory_reserved` has them, and
    `allocated_bytes` of tensors among them.

    Example:
        >>> memory = reserved(local, OWN)
        >>> print(memory.reserved_bytes, memory.allocated_bytes)
    """

    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class _Life:
    """Bytes from call `first` to call `last`, inclusive; -1 and None: for good."""

    size_bytes: int
    first: int
    last: int | None
    stream: str = ""


@dataclass(frozen=True)
class _Allocations:
    """Those of so many `calls`. `inside`: of the pieces of a loop, by the call that runs them, and how often to repeat
    them: each further piece takes what the second has freed.
    """

    calls: int
    lives: Sequence[_Life]
    inside: Mapping[int, tuple[int, _Allocations]]


def reserved(
    local: LocalGraph, software: Software, *, until: Mapping[Node, Node] | None = None, added: Sequence[int] = ()
) -> Reserved:
    """Repeat the allocations of a step until they are steady. `until`: results that are held until another node ran.
    `added`: sizes of tensors that are there for good besides, as gradients that stay from one micro-batch to the next.
    Buffers of gathers belong to another stream where the software copies out of them, so that no other tensor takes
    their blocks.

    Example:
        >>> print(reserved(local, OWN).reserved_bytes)
    """
    buffers = storages_here(local, storages(local.graph))
    allocations, place = _allocations(local.graph, buffers, software, until or {})
    roles = {node: graph_input.role for graph_input, node in local.placeholders()}
    states = [buffer for buffer in buffers if roles.get(buffer.node) is Role.STATE]
    rest = [buffer.size_bytes for buffer in buffers if buffer.first < 0 and roles.get(buffer.node) is not Role.STATE]
    updated = min((place[user] for buffer in states for user in buffer.node.users if user in place), default=0)
    run = _Replay(Allocator(software.expandable_segments))
    for size_bytes in (*rest, *added):
        run.take(_Life(size_bytes, -1, None))
    for number in range(_STEPS):
        run.step(allocations, (states if number == 0 else [], updated))
    return Reserved(run.allocator.reserved_bytes, run.peak_bytes)


def reserved_bytes(local: LocalGraph, hardware: Hardware, software: Software = OWN) -> int | None:
    """What torch reserves on a GPU of `hardware` while `local` runs, with the allocator of `software`; None
    for what is no GPU, and for the program of all stages of a pipeline, which none of them runs.
    """
    if not hardware.has_gpus or (local.stage_axis and local.stage is None):
        return None
    return reserved(local, software).reserved_bytes


def _allocations(
    graph: Graph, buffers: Sequence[Storage], software: Software, until: Mapping[Node, Node]
) -> tuple[_Allocations, dict[Node, int]]:
    """The allocations of a program for the storages that it holds, and the places of its calls."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    place, inside = {node: i for i, node in enumerate(calls)}, dict[int, tuple[int, _Allocations]]()
    regions = dict[Region, _Allocations]()
    for i, node in enumerate(calls):
        if loop := loop_of(node):
            inside[i] = min(loop.pieces, 2), _of_piece(loop.body, software)
        elif region := region_of(node):
            if region not in regions:
                regions[region] = _of_piece(region.body, software)
            inside[i] = 1, regions[region]
    of_graph = [s for s in buffers if s.node.graph is graph]  # else of one moment of a piece
    of_graph = [s for s in of_graph if s.index != PIECES or place[s.node] not in inside]
    lives = [life for s in of_graph for life in _lives(s, place, software, until)]
    return _Allocations(len(calls), lives, inside), place


def _of_piece(body: Graph, software: Software) -> _Allocations:
    """The allocations of a piece, which end with it."""
    return _allocations(body, [s for s in storages(body) if s.last is not None], software, {})[0]


def _lives(buffer: Storage, place: Mapping[Node, int], software: Software, until: Mapping[Node, Node]) -> list[_Life]:
    if buffer.first < 0:
        return []
    last = buffer.last
    if last is not None and buffer.node in until:
        last = max(last, place[until[buffer.node]])
    waits = [place[user] for user in buffer.node.users if is_wait(user)]
    if not (software.copies and waits and collective_kind(buffer.node.target) == "all_gather"):
        return [_Life(buffer.size_bytes, buffer.first, last)]
    copied = min(waits)
    return [_Life(buffer.size_bytes, buffer.first, copied, _BESIDE), _Life(buffer.size_bytes, copied, last)]


@dataclass
class _Replay:
    allocator: Allocator
    bytes_now: int = 0
    peak_bytes: int = 0

    def take(self, life: _Life) -> tuple[Block, int]:
        self.bytes_now += life.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        return self.allocator.take(life.size_bytes, life.stream), life.size_bytes

    def give(self, block: Block, size_bytes: int) -> None:
        self.bytes_now -= size_bytes
        self.allocator.give(block)

    def step(self, allocations: _Allocations, created: tuple[list[Storage], int]) -> None:
        """One step, or one piece. `created`: states that the call of this number makes."""
        begins: list[list[_Life]] = [[] for _ in range(allocations.calls)]
        ends: list[list[tuple[Block, int]]] = [[] for _ in range(allocations.calls + 1)]
        for life in allocations.lives:
            begins[life.first].append(life)
        for number in range(allocations.calls):
            if number == created[1]:
                for state in created[0]:
                    self.take(_Life(state.size_bytes, -1, None))
            for life in begins[number]:
                ends[allocations.calls if life.last is None else life.last].append(self.take(life))
            times, piece = allocations.inside.get(number, (0, allocations))
            for _ in range(times):
                self.step(piece, ([], 0))
            for block, size in ends[number]:
                self.give(block, size)
        for block, size in ends[allocations.calls]:
            self.give(block, size)


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
