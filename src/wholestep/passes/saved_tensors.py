"""The tensors that a step saves from the forward for the backward, and which of them can be rematerialized."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import is_collective, is_mutating, is_wait, operands
from ..graph.op_kinds import IN_PLACE_OF, collective_kind, is_uninitialized
from ..graph.storage import Storage, storages
from ..partition import rank_ops
from ..partition.batch_dependent import batch_dependent
from ..rules.registry import draws, is_random
from .bucket import GATHER

_PURE: frozenset[Any] = frozenset({
    *rank_ops.MAY_ALIAS, *rank_ops.RANK_DEPENDENT, rank_ops.join_exchanged, rank_ops.rows_in_parts,
    rank_ops.tokens_first,
})  # fmt: skip


@dataclass
class SavedTensor:
    """One saved storage.

    `last_read` is the last call of its own segment that reads it; `reads` has, for each later segment, the position
    and the member of each read.
    """

    storage: Storage
    last_read: int
    reads: dict[int, list[tuple[int, Node]]]

    @property
    def name(self) -> str:
        """The same on all ranks."""
        return f"{self.storage.node.name}:{self.storage.index}"


@dataclass
class SavedTensors:
    """The values of `local` (a functional graph) with their positions among call nodes.

    A step alternates between forward and backward; each such phase is a segment. A value is saved if a later segment
    than its own reads it. `gathers` allows gathered parameters to be re-gathered, `activations` what is gathered of
    values that depend on the batch, or exchanged: all ranks have to choose the same of these. `kept_ids`: ids of
    storages that may be read in later segments, whoever reads them now.
    """

    local: LocalGraph
    gathers: bool = True
    activations: bool = False
    position: dict[Node, int] = field(default_factory=dict[Node, int])
    segment: dict[Node, int] = field(default_factory=dict[Node, int])
    of: dict[Node, list[Storage]] = field(default_factory=dict[Node, list[Storage]])
    batch_dependent: set[Node] = field(default_factory=set[Node])
    gradients: set[Node] = field(default_factory=set[Node])
    kept_ids: set[int] = field(default_factory=set[int])
    _repeatable: dict[Node, bool] = field(default_factory=dict[Node, bool])
    _twins: dict[tuple[int, int], Node] = field(default_factory=dict[tuple[int, int], Node])
    _number: dict[Node, int] = field(default_factory=dict[Node, int])

    def __post_init__(self) -> None:
        graph = self.local.graph
        self.storages = [storage for storage in storages(graph) if storage.node.graph is graph]  # no body's
        self._find_segments()
        for storage in self.storages:
            for member in storage.members:
                self.of.setdefault(member, []).append(storage)
        self._number_equal_calls()
        self.last_segment = {id(s): self._last_segment(s) for s in self.storages}
        self.natural = {id(s): (s.first, s.last) for s in self.storages if s.last is not None}

    def _find_segments(self) -> None:
        self.batch_dependent = batch_dependent(self.local)
        current, backward = 0, False
        for node in self.local.graph.nodes:
            if node.op != "call_function":
                continue
            self.position[node] = len(self.position)
            if node in self.batch_dependent:
                inputs = [n for n in operands(node) if n in self.batch_dependent]
                piece = _torch.is_getitem(node.target) or meta.value(node) is None
                if meta.is_batch_invariant(node) or (piece and inputs and all(n in self.gradients for n in inputs)):
                    self.gradients.add(node)
                elif meta.value(node) is not None and meta.is_backward(node) != backward:
                    backward, current = not backward, current + 1
            self.segment[node] = current

    def _number_equal_calls(self) -> None:
        """Give one number to calls that compute the same function of stored tensors alone."""
        seen: dict[Any, int] = {}
        for node in self.local.graph.nodes:
            if node.op == "placeholder":
                self._number[node] = seen.setdefault(node, len(seen))
            elif node.op == "call_function" and node not in self.batch_dependent and not is_random(node):

                def plain(argument: Any) -> Any:
                    return ("node", self._number.get(argument, -1)) if isinstance(argument, Node) else repr(argument)

                key = (node.target, _mapped(node.args, plain), _mapped(tuple(sorted(node.kwargs.items())), plain))
                self._number[node] = number = seen.setdefault(key, len(seen))
                self._twins.setdefault((number, self.segment[node]), node)

    def twin(self, node: Node, segment: int) -> Node | None:
        """The call in `segment` that computes the same as `node` of another segment, if there is one."""
        if self.segment.get(node, segment) == segment or node not in self._number:
            return None
        return self._twins.get((self._number[node], segment))

    def _readers(self, storage: Storage) -> list[tuple[Node, Node]]:
        """What reads the storage; of its views those of a later segment, which are made anew with it."""
        inside = set(storage.members)
        return [
            (user, m) for m in storage.members for user in m.users
            if user not in inside or self.segment[user] > self.segment.get(m, -1)
        ]  # fmt: skip

    def _last_segment(self, storage: Storage) -> int:
        if storage.first < 0:
            return 1 << 30
        readers = [self.segment[user] for user, _ in self._readers(storage) if user.op == "call_function"]
        return max([self.segment[storage.node], *readers])

    @cached_property
    def candidates(self) -> list[SavedTensor]:
        """The saved values that can be rematerialized, in the order of the program."""
        tensors: list[SavedTensor] = []
        for storage in self.storages:
            node = storage.node
            if node.op == "call_function" and storage.size_bytes and self.repeatable(node):
                value = self._value(storage)
                if value is not None:
                    tensors.append(value)
        return tensors

    def _value(self, storage: Storage) -> SavedTensor | None:
        own_segment, last_read = self.segment[storage.node], storage.first
        if meta.is_backward(storage.node) and storage.node in self.batch_dependent:
            return None
        reads: dict[int, list[tuple[int, Node]]] = {}
        for user, member in self._readers(storage):
            if user.op == "output" or user in self.gradients:
                return None
            at, segment = self.position[user], self.segment[user]
            if segment > own_segment:
                reads.setdefault(segment, []).append((at, member))
            else:
                last_read = max(last_read, at)
        return SavedTensor(storage, last_read, reads) if reads else None

    def repeatable(self, node: Node) -> bool:
        """True for a call that gives the same bits when it runs twice, as gathers of stored tensors do."""
        if node not in self._repeatable:
            self._repeatable[node] = self._can_repeat(node)
        return self._repeatable[node]

    def is_alive(self, node: Node, segment: int, dropped: Collection[int]) -> bool:
        """True if `node` can be read in `segment` while the storages with the ids `dropped` are not kept for it."""
        if not self.repeatable(node):
            return True
        node_storages = self.of.get(node, ())
        if len(node_storages) != 1 or id(node_storages[0]) in dropped:
            return False
        return id(node_storages[0]) in self.kept_ids or self.last_segment[id(node_storages[0])] >= segment

    def _can_repeat(self, node: Node) -> bool:
        if _torch.is_getitem(node.target) or is_wait(node):
            return self.repeatable(operands(node)[0])
        if is_collective(node):
            varies = node in self.batch_dependent
            moves = node.target is GATHER or (varies and collective_kind(node.target) == "all_to_all")
            return moves and (self.activations if varies else self.gathers) and node.args[-1] != self.local.stage_axis
        if node.op != "call_function":
            return False
        if not _torch.is_op(node.target):
            return node.target in _PURE or node.target in IN_PLACE_OF
        return not (draws(node) or is_mutating(node) or is_uninitialized(node.target))


def _mapped(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_mapped(v, convert) for v in value)  # pyright: ignore[reportUnknownVariableType]
    return convert(value)
