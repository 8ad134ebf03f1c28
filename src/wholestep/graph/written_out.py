"""Writes out what a program runs for pieces of the batch: a call of a region for each run, and each message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch.fx import Graph, Node

from .. import _torch
from . import meta
from .loop import Loop, loop_of
from .messages import complete, start_receive, start_send
from .nodes import add_node, copy_node, ends_of, operands
from .region import Region, inputs_of, region_of
from .stage_part import OfPiece, StageBlock, StagePart
from .storage import most_at_once, storages


def written_out(graph: Graph) -> None:
    """Put, in place of loops, a call for each run of their bodies."""
    calls = RegionCalls(graph)
    for node in list(graph.nodes):
        if loop := loop_of(node):
            with graph.inserting_before(node):
                totals = calls.loop(node, loop)
            for item in list(node.users):
                if (total := totals[cast(int, item.args[1])]) is not None:
                    item.replace_all_uses_with(total)
                    mark_complete(total, item)
                    graph.erase_node(item)
            if not node.users:
                graph.erase_node(node)
    calls.drop_unread()


def mark_complete(total: Node, origin: Node) -> None:
    """Note that the result `total` of a run is that of all pieces, with what is recorded about `origin`."""
    meta.copy(origin, total)
    meta.set_piece(total, None)


def inline(run: Node) -> list[Node]:
    """Put the body of a region in place of a call, and return its nodes."""
    region, graph, piece = region_of(run), run.graph, meta.piece(run)
    assert region is not None, "a call"
    inside = dict[Node, Any](zip(region.body.nodes, inputs_of(run), strict=False))
    ends, nodes = ends_of(region.body), list[Node]()
    with graph.inserting_before(run):
        for node in region.body.nodes:
            if node.op == "call_function":
                inside[node] = copy_node(node, graph, inside.__getitem__)
                meta.set_piece(inside[node], piece)
                meta.set_block(inside[node], meta.block(run))
                nodes.append(inside[node])
    for item in list(run.users):
        end = inside[ends[cast(int, item.args[1])]]
        if meta.piece(item) is None:
            meta.copy(item, end)
            meta.set_piece(end, piece)
        item.replace_all_uses_with(end)
        graph.erase_node(item)
    graph.erase_node(run)
    return nodes


def calls_in(graph: Graph) -> dict[str, list[Node]]:
    """The calls of regions in the program of a stage, by the loop over pieces that they are of."""
    calls = dict[str, list[Node]]()
    for node in graph.nodes:
        if region_of(node):
            calls.setdefault(meta.part_of(node), []).append(node)
    return calls


def blocks_in(nodes: Iterable[Node]) -> list[StageBlock]:
    """The blocks that nodes in the program of a stage run, or are a part of, as they were priced last."""
    blocks = {block.name: block for node in nodes if (block := meta.block(node))}
    return sorted(blocks.values(), key=lambda block: (block.level, block.is_filler))


@dataclass
class RegionCalls:
    """Adds calls to a graph where it inserts. `items`: the results of runs."""

    graph: Graph
    items: list[Node] = field(default_factory=list[Node])

    def loop(self, node: Node, loop: Loop) -> Sequence[Node | None]:
        """The runs of a loop, for what it accumulates."""
        region, totals = (
            region_from(loop.body, loop.pieces),
            cast("list[Node | None]", [None] * len(ends_of(loop.body))),
        )
        for piece in range(loop.pieces):
            totals = self._run(node, region, [*operands(node), *totals], piece)
        return totals

    def part(
        self, node: Node, part: StagePart, fixed: Mapping[str, Node], received: Mapping[str, meta.TensorMeta]
    ) -> dict[str, Node | None]:
        """The actions of a part of a stage, for what it accumulates, by the names of the ends. `fixed`: its operands;
        `received`: what messages bring.
        """
        befores, values = {end: before for before, end in part.totals}, dict[OfPiece, Node]()
        totals = dict[str, Node | None].fromkeys(befores.values())
        regions = {block.name: region_from(block.body, part.pieces, block) for block in part.blocks}
        blocks = {block.name: block for block in part.blocks}

        def value(name: str, piece: int) -> Node | None:
            return fixed.get(name) or (totals[name] if name in totals else values[name, piece])

        for action in part.actions:
            name, piece, kind = action.name, action.piece, action.kind
            if kind == "run":
                block, reads = blocks[name], [value(taken, piece) for taken in blocks[name].takes]
                for end, item in zip(block.gives, self._run(node, regions[name], reads, piece, block), strict=True):
                    values[end, piece] = item
                    totals |= {befores[end]: item} if end in befores else {}
            elif kind in ("wait", "sent"):
                under_way = values.pop((name, piece))
                tensor = self._call(node, f"{kind} {name}", complete, (under_way,), piece, [meta.tensor(under_way)])
                values |= {(name, piece): tensor} if kind == "wait" else {}
            else:
                message, start, tensor = part.messages[name], start_receive, received.get(name)
                ends: tuple[Any, ...] = (message.shape, message.dtype, part.device, message.source)
                if kind == "send":
                    sent, start = value(message.value, piece), start_send
                    ends, tensor = (sent, message.target), meta.tensor(sent) if sent else None
                args = (*ends, part.tag(name, piece), part.axis)
                values[name, piece] = self._call(node, f"{kind} {name}", start, args, piece, [tensor])
        return {end: totals[before] for before, end in part.totals}

    def drop_unread(self) -> None:
        """Erase the results of runs that nothing reads."""
        for item in self.items:
            if not item.users:
                self.graph.erase_node(item)

    def _run(
        self, node: Node, region: Region, inputs: Sequence[Node | None], piece: int, block: StageBlock | None = None
    ) -> list[Node]:
        """The items of a call of a region."""
        name, tensors = block.name if block else node.name, [meta.tensor(end) for end in ends_of(region.body)]
        run, items = self._call(node, name, region, (list(inputs), piece), piece, tensors), list[Node]()
        meta.set_block(run, block)
        for number, tensor in enumerate(tensors):
            item = add_node(self.graph, "call_function", _torch.GETITEM, (run, number), {}, run.name)
            meta.copy(node, item)
            meta.set_kept(item, False)
            meta.set_tensors(item, [tensor])
            meta.set_piece(item, piece)
            items.append(item)
        self.items += items
        return items

    def _call(self, node: Node, name: str, target: Any, args: Any, piece: int, tensors: Sequence[Any]) -> Node:
        call = add_node(self.graph, "call_function", target, args, {}, f"{name} {piece}")
        meta.copy(node, call)
        meta.set_tensors(call, tensors)
        meta.set_kept(call, True)
        meta.set_part_of(call, node.name)
        meta.set_piece(call, piece)
        meta.set_received_of_batch(call, target is start_receive)
        return call


def region_from(body: Graph, pieces: int, block: StageBlock | None = None) -> Region:
    """The region of a body, priced as its block."""
    numbers = {node: number for number, node in enumerate(body.nodes) if node.op == "placeholder"}
    buffers, shares, sizes = list(enumerate(storages(body))), list[int](), list[int]()
    for end in ends_of(body):
        at, buffer = next(((at, buffer) for at, buffer in buffers if end in buffer.members), (-1, None))
        shares.append(numbers.get(buffer.node if buffer else end, -2 - at))
        sizes.append(buffer.size_bytes if buffer else 0)
    us, work_bytes = (block.us, block.work_bytes) if block else (0.0, sum(s.size_bytes for s in most_at_once(body)))
    return Region(body, pieces, tuple(shares), tuple(sizes), us, work_bytes)
