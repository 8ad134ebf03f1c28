"""Writes out what a program runs for pieces of the batch: a call of a region for each run, and each message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.loop import Loop, loop_of
from ..graph.nodes import add_node, ends_of, operands
from ..graph.region import Region
from ..graph.stage_part import TOTAL, OfPiece, StagePart, part_of
from .stage_program import complete, start_receive, start_send

_TAGS = 1 << 16  # of messages for pieces; sends outside of loops have smaller ones


def written_out(graph: Graph) -> None:
    """Put, in place of loops and of parts of stages, a call for each run of their bodies, and for what is sent,
    received and waited for.
    """
    write, replaced = _Write(graph), list[Node]()
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if loop := loop_of(node):
                write.loop(node, loop)
            elif part := part_of(node):
                write.part(node, part)
            else:
                continue
        replaced = [*node.users, node, *replaced]
    for node in (*write.items, *replaced):
        if not node.users:
            graph.erase_node(node)


@dataclass
class _Write:
    """`regions`: by body. `items`: those of runs."""

    graph: Graph
    regions: dict[Graph, Region] = field(default_factory=dict[Graph, Region])
    items: dict[Node, None] = field(default_factory=dict[Node, None])

    def loop(self, node: Node, loop: Loop) -> None:
        """The runs of a loop."""
        totals: list[Node | None] = [None] * len(ends_of(loop.body))
        for piece in range(loop.pieces):
            totals = [*self._run(node, loop, loop.body, [*operands(node), *totals], piece)]
        self._hand_out(node, totals)

    def part(self, node: Node, part: StagePart) -> None:
        """The actions of a part of a stage."""
        inputs, befores = operands(node), {end: before for before, end in part.totals}
        fixed = dict(zip(part.operands, inputs, strict=False))
        values: dict[OfPiece, Node | None] = {(before, TOTAL): None for before, _ in part.totals}
        values |= dict(zip(part.entering, inputs[len(fixed) :], strict=True))

        for action in part.actions:
            name, piece, kind, message = action.name, action.piece, action.kind, part.messages.get(action.name)
            if kind == "run":
                block = part.block(name)
                reads = [fixed.get(value) or values[part.key_of(value, piece)] for value in block.takes]
                for end, item in zip(block.gives, self._run(node, part, block.body, reads, piece, name), strict=True):
                    values[end, piece] = item
                    values |= {(befores[end], TOTAL): item} if end in befores else {}
            elif message is None or kind in ("wait", "sent"):  # without a message: until all have left
                for key in part.reads(action, values):
                    tensor = self._call(node, f"{kind} {key[0]}", complete, (values.pop(key),), key[1])
                    values |= {key: tensor} if kind == "wait" else {}
            else:
                tag = _TAGS + list(part.messages).index(name) * part.pieces + piece
                ends: tuple[Any, ...] = (message.shape, message.dtype, part.device, message.source)
                if kind == "send":
                    ends = values[part.key_of(message.value, piece)], message.target
                start = start_send if kind == "send" else start_receive
                values[name, piece] = self._call(node, f"{kind} {name}", start, (*ends, tag, part.axis), piece)
        self._hand_out(node, [values[key] for key in part.leaving])

    def _run(
        self, node: Node, of: Loop | StagePart, body: Graph, inputs: Sequence[Node | None], piece: int,
        block: str | None = None,
    ) -> list[Node]:  # fmt: skip
        """The items of a call of the region of `body`."""
        region = self.regions.setdefault(body, Region(body, of.pieces))
        run = self._call(node, block or node.name, region, (list(inputs), piece), piece, block)
        ends = ends_of(body)
        items = [
            add_node(self.graph, "call_function", _torch.GETITEM, (run, i), {}, run.name) for i in range(len(ends))
        ]
        self.items |= dict.fromkeys(items)
        return items

    def _call(self, node: Node, name: str, target: Any, args: Any, piece: int, block: str | None = None) -> Node:
        call = add_node(self.graph, "call_function", target, args, {}, f"{name} {piece}")
        meta.copy_origin(node, call)
        meta.set_part_of(call, node.name)
        meta.set_piece(call, piece)
        meta.set_block(call, block)
        meta.set_ranked(call, target is start_receive)
        return call

    def _hand_out(self, node: Node, values: Sequence[Node | None]) -> None:
        """Let readers of the items of `node` read `values`."""
        for item in node.users:
            if (value := values[cast(int, item.args[1])]) is not None:
                item.replace_all_uses_with(value)
                if value in self.items:
                    meta.copy(item, value)
