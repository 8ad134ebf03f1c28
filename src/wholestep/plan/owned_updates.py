"""Updates that need a whole tensor, each by one rank: which parameters, who owns them, and what runs at the owner.

An op of an update that no rule can shard (an iteration on a matrix, a preconditioner) takes whole operands: each rank
would gather them and compute the same. With an owner, one rank has the gradient's sum and the state, computes the
update, and sends the new parameter to all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch.fx import Node

from .. import _torch
from ..cost.compute import node_us
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import copy_graph, drop_dead, node_at, operands
from ..graph.op_kinds import is_pointwise
from ..graph.ops import COMPLETE, GRAD_READY, OVER_RANKS
from ..graph.split_lists import lists_of, split_lists
from ..hardware.hardware import Hardware
from ..layout import REPLICATED, Layout
from ..rules.find_rule import find_rule
from ..rules.registry import draws
from .decision import Decision
from .propagation_inputs import moving

aten = torch.ops.aten


def whole_updates(
    graph: TrainGraph, decisions: Mapping[str, Decision], rest: Mapping[str, Layout], axis: str
) -> tuple[str, ...]:
    """The parameters of which an update gathers something as large as them, that `axis` alone shards: what another axis
    shards, no rank could gather at an owner.
    """
    of_param, moves = _of_params(graph), moving(graph)
    sizes = {i.name: i.meta.numel for i in graph.inputs if i.role is Role.PARAM}
    layouts: dict[Node, Layout] = {node: rest[spec.name] for spec, node in graph.placeholders()}
    params = dict[str, None]()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        decision = decisions[node.name]
        if decision.given:
            layouts[node] = decision.given[0]
        if node in moves or node.target in COMPLETE or _torch.is_getitem(node.target):
            continue
        for operand, want in zip(operands(node), decision.operands, strict=True):
            have, tensor, names = layouts.get(operand), meta.tensor(operand), of_param.get(operand, frozenset())
            is_cut = have is not None and have.state(axis).kind in "SP" and want.state(axis) == REPLICATED
            name = min(names) if len(names) == 1 else ""
            if is_cut and name and not rest[name].is_sharded and tensor is not None and tensor.numel == sizes[name] > 1:
                params[name] = None
    return tuple(params)


def assigned(
    graph: TrainGraph, names: tuple[str, ...], ranks: int, hardware: Hardware, stages: Mapping[str, int]
) -> dict[str, int]:
    """An owner for each parameter: the longest update goes first, to the rank of its stage with the shortest."""
    of_param, moves = _of_params(graph), moving(graph)
    us, sizes = dict.fromkeys(names, 0.0), {i.name: i.meta.size_bytes for i in graph.inputs}
    for node in graph.graph.nodes:
        params = of_param.get(node, frozenset())
        if node.op == "call_function" and node not in moves and len(params) == 1 and (name := min(params)) in us:
            us[name] += node_us(node, hardware)
    by_stage, owners = dict[int, list[tuple[float, int]]](), dict[str, int]()
    for name in sorted(names, key=lambda name: (-us[name], -sizes[name])):
        of_stage = by_stage.setdefault(stages.get(name, 0), [(0.0, 0)] * ranks)
        at = min(range(ranks), key=of_stage.__getitem__)
        of_stage[at] = of_stage[at][0] + us[name], of_stage[at][1] + sizes[name]
        owners[name] = at
    return {name: owners[name] for name in names}


def owners_of_nodes(graph: TrainGraph, owners: Mapping[str, int]) -> dict[str, int]:
    """The owner of every call that one runs, of updates of parameters with these owners."""
    return _Updates(graph, owners).run()


def with_updates_by_owner(graph: TrainGraph, owners: Mapping[str, int]) -> TrainGraph:
    """`graph` in which ops over lists of tensors have those of one owner each, or of none."""
    new = replace(graph, graph=copy_graph(graph.graph))
    _Updates(new, owners, splits=True).run()
    drop_dead(new.graph)
    return new


def split_by(
    node: Node, owner: Callable[[tuple[Node, ...]], int | None]
) -> tuple[dict[int | None, Node], dict[Node, tuple[Node, int]]]:
    """`split_lists` by the owners of the entries at each position: the ops by owner. None where it is one for all."""
    groups: dict[int | None, list[int]] = {}
    for position, entries in enumerate(zip(*lists_of(node), strict=True)):
        groups.setdefault(owner(entries), []).append(position)
    if len(groups) < 2:
        return {}, {}
    ops, picked = split_lists(node, list(groups.values()))
    return dict(zip(groups, ops, strict=True)), picked


def _of_params(graph: TrainGraph) -> dict[Node, frozenset[str]]:
    """The parameters of whose gradients and state a value is made."""
    of_param = {
        node: frozenset({spec.owner})
        for spec, node in graph.placeholders()
        if spec.role in (Role.STATE, Role.GRAD) and spec.meta.shape
    }
    for node in graph.graph.nodes:
        if node.target is GRAD_READY:
            of_param[node] = frozenset({str(node.args[1])})
        elif node.op == "call_function":
            sources = [operand for operand in _made_of(node) if operand in of_param]
            tensors = [operand for operand in sources if _is_tensor(operand)]  # a factor of all gradients is of none
            if sources:
                of_param[node] = frozenset[str]().union(*(of_param[operand] for operand in tensors or sources))
    return of_param


def _made_of(node: Node) -> list[Node]:
    """What a value is computed of: of an entry of a list, the entries at its place."""
    if not _torch.is_getitem(node.target) or isinstance(meta.value(node), (list, tuple)):
        return node.all_input_nodes
    source = node_at(node, 0)
    while _torch.is_getitem(source.target):
        source = node_at(source, 0)
    lists, at = lists_of(source), cast(int, node.args[1])
    return [entries[at] for entries in lists] or node.all_input_nodes


@dataclass
class _Updates:
    """`at`: the owner of a value. `shared`: values of several owners, and of parameters without one. `sums`: gradients
    of several backwards that add up before ranks reduce them. `splits`: list ops are split by owner.
    """

    graph: TrainGraph
    owners: Mapping[str, int]
    splits: bool = False
    at: dict[Node, int] = field(default_factory=dict[Node, int])
    shared: set[Node] = field(default_factory=set[Node])
    sums: set[Node] = field(default_factory=set[Node])

    def run(self) -> dict[str, int]:
        moves = moving(self.graph)
        for spec, node in self.graph.placeholders():
            if spec.role in (Role.STATE, Role.GRAD) and spec.meta.shape:
                self._note(node, spec.owner)
        calls = [n for n in self.graph.graph.nodes if n.op == "call_function" and n not in moves]
        calls = [n for n in calls if not draws(n) and any(meta.tensors(n))]  # numbers of Python have no owner
        for node in calls:
            self._visit(node)
        self._end_early()
        for node in reversed(calls):
            self._with_readers(node)
        run_there = (n for n in self.at if n.op == "call_function" and n not in self.sums)
        return {node.name: self.at[node] for node in run_there}

    def _note(self, node: Node, param: str) -> None:
        if param in self.owners:
            self.at[node] = self.owners[param]
        else:
            self.shared.add(node)

    def _visit(self, node: Node) -> None:
        if node.target is GRAD_READY:
            self._note(node, str(node.args[1]))
            self.sums.add(node)
        elif _torch.is_getitem(node.target):
            source = node_at(node, 0)
            if source in self.at:
                self.at[node] = self.at[source]
            elif source in self.shared:
                self.shared.add(node)
        elif node.target is OVER_RANKS:
            self.shared.add(node)
        elif not self._is_split(node):
            self._place(node)

    def _place(self, node: Node) -> None:
        """Where the tensors are that it reads; numbers count where it reads no tensors of owners."""
        rule = find_rule(node)
        inputs = operands(node)
        reads = [n for i, n in enumerate(inputs) if rule is None or i not in rule.by_shape]
        placed = [n for n in reads if n in self.at or n in self.shared]
        tensors = [n for n in placed if _is_tensor(n)] or placed
        owners = {self.at[n] for n in tensors if n in self.at}
        if len(owners) > 1 or (tensors and any(n in self.shared for n in tensors)):
            self.shared.add(node)
        elif owners:
            self.at[node] = owners.pop()
            if node.target is aten.add.Tensor and all(n in self.sums for n in inputs):
                self.sums.add(node)

    def _is_split(self, node: Node) -> bool:
        """Split a list op whose entries have several owners, if that is asked for."""
        if not self.splits:
            return False
        calls, picked = split_by(node, lambda e: next((self.at[n] for n in e if n in self.at and _is_tensor(n)), None))
        for new in calls.values():
            self._place(new)
        for pick in picked:
            self._visit(pick)
        return bool(calls)

    def _end_early(self) -> None:
        """Where owners send less than the new parameter, all ranks compute the rest: the update in 16 bits, say, is
        added to the parameter everywhere.
        """
        todo = [node for out, node in self.graph.results() if out.kind == "update" and out.target in self.owners]
        while todo:
            node = todo.pop()
            if node not in self.at or not is_pointwise(node.target):
                continue
            sent = [n for n in dict.fromkeys(operands(node)) if n in self.at]
            is_last = all(user.op == "output" or user in self.shared for user in node.users)
            is_made = all(n.op == "call_function" for n in sent)  # not the state, which stays
            if is_last and is_made and sum(map(meta.size_bytes, sent)) < meta.size_bytes(node):
                del self.at[node]
                self.shared.add(node)
                todo += sent

    def _with_readers(self, node: Node) -> None:
        """A value that only one owner reads, as the decayed parameter, is made there."""
        at = {None if user in self.sums else self.at.get(user) for user in node.users}
        if node not in self.at and node not in self.shared and len(at) == 1 and (owner := at.pop()) is not None:
            self.at[node] = owner


def _is_tensor(node: Node) -> bool:
    return any(tensor is not None and tensor.numel > 1 for tensor in meta.tensors(node))
