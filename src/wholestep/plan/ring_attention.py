"""Attention in a ring: ranks keep their queries, and keys and values go from rank to rank, a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..errors import PlanError
from ..graph import meta
from ..graph.op_kinds import arithmetic
from ..layout import OfOwner, chunk_range, dealt
from ..mesh import Mesh
from ..rules.call import Call
from ..rules.find_rule import find_rule
from ..sizes import least, most
from .attention_windows import mask_of, reach_of
from .decision import Decision
from .op_strategies import ring

ZERO, FIRST, START, END, LAST = range(5)
"""Places of keys: the first of all, the first within reach of a rank, the first that it has, and the ends of both."""


@dataclass(frozen=True)
class Ring:
    """A call of which `parts` ranks along `axis` have a piece of `queries` queries, and one of `keys` keys. In step t a
    rank attends to the keys of the t-th rank before it; or in one step to all that its mask lets through, with `reach`
    how far from a query. `key`, `mask`: places among the operands, 0 without a mask; values follow keys. If `balanced`,
    queries and keys are dealt (`layout.dealt`), so that all ranks attend to as many in each step.
    """

    axis: str
    parts: int
    queries: int
    keys: int
    key: int
    causal: bool
    backward: bool
    reach: tuple[int, int] | None = None
    mask: int = 0
    balanced: bool = False

    @property
    def spans(self) -> list[tuple[int, int, int, int, int]]:
        """For each rank the places `ZERO` to `LAST` of the keys within reach, and of its own."""
        (before, behind), spans = self.reach or (0, 0), list[tuple[int, int, int, int, int]]()
        for start, length in (chunk_range(self.keys, self.parts, rank) for rank in range(self.parts)):
            first, end = most(0, start - least(before, length * before)), start + length
            spans.append((0, first, start, end, least(self.keys, end + least(behind, length * behind))))
        return spans

    def keys_between(self, since: int, until: int, start: bool = False) -> OfOwner:
        """How many keys are between two of these places."""
        return OfOwner(self.axis, tuple(span[until] - span[since] for span in self.spans), start)

    @property
    def own_and_near(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The keys that each rank has, and those within its reach."""
        return [(span[START], span[END]) for span in self.spans], [(span[FIRST], span[LAST]) for span in self.spans]

    def arrived(self, step: int) -> tuple[int, ...]:
        """How many keys each rank has in a step."""
        if self.balanced:
            return tuple(sum(self._dealt((rank - step) % self.parts)) for rank in range(self.parts))
        return tuple(chunk_range(self.keys, self.parts, (rank - step) % self.parts)[1] for rank in range(self.parts))

    def columns(self, step: int) -> tuple[OfOwner, OfOwner]:
        """The first of the keys that each rank has in a step, or within reach, and how many they are."""
        if self.reach:
            return self.keys_between(ZERO, FIRST, start=True), self.keys_between(FIRST, LAST)
        starts = (chunk_range(self.keys, self.parts, (rank - step) % self.parts)[0] for rank in range(self.parts))
        return OfOwner(self.axis, tuple(starts), start=True), OfOwner(self.axis, self.arrived(step))

    def attended(self, step: int) -> tuple[OfOwner, OfOwner]:
        """How many of these keys are in front of the queries that attend to some of them, and how many queries do."""
        before, lengths = list[int](), list[int]()
        for rank in range(self.parts if self.balanced else 0):
            piece = (rank - step) % self.parts
            (early, late), (_, own_late) = self._dealt(piece), self._dealt(rank)
            before.append(0 if piece == rank else early if piece < rank else early + late)
            lengths.append(own_late if piece > rank else sum(self._dealt(rank)))
        if self.balanced:
            return OfOwner(self.axis, tuple(before), start=True), OfOwner(self.axis, tuple(lengths), start=True)
        for rank in range(self.parts):
            first, length = chunk_range(self.queries, self.parts, rank)
            start, count = chunk_range(self.keys, self.parts, (rank - step) % self.parts)
            count = self.keys_between(FIRST, LAST).numbers[rank] if self.reach else count
            before.append(most(0, first - start) if self.causal else count)
            lengths.append(most(0, length - most(0, start - first)) if self.causal else length)
        return OfOwner(self.axis, tuple(before), start=True), OfOwner(self.axis, tuple(lengths), start=True)

    def seen(self, step: int) -> dict[str, OfOwner]:
        """How many of these keys, the first ones, any query of a rank attends to, where that is not all."""
        return {"keys": self.attended(step)[0]} if self.balanced and step else {}

    def _dealt(self, rank: int) -> tuple[int, int]:
        """How many places a rank gets from the front, and from the end."""
        (_, early), (_, late) = dealt(self.keys, self.parts, rank)
        return early, late


def shared(
    axis: str, own: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]]
) -> tuple[list[OfOwner], list[OfOwner], list[OfOwner], OfOwner]:
    """What a rank has for each rank of its `own` places, of those that are `wanted` there: starts and numbers; how many
    it gets of each; and how many of its own it wants itself, which it does not send.
    """
    starts, numbers = list[list[int]](), list[list[int]]()  # by receiver and sender
    for first, last in wanted:
        starts.append([least(most(0, first - start), end - start) for start, end in own])
        numbers.append([most(0, least(e, last) - s - at) for (s, e), at in zip(own, starts[-1], strict=True)])
    kept = OfOwner(axis, tuple(row[i] for i, row in enumerate(numbers)), start=True)
    sent = [[0 if i == to else n for i, n in enumerate(row)] for to, row in enumerate(numbers)]
    of_receivers = [OfOwner(axis, of_sender) for of_sender in zip(*sent, strict=True)]
    return (
        [OfOwner(axis, tuple(n), start=True) for n in starts],
        [OfOwner(axis, tuple(n)) for n in sent],
        of_receivers,
        kept,
    )


def ring_of(node: Node, decision: Decision, mesh: Mesh) -> Ring | None:
    """The ring of a call; None where ranks have all keys. Raises PlanError if several axes cut them or the queries."""
    operation = arithmetic(node.target) if node.op == "call_function" else None
    rule = find_rule(node) if operation and operation.kind == "attention" else None
    if operation is None or rule is None or not any(ring(rule, group) for group in rule.groups):
        return None
    call, query, mask = Call.of(node), int(operation.backward), mask_of(node)
    cut, reach = decision.operands[query + 1].dims[2], reach_of(node)
    if not cut:
        return None
    axis, how = cut[0], "in a ring" if reach is None else "to keys that are near by a mask"
    if {cut, decision.operands[query].dims[2]} != {(axis,)}:
        problem = f"%{node.name} attends {how}, and other axes than {axis} share its tokens too"
        next_step = "give method='gather', or method='heads' along the others"
        raise PlanError(problem, f"tokens that {axis} alone shares", next_step, meta.source_line(node))
    numbers = mesh.axis_size(axis), call.shape(query)[2], call.shape(query + 1)[2], query + 1
    return Ring(axis, *numbers, bool(call.argument("is_causal")), operation.backward, reach, mask or 0)
