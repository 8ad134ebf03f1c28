"""Calls whose kernels need one place of a dim of which a rank may have none: it computes on zeros, that are cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..graph import meta
from ..layout import Extent, extent
from ..plan.decision import Decision
from ..rules.call import Call
from ..rules.find_rule import find_rule
from ..rules.registry import draws
from . import rank_ops
from .collectives import Emitter

Added = dict[int, list[tuple[int, Extent]]]
"""For outputs by number, the dims that may have a place too many, and their length without it."""


@dataclass
class ExtendedCalls:
    """Writes such calls. `extended`: what has one place at least, by operand and dim. `added`: of a call."""

    emit: Emitter
    extended: dict[tuple[Node, int], Node] = field(default_factory=dict[tuple[Node, int], Node])
    added: dict[Node, Added] = field(default_factory=dict[Node, Added])

    def operands(self, node: Node, decision: Decision, arguments: list[Node]) -> Added:
        """Extend those of `arguments`, the operands of a call, where that is needed. Returns what is to be cut off."""
        added: Added = {}
        cut = any(layout.is_sharded for layout in decision.operands)
        rule = find_rule(node) if cut and not draws(node) else None
        if rule is None or not rule.extends or not any(group.filled for group in rule.groups):
            return added
        call = Call.of(node)
        for group in rule.groups:
            for factor in filter(group.may_be_extended, group.filled):
                places = [(i, term.index(factor)) for i, term in group.operands.items() if factor in term]
                lengths = [extent(call.shape(i)[d], decision.operands[i].dims[d], self.emit.mesh) for i, d in places]
                length = next((size for size in lengths if isinstance(size, Extent)), None)
                in_blocks = any(decision.operands[i].blocks for i, _ in places)  # of which no rank has none
                if length is not None and not in_blocks:
                    for i, dim in places:
                        arguments[i] = self._at_least_one(arguments[i], dim)
                    for number, term in group.outputs.items():
                        if factor in term:
                            added.setdefault(number, []).append((term.index(factor), length))
        return added

    def result(self, new: Node, node: Node, added: Added) -> Node:
        """The result of a call without what was added; of several, each is cut where it is picked."""
        if not isinstance(meta.value(node), torch.Tensor):
            self.added[node] = added
            return new
        return self._shortened(new, added.get(0, ()))

    def item(self, new: Node, node: Node, source: Node) -> Node:
        """`new`, which `node` picks of the results of `source`, without what was added."""
        picked, added = meta.picked(node), self.added.get(source, {})
        cuts = {n - picked.start: lengths for n, lengths in added.items() if picked.start <= n < picked.stop}
        return self.result(new, node, cuts)

    def _at_least_one(self, node: Node, dim: int) -> Node:
        if (node, dim) not in self.extended:
            new = self.emit.call(rank_ops.at_least_one, (node, dim), meta.one_tensor(node), node)
            meta.set_strided(new, meta.is_strided(node))
            self.extended[node, dim] = new
        return self.extended[node, dim]

    def _shortened(self, new: Node, lengths: Sequence[tuple[int, Extent]]) -> Node:
        for dim, length in lengths:
            strided = meta.is_strided(new) or dim > 0
            new = self.emit.call(rank_ops.cut_to, (new, dim, length), meta.one_tensor(new), new)
            meta.set_strided(new, strided)
        return new
