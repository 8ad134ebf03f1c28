"""Context parallelism: ranks of one axis, or of several, share the tokens of each sequence."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, Literal

from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Input, Role, TrainGraph
from ..graph.nodes import node_at, operands
from ..graph.op_kinds import VIEWS, arithmetic, packet_name
from ..graph.text import human, op_name
from ..layout import AxisState
from ..mesh import TIME, Mesh
from ..rules.find_rule import find_rule
from ..rules.registry import draws
from ..rules.rule import Group
from .attention_windows import mask_of, near_tokens, reach_of
from .data_parallel import BatchDim, stored
from .decision import Decision
from .op_strategies import NEAR, PART, RING, part_of, ring
from .propagation_inputs import moving
from .storage_styles import style_named
from .strategy import Pins, States, Stored
from .tensor_parallel import OneAxis

_QUERIES, _HEADS = "q", "g"
"""Factors in the rules of fused attention; a head of keys has a group of heads of queries."""

_Ways = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ContextParallel(OneAxis):
    """Ranks of one axis share the tokens of each sequence, contiguous pieces of any length, and compute what one device
    computes. Positions, labels, masks and the loss follow by propagation; in attention tokens meet.

    Args:
        axis: the mesh axis.
        method: how tokens meet in `scaled_dot_product_attention`. `"gather"`: a rank has its queries, and gathers keys
            and values, with as many heads as they have. `"heads"`: all tokens of some heads, by an all-to-all before
            and after. `"ring"`: as `"gather"`, but keys and values go from rank to rank, so that a rank never has all
            of them. `"auto"`: of the first two the one that sends less, counting the rows of a mask that `"heads"`
            makes besides; "gather" where the heads of keys do not divide.
            Of all but `"heads"`, a mask that is proved to be a window sends the keys and values within it alone.
        input_dim: the dim of batch tensors that counts tokens; or by argument, as `DataParallel.input_batch_dim`.
        inputs: what a rank is given: the `global` sequences, of which it takes its part, or its `local` part.
        style: how ranks of the axis store parameters and optimizer state, as `DataParallel.style`; None: as the
            `DataParallel` beside it, or `"fully_shard"`.
        balance: whether ranks exchange queries for causal attention by `"gather"`, and by `"ring"` keys too, where the
            last rank would attend to most keys; None: where that saves more time than it takes.

    Example:
        >>> step = ws.compile(train_step, mesh="cp=4", parallel=ws.ContextParallel())
        >>> both = [ws.DataParallel("fully_shard", axis="dp"), ws.ContextParallel()]
        >>> step = ws.compile(train_step, mesh="dp=2,cp=4", parallel=both)
        >>> nodes = [ws.ContextParallel(method="ring"), ws.ContextParallel("inner", method="heads")]
        >>> step = ws.compile(train_step, mesh="cp=4,inner=8", parallel=nodes)
    """

    axis: str = "cp"
    method: Literal["auto", "gather", "heads", "ring"] = "auto"
    input_dim: BatchDim = 1  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    inputs: Literal["global", "local"] = "global"
    style: str | None = None
    balance: bool | None = None

    def storage_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Its axis."""
        return (self.axis,)

    def storage_layouts(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Stored]) -> dict[str, Stored]:
        """Where each parameter and its optimizer state rest. Raises PlanError if no tensor of the batch has tokens."""
        if not self._cut(graph, mesh):
            shapes = ", ".join(f"{i.name} {list(i.meta.shape)}" for i in graph.inputs if i.role is Role.BATCH)
            problem = f"no tensor of the batch has dim {self.input_dim} ({shapes or 'it has no tensors'})"
            raise PlanError(problem, "a tensor with a dim of tokens", "give ContextParallel(input_dim=...)")
        style, out = style_named(self.style or "fully_shard"), dict[str, Stored]()
        for spec in graph.inputs:
            if spec.role is Role.PARAM:
                out[spec.name] = stored(style, spec, before[spec.name], mesh, (self.axis,))
        return out

    def _cut(self, graph: TrainGraph, mesh: Mesh) -> list[tuple[Input, int]]:
        """Tensors of the batch of which ranks have parts, and the dim."""
        cuts = [(i, self.batch_cut(mesh, i.name, len(i.meta.shape))) for i in graph.inputs if i.role is Role.BATCH]
        return [(spec, cut.dim) for spec, cut in cuts if cut is not None]

    def _lengths(self, graph: TrainGraph, mesh: Mesh) -> tuple[set[Any], dict[str, _Ways]]:
        """How many tokens the batch has, or most of it, as for a loss of the next ones; the calls that take these."""
        lengths, calls = {spec.meta.shape[dim] for spec, dim in self._cut(graph, mesh)}, dict[str, _Ways]()
        for node in filter(moving(graph).__contains__, graph.graph.nodes):
            if (place := part_of(node)) is not None:
                few, many = sorted((meta.one_tensor(n).shape[place[1]] for n in (operands(node)[0], node)), key=int)
                if many in lengths and 2 * int(few) > int(many):
                    lengths, calls[node.name] = lengths | {few}, {self.axis: (PART,)}
        return lengths, calls

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """Heads are sharded in attention to the tokens of the batch, or keys and values with the queries, where that is
        the method. Queries are otherwise, since they arrive so.
        """
        parts = mesh.axis_size(self.axis)
        if parts == 1:
            return Pins()
        lengths, strategies = self._lengths(graph, mesh)
        reads, biases = self._looked_up(graph, lengths)
        if self.method == "ring":
            return Pins(reads=reads, op_strategies=strategies | biases | self._rings(graph, lengths))
        for node, group in _attention(graph):
            query, dim = 0, len(group.operands[0]) - 2  # or the gradient of what queries give
            if meta.one_tensor(operands(node)[query]).shape[dim] not in lengths:
                continue
            near = near_tokens(node, parts) if _QUERIES in group.factors else None
            if not self._by_heads(node, group, query, parts, near):
                strategies |= {node.name: {self.axis: (NEAR,)}} if near is not None else {}
                continue
            strategies[node.name] = {self.axis: (f"cut {_HEADS}",)}
            for item in node.users:
                term = group.outputs.get(meta.picked(item).start, ()) if _torch.is_getitem(item.target) else ()
                if _HEADS in term and len(term) == len(group.operands[query]):
                    others = [user.name for user in item.users if not _attends(user)]
                    reads |= {(name, item.name): {self.axis: AxisState("S", dim)} for name in others}
        by_heads = any(way == (f"cut {_HEADS}",) for ways in strategies.values() for way in ways.values())
        return Pins(reads=reads, op_strategies=strategies if by_heads else strategies | biases)

    def _looked_up(
        self, graph: TrainGraph, lengths: set[int]
    ) -> tuple[dict[tuple[str, str], States], dict[str, _Ways]]:
        """That ranks look up what their tokens are, also where a shift of these has gathered them, and their rows of a
        bias for each two tokens, as that of T5: of all rows they would look up what their parts of the table have.
        """
        reads, pinned, moves = dict[tuple[str, str], States](), dict[str, str](), moving(graph)
        for node in graph.graph.nodes:
            rule = find_rule(node) if packet_name(node.target) == "embedding" else None
            if rule is None:
                continue
            index = node_at(node, 1)
            dims = [dim for dim, size in enumerate(meta.one_tensor(index).shape) if size in lengths]
            if index in moves and dims:
                reads[node.name, index.name] = {self.axis: AxisState("S", dims[-1])}
            rows = [_views_of_rows(node, rule.groups[0].operands[1][dim], moves) for dim in dims if index not in moves]
            pinned |= next(filter(None, rows), dict[str, str]())
        return reads, {name: {self.axis: (f"cut {factor}",)} for name, factor in pinned.items()}

    def _rings(self, graph: TrainGraph, lengths: set[int]) -> dict[str, _Ways]:
        """Ways of calls of attention to the tokens of the batch. Raises PlanError: for one of them there is no ring."""
        ways = dict[str, _Ways]()
        for node in filter(_attends, graph.graph.nodes):
            operation, rule = arithmetic(node.target), find_rule(node)
            assert operation is not None, "it attends"
            query, key = (meta.one_tensor(operands(node)[operation.backward + i]).shape for i in (0, 1))
            if query[-2] not in lengths or key[-2] not in lengths:
                continue
            if rule is None or not any(ring(rule, group) for group in rule.groups[:1]):
                problem = f"ContextParallel(method='ring'): %{node.name} ({op_name(node)})"
                needed = "no dropout, a mask without a gradient or is_causal but not both, and a fused kernel"
                raise PlanError(problem, needed, "give method='gather'", meta.source_line(node))
            ways[node.name] = {self.axis: (RING if reach_of(node) is None else NEAR,)}
        return ways

    def _by_heads(self, node: Node, group: Group, query: int, parts: int, near: int | None) -> bool:
        """Whether heads are sharded: by bytes, keys and values to each rank, or those of `near` tokens, against an
        all-to-all of each operand and of the result, and the rows of a mask that it has by no other method.
        """
        if self.method == "gather":
            return False
        if self.method == "auto" and _QUERIES not in group.factors:  # all queries would be on every rank
            return group.splits(_HEADS, (parts,))
        if _HEADS not in group.factors or not group.splits(_HEADS, (parts,)):
            if self.method == "auto":
                return False
            problem = f"ContextParallel(method='heads') over {parts} ranks: the heads of %{node.name} do not divide"
            needed = "as many heads of keys and values on each rank"
            raise PlanError(problem, needed, "give method='gather', or fewer ranks", meta.source_line(node))
        key = next(i for i, term in group.operands.items() if _HEADS in term and _QUERIES not in term)
        queries, keys = (meta.size_bytes(operands(node)[operand]) for operand in (query, key))
        others = parts - 1
        near_keys = keys * others if near is None else keys * near * parts // int(_size(node, group, query, _QUERIES))
        exchanged = (queries + keys) * others + _mask_bytes(node) * others * parts // 2
        return self.method == "heads" or near_keys * parts >= exchanged  # work is divided alike by heads

    def check(self, graph: TrainGraph, mesh: Mesh, decisions: Mapping[str, Decision]) -> None:
        """Warn of attention by hand where the method is not for it; `Plan.repeated` says what ranks repeat."""
        lengths, _ = self._lengths(graph, mesh)
        for node in graph.graph.nodes if self.method in ("heads", "ring") and mesh.axis_size(self.axis) > 1 else ():
            shape = meta.one_tensor(node).shape if packet_name(node.target) == "_softmax" else ()
            if len(shape) == 4 and shape[2] in lengths:
                where = f"%{node.name} ({op_name(node)}) at {meta.source_line(node)}"
                problem = f"ContextParallel(method={self.method!r}) gathers keys and values of attention by hand"
                cure = "use scaled_dot_product_attention, or method='gather'"
                warnings.warn(f"{problem}: {where}; {cure}", stacklevel=2)

    def notes(self, graph: TrainGraph, mesh: Mesh, decisions: Mapping[str, Decision]) -> tuple[str, ...]:
        """What a rank sends for calls of attention, forward and backward, by their method and by others: of what it has
        by the other axes.
        """
        parts, pinned, counts = mesh.axis_size(self.axis), self.pins(graph, mesh).op_strategies, Counter[str]()
        lengths, _ = self._lengths(graph, mesh)
        for node, group in _attention(graph) if parts > 1 else ():
            sizes = [meta.size_bytes(operand) for operand in operands(node)[:3]]
            tokens = meta.one_tensor(operands(node)[0]).shape[2]
            if (operation := arithmetic(node.target)) is None or operation.backward or tokens not in lengths:
                continue
            near = near_tokens(node, parts) if _QUERIES in group.factors else None
            axes, of_key = (*decisions[node.name].operands[0].dims[2], self.axis), decisions[node.name].operands[1]
            others = {*axes[: axes.index(self.axis)], *chain(*of_key.dims)} - {self.axis, TIME}
            both, queries = (s // prod(map(mesh.axis_size, others)) for s in (sum(sizes[1:]), sizes[0]))
            sent = {"gather": 2 * both * (parts - 1) // parts, "ring": 3 * both * (parts - 1) // parts}
            if _QUERIES not in group.factors:  # all ranks have all of them, and of the gradients of what they give
                sent = {"gather": (both + 2 * queries) * (parts - 1) // parts}
            if _HEADS in group.factors and group.splits(_HEADS, (parts,)):
                sent["heads"] = 2 * (both + 2 * queries) * (parts - 1) // parts**2
            sent |= {} if near is None else {"window": 2 * both * near // int(tokens)}
            (name,) = pinned.get(node.name, {}).get(self.axis, ("gather",))[:1]
            taken = {RING: "ring", NEAR: "window"}.get(name, "heads" if name.startswith("cut") else "gather")
            texts = ", ".join(f"{human(count)} by {method}" for method, count in sent.items())
            counts[f"of attention along {self.axis} by {taken}: a rank sends for each {texts}"] += 1
        return tuple(f"{count} calls {text}" for text, count in counts.items())

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        stored_as = style_named(self.style or "fully_shard").name
        return f"context parallel on {self.axis}, attention by {self.method}, {stored_as}"


def _mask_bytes(node: Node) -> int:
    """Bytes of the mask of a call that is the same for all heads, for each call that reads it; 0 without one."""
    if (place := mask_of(node)) is None:
        return 0
    mask = operands(node)[place]
    tensor = meta.one_tensor(mask)
    once = [int(size) for size, step in zip(tensor.shape, tensor.stride, strict=True) if step]
    of_heads = len(tensor.shape) == 4 and int(tensor.shape[1]) > 1 and tensor.stride[1] != 0
    return 0 if of_heads else prod(once) * tensor.dtype.itemsize // max(1, sum(map(_attends, mask.users)))


def _views_of_rows(node: Node, factor: str | None, moves: Container[Node]) -> dict[str, str]:
    """Factors of `node`, and of views of its result, that become the rows that others read; none if some do not."""
    rule = find_rule(node)
    term = rule.groups[0].outputs[0] if rule else ()
    if rule is None or factor is None or factor not in term:
        return {}
    pinned, place = {node.name: factor}, term.index(factor)
    for user in node.users:
        views = find_rule(user) if user.target in VIEWS and user not in moves else None
        further = _views_of_rows(user, views.groups[0].operands[0][place], moves) if views else {}
        if not further and (views or place != len(term) - 2):
            return {}
        pinned |= further
    return pinned


def _size(node: Node, group: Group, operand: int, factor: str) -> int:
    """The size of a factor in an operand."""
    return meta.one_tensor(operands(node)[operand]).shape[group.operands[operand].index(factor)]


def _attention(graph: TrainGraph) -> Iterator[tuple[Node, Group]]:
    """Calls of fused attention that the rules can shard by queries or heads, and the group of their rule."""
    for node in graph.graph.nodes:
        rule = find_rule(node) if _attends(node) else None
        for group in rule.groups if rule else ():
            by_heads = _HEADS in group.factors and packet_name(node.target).startswith("_scaled_dot_product")
            if _QUERIES in group.factors or (by_heads and not draws(node)):
                yield node, group


def _attends(node: Node) -> bool:
    operation = arithmetic(node.target) if node.op == "call_function" else None
    return operation is not None and operation.kind == "attention"
