"""Prices the blocks of a pipeline: what each takes alone, sends and leaves behind."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..graph import meta
from ..graph.nodes import operands
from ..graph.stage_part import Message, StageBlock
from ..graph.storage import most_at_once, shared_operand, storage_bytes
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from .simulation import Clock, clock_of, run_all
from .software import OWN, Software
from .stage_orders import BlockCost

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
        own = self.software
        return clock_of(graph, self.mesh, self.hardware, own.compiled, own.stack, own.profile)

    def sent_us(self, size_bytes: int, axis: str) -> float:
        """Microseconds from a stage to the next one along `axis`."""
        return self.hardware.collective_us(SEND, size_bytes, self.mesh, axis)


def block_costs(
    blocks: Sequence[Sequence[StageBlock]], totals: Sequence[Collection[str]], messages: Mapping[str, Message],
    axis: str, prices: BlockPrices,
) -> dict[str, BlockCost]:  # fmt: skip
    """What each block takes, by its name. `blocks` of each stage; `totals`: the names of what a stage accumulates."""
    found: dict[str, BlockCost] = {}
    by_value: dict[tuple[int, str], list[Message]] = {}
    for message in messages.values():
        by_value.setdefault((message.source, message.value), []).append(message)
    for stage, own in enumerate(blocks):
        maker = {name: block.name for block in own for name in block.gives}
        kept = set[str]()  # messages that an earlier block has counted
        for block in own:
            clock = prices.clock(block.body)
            run_all(clock, block.body.nodes)
            sends = tuple(
                (m.name, m.target, prices.sent_us(m.size_bytes, axis))
                for name in block.gives for m in by_value.get((stage, name), ())
            )  # fmt: skip
            needs = tuple(name for name in block.takes if name in messages)
            after = tuple(dict.fromkeys(maker[name] for name in block.takes if name in maker))
            later = {name for other in own if other is not block for name in other.takes}
            held = _held(block, {name for name in block.gives if name in later}.difference(totals[stage]))
            again = [name for name in needs if name in later and name not in kept]
            held += sum(messages[name].size_bytes for name in again)
            kept |= set(again)
            work = sum(one.size_bytes for one in most_at_once(block.body))
            found[block.name] = BlockCost(
                stage, clock.now, block.level, block.is_backward, block.is_filler, needs, after, sends, held, work,
                clock.waited,
            )  # fmt: skip
    return found


def _held(block: StageBlock, names: set[str]) -> int:
    """Bytes of the memory that a block makes and leaves to later blocks."""
    given = dict(zip(block.gives, operands(next(iter(reversed(block.body.nodes)))), strict=True))
    roots = set[Node]()
    for name in names:
        node = given[name]
        while (shared := shared_operand(node)) is not None:
            node = shared
        if node.op != "placeholder":
            roots.add(node)
    return sum(storage_bytes(made) for node in roots for made in meta.tensors(node) if made is not None)
