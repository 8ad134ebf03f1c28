"""Cuts the body of a loop into what each stage of a pipeline runs of it, and puts that into an order.

A node's level is the number of sends on the longest way to it. Nodes of one stage and level never wait for each other
by way of another stage: they are a block. So blocks follow from the sends alone, whatever the model is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..cost.block_runs import BlockCost, Orders, on_shared_cores
from ..cost.stage_costs import BlockPrices, block_costs
from ..cost.stage_orders import APART, NAMED, simulated_orders
from ..errors import GraphError, PlanError
from ..graph import meta
from ..graph.deadlock import check_orders
from ..graph.loop import Loop
from ..graph.nodes import add_empty, copy_node, is_collective, node_at, operands, reached
from ..graph.region import Region
from ..graph.stage_part import Message, StageBlock, StagePart, StageParts, transfer
from ..graph.written_out import region_from
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from .rank_ops import share
from .rows_by_rank import numbers_of, readers_of
from .stage_actions import actions_of

aten = torch.ops.aten
NamedOrder = tuple[str, Orders]
"""The order of a loop by name, and the tasks of each stage, as ranks tell each other."""


def is_staged(loop: Loop) -> bool:
    """True if stages share the body of a loop."""
    return any(meta.stage(node) is not None for node in loop.body.nodes)


def cuts_for(loop: Loop, mesh: Mesh, axis: str, order: str) -> tuple[StageCut, StageCut]:
    """The blocks of the stages along `axis`, and those with gradients of weights apart, which an order of this name may
    need; the same where it does not. What stages have already they keep.

    Raises:
        PlanError: ranks of all stages would exchange something for each piece.
    """
    _refuse_exchanges(loop, axis)
    joined = StageCut(loop, mesh.axis_size(axis), False)
    apart = StageCut(loop, joined.count, True) if order in APART or order not in NAMED else joined
    for cut in (joined, apart):
        if loop.stages is not None and cut.fillers == loop.stages.has_fillers:
            cut.blocks = [part.blocks for part in loop.stages.parts]
    return joined, apart


def stages_of(
    joined: StageCut, apart: StageCut, mesh: Mesh, axis: str, order: str, hardware: Hardware, device: str,
    beside: Sequence[float] = (),
) -> StageParts:  # fmt: skip
    """Schedule the blocks of each stage by a named order or the fastest (`auto`), which is chosen by what blocks take
    as they run and by the bytes that each stage holds `beside` micro-batches.
    """
    pieces, count, prices = joined.loop.pieces, joined.count, BlockPrices(hardware, mesh)
    costs = joined.costs(axis, prices, as_run=True)
    cut_costs = costs if apart is joined else apart.costs(axis, prices, as_run=True)
    if order in NAMED:
        schedule = NAMED[order](cut_costs, pieces, count)
        name, us = order, {order: on_shared_cores(cut_costs, pieces, schedule, hardware.ranks_per_core).us}
    else:
        tried = simulated_orders(costs, cut_costs, pieces, count, hardware.ranks_per_core)
        name = tried.fitting(beside)[0] if order == "auto" else order
        schedule, us = tried[name], tried.us
    return StageParts(parts_in(schedule.orders, joined, apart, mesh, axis, hardware, device), name, us)


def parts_in(
    orders: Orders, joined: StageCut, apart: StageCut, mesh: Mesh, axis: str, hardware: Hardware, device: str
) -> tuple[StagePart, ...]:
    """The parts of the stages along `axis` in known orders, which are proven to end."""
    fillers = {block.name for blocks in apart.blocks for block in blocks if block.is_filler}
    cut = apart if any(name in fillers for tasks in orders for name, _ in tasks) else joined
    alone, priced = is_alone(device), cut.costs(axis, BlockPrices(hardware, mesh))
    parts = cut.parts(axis, device, orders, alone)
    check_orders([part.actions for part in parts], cut.messages, cut.blocks, cut.loop.pieces, alone)
    return tuple(replace(part, blocks=tuple(_priced(b, priced[b.name]) for b in part.blocks)) for part in parts)


def is_alone(device: str) -> bool:
    """True for devices that may do one thing at a time: messages of CPUs run beside all else."""
    return device.startswith("cuda")


def recut(loop: Loop, mesh: Mesh, axis: str, hardware: Hardware, only: int | None = None) -> Loop:
    """`loop`, whose body computes the same in another way, with blocks of stages cut anew, of stage `only` or of all;
    what stages exchange stays as it is, and its order. Other loops stay as they are.
    """
    if loop.stages is None:
        return loop
    parts, prices = list(loop.stages.parts), BlockPrices(hardware, mesh)
    stages = range(len(parts)) if only is None else [only]
    cut = StageCut(loop, len(parts), loop.stages.has_fillers, stages)
    costs = cut.costs(axis, prices)
    for stage in stages:
        part, priced = parts[stage], [_priced(block, costs[block.name]) for block in cut.blocks[stage]]
        if [block.name for block in priced] != [block.name for block in part.blocks]:
            raise GraphError(f"stage {stage} has other blocks than before", "the same blocks with other contents")
        parts[stage] = replace(part, blocks=tuple(priced), operands=cut.operands[stage])
    actions, blocks = [part.actions for part in parts], [part.blocks for part in parts]
    check_orders(actions, cut.messages, blocks, loop.pieces, is_alone(parts[0].device))
    return replace(loop, stages=replace(loop.stages, parts=tuple(parts)))


def put_blocks(calls: Sequence[Node], blocks: Sequence[StageBlock], axis: str, prices: BlockPrices) -> None:
    """Let the `calls` of a loop's regions run `blocks` with other bodies, which compute the same, priced anew."""
    costs, regions = block_costs([blocks], axis, prices), dict[str, tuple[StageBlock, Region]]()
    for block in (_priced(block, costs[block.name]) for block in blocks):
        regions[block.name] = block, region_from(block.body, cast(Region, calls[0].target).pieces, block)
    for call in calls:
        block, call.target = regions[cast(StageBlock, meta.block(call)).name]
        meta.set_block(call, block)


def in_order_of(
    loop: Loop, named: NamedOrder, mesh: Mesh, axis: str, hardware: Hardware, device: str
) -> StageParts | None:  # fmt: skip
    """How stages share `loop` in the order of another one; None where it has other blocks or pieces, or would not end.
    An order follows from prices, which follow from sizes, and ranks have to keep to one.
    """
    (name, orders), pieces = named, range(loop.pieces)
    cuts = cuts_for(loop, mesh, axis, name)
    runs = [[{(block.name, i) for block in blocks for i in pieces} for blocks in cut.blocks] for cut in cuts]
    if list(map(set, orders)) in runs:
        with suppress(GraphError):
            parts = parts_in(orders, *cuts, mesh, axis, hardware, device)
            return StageParts(parts, name, loop.stages.simulated_us if loop.stages else {})
    return None


def _priced(block: StageBlock, other: BlockCost) -> StageBlock:
    return replace(block, us=other.us, work_bytes=other.work_bytes)


def _refuse_exchanges(loop: Loop, axis: str) -> None:
    for node in loop.body.nodes:
        if node.target is share or (is_collective(node) and node.args[-1] == axis):
            problem = f"%{node.name} is exchanged among all stages for each micro-batch"
            needed = "values of a micro-batch that one stage sends to one other"
            raise PlanError(problem, needed, "leave out MicroBatches, or put its readers into one stage",
                            meta.source_line(node))  # fmt: skip


def levels_of(body: Graph) -> dict[Node, int]:
    """The level of each node: the number of sends on the longest way to it."""
    level: dict[Node, int] = {}
    for node in body.nodes:
        below = max((level[operand] for operand in node.all_input_nodes), default=0)
        level[node] = below + (node.target is transfer)
    return level


@dataclass
class StageCut:
    """The blocks of each stage. `fillers`: gradients that no other stage waits for are blocks of their own.
    `stages`: those to cut; None for all. `was_backward`: whether a block is of the backward, by stage
    and key, where the loop has been cut before, and has an order of these blocks.
    """

    loop: Loop
    count: int
    fillers: bool
    stages: Sequence[int] | None = None
    messages: dict[str, Message] = field(default_factory=dict[str, Message])

    def __post_init__(self) -> None:
        self.nodes = list(self.loop.body.nodes)
        self.ends = operands(self.nodes[-1])
        self.level = levels_of(self.loop.body)
        stages = self.loop.stages
        before = stages.parts if stages is not None and stages.has_fillers == self.fillers else ()
        self.was_backward = {
            (part.stage, block.level, block.is_filler): block.is_backward for part in before for block in part.blocks
        }
        for node in self.nodes:
            if node.target is transfer:
                value, source, target = cast("tuple[Node, int, int]", node.args[:3])
                tensor, shape = meta.one_tensor(node), tuple(cast(Sequence[int], node.args[3]))
                what = shape, tensor.dtype, tensor.size_bytes
                self.messages[node.name] = Message(node.name, value.name, source, target, *what)
        self.blocks: list[tuple[StageBlock, ...]] = [()] * self.count
        self.operands: list[tuple[str, ...]] = [()] * self.count
        self.totals: list[tuple[tuple[str, str], ...]] = [()] * self.count
        for stage in range(self.count) if self.stages is None else self.stages:
            self._stage(stage)

    def _stage(self, stage: int) -> None:
        needed = self._needed(stage)
        level = self._late(stage, needed)
        groups: dict[tuple[int, bool], list[Node]] = {}
        for node in needed:
            groups.setdefault((level[node], False), []).append(node)
        for key, nodes in list(groups.items()):
            if self.fillers and (not self.was_backward or (stage, key[0], True) in self.was_backward):
                self._set_apart(stage, key, nodes, groups)
        number = len(self.ends)
        totals = [i for i in range(number) if self.ends[i] in set(needed)]
        names = [n.name for n in self.nodes if n.op == "placeholder"]
        first_total = len(names) - number
        self.totals[stage] = tuple((names[first_total + i], self.ends[i].name) for i in totals)
        writers: dict[Node, tuple[int, bool]] = {node: key for key, nodes in groups.items() for node in nodes}
        blocks = [self._block(stage, key, groups[key], writers) for key in sorted(groups)]
        self.blocks[stage] = tuple(blocks)
        reads = dict.fromkeys(name for block in blocks for name in block.takes)
        self.operands[stage] = tuple(name for name in names[:first_total] if name in reads)

    def _sent(self, stage: int) -> list[Node]:
        return [n for n in self.nodes if n.target is transfer and n.args[1] == stage]

    def _needed(self, stage: int) -> list[Node]:
        """The nodes that a stage runs: its own, and those of all stages that it reads."""
        todo = [end for end in self.ends if meta.stage(end) in (None, stage)]
        todo += [node_at(sent, 0) for sent in self._sent(stage)]
        needed = reached(todo, where=lambda n: n.target is not transfer and meta.stage(n) in (None, stage))
        return [node for node in self.nodes if node in needed]

    def _late(self, stage: int, needed: Sequence[Node]) -> dict[Node, int]:
        """Levels of the nodes of a stage. A node runs as late as it can where no more memory is held for it: a view of
        a value that is held anyway, and a value computed from what all stages have. Recomputed nodes wait for the
        backward. Results of one op stay together.
        """
        level, inside = dict(self.level), set(needed)
        turn = max((level[node] for node in needed if not meta.is_backward(node)), default=-1)
        leaves = {*(node_at(sent, 0) for sent in self._sent(stage)), *self.ends}
        readers = {node: [user for user in node.users if user in inside] for node in self.nodes}
        for node in reversed(needed):
            group = {node, *(user for user in readers[node] if _torch.is_getitem(user.target))}
            later = [level[user] for member in group for user in readers[member] if user not in group]
            if _torch.is_getitem(node.target) or group & leaves or not later:
                continue
            late = min(later)
            inputs = [n for n in node.all_input_nodes if n.op != "placeholder"]
            again = meta.is_backward(node) and level[node] <= turn
            if late > level[node] and (again or (len(group) == 1 and all(
                meta.stage(n) is None or any(level[user] >= late for user in readers[n] if user is not node)
                for n in inputs
            ))):  # fmt: skip
                level |= dict.fromkeys(group, late)
        return level

    def _set_apart(
        self, stage: int, key: tuple[int, bool], nodes: list[Node], groups: dict[tuple[int, bool], list[Node]]
    ) -> None:
        """Split a block of the backward into what leads to a send, and the rest."""
        inside = set(nodes)
        urgent = reached((node_at(sent, 0) for sent in self._sent(stage)), where=inside.__contains__)
        for node in nodes:  # results of one op stay together
            if _torch.is_getitem(node.target) and node_at(node, 0) in urgent:
                urgent.add(node)
        rest = [node for node in nodes if node not in urgent]
        if urgent and any(map(meta.is_backward, nodes)) and any(map(meta.is_backward, rest)):
            groups[key] = [node for node in nodes if node in urgent]
            groups[key[0], True] = rest

    def _block(
        self, stage: int, key: tuple[int, bool], nodes: Sequence[Node], writers: Mapping[Node, tuple[int, bool]]
    ) -> StageBlock:
        body, inside, takes = Graph(), dict[Node, Node](), dict[str, Node]()

        def read(node: Node) -> Node:
            if node in inside:
                return inside[node]
            if node.target is numbers_of:
                inside[node] = copy_node(node, body, read)
                return inside[node]
            if node.op == "placeholder" or node in writers or (node.target is transfer and node.args[2] == stage):
                new = body.create_node("placeholder", node.name, name=node.name)
                meta.copy(node, new)
                takes[node.name] = inside[node] = new
                return new
            inside[node] = add_empty(body, meta.one_tensor(node), node, "shape")  # of another stage
            return inside[node]

        for node in nodes:
            inside[node] = copy_node(node, body, read)
        sent = {node_at(send, 0) for send in self._sent(stage)}
        gives = [
            node for node in nodes
            if node in sent or node in self.ends
            or (node.target is not numbers_of and any(writers.get(user, key) != key for user in readers_of(node)))
        ]  # fmt: skip
        body.output(tuple(inside[node] for node in gives))
        first = next(node for node in body.nodes if node.op != "placeholder")
        for placeholder in takes.values():
            first.prepend(placeholder)
        backward = self.was_backward.get((stage, *key), 2 * sum(map(meta.is_backward, nodes)) > len(nodes))
        receives = tuple(self.messages[name] for name in takes if name in self.messages)
        sends = tuple(self.messages[n.name] for end in gives for n in self._sent(stage) if node_at(n, 0) is end)
        ends = tuple(node.name for node in gives)
        block = StageBlock("", body, tuple(takes), ends, key[0], backward, key[1], receives, sends)
        return replace(block, name=f"stage {stage}, {block.label}")

    def costs(self, axis: str, prices: BlockPrices, as_run: bool = False) -> dict[str, BlockCost]:
        """What each block takes; `as_run`: with the body that passes have made for it."""
        ran = [[block.as_run for block in blocks] for blocks in self.blocks] if as_run else self.blocks
        return block_costs(ran, axis, prices)

    def parts(self, axis: str, device: str, orders: Orders = (), alone: bool = False) -> tuple[StagePart, ...]:
        """The parts of the stages; without `orders` for one piece."""
        orders = orders or tuple(tuple((block.name, 0) for block in blocks) for blocks in self.blocks)
        by_name = {block.name: block for blocks in self.blocks for block in blocks}
        actions = actions_of(orders, by_name, self.messages, alone)
        return tuple(
            StagePart(
                axis, stage, self.loop.pieces, blocks, self.messages, actions[stage], self.operands[stage],
                self.totals[stage], device,
            )
            for stage, blocks in enumerate(self.blocks)
        )  # fmt: skip
