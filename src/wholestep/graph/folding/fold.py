"""Folds a captured step: the graph that a capture of a model with fewer equal layers would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch.fx import Graph, Node

from ...errors import GraphError
from .. import meta
from ..graph import TrainGraph
from ..nodes import add_node, copy_node, operands
from ..verify import check_train_graph
from .blocks import ListCalls, first_list, owner_block
from .repeats import Repeats


def fold(graph: TrainGraph, repeats: Repeats, blocks: int) -> TrainGraph:
    """`graph` with the first `blocks` of its equal blocks. Readers of the last block read the last one that is left,
    and lists over all layers are shorter. Nodes and inputs keep their names.

    Numbers that Python code of the step computed from its number of layers stay as they are. Raises GraphError: the
    graph has fewer blocks, or shapes depend on the number of layers.
    """
    if not 1 <= blocks <= repeats.count:
        raise GraphError(f"{blocks} of {repeats.count} equal layers", f"1 to {repeats.count} of them")
    if blocks == repeats.count:
        return graph
    made = _Fold(graph, repeats, blocks).run()
    check_train_graph(made)
    return made


class _Fold:
    def __init__(self, graph: TrainGraph, repeats: Repeats, kept: int) -> None:
        self.train, self.repeats, self.kept = graph, repeats, kept
        self.last = repeats.count - 1
        self.lists = ListCalls(graph.graph)
        self.new, self.at = Graph(), dict[Node, Node]()
        self.changed: set[Node] = set()

    def run(self) -> TrainGraph:
        owners = {i.name: self.repeats.places[n][0] for i, n in self.train.placeholders() if n in self.repeats.places}
        inputs = tuple(i for i, n in self.train.placeholders() if not self._is_dropped(n))
        for node in self.train.graph.nodes:
            if node.op != "output" and not self._is_dropped(node):
                self._copy(node)
        pairs = [
            (out, n) for out, n in self.train.results()
            if out.kind != "update" or (owner_block(out.target, owners) or 0) < self.kept
        ]  # fmt: skip
        self.new.output(tuple(self.at[self._end(n)] if isinstance(n, Node) else n for _, n in pairs))
        names = {n.name for n in self.new.nodes}
        losses = tuple(name for name in self.train.losses if name in names)
        held = {i.name for i in inputs}
        constants = {name: tensor for name, tensor in self.train.constants.items() if name in held}
        return replace(
            self.train, graph=self.new, inputs=inputs, outputs=tuple(out for out, _ in pairs), constants=constants,
            losses=losses,
        )  # fmt: skip

    def _is_dropped(self, node: Node) -> bool:
        block = self.repeats.block(node)
        return block is not None and block >= self.kept

    def _end(self, node: Node) -> Node:
        """The node that replaces `node`, of the last block, for readers outside."""
        block, slot = self.repeats.places.get(node, (None, 0))
        return self.repeats.blocks[self.kept - 1][slot] if block == self.last else node

    def _copy(self, node: Node) -> None:
        block = self.repeats.block(node)
        if node.op == "placeholder":
            self.at[node] = copy_node(node, self.new, self.at.__getitem__)
        elif block is not None:
            reads = iter(self._reads_in(node, block))
            self.at[node] = copy_node(node, self.new, lambda _: self.at[next(reads)])
            if node in self.lists.items:
                self._pick(node)
            elif any(n in self.changed for n in operands(node)):
                raise GraphError(f"%{node.name} reads what depends on the number of layers", "layers that do not")
        elif node in self.lists.items:
            self.at[node] = copy_node(node, self.new, self.at.__getitem__)
            self._pick(node)
        else:
            self._copy_outside(node)

    def _reads_in(self, node: Node, block: int) -> list[Node]:
        """Operands of a node in a block; the last block left reads outside as the last of all did."""
        given = operands(node)
        if block == self.kept - 1:
            end = operands(self.repeats.blocks[self.last][self.repeats.places[node][1]])
            given = [theirs if self._is_dropped(own) else own for own, theirs in zip(given, end, strict=True)]
        return given

    def _copy_outside(self, node: Node) -> None:
        on_lists = self.lists.made.get(node) is node
        columns, length = (self._columns(node), len(first_list(node))) if on_lists else (None, 0)
        args = tuple(self._argument(a, columns, length) for a in node.args)
        kwargs = {k: self._argument(v, columns, length) for k, v in node.kwargs.items()}
        new = add_node(self.new, "call_function", node.target, args, kwargs, node.name)
        meta.copy(node, new)
        self.at[node] = new
        if node in self.lists.made:
            self._shorten(node, new)
        elif len(operands(new)) != len(operands(node)) or any(n in self.changed for n in operands(node)):
            self._make_again(node, new)

    def _columns(self, call: Node) -> list[int]:
        """Places that are kept in the operand lists of a call."""
        return [i for i, n in enumerate(first_list(call)) if not (isinstance(n, Node) and self._is_dropped(n))]

    def _argument(self, given: Any, columns: Sequence[int] | None, length: int) -> Any:
        if isinstance(given, Node):
            return self.at[self._end(given)]
        if not isinstance(given, (list, tuple)):
            return given
        entries = cast(Sequence[Any], given)
        blocks = {self.repeats.block(n) for n in entries if isinstance(n, Node)} - {None}
        if columns is not None:
            entries = [entries[i] for i in columns] if len(entries) == length else entries
        elif blocks and blocks <= {0, self.last}:
            entries = [self._end(n) if isinstance(n, Node) else n for n in entries]
        else:
            entries = [n for n in entries if not (isinstance(n, Node) and self._is_dropped(n))]
        return [self.at[n] if isinstance(n, Node) else n for n in entries]

    def _pick(self, node: Node) -> None:
        call, index = self.lists.items[node]
        new = self.at[node]
        new.args = (new.args[0], self._columns(call).index(index))

    def _shorten(self, node: Node, new: Node) -> None:
        """The results of a call on lists become shorter."""
        keep = self._columns(self.lists.made[node])

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
            raise GraphError(f"%{node.name} does not run with fewer layers: {error}", "one that does") from error
        if meta.tensors(new) != meta.tensors(node):
            self.changed.add(node)
