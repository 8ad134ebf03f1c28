"""Folds a captured step: the graph that a capture of a model with fewer equal layers, or with more, would give."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ...errors import GraphError
from .. import meta
from ..graph import Input, Output, Role, TrainGraph
from ..nodes import add_node, copy_node, name_in_order, operands
from ..ops import GRAD_READY
from ..verify import check_train_graph
from .blocks import ListCalls, Place, first_list, owner_block
from .repeats import Repeats


def fold(graph: TrainGraph, repeats: Repeats, blocks: int) -> TrainGraph:
    """`graph` with the first `blocks` of its equal blocks, or with more, copies of the second behind it. Readers of the
    last block read the last one that is there, and lists over all layers are shorter or longer. With fewer
    blocks nodes keep their names; with more blocks nodes are named as a capture names them.

    Numbers that Python code of the step computed from its number of layers stay as they are. Raises GraphError: no
    block is left, or shapes depend on the number of layers.
    """
    if blocks < 1:
        raise GraphError(f"{blocks} of {repeats.count} equal layers", "1 of them, or more")
    if blocks == repeats.count:
        return graph
    copies = (0, *[1] * (blocks - repeats.count + 1), *range(2, repeats.count))
    folded = _Fold(graph, repeats, range(blocks) if blocks < repeats.count else copies).run()
    check_train_graph(folded)
    return folded


class _Fold:
    """`sources`: the block that each new one is made of."""

    def __init__(self, graph: TrainGraph, repeats: Repeats, sources: Sequence[int]) -> None:
        self.train, self.repeats, self.count = graph, repeats, len(sources)
        self.last = repeats.count - 1
        self.copies = [[new for new, old in enumerate(sources) if old == block] for block in range(repeats.count)]
        self.lists = ListCalls(graph.graph)
        self.pattern = re.compile(re.escape(repeats.prefix) + r"\.(\d+)(?=[./]|$)")
        self.new, self.at, self.copied = Graph(), dict[Node | Place, Node](), dict[str, Node]()
        self.changed: set[Node] = set()
        self.columns = cache(self._columns)

    def run(self) -> TrainGraph:
        nodes, pairs, results = list(self.train.graph.nodes)[:-1], list(self.train.placeholders()), self.train.results()
        inputs, constants = list[Input](), dict[str, torch.Tensor]()
        for i, *at in self._laid_out([self._block(n) for _, n in pairs]):
            inputs.append(new_input := self._input(pairs[i][0], *at))
            if new_input.role is Role.CONST:
                constants[new_input.name] = self.train.constants[pairs[i][0].name]
        for i, _, block in self._laid_out([*map(self._block, nodes)]):
            self._copy(nodes[i], block)
        owners = {i.name: self.repeats.places[n][0] for i, n in pairs if n in self.repeats.places}
        owned = [owner_block(out, owners) if out.kind == "update" else None for out, _ in results]
        outputs, returned = list[Output](), list[Any]()
        for i, old, block in self._laid_out(owned):
            out, node = results[i]
            names = self._named(out.target, old, block), self._named(out.owner, old, block)
            outputs.append(replace(out, target=names[0], owner=names[1]))
            returned.append(self._read(node, old, block) if isinstance(node, Node) else node)
        self.new.output(tuple(returned))
        if self.count > self.repeats.count:
            name_in_order(self.new, [new_input.name for new_input in inputs])
        losses = tuple(self.copied[name].name for name in self.train.losses if name in self.copied)
        return replace(
            self.train, graph=self.new, inputs=tuple(inputs), outputs=tuple(outputs), constants=constants,
            losses=losses,
        )  # fmt: skip

    def _block(self, entry: object) -> int | None:
        return self.repeats.block(entry) if isinstance(entry, Node) else None

    def _laid_out(self, blocks: Sequence[int | None]) -> Iterator[tuple[int, int | None, int | None]]:
        """The number of each entry that is in one of `blocks`, in the new order, its block and the new one: runs of one
        block once for each copy, in the direction in which the blocks follow each other.
        """
        before = -1
        for block, run in groupby(range(len(blocks)), key=blocks.__getitem__):
            several = list(run)
            if block is None:
                yield from ((i, None, None) for i in several)
                continue
            copies = self.copies[block]
            for new in copies if before < block else reversed(copies):
                yield from ((i, block, new) for i in several)
            before = block

    def _named(self, name: str, old: int | None, new: int | None) -> str:
        """A name with the number of its layer: in the block `new`, a copy of `old`, or behind all blocks."""
        end, period = self.repeats.first + self.repeats.layers, self.repeats.period
        shift = max(self.count - self.repeats.count, 0) if old is None or new is None else new - old

        def number(match: re.Match[str]) -> str:
            moves = old is not None or int(match[1]) >= end
            return f"{self.repeats.prefix}.{int(match[1]) + shift * period}" if moves else match[0]

        return self.pattern.sub(number, name) if shift else name

    def _input(self, source: Input, old: int | None, new: int | None) -> Input:
        if source.role is Role.CONST:
            return source if old == new else replace(source, name=f"{source.name}.{new}")
        return replace(source, name=self._named(source.name, old, new), owner=self._named(source.owner, old, new))

    def _read(self, node: Node, old: int | None, new: int | None) -> Node:
        """What a node in the block `new`, a copy of `old`, or one outside, reads for `node`."""
        block, slot = self.repeats.places.get(node, (None, 0))
        if block is None:
            return self.at[node]
        if old is None or new is None:
            return self.at[self.count - 1 if block == self.last else block, slot]
        return self.at[new + block - old, slot]

    def _copy(self, node: Node, new: int | None) -> None:
        block, slot = self.repeats.places.get(node, (None, 0))
        if block is None and node.op != "placeholder" and node not in self.lists.items:
            copied = self._copy_outside(node)
        else:
            reads = iter(self._reads_in(node, block, new))
            copied = copy_node(node, self.new, lambda _: next(reads))
            if node in self.lists.items:
                call, index = self.lists.items[node]
                copied.args = (copied.args[0], self.columns(call)[index, new])
            elif any(n in self.changed for n in operands(node)):
                raise GraphError(f"%{node.name} reads what depends on the number of layers", "layers that do not")
        self.at[node if block is None or new is None else (new, slot)] = copied
        if block == new:
            self.copied[node.name] = copied
        if node.target is GRAD_READY:
            copied.args = (copied.args[0], self._named(str(copied.args[1]), block, new))
        meta.set_module_path(copied, self._named(meta.module_path(copied), block, new))

    def _reads_in(self, node: Node, block: int | None, new: int | None) -> list[Node]:
        """Operands of a node; the last block left reads outside as the last of all did."""
        reads = operands(node)
        if new == self.count - 1 and block is not None and block != self.last:
            end = operands(self.repeats.blocks[self.last][self.repeats.places[node][1]])
            reads = [
                theirs if (self._block(ours) or 0) > block else ours for ours, theirs in zip(reads, end, strict=True)
            ]  # fmt: skip
        return [self._read(operand, block, new) for operand in reads]

    def _copy_outside(self, node: Node) -> Node:
        on_lists = self.lists.call_of.get(node) is node
        columns, length = (self.columns(node), len(first_list(node))) if on_lists else (None, 0)
        args = tuple(self._argument(a, columns, length) for a in node.args)
        kwargs = {k: self._argument(v, columns, length) for k, v in node.kwargs.items()}
        new = add_node(self.new, "call_function", node.target, args, kwargs, node.name)
        meta.copy(node, new)
        if node in self.lists.call_of:
            self._resize(node, new)
        elif len(operands(new)) != len(operands(node)) or any(n in self.changed for n in operands(node)):
            self._make_again(node, new)
        return new

    def _columns(self, call: Node) -> dict[tuple[int, int | None], int]:
        """The places in the operand lists of a call, and the new blocks that they are for, with their new places."""
        placed = self._laid_out([*map(self._block, first_list(call))])
        return {(i, new): place for place, (i, _, new) in enumerate(placed)}

    def _argument(self, argument: Any, columns: dict[tuple[int, int | None], int] | None, length: int) -> Any:
        if isinstance(argument, Node):
            return self._read(argument, None, None)
        if not isinstance(argument, (list, tuple)):
            return argument
        entries = cast(Sequence[Any], argument)
        blocks = [*map(self._block, entries)]
        places = [(i, blocks[i], new) for i, new in columns] if columns is not None and len(entries) == length else None
        if places is None:
            ends = columns is not None or {*blocks} - {None} <= {0, self.last}
            places = [(i, None, None) for i in range(len(entries))] if ends else [*self._laid_out(blocks)]
        return [self._read(n, *at) if isinstance(n := entries[i], Node) else n for i, *at in places]

    def _resize(self, node: Node, new: Node) -> None:
        """The results of a call on lists become shorter or longer."""
        keep = [i for i, _ in self.columns(self.lists.call_of[node])]

        def cut(values: Any) -> Any:
            if not isinstance(values, (list, tuple)) or not values:
                return cast(Any, values)
            several = cast(Sequence[Any], values)
            nested = isinstance(several[0], (list, tuple))
            return [cut(v) for v in several] if nested else [several[i] for i in keep]

        meta.replace_value(new, cut(meta.value(node)))

    def _make_again(self, node: Node, new: Node) -> None:
        """Recompute the metadata of a node that depends on the number of layers, with fake tensors."""
        try:
            meta.recompute_value(new)
        except Exception as error:
            problem = f"%{node.name} does not run with another number of layers: {error}"
            raise GraphError(problem, "one that does") from error
        if meta.tensors(new) != meta.tensors(node):
            self.changed.add(node)
