"""What a step keeps from the forward for the backward, and what it would take to make each of it again.

A step alternates between forward and backward; a stretch is one of these. A value is saved when a later stretch than
its own reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, Role, operands
from ..graph.storage import Storage, storages
from ..graph.verify import is_collective, is_mutating, is_wait
from ..partition import rank_ops
from ..rules.registry import is_random

_PURE: frozenset[Any] = frozenset({*rank_ops.MAY_ALIAS, *rank_ops.RANK_DEPENDENT, rank_ops.join_exchanged})
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@dataclass
class SavedTensor:
    """One piece of memory that is saved. `reads` are, by later stretch, the calls that read it: position and member."""

    storage: Storage
    stretch: int
    own_last: int
    reads: dict[int, list[tuple[int, Node]]]

    @property
    def name(self) -> str:
        """The same on all ranks."""
        return f"{self.storage.node.name}:{self.storage.index}"


@dataclass
class SavedTensors:
    """The values of `local` (a functional graph) with their positions among call nodes.

    `compute` allows values that depend on the batch to be made again, `gathers` what is gathered of what rests.
    """

    local: LocalGraph
    compute: bool = True
    gathers: bool = True
    position: dict[Node, int] = field(default_factory=dict[Node, int])
    stretch: dict[Node, int] = field(default_factory=dict[Node, int])
    of: dict[Node, list[Storage]] = field(default_factory=dict[Node, list[Storage]])
    moving: set[Node] = field(default_factory=set[Node])
    settled: set[Node] = field(default_factory=set[Node])
    _repeatable: dict[Node, bool] = field(default_factory=dict[Node, bool])
    _twins: dict[tuple[int, int], Node] = field(default_factory=dict[tuple[int, int], Node])
    _number: dict[Node, int] = field(default_factory=dict[Node, int])

    def __post_init__(self) -> None:
        self.storages = storages(self.local.graph)
        self._find_stretches()
        for storage in self.storages:
            for member in storage.members:
                self.of.setdefault(member, []).append(storage)
        self._number_alike()
        self.last_stretch = {id(s): self._last_stretch(s) for s in self.storages}
        self.natural = {id(s): (s.first, s.last) for s in self.storages if s.last is not None}

    def _find_stretches(self) -> None:
        self.moving |= {n for i, n in self.local.placeholders() if i.role in (Role.BATCH, Role.GRAD)}
        current, backward = 0, False
        for node in self.local.graph.nodes:
            if node.op != "call_function":
                continue
            self.position[node] = len(self.position)
            given = [n for n in operands(node) if n in self.moving]
            if given or is_random(node):
                self.moving.add(node)
                piece = _torch.is_getitem(node.target) or meta.value(node) is None
                if meta.is_batch_invariant(node) or (piece and given and all(n in self.settled for n in given)):
                    self.settled.add(node)
                elif meta.value(node) is not None and meta.is_backward(node) != backward:
                    backward, current = not backward, current + 1
            self.stretch[node] = current

    def _number_alike(self) -> None:
        """Calls that follow from what rests alone and compute the same share a number."""
        seen: dict[Any, int] = {}
        for node in self.local.graph.nodes:
            if node.op == "placeholder":
                self._number[node] = seen.setdefault(node, len(seen))
            elif node.op == "call_function" and node not in self.moving and not is_random(node):

                def plain(given: Any) -> Any:
                    return ("node", self._number.get(given, -1)) if isinstance(given, Node) else repr(given)

                key = (node.target, _mapped(node.args, plain), _mapped(tuple(sorted(node.kwargs.items())), plain))
                self._number[node] = number = seen.setdefault(key, len(seen))
                self._twins.setdefault((number, self.stretch[node]), node)

    def twin(self, node: Node, stretch: int) -> Node | None:
        """The call in `stretch` that computes what `node` of another stretch does, if there is one."""
        if self.stretch.get(node, stretch) == stretch or node not in self._number:
            return None
        return self._twins.get((self._number[node], stretch))

    # -- what is saved --------------------------------------------------------------------
    def _readers(self, storage: Storage) -> list[tuple[Node, Node]]:
        inside = set(storage.members)
        return [(user, m) for m in storage.members for user in m.users if user not in inside]

    def _last_stretch(self, storage: Storage) -> int:
        if storage.first < 0:
            return 1 << 30
        readers = [self.stretch[user] for user, _ in self._readers(storage) if user.op == "call_function"]
        return max([self.stretch[storage.node], *readers])

    @cached_property
    def candidates(self) -> list[SavedTensor]:
        """The saved values that can be made again, in the order in which they are made."""
        found: list[SavedTensor] = []
        for storage in self.storages:
            node = storage.node
            if node.op == "call_function" and storage.size_bytes and self.repeatable(node):
                value = self._value(storage)
                if value is not None:
                    found.append(value)
        return found

    def _value(self, storage: Storage) -> SavedTensor | None:
        own, own_last = self.stretch[storage.node], storage.first
        if meta.is_backward(storage.node) and storage.node in self.moving:
            return None
        reads: dict[int, list[tuple[int, Node]]] = {}
        for user, member in self._readers(storage):
            if user.op == "output" or user in self.settled:
                return None
            at, stretch = self.position[user], self.stretch[user]
            if stretch > own:
                reads.setdefault(stretch, []).append((at, member))
            else:
                own_last = max(own_last, at)
        return SavedTensor(storage, own, own_last, reads) if reads else None

    # -- what can be made again -------------------------------------------------------------
    def repeatable(self, node: Node) -> bool:
        """True for a call that gives the same bits when it is made again: not for what draws random numbers, nor for
        what was sent, but for gathers of what rests.
        """
        found = self._repeatable.get(node)
        if found is None:
            found = self._repeatable[node] = self._can_repeat(node)
        return found

    def _can_repeat(self, node: Node) -> bool:
        if _torch.is_getitem(node.target) or is_wait(node):
            return self.repeatable(operands(node)[0])
        if is_collective(node):
            return self.gathers and node.target is _GATHER and node not in self.moving
        if node.op != "call_function" or (node in self.moving and not self.compute):
            return False
        if not _torch.is_op(node.target):
            return node.target in _PURE
        return not (is_random(node) or is_mutating(node) or "empty" in str(node.target))


def _mapped(value: Any, one: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_mapped(v, one) for v in value)  # pyright: ignore[reportUnknownVariableType]
    return one(value)
