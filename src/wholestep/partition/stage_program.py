"""The program of one stage of a pipeline, from that of all stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, Output
from ..graph.loop import Loop, loop_of
from ..graph.messages import receive, send
from ..graph.nodes import add_call, add_empty, copy_node, ends_of, is_collective, is_wait, node_at, operands, reached
from ..graph.stage_part import StageParts, transfer
from ..graph.written_out import RegionCalls, mark_complete
from .batch_dependent import batch_dependent
from .rank_ops import draws_numbers


def orders_in(local: LocalGraph) -> list[StageParts]:
    """How stages share the loops of a program."""
    loops = [loop for node in local.graph.nodes if (loop := loop_of(node))]
    return [loop.stages for loop in loops if loop.stages is not None]


def channels_of(local: LocalGraph) -> set[tuple[int, int]]:
    """Which stages send which others something, in the program of all stages."""
    sends = (node.args for node in local.graph.nodes if node.target is transfer)
    channels = {(cast(int, source), cast(int, target)) for _, source, target, *_ in sends}
    messages = (message for stages in orders_in(local) for message in stages.parts[0].messages.values())
    return channels | {(message.source, message.target) for message in messages}


def stage_program(local: LocalGraph, coordinate: int) -> LocalGraph:
    """The program that ranks at one coordinate of the axis of stages run. Other programs stay as they are.

    Example:
        >>> whole = ws.partition(graph, ws.plan(graph, "pp=2", ws.Pipeline(micro_batches=4)))
        >>> print(stage_program(whole, 1))
    """
    if not local.stage_axis or local.stage is not None:
        return local
    return _Program(local, coordinate).made()


@dataclass
class _Program:
    local: LocalGraph
    stage: int
    graph: Graph = field(default_factory=Graph)
    at: dict[Node, Node] = field(default_factory=dict[Node, Node])
    totals: dict[Node, list[Node | None]] = field(default_factory=dict[Node, "list[Node | None]"])

    def made(self) -> LocalGraph:
        sends = [node for node in self.local.graph.nodes if node.target is transfer]
        self.tags = {node: number for number, node in enumerate(sends)}
        self.varying, self.calls = batch_dependent(self.local), RegionCalls(self.graph)
        needed = self._needed()
        for node in self.local.graph.nodes:
            if node.op == "placeholder":
                self.at[node] = copy_node(node, self.graph, self.at.__getitem__)
            elif node in needed:
                self._write(node)
        outputs, ends = self._outputs()
        self.graph.output(tuple(ends))
        self.calls.drop_unread()
        return replace(self.local, graph=self.graph, outputs=tuple(outputs), stage=self.stage)

    def _is_here(self, node: Node) -> bool:
        return meta.stage(node) in (None, self.stage)

    def _needed(self) -> set[Node]:
        """Nodes that this stage has a part in: what it returns and updates, sends, and exchanges with all stages, and
        draws, which advance the random stream of all ranks alike.
        """
        todo: list[Node] = []
        for _, node in self.local.results():
            todo += [node] if isinstance(node, Node) and self._is_here(node) else []
        for node in self.local.graph.nodes:
            if self._is_sent(node) or self._exchanges(node) or draws_numbers(node):
                todo.append(node)
            if (loop := loop_of(node)) and loop.stages and loop.stages.parts[self.stage].blocks:
                todo.append(node)
        return reached(todo, self._reads, lambda node: self._is_here(node) or self._is_sent(node))

    def _is_sent(self, node: Node) -> bool:
        return node.target is transfer and cast(int, node.args[1]) == self.stage

    def _reads(self, node: Node) -> list[Node]:
        """The operands that this stage has to have for a node."""
        if (loop := loop_of(node)) and loop.stages:
            reads = loop.stages.parts[self.stage].operands
            names = [n.name for n in loop.body.nodes if n.op == "placeholder"]
            return [operand for name, operand in zip(names, operands(node), strict=False) if name in reads]
        return node.all_input_nodes if node.target is not transfer or self._is_sent(node) else []

    def _exchanges(self, node: Node) -> bool:
        """True for a collective of all stages, and for the wait for one."""
        collective = node_at(node, 0) if is_wait(node) else node
        return is_collective(collective) and collective.args[-1] == self.local.stage_axis

    def _write(self, node: Node) -> None:
        loop = loop_of(node)
        if node.target is transfer:
            self._transfer(node)
        elif loop is not None and loop.stages is not None:
            self._loop(node, loop)
        elif _torch.is_getitem(node.target) and node_at(node, 0) in self.totals:
            if (total := self.totals[node_at(node, 0)][cast(int, node.args[1])]) is not None:
                self.at[node] = total
                mark_complete(total, node)
        else:
            self.at[node] = copy_node(node, self.graph, self._read)
            meta.set_kept(self.at[node], self._exchanges(node) or draws_numbers(node))

    def _read(self, node: Node) -> Node:
        """A value of this stage; memory of its shape for one of another stage: only the shape is read."""
        is_here = node.op != "placeholder" or self._is_here(node)
        if node in self.at and is_here:
            return self.at[node]
        return add_empty(self.graph, meta.one_tensor(node), node, "shape")

    def _transfer(self, node: Node) -> None:
        value, source, target, shape, axis = cast("tuple[Node, int, int, Any, str]", node.args)
        tensor = meta.one_tensor(node)
        if source == self.stage:
            args = self._read(value), target, self.tags[node], axis
            new = add_call(self.graph, send, args, tensor, node, node.name)
            meta.set_tensors(new, ())
            meta.set_kept(new, True)
        elif target == self.stage:
            args = (shape, tensor.dtype, tensor.device, source, self.tags[node], axis)
            self.at[node] = add_call(self.graph, receive, args, tensor, node, node.name)
            meta.set_received_of_batch(self.at[node], node in self.varying)

    def _loop(self, node: Node, loop: Loop) -> None:
        assert loop.stages is not None, "a loop of stages"
        part, body = loop.stages.parts[self.stage], loop.body
        values = dict(zip((n.name for n in body.nodes if n.op == "placeholder"), operands(node), strict=False))
        received = {n.name: meta.one_tensor(n) for n in body.nodes if n.target is transfer}
        totals = self.calls.part(node, part, {name: self._read(values[name]) for name in part.operands}, received)
        self.totals[node] = [totals.get(end.name) for end in ends_of(body)]

    def _outputs(self) -> tuple[list[Output], list[Any]]:
        """What this stage returns. State of another stage that the step creates is empty here."""
        names, outputs = {spec.name for spec in self.local.inputs}, list[tuple[Output, Any]]()
        for output, node in self.local.results():
            if not isinstance(node, Node) or self._is_here(node):
                outputs.append((output, self.at[node] if isinstance(node, Node) else node))
            elif output.target not in names:
                empty = meta.contiguous((0,), meta.one_tensor(node))
                outputs.append((output, add_empty(self.graph, empty, node, "elsewhere")))
        return [output for output, _ in outputs], [node for _, node in outputs]
