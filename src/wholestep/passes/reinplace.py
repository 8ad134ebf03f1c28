"""Turns functional ops whose operand dies into in-place ops, and writes new state into the storage of the old."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, Output, Role
from ..graph.loop import bodies_of
from ..graph.nodes import add_call, arguments_of, is_collective, is_mutating, is_wait, node_at, operands, redirect
from ..graph.op_kinds import packet_name
from ..graph.region import region_of, shared_with
from ..graph.storage import UNMARKED_VIEWS, returns_new
from ..partition.rank_ops import MAY_ALIAS, take_chunk
from ..sizes import equal
from ..tuning import TUNING
from .base import InPlace
from .bucket import GATHER, in_pieces, in_rows, join_rows, part_of_gather, pieces_of_gather, rows_of_gather
from .coalesced import coalesce

aten = torch.ops.aten
_OWNED = frozenset({Role.PARAM, Role.BUFFER, Role.STATE, Role.GRAD})
_END = 1 << 60
GATHER_INTO = torch.ops._c10d_functional.all_gather_into_tensor_out.default
WHERE_INTO = aten.where.self_out
_REPEATS = frozenset({"expand", "unfold", "as_strided"})
_INTO = frozenset({GATHER_INTO, WHERE_INTO})


@dataclass(frozen=True)
class Reinplace(InPlace):
    """Updates parameters and state in place, and lets other ops overwrite operands that nothing reads afterwards:
    unless `temporaries` is False, as in software that runs the ops of a model one by one.

    Takes a functional LocalGraph; the outputs of the result are the step's results and the state that it creates.
    State that cannot be updated in place is copied at the end: a parameter always keeps its storage. Bitwise the same,
    except that sums over tensors whose strides the trace does not fix may run in another order.
    """

    temporaries: bool = True

    must_precede: ClassVar[tuple[str, ...]] = ()

    def change(self, local: LocalGraph) -> LocalGraph:
        """Let the ops of `local` write in place."""
        work = _Work(local, self.temporaries)
        work.run()
        return replace(local, outputs=work.finish())


class _Arriving:
    """One copy of several parameters from the bucket in which they were gathered, at position `at`; without the own
    part along `axis`, where one is given.
    """

    def __init__(
        self, graph: Graph, part: Node, stored: Node, tensor: meta.TensorMeta, at: int, axis: str | None
    ) -> None:
        self.at, self.axis = at, axis
        joined, outlines, number, parts = part.args
        with graph.inserting_before(part):
            self.homes = add_call(graph, in_pieces, ([stored], parts, axis), tensor, part)
            self.pieces = add_call(graph, pieces_of_gather, (joined, outlines, [number], parts, axis), tensor, part)
            self.copy = add_call(graph, aten._foreach_copy_.default, (self.homes, self.pieces), tensor, part)
        self.length = 0
        self._lengthen(tensor, cast(int, parts))

    def add(self, stored: Node, number: int, tensor: meta.TensorMeta, parts: int) -> None:
        """Copy one more."""
        self.homes.update_arg(0, [*cast("list[Node]", self.homes.args[0]), stored])
        self.pieces.update_arg(2, [*cast("list[int]", self.pieces.args[2]), number])
        self._lengthen(tensor, parts)

    def _lengthen(self, tensor: meta.TensorMeta, parts: int) -> None:
        self.length += tensor.numel if self.axis is None else tensor.numel // parts * (parts - 1)
        for node in (self.homes, self.pieces, self.copy):
            meta.set_tensors(node, (meta.contiguous([self.length], tensor),))


@dataclass
class _Work:
    """`root`: one node for all that share memory. `last_use`: of a root. `updated_inputs`: inputs by new value."""

    local: LocalGraph
    temporaries: bool
    index: dict[Node, int] = field(default_factory=dict[Node, int])
    arriving: dict[tuple[Node, str | None], _Arriving] = field(
        default_factory=dict[tuple[Node, "str | None"], "_Arriving"]
    )
    root: dict[Node, Node] = field(default_factory=dict[Node, Node])
    members: dict[Node, list[Node]] = field(default_factory=dict[Node, list[Node]])
    last_use: dict[Node, int] = field(default_factory=dict[Node, int])
    counted: tuple[Node, Counter[Node]] | None = None

    def __post_init__(self) -> None:
        self.graph: Graph = self.local.graph
        self.index = {node: i for i, node in enumerate(self.graph.nodes)}
        self.updates = {o.target: n for o, n in self.local.results() if o.kind == "update"}
        self.updated_inputs = {self.updates[i.name]: n for i, n in self.local.placeholders() if i.name in self.updates}
        self.owned = {n for i, n in self.local.placeholders() if i.role in _OWNED and i.name in self.updates}
        for node in self.graph.nodes:
            self._join(node)
            for operand in operands(node):
                self._use(operand, _END if node.op == "output" else self._until(node))

    def _join(self, node: Node) -> None:
        source = aliased(node)
        root = self.root[source] if source is not None else node
        self.root[node] = root
        self.members.setdefault(root, []).append(node)

    def _until(self, node: Node) -> int:
        """Position until which `node` reads its operands: a collective until its wait, perhaps in the next call."""
        if node.target is coalesce:
            return max(map(self._until, node.users))
        if not is_collective(node):
            return self.index[node]
        return max([self.index[node], *(self.index[u] if is_wait(u) else _END for u in node.users)])

    def _use(self, node: Node, when: int) -> None:
        root = self.root[node]
        self.last_use[root] = max(self.last_use.get(root, -1), when)

    def _dies_at(self, node: Node, user: Node) -> bool:
        """True if nothing reads the storage of `node` after `user`, and it may be written."""
        root = self.root[node]
        writable = root in self.owned or (self.temporaries and root.op == "call_function")
        return writable and self.last_use.get(root, -1) <= self.index[user]

    def _merge(self, alias: Node, into: Node) -> None:
        """`alias` now shares the storage of `into`."""
        old, new = self.root[alias], self.root[into]
        if old is new:
            return
        for node in self.members.pop(old, []):
            self.root[node] = new
            self.members[new].append(node)
        self.last_use[new] = max(self.last_use.get(new, -1), self.last_use.pop(old, -1))

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.target is part_of_gather:
                self._copy_out(node)
            elif node.target is GATHER:
                self._gather_into(node)
            if node.op != "call_function" or not _torch.is_op(node.target) or is_mutating(node):
                continue
            if node.target is aten.where.self and node in self.updated_inputs:
                self._choose_into(node)
            inplace = inplace_form(node.target)
            if inplace is None:
                continue
            if isinstance(node.args[0], (list, tuple)):
                self._lists(node, inplace)
            elif isinstance(node.args[0], Node) and self._can_hold(node.args[0], node, meta.tensor(node)):
                node.target = inplace
                self._merge(node, node.args[0])

    def _copy_out(self, node: Node) -> None:
        """Copy a gathered parameter from its bucket straight into the storage of the parameter."""
        stored, tensor = self.updated_inputs.get(node), meta.tensor(node)
        if stored is None or tensor is None or tensor != meta.tensor(stored) or not tensor.is_contiguous:
            return
        joined, _, number, parts = cast("tuple[Node, Any, int, int]", node.args)
        key = joined, self._updated_along(stored, joined, number, parts)
        begun = self.arriving.get(key)
        if self.last_use.get(self.root[stored], -1) >= (self.index[node] if begun is None else begun.at):
            return
        if begun is not None:
            begun.add(stored, number, tensor, parts)
        elif parts <= TUNING.most_pieces_together:
            self.arriving[key] = _Arriving(self.graph, node, stored, tensor, self.index[node], key[1])
        else:
            rows = meta.contiguous([parts, tensor.numel // parts], tensor)
            with self.graph.inserting_before(node):
                target = add_call(self.graph, in_rows, (stored, parts), rows, node)
                source = add_call(self.graph, rows_of_gather, node.args, rows, node)
                add_call(self.graph, aten.copy_.default, (target, source), rows, node)
        self._use(stored, self.last_use[self.root[node]])
        node.replace_all_uses_with(stored)
        self.graph.erase_node(node)

    def _updated_along(self, stored: Node, joined: Node, number: int, parts: int) -> str | None:
        """The axis along which ranks sent their parts of a bucket from where `stored` is: the own one is there."""
        gather = next(iter(operands(joined)), None)
        if gather is None or gather.target is not GATHER:  # the gather was started in the previous step
            return None
        sent = node_at(gather, 0)
        if sent.target not in (join_rows, coalesce):
            return None
        piece = cast("Sequence[Node]", sent.args[0])[number]
        axis = gather.args[2]
        return str(axis) if piece.target is take_chunk and piece.args == (stored, 0, parts, axis) else None

    def _gather_into(self, node: Node) -> None:
        """Receive a parameter that is gathered outside a bucket, and stored gathered, in its storage."""
        wait, *readers = node.users
        stored, tensor = self.updated_inputs.get(wait), meta.tensor(node)
        if readers or stored is None or tensor is None or tensor != meta.tensor(stored) or not tensor.is_contiguous:
            return
        views = self.members[self.root[stored]]
        read_meanwhile = any(self.index[user] > self.index[node] for view in views for user in view.users)
        if not read_meanwhile and not tensor.dtype.is_complex:  # gloo gathers these as pairs of real numbers
            node.target, node.kwargs = GATHER_INTO, {"out": stored}
            self._merge(node, stored)

    def _choose_into(self, node: Node) -> None:
        """Write the choice between old and new state into the storage of the old."""
        stored = self.updated_inputs[node]
        if node.args[1] is stored and self._can_hold(stored, node, meta.tensor(node)):
            node.target, node.kwargs = WHERE_INTO, {"out": stored}
            self._merge(node, stored)

    def _can_hold(self, operand: Node, node: Node, new: meta.TensorMeta | None) -> bool:
        old = meta.tensor(operand)
        if old is None or new is None:
            return False
        strides = zip(old.stride, new.stride, old.shape, strict=True)
        alike = (old.dtype, old.device) == (new.dtype, new.device) and equal(old.shape, new.shape)
        fits = alike and all(a == b != 0 for a, b, size in strides if size > 1)
        alone = self._reads(node)[self.root[operand]] == 1 and not _repeats(operand)
        return fits and alone and not self._may_broadcast(operand, node, new) and self._dies_at(operand, node)

    def _reads(self, node: Node) -> Counter[Node]:
        """How often `node` reads a storage; it is asked for each of many operands of one node."""
        if self.counted is None or self.counted[0] is not node:
            self.counted = node, Counter(self.root[operand] for operand in operands(node))
        return self.counted[1]

    def _may_broadcast(self, operand: Node, node: Node, tensor: meta.TensorMeta) -> bool:
        """True if `operand` has the shape of the result on the first rank, but may be broadcast to it on another."""
        if 1 not in tensor.shape:
            return False
        shapes = meta.global_shapes(operand)
        return len(shapes) != 1 or shapes[0] is None or shapes[0] not in meta.global_shapes(node)

    def _lists(self, node: Node, inplace: Any) -> None:
        """Foreach and fused ops: in place for all their lists, or not at all."""
        arguments = _torch.schema_of(inplace).arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        bound = arguments_of(node)
        lists = [list(cast(Sequence[Node], bound[name])) for name in written]
        nested = len(_torch.schema_of(node.target).returns) > 1
        takers = _takers(node, nested)
        for position, (name, entries) in enumerate(zip(written, lists, strict=True)):
            unread = name == "grads" and bound.get("grad_scale") is None and not any(p == position for p, _ in takers)
            tensors = [meta.tensor(n) for n in entries] if nested else meta.tensors(node)
            if not unread and not all(self._can_hold(n, node, m) for n, m in zip(entries, tensors, strict=True)):
                return
        node.target = inplace
        redirect({taker: lists[position][i] for (position, i), taker in takers.items()})
        for (position, i), taker in takers.items():
            self._merge(taker, lists[position][i])
        for user in list(node.users):
            for inner in list(user.users):
                self.graph.erase_node(inner)
            self.graph.erase_node(user)

    def finish(self) -> tuple[Output, ...]:
        """Copy updates that are not in their storage; keep results and created state as outputs."""
        placeholders = {i.name: n for i, n in self.local.placeholders()}
        output = next(iter(reversed(self.graph.nodes)))
        returned: list[tuple[Output, Node]] = []
        copies: list[tuple[Node, Node]] = []
        with self.graph.inserting_before(output):
            for out, node in self.local.results():
                if out.kind == "update" and out.target in placeholders:
                    target = placeholders[out.target]
                    if not (self.root[node] is target and self._is_whole(node, target)):
                        copies.append((target, self._safe(node, target)))
                else:
                    returned.append((out, self._safe(node, None)))
            for target, value in copies:
                meta.copy(target, self.graph.call_function(aten.copy_.default, (target, value)))
        output.args = (tuple(node for _, node in returned),)
        return tuple(out for out, _ in returned)

    def _is_whole(self, node: Node, target: Node) -> bool:
        """True if `node` is `target` updated in place, and no view of it."""
        while node is not target:
            if node.target in MAY_ALIAS or not (is_mutating(node) or is_wait(node)):
                return False
            node = cast(Node, node.kwargs["out"]) if node.target in _INTO else operands(node)[0]
        return True

    def _safe(self, node: Node, target: Node | None) -> Node:
        """The value of `node`, cloned if it shares storage with an input that may be overwritten."""
        root = self.root.get(node, node)
        if root.op != "placeholder" or root is target:
            return node
        new = self.graph.call_function(aten.clone.default, (node,))
        meta.copy(node, new)
        return new


def _takers(node: Node, nested: bool) -> dict[tuple[int, int], Node]:
    """The getitem nodes that pick entry i of list p out of a multi-list op: (p, i) -> node."""
    takers: dict[tuple[int, int], Node] = {}
    for user in node.users:
        if not nested:
            takers[0, _index(user)] = user
            continue
        for inner in user.users:
            takers[_index(user), _index(inner)] = inner
    return takers


def _index(getitem: Node) -> int:
    return cast(int, getitem.args[1])


def aliased(node: Node) -> Node | None:
    """The operand whose storage `node` may share."""
    if node.op != "call_function" or bodies_of(node)[1]:
        return None
    if _torch.is_getitem(node.target):
        source = node_at(node, 0)
        return shared_with(node) if region_of(source) else source if aliased(source) is not None else None
    may_alias = node.target in MAY_ALIAS or node.target in UNMARKED_VIEWS or is_wait(node)
    if not may_alias and _torch.is_op(node.target) and returns_new(node.target):
        return None
    return next(iter(operands(node)), None)  # of a function of wholestep too: it may return a view


def _repeats(node: Node) -> bool:
    """Whether a view may have one element at several places; a reshape of an expanded tensor is a view or a copy."""
    source = aliased(node)
    while source is not None and not is_mutating(node):
        new, old = meta.tensor(node), meta.tensor(source)
        if packet_name(node.target) in _REPEATS and not (new and old and equal(new.shape, old.shape)):
            return True
        node, source = source, aliased(source)
    return False


@cache
def inplace_form(target: Any) -> Any:
    """The in-place overload of a functional op that takes the same arguments, if there is one."""
    packet = getattr(target, "_overloadpacket", None)
    other = getattr(getattr(torch.ops, target.namespace), f"{packet.__name__}_", None) if packet else None
    overload = getattr(other, target._overloadname, None) if other else None
    return overload if overload and target.namespace == "aten" and _takes(overload) == _takes(target) else None


@cache
def fresh_form(target: Any) -> Any:
    """The functional overload of an in-place op that takes the same arguments, if there is one."""
    packet = getattr(getattr(torch.ops, target.namespace), target.overloadpacket.__name__.rstrip("_"), None)
    overload = getattr(packet, target._overloadname, None)
    return overload if overload and _takes(overload) == _takes(target) else None


def _takes(target: Any) -> list[str]:
    return [argument.name for argument in _torch.schema_of(target).arguments]
