"""Which stage runs each node of a step: owners of parameters decide, everything else follows from what it reads.

A forward node runs at the latest stage whose values it reads, so that the forward only moves on, and not before the
parameters of its module. A backward node runs where the forward left what it reads besides gradients. Updates run where
their parameter is. What reads nothing that has an owner runs everywhere. Stages are counted along the forward;
`Pipeline.rank_of` says where each one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import copy_graph, drop_dead, node_at, operands
from ..graph.op_kinds import VIEWS, is_list_op
from ..graph.ops import COMPLETE, GRAD_READY
from ..rules.find_rule import find_rule
from ..rules.registry import draws
from .owned_updates import split_by
from .propagation_inputs import moving


def forward_nodes(graph: TrainGraph) -> tuple[Node, ...]:
    """The calls of the forward in order: what the batch and parameters become before a gradient is complete."""
    moves, after = moving(graph), set[Node]()
    for node in graph.graph.nodes:
        if node.target in COMPLETE or any(operand in after for operand in node.all_input_nodes):
            after.add(node)
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and not meta.is_backward(n) and n not in after]
    feeds = {node for node in calls if node in moves}
    for node in reversed(calls):
        if any(user in feeds and not meta.is_backward(user) for user in node.users):
            feeds.add(node)
    return tuple(node for node in calls if node in feeds)


def first_readers(graph: TrainGraph) -> dict[str, int]:
    """For each parameter, the position in `forward_nodes` of the first node that uses it with samples, or of the first
    node of its module: a norm computes before it reads its weight.
    """
    moves, calls = moving(graph), forward_nodes(graph)
    source = {node: spec.name for spec, node in graph.placeholders() if spec.role is Role.PARAM}
    positions: dict[str, int] = {}
    derived: dict[Node, set[str]] = {node: {name} for node, name in source.items()}
    for position, node in enumerate(calls):
        names = {name for operand in node.all_input_nodes for name in derived.get(operand, ())}
        if node not in moves:
            derived[node] = names
            continue
        for name in names:
            positions.setdefault(name, position)
    starts: dict[str, int] = {}
    for position, node in enumerate(calls):
        if node in moves:
            starts.setdefault(meta.module_path(node), position)
    return {name: min(at, starts.get(name.rpartition(".")[0] or name, at)) for name, at in positions.items()}


def with_lists_by_owner(graph: TrainGraph, owners: Mapping[str, int]) -> TrainGraph:
    """`graph` in which ops over lists of tensors have the tensors of one owner each."""
    new = replace(graph, graph=copy_graph(graph.graph))
    _Stages(new, owners, splits=True).run()
    drop_dead(new.graph)
    return new


def stages_of_nodes(graph: TrainGraph, of_param: Mapping[str, int], rank_of: Callable[[int], int]) -> dict[str, int]:
    """The stage of every node that runs at one, for parameters at these stages, each on the rank that `rank_of` says.
    Raises PlanError for an op that hears all ranks.
    """
    return _Stages(graph, of_param, rank_of=rank_of).run()


@dataclass
class _Stages:
    """`rank_of`: the rank that has a stage. `splits`: list ops are split by stage. `stage`: of nodes that run
    at one. `read_at`: of parameters and values of the forward, the stages that make or read them there. `hints`: of a
    node of the backward that reads gradients alone, where its readers run.
    """

    graph: TrainGraph
    of_param: Mapping[str, int]
    stage: dict[Node, int] = field(default_factory=dict[Node, int])
    read_at: dict[Node, set[int]] = field(default_factory=dict[Node, "set[int]"])
    rank_of: Callable[[int], int] = int
    splits: bool = False

    def __post_init__(self) -> None:
        self.forward = set(forward_nodes(self.graph))
        self.moves = moving(self.graph)
        self.of_module: dict[str, int] = {}
        for name, at in self.of_param.items():
            if path := name.rpartition(".")[0]:
                self.of_module[path] = min(at, self.of_module.get(path, at))
        shapes = {i.name: i.meta.shape for i in self.graph.inputs if i.role is Role.PARAM}
        for spec, node in self.graph.placeholders():
            if spec.role is Role.PARAM:
                self.stage[node] = self.of_param[spec.name]
                self.read_at[node] = set()
            elif spec.role in (Role.STATE, Role.GRAD) and spec.meta.shape == shapes.get(spec.owner):
                self.stage[node] = self.of_param[spec.owner]

    def run(self) -> dict[str, int]:
        calls = [node for node in self.graph.graph.nodes if node.op == "call_function"]
        for node in calls:
            if node in self.forward:
                self._run_forward(node)
        self._views_where_they_are_read()
        self._note_readers()
        self.hints = self._hints(calls)
        for node in calls:
            if node not in self.forward and not self._is_split(node) and (at := self._later(node)) is not None:
                self.stage[node] = at
        return {node.name: at for node, at in self.stage.items() if node.op == "call_function"}

    def _is_split(self, node: Node) -> bool:
        """Split a list op whose entries have several owners, if that is asked for."""
        if not self.splits:
            return False
        calls, picked = split_by(
            node, lambda entry: max((self.stage[n] for n in entry if n in self.stage), default=None)
        )
        self.stage |= {new: at for at, new in calls.items() if at is not None}
        self.stage |= {pick: self.stage[new] for pick, (new, _) in picked.items() if new in self.stage}
        return bool(calls)

    def _read(self, node: Node) -> list[Node]:
        """The operands whose values `node` reads, not only their shape."""
        inputs = operands(node)
        rule = find_rule(node) if node.op == "call_function" and not _torch.is_getitem(node.target) else None
        return [n for i, n in enumerate(inputs) if rule is None or i not in rule.by_shape]

    def _views_where_they_are_read(self) -> None:
        """A view that one other stage reads is made there: what it is a view of may be sent anyway."""
        for node in reversed(self.graph.graph.nodes):
            if node in self.forward and node in self.stage and node.target in VIEWS:
                at = {self.stage[user] for user in node.users if user in self.forward and user in self.stage}
                if len(at) == 1:
                    self.stage[node] = at.pop()

    def _run_forward(self, node: Node) -> None:
        """At the latest stage of what it reads, and not before the parameters of its module. Random numbers are drawn
        everywhere: all ranks share one stream.
        """
        at = [self.stage[operand] for operand in self._read(node) if operand in self.stage]
        if at and not draws(node):
            self.stage[node] = max(*at, self.of_module.get(meta.module_path(node), 0))

    def _note_readers(self) -> None:
        """Find `read_at`: what is made of a parameter alone says where the parameter is read."""
        for node in self.graph.graph.nodes:
            if node in self.forward and node in self.stage:
                self.read_at[node] = {self.stage[node]} if node in self.moves else set()
                for operand in self._read(node) if node in self.moves else ():
                    self._reads(operand, self.stage[node])

    def _reads(self, node: Node, at: int) -> None:
        if node in self.read_at:
            self.read_at[node].add(at)
            for operand in node.all_input_nodes if node not in self.moves else ():
                self._reads(operand, at)

    def _hints(self, calls: Iterable[Node]) -> dict[Node, int]:
        """Where the readers of a gradient run, as far as what the forward left says so."""
        hints: dict[Node, int] = {}
        for node in reversed(list(calls)):
            if node in self.forward:
                continue
            if node.target is GRAD_READY:
                hints[node] = self.of_param.get(str(node.args[1]), 0)
                continue
            saved = self._saved(node)
            gradients = [g for g in self._read(node) if g not in self.forward and g.op == "call_function"]
            if saved is not None:
                hints[node] = saved
            elif len(gradients) == 1 and (below := [hints[user] for user in node.users if user in hints]):
                hints[node] = max(below)
        return hints

    def _saved(self, node: Node, before: int | None = None) -> int | None:
        """The stage that has most of what `node` reads of the forward, the latest of several and not after `before`:
        both the stage that makes a value and those that read it have it. None if it reads nothing of the forward.
        """
        count: dict[int, int] = {}
        for operand in self._read(node):
            for at in self.read_at.get(operand, ()) or ({self.stage[operand]} if operand in self.read_at else ()):
                count[at] = count.get(at, 0) + 1
        fits = [at for at in count if before is None or at <= before] or list(count)
        return max(fits, key=lambda at: (count[at], at), default=None)

    def _later(self, node: Node) -> int | None:
        """The stage of a node of the backward or the update; None where it runs everywhere."""
        if node.target is GRAD_READY:
            return self.of_param.get(str(node.args[1]))
        if _torch.is_getitem(node.target):
            return self.stage.get(node_at(node, 0))
        if draws(node):
            return None
        have = {operand: self.stage[operand] for operand in self._read(node) if operand in self.stage}
        if not have:
            return None
        if not meta.is_backward(node) and not node.all_input_nodes:
            return None
        if node in self.moves:
            return self._backward(node, have)
        return self._update(node, have)

    def _backward(self, node: Node, have: Mapping[Node, int]) -> int:
        gradients = [at for g, at in have.items() if g not in self.forward and g.op == "call_function"]
        newest = min(gradients, default=None)
        if (saved := self._saved(node, newest)) is not None:
            return saved
        if len(gradients) == 1 and node in self.hints:
            return min(self.hints[node], gradients[0])
        return min(gradients) if gradients else max(have.values())

    def _update(self, node: Node, have: Mapping[Node, int]) -> int | None:
        """Where its operands are; several numbers from several stages meet on all ranks."""
        if len({self.rank_of(at) for at in have.values()}) == 1:
            return max(have.values())
        if is_list_op(node.target):
            problem = f"%{node.name} ({node.target}) updates parameters of several stages at once"
            raise PlanError(problem, "an op for each stage", "report this", meta.source_line(node))
        if all(meta.one_tensor(operand).numel == 1 for operand in have):
            return None
        return self.stage[max(have, key=meta.size_bytes)]
