"""What of a plan all ranks of an axis compute alike: products that nothing divides, and the operation that is why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..cost.compute import flops
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import operands
from ..graph.op_kinds import PACKED_CURE
from ..graph.text import op_name
from ..layout import Layout
from .decision import Decision

_SHOWN = 2  # causes of an axis
_PACKED = ("._flash_attention_forward", "._flash_attention_backward", "._efficient_attention_forward")


@dataclass(frozen=True)
class RepeatedWork:
    """The share of all multiplications (of products, convolutions and attention) that every rank of `axis` does in
    full. `causes`: the operations that make it so, the largest first: op, user's line and share of each.
    """

    axis: str
    share: float
    causes: tuple[tuple[str, str, float], ...]

    def __str__(self) -> str:
        """`every rank of dp repeats 59% of the products`, and a line for each of the largest causes."""
        causes = [f"{share:.0%} since {op} at {line}{_cure(op)}" for op, line, share in self.causes[:_SHOWN]]
        causes += [f"{len(self.causes) - _SHOWN} more causes"] if len(self.causes) > _SHOWN else []
        return "\n    ".join([f"every rank of {self.axis} repeats {self.share:.0%} of the products", *causes])


def _cure(op: str) -> str:
    """What is shared out in place of an op of packed sequences."""
    return f"; use {PACKED_CURE}" if op.endswith(_PACKED) or "varlen" in op else ""


def repeated_work(
    graph: TrainGraph, decisions: Mapping[str, Decision], storage: Mapping[str, Layout], axes: Sequence[str]
) -> tuple[RepeatedWork, ...]:
    """The repeated work along each of `axes` that does not divide all, by the layouts of decisions and inputs.

    A product is repeated along an axis that shards none of its operands. It starts at the first operation on the way
    to it that takes a sharded tensor and has it whole, or at the product itself, if nothing was sharded before it.
    """
    work = {node: flops(node) for node in graph.graph.nodes if node.op == "call_function"}
    products = [decisions[node.name].operands for node, count in work.items() if count]
    undivided = [axis for axis in axes if not all(_is_sharded(layouts, axis) for layouts in products)]
    batch = {node: storage[spec.name] for spec, node in graph.placeholders() if spec.role is Role.BATCH}
    repeated = ((axis, _causes(axis, work, batch, decisions)) for axis in undivided)
    return tuple(RepeatedWork(axis, sum(share for *_, share in causes), causes) for axis, causes in repeated if causes)


def _causes(
    axis: str, work: Mapping[Node, float], batch: Mapping[Node, Layout], decisions: Mapping[str, Decision]
) -> tuple[tuple[str, str, float], ...]:
    sharded = {node: _is_sharded([layout], axis) for node, layout in batch.items()}  # what the batch reaches
    counts, cause_of = defaultdict[tuple[str, str], float](float), dict[Node, Node]()
    for node, count in work.items():
        decision, read = decisions[node.name], [operand for operand in operands(node) if operand in sharded]
        if not read:
            continue
        sharded[node] = _is_sharded(decision.given, axis)
        if _is_sharded(decision.operands, axis):
            if not sharded[node] and _is_sharded(decision.outputs, axis):
                cause_of[node] = node
            continue
        before = next((cause_of[operand] for operand in read if operand in cause_of), node)
        cause = node if any(sharded[operand] for operand in read) else before
        if cause is not node or any(sharded[operand] for operand in read):
            cause_of[node] = cause
        counts[op_name(cause), meta.source_line(cause) or "a line of torch"] += count
    total, largest = sum(work.values()), sorted(counts.items(), key=lambda cause: -cause[1])
    return tuple((op, line, count / total) for (op, line), count in largest if count > total / 200)


def _is_sharded(layouts: Sequence[Layout], axis: str) -> bool:
    """Whether `axis` shards, owns or varies one of these; partial values have the size of the whole."""
    return any(layout.state(axis).kind not in "RP" for layout in layouts)
