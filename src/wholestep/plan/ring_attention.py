"""Attention in a ring: ranks keep their queries, and keys and values go from rank to rank, a piece at a time."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ..errors import PlanError
from ..graph import meta
from ..graph.op_kinds import arithmetic
from ..layout import OfOwner, chunk_range
from ..mesh import Mesh
from ..rules.call import Call
from ..rules.find_rule import find_rule
from ..sizes import most
from .decision import Decision
from .op_strategies import ring


@dataclass(frozen=True)
class Ring:
    """A call of which `parts` ranks along `axis` have a piece of `queries` queries, and one of `keys` keys. In step t a
    rank attends to the keys of the t-th rank before it. `key`: the place of keys among the operands; values follow.
    """

    axis: str
    parts: int
    queries: int
    keys: int
    key: int
    causal: bool
    backward: bool

    def arrived(self, step: int) -> tuple[int, ...]:
        """How many keys each rank has in a step."""
        return tuple(chunk_range(self.keys, self.parts, (rank - step) % self.parts)[1] for rank in range(self.parts))

    def attended(self, step: int) -> tuple[OfOwner, OfOwner]:
        """How many of these keys are in front of the queries that attend to some of them, and how many queries do."""
        before, lengths = list[int](), list[int]()
        for rank in range(self.parts):
            first, length = chunk_range(self.queries, self.parts, rank)
            start, count = chunk_range(self.keys, self.parts, (rank - step) % self.parts)
            before.append(most(0, first - start) if self.causal else count)
            lengths.append(most(0, length - most(0, start - first)) if self.causal else length)
        return OfOwner(self.axis, tuple(before), start=True), OfOwner(self.axis, tuple(lengths), start=True)


def ring_of(node: Node, decision: Decision, mesh: Mesh) -> Ring | None:
    """The ring of a call; None where ranks have all keys. Raises PlanError if several axes cut them or the queries."""
    operation = arithmetic(node.target) if node.op == "call_function" else None
    rule = find_rule(node) if operation and operation.kind == "attention" else None
    if operation is None or rule is None or not any(ring(rule, group) for group in rule.groups):
        return None
    call, query = Call.of(node), int(operation.backward)
    cut = decision.operands[query + 1].dims[2]
    if not cut:
        return None
    axis = cut[0]
    if {cut, decision.operands[query].dims[2]} != {(axis,)}:
        problem = f"%{node.name} attends in a ring, and other axes than {axis} share its tokens too"
        raise PlanError(problem, f"tokens that {axis} alone shares", "give method='gather'", meta.source_line(node))
    sizes = call.shape(query)[2], call.shape(query + 1)[2]
    causal = bool(call.argument("is_causal"))
    return Ring(axis, mesh.axis_size(axis), *sizes, query + 1, causal, operation.backward)
