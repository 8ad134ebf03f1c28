"""Prices the blocks of a pipeline: what each takes alone, with its ends of messages, sends and leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import cast

from torch.fx import Graph

from ..graph import meta
from ..graph.nodes import ends_of
from ..graph.region import Region
from ..graph.stage_part import StageBlock
from ..graph.storage import storages
from ..graph.written_out import blocks_in, calls_in, region_from
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from .block_runs import BlockCost
from .simulation import Clock, clock_of, run_all
from .software import OWN, Software

SEND = "send"
"""The kind of collective that a message between stages is priced as."""


@dataclass(frozen=True)
class BlockPrices:
    """How blocks are priced: as a program is on such hardware and software, with the links of `mesh`."""

    hardware: Hardware
    mesh: Mesh
    software: Software = OWN

    def clock(self, graph: Graph) -> Clock:
        """A clock for `graph` that stands at 0."""
        return clock_of(graph, self.mesh, self.hardware, self.software)

    def sent_us(self, size_bytes: int, axis: str) -> float:
        """Microseconds from a stage to the next one along `axis`."""
        return self.hardware.collective_us(SEND, size_bytes, self.mesh, axis)

    def end_us(self, size_bytes: int, axis: str) -> float:
        """Microseconds of computing that a message takes at each end."""
        return self.hardware.message_end_us(size_bytes, self.mesh, axis)


def block_costs(blocks: Sequence[Sequence[StageBlock]], axis: str, prices: BlockPrices) -> dict[str, BlockCost]:
    """What each block takes, by its name; `blocks` of each stage."""
    costs: dict[str, BlockCost] = {}
    for stage, stage_blocks in enumerate(blocks):
        maker = {name: block.name for block in stage_blocks for name in block.gives}
        memory = LeftMemory(stage_blocks)
        for block in stage_blocks:
            clock = prices.clock(block.body)
            run_all(clock, block.body.nodes)
            sends = tuple((m.name, m.target, prices.sent_us(m.size_bytes, axis)) for m in block.sends)
            needs = tuple(m.name for m in block.receives)
            ends_us = sum(prices.end_us(m.size_bytes, axis) for m in (*block.receives, *block.sends))
            after = tuple(dict.fromkeys(maker[name] for name in block.takes if name in maker))
            holds, frees, work = memory.of(block)
            costs[block.name] = BlockCost(
                stage, clock.now + ends_us, block.level, block.is_backward, block.is_filler, needs, after, sends, holds,
                work, clock.waited, frees_bytes=frees, label=block.label,
            )  # fmt: skip
    return costs


def resize_regions(graph: Graph) -> None:
    """Let regions of a stage hold what the sizes in their bodies say."""
    for calls in calls_in(graph).values():
        regions = {block.name: cast(Region, call.target) for call in calls if (block := meta.block(call))}
        blocks = [replace(block, body=regions[block.name].body) for block in blocks_in(calls)]
        memory = LeftMemory(blocks)
        for block in blocks:
            sized = replace(block, work_bytes=memory.of(block)[2])
            regions[block.name] = region_from(block.body, regions[block.name].pieces, sized)
        for call in calls:
            call.target = regions[block.name] if (block := meta.block(call)) else call.target


@dataclass
class LeftMemory:
    """The memory in which blocks of a stage leave values of a piece to later ones, by where it was made: a message, or
    a storage of a block. `root`: of each value; `size`, `first`, `last`: of each memory its bytes, the number of the
    block that makes it or reads it first, and that of the last block that reads it.
    """

    blocks: Sequence[StageBlock]
    root: dict[str, object] = field(default_factory=dict[str, object])
    size: dict[object, int] = field(default_factory=dict[object, int])
    first: dict[object, int] = field(default_factory=dict[object, int])
    last: dict[object, int] = field(default_factory=dict[object, int])

    def __post_init__(self) -> None:
        self.storages = [storages(block.body) for block in self.blocks]
        for number, (block, block_storages) in enumerate(zip(self.blocks, self.storages, strict=True)):
            received = {message.name for message in block.receives}
            for name, node in zip(block.takes, block.body.nodes, strict=False):
                if name in received and name not in self.root:
                    self._note(name, name, meta.size_bytes(node), number)
                if name in self.root:
                    self.last[self.root[name]] = number
            of = {member: storage for storage in block_storages for member in storage.members}
            ends = ends_of(block.body)
            for name, node in zip(block.gives, ends, strict=True):
                storage = of.get(node)
                if storage is not None and storage.first >= 0:
                    self._note(name, (number, id(storage)), storage.size_bytes, number)
                elif storage is not None and storage.node.name in self.root:  # a view of what the block is given
                    self.root[name] = self.root[storage.node.name]

    def _note(self, name: str, root: object, size_bytes: int, number: int) -> None:
        self.root[name], self.size[root], self.first[root] = root, size_bytes, number

    def of(self, block: StageBlock) -> tuple[int, int, int]:
        """The bytes that a block leaves to later blocks; of what earlier ones have left, those that it reads last; and
        the most that it adds to what is there when it begins.
        """
        number = self.blocks.index(block)
        lasting = {root for root, last in self.last.items() if last > self.first[root]}
        holds = sum(self.size[root] for root in lasting if self.first[root] == number)
        dying = {root for root in lasting if self.last[root] == number}
        at = {node: i for i, node in enumerate(n for n in block.body.nodes if n.op == "call_function")}
        steps, death = [0] * (len(at) + 1), dict.fromkeys(dying, 0)
        for storage in self.storages[number]:
            root = self.root.get(storage.node.name) if storage.first < 0 else None
            if root in death:
                reads = [at[user] for member in storage.members for user in member.users if user in at]
                death[root] = max([death[root], *(index + 1 for index in reads)])
            elif storage.first >= 0:
                steps[storage.first] += storage.size_bytes
                steps[len(at) if storage.last is None else storage.last + 1] -= storage.size_bytes
        for root, position in death.items():
            steps[position] -= self.size[root]
        return holds, sum(self.size[root] for root in dying), max(accumulate(steps[:-1]), default=0)
