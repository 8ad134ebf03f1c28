"""Aliasing and lifetimes of storages; a value is freed after its last reader, that of a collective after the wait."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import Any, Literal, TypeVar, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from . import meta
from .loop import loop_of
from .meta import TensorMeta
from .nodes import is_collective, is_wait, operands
from .region import Region, inputs_of, region_of

aten = torch.ops.aten
Sharing = Literal["view", "if alike", "all", "nothing"]
F = TypeVar("F", bound=Callable[..., Any])
PIECES = -1
"""The `index` of a storage that stands for what the run of a body holds at once."""

UNMARKED_VIEWS = frozenset(
    {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.lift.default}
)
"""Views that their schemas do not mark as views."""
_COPIES_AT_NEED = frozenset({aten.reshape.default, aten.contiguous.default})
_SHARING: dict[Any, Sharing] = {meta.with_stride: "if alike"}


def shares(how: Sharing) -> Callable[[F], F]:
    """Decorator that declares how the result of a function of local graphs shares memory with its first operand.

    "view": a view of it. "if alike": the operand itself, if shape, strides, dtype and device are equal. "all": the
    memory of all operands. "nothing": the result has no memory. Undeclared functions return new memory.
    """

    def note(function: F) -> F:
        _SHARING[function] = how
        return function

    return note


def always_shares(target: object) -> bool:
    """Return whether a function of local graphs always returns a view of its first operand."""
    return _SHARING.get(target) == "view"


def copies_at_need(target: object) -> bool:
    """Return whether a function of local graphs returns its first operand itself, if that is as it should be."""
    return _SHARING.get(target) == "if alike"


@dataclass
class Storage:
    """One storage: created as output `index` of `node`; `members` are the nodes that share it.

    It is live from call `first` to call `last`, inclusive, counting call nodes from 0. `last` is None for an output of
    the graph, `first` -1 for an input.
    """

    node: Node
    index: int
    size_bytes: int
    first: int
    last: int | None
    members: list[Node] = field(default_factory=list[Node])


def storages(graph: Graph) -> list[Storage]:
    """Return all storages of a graph, in order of creation."""
    work = _Work()
    for node in graph.nodes:
        work.visit(node)
    return work.storages


def storage_bytes(tensor: TensorMeta) -> int:
    """Return the bytes from the first to the last element of a tensor with these strides: a plain number, which prices
    programs.
    """
    if 0 in tensor.shape:
        return 0
    reach = sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return (1 + reach) * tensor.dtype.itemsize


def shared_operand(node: Node, index: int = 0) -> Node | None:
    """Return the operand that output `index` of `node` aliases; None for new memory."""
    if _torch.is_op(node.target) and returns_new(node.target) and not is_wait(node):
        return None
    inputs = operands(node)
    if node.op != "call_function" or not inputs:
        return None
    if is_wait(node) or node.target in UNMARKED_VIEWS:
        return inputs[0]
    if not _torch.is_op(node.target):
        return inputs[0] if _shares_first(node, inputs[0]) else None
    if node.target in _COPIES_AT_NEED:
        tensor = meta.tensor(inputs[0])
        return inputs[0] if tensor is not None and tensor.is_contiguous else None
    return _by_schema(node, index)


@cache
def returns_new(target: Any) -> bool:
    """Return whether an op never returns an alias of an operand."""
    unmarked = all(returned.alias_info is None for returned in _torch.schema_of(target).returns)
    return unmarked and target not in UNMARKED_VIEWS and target not in _COPIES_AT_NEED


def _shares_first(node: Node, source: Node) -> bool:
    how = _SHARING.get(node.target)
    return how == "view" or (how == "if alike" and meta.tensor(node) == meta.tensor(source) is not None)


def _by_schema(node: Node, index: int) -> Node | None:
    """Return the argument with the same alias annotation as the output, in the op's schema."""
    schema = _torch.schema_of(node.target)
    marked = [r.alias_info for r in schema.returns]
    item = bisect(meta.item_starts(node), index) - 1 if len(marked) > 1 else 0  # a return value may be a list
    alias = marked[item] if marked else None
    if alias is None:
        return None
    for position, argument in enumerate(schema.arguments):
        marks = argument.alias_info
        if marks is not None and (marks.before_set & alias.before_set or "*" in marks.after_set):  # *: a list of views
            value = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
            return value if isinstance(value, Node) else None
    return None


def most_at_once(body: Graph) -> list[Storage]:
    """Return the storages of a piece where it has most; what it is given and what it accumulates are none of them."""
    inner = [storage for storage in storages(body) if storage.first >= 0 and storage.last is not None]
    changes = sorted(
        (at, size) for s in inner for at, size in ((s.first, s.size_bytes), (cast(int, s.last) + 0.5, -s.size_bytes))
    )
    sizes = list(accumulate((size for _, size in changes), initial=0))
    at = changes[sizes.index(max(sizes)) - 1][0] if changes else 0
    return [storage for storage in inner if storage.first <= at <= cast(int, storage.last)]


@dataclass
class _Work:
    storages: list[Storage] = field(default_factory=list[Storage])
    of: dict[Node, list[Storage | None]] = field(default_factory=dict[Node, "list[Storage | None]"])
    at: int = -1

    def visit(self, node: Node) -> None:
        if node.op == "output":
            ends = operands(node)
            for source in [*ends, *(n for end in ends if is_collective(end) for n in operands(end))]:
                for storage in self.of.get(source, []):
                    if storage is not None:
                        storage.last = None
            return
        if node.op == "call_function":
            self.at += 1
            self._hold(node.all_input_nodes, self.at)
            if is_wait(node):
                self._hold(operands(node)[0].all_input_nodes, self.at)
        self.of[node] = self._outputs(node)
        for storage in self.of[node]:
            if storage is not None:
                storage.members.append(node)
        if loop := loop_of(node):
            self.storages += [replace(temporary, first=self.at, last=self.at) for temporary in most_at_once(loop.body)]

    def _hold(self, nodes: Sequence[Node], until: int) -> None:
        for node in nodes:
            for storage in self.of.get(node, []):
                if storage is not None and storage.first >= 0:
                    storage.last = until if storage.last is None else max(storage.last, until)

    def _outputs(self, node: Node) -> list[Storage | None]:
        metas = meta.tensors(node)
        if _torch.is_getitem(node.target):
            return self._picked(node, len(metas))
        if _SHARING.get(node.target) == "all":
            return [storage for source in operands(node) for storage in self.of.get(source, [])]
        if _torch.is_op(node.target) and not _torch.schema_of(node.target).returns:
            return []  # it writes into its operands
        if region := region_of(node):
            return self._left(node, region)
        return [self._output(node, i, m) for i, m in enumerate(metas)]

    def _left(self, node: Node, region: Region) -> list[Storage | None]:
        """The storages of what a call of a region leaves: new ones, or of what it is given; with what it holds besides
        while it runs.
        """
        inputs, left, added = inputs_of(node), list[Storage | None](), dict[int, Storage]()
        for number, (place, size_bytes) in enumerate(zip(region.shares, region.sizes, strict=True)):
            source = inputs[place] if place >= 0 else None
            if source is not None:
                left.append(next(iter(self.of[source]), None))
            elif place in added:
                left.append(added[place])
            else:
                added[place] = Storage(node, number, size_bytes, self.at, self.at)
                left.append(added[place])
        left_bytes = sum(storage.size_bytes for place, storage in added.items() if place < 0)
        working = Storage(node, PIECES, max(region.work_bytes - left_bytes, 0), self.at, self.at)
        self.storages += [*added.values(), working]
        return left

    def _picked(self, node: Node, count: int) -> list[Storage | None]:
        """Return the storages that a getitem selects: one, or a list of an op that returns lists."""
        start = meta.picked(node).start
        picked = self.of.get(cast(Node, node.args[0]), [])[start : start + count]
        return picked + [None] * (count - len(picked))

    def _output(self, node: Node, index: int, tensor: TensorMeta | None) -> Storage | None:
        if tensor is None or _SHARING.get(node.target) == "nothing":
            return None
        source = shared_operand(node, index)
        if source is not None:
            shared = self.of.get(source, [])
            return shared[0] if len(shared) == 1 else next((s for s in shared if s is not None), None)
        first, last = (-1, None) if node.op == "placeholder" else (self.at, self.at)
        self.storages.append(Storage(node, index, storage_bytes(tensor), first, last))
        return self.storages[-1]
