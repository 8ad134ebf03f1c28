"""Writes out what a program runs for pieces of the batch: a call of a region for each run, and each message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch.fx import Graph, Node

from .. import _torch
from . import meta
from .loop import Loop, loop_of
from .messages import complete, start_receive, start_send
from .nodes import add_node, copy_node, ends_of, operands
from .region import Region, inputs_of, region_of
from .stage_part import OfPiece, StageBlock, StagePart, part_of
from .storage import most_at_once, storages


def written_out(graph: Graph, loops: bool = True) -> set[Node]:
    """Put, in place of parts of stages and with `loops` of loops, a call for each run of their bodies, and for what is
    sent, received and waited for. Returns what is accumulated.
    """
    write, replaced = _Write(graph), list[Node]()
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if part := part_of(node):
                write.part(node, part)
            elif loops and (loop := loop_of(node)):
                write.loop(node, loop)
            else:
                continue
        replaced = [*node.users, node, *replaced]
    for node in (*write.items, *replaced):
        if not node.users:
            graph.erase_node(node)
    return write.complete


def inline(run: Node, complete: set[Node]) -> list[Node]:
    """Put the body of a region in place of a call, and return its nodes. `complete`: as `written_out` returns it."""
    region, graph = region_of(run), run.graph
    assert region is not None, "a call"
    inside = dict[Node, Any](zip(region.body.nodes, inputs_of(run), strict=False))
    ends, nodes = ends_of(region.body), list[Node]()
    with graph.inserting_before(run):
        for node in region.body.nodes:
            if node.op == "call_function":
                inside[node] = copy_node(node, graph, inside.__getitem__)
                meta.set_piece(inside[node], meta.piece(run))
                meta.set_block(inside[node], meta.block(run))
                nodes.append(inside[node])
    for item in list(run.users):
        end = inside[ends[cast(int, item.args[1])]]
        if item in complete:
            meta.copy(item, end)
        item.replace_all_uses_with(end)
        graph.erase_node(item)
    graph.erase_node(run)
    return nodes


def blocks_in(graph: Graph) -> list[StageBlock]:
    """The blocks that the program of a stage runs, as they were priced last."""
    written = {block.name: block for node in graph.nodes if (block := meta.block(node))}
    blocks = [*written.values(), *(block for node in graph.nodes if (part := part_of(node)) for block in part.blocks)]
    return sorted(blocks, key=lambda block: (block.level, block.is_filler))


@dataclass
class _Write:
    """`regions`: by body. `items`: those of runs. `complete`: what is accumulated."""

    graph: Graph
    regions: dict[Graph, Region] = field(default_factory=dict[Graph, Region])
    items: dict[Node, None] = field(default_factory=dict[Node, None])
    complete: set[Node] = field(default_factory=set[Node])

    def loop(self, node: Node, loop: Loop) -> None:
        """The runs of a loop."""
        totals: list[Node | None] = [None] * len(ends_of(loop.body))
        for piece in range(loop.pieces):
            totals = [*self._run(node, loop, loop.body, [*operands(node), *totals], piece)]
        self._hand_out(node, totals)

    def part(self, node: Node, part: StagePart) -> None:
        """The actions of a part of a stage."""
        befores = {end: before for before, end in part.totals}
        fixed = dict(zip(part.operands, operands(node), strict=True))
        totals: dict[str, Node | None] = dict.fromkeys(befores.values())
        values = dict[OfPiece, Node]()

        def value(name: str, piece: int) -> Node | None:
            return fixed.get(name) or (totals[name] if name in totals else values[name, piece])

        for action in part.actions:
            name, piece, kind = action.name, action.piece, action.kind
            if kind == "run":
                block = part.block(name)
                reads = [value(taken, piece) for taken in block.takes]
                for end, item in zip(block.gives, self._run(node, part, block.body, reads, piece, block), strict=True):
                    values[end, piece] = item
                    totals |= {befores[end]: item} if end in befores else {}
            elif kind in ("wait", "sent"):
                under_way = values.pop((name, piece))
                tensor = self._call(node, f"{kind} {name}", complete, (under_way,), piece, [meta.tensor(under_way)])
                values |= {(name, piece): tensor} if kind == "wait" else {}
            else:
                message, start, tensor = part.messages[name], start_receive, _received(part, name)
                ends: tuple[Any, ...] = (message.shape, message.dtype, part.device, message.source)
                if kind == "send":
                    sent, start = value(message.value, piece), start_send
                    ends, tensor = (sent, message.target), meta.tensor(sent) if sent else None
                args = (*ends, part.tag(name, piece), part.axis)
                values[name, piece] = self._call(node, f"{kind} {name}", start, args, piece, [tensor])
        self._hand_out(node, [totals[before] for before, _ in part.totals])

    def _run(
        self, node: Node, of: Loop | StagePart, body: Graph, inputs: Sequence[Node | None], piece: int,
        block: StageBlock | None = None,
    ) -> list[Node]:  # fmt: skip
        """The items of a call of the region of `body`."""
        region = self.regions.get(body) or self.regions.setdefault(body, _region(of, body, block))
        name, tensors = block.name if block else node.name, [meta.tensor(end) for end in ends_of(body)]
        run, items = self._call(node, name, region, (list(inputs), piece), piece, tensors), list[Node]()
        meta.set_block(run, block)
        for number, tensor in enumerate(tensors):
            item = add_node(self.graph, "call_function", _torch.GETITEM, (run, number), {}, run.name)
            meta.copy(node, item)
            meta.set_kept(item, False)
            meta.set_tensors(item, [tensor])
            items.append(item)
        self.items |= dict.fromkeys(items)
        return items

    def _call(self, node: Node, name: str, target: Any, args: Any, piece: int, tensors: Sequence[Any]) -> Node:
        call = add_node(self.graph, "call_function", target, args, {}, f"{name} {piece}")
        meta.copy(node, call)
        meta.set_tensors(call, tensors)
        meta.set_kept(call)
        meta.set_part_of(call, node.name)
        meta.set_piece(call, piece)
        meta.set_ranked(call, target is start_receive)
        meta.set_received_of_batch(call, target is start_receive)
        return call

    def _hand_out(self, node: Node, values: Sequence[Node | None]) -> None:
        """Let readers of the items of `node` read `values`."""
        for item in node.users:
            if (value := values[cast(int, item.args[1])]) is not None:
                item.replace_all_uses_with(value)
                if value in self.items:
                    meta.copy(item, value)
                    self.complete.add(value)


def _received(part: StagePart, message: str) -> meta.TensorMeta | None:
    taken = (pair for block in part.blocks for pair in zip(block.takes, block.body.nodes, strict=False))
    return next((meta.tensor(node) for name, node in taken if name == message), None)


def _region(of: Loop | StagePart, body: Graph, block: StageBlock | None) -> Region:
    numbers = {node: number for number, node in enumerate(body.nodes) if node.op == "placeholder"}
    buffers, shares, sizes = list(enumerate(storages(body))), list[int](), list[int]()
    for end in ends_of(body):
        at, buffer = next(((at, buffer) for at, buffer in buffers if end in buffer.members), (-1, None))
        shares.append(numbers.get(buffer.node if buffer else end, -2 - at))
        sizes.append(buffer.size_bytes if buffer else 0)
    us, work_bytes = (block.us, block.work_bytes) if block else (0.0, sum(s.size_bytes for s in most_at_once(body)))
    return Region(body, of.pieces, tuple(shares), tuple(sizes), us, work_bytes)
