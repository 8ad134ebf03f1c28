"""Ops on lists, entry by entry: `_foreach_*` and `_fused_*`; `stack`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ...graph.meta import TensorMeta
from ...graph.op_kinds import is_list_op
from ..call import Call, Slot
from ..dsl import row
from ..registry import FAMILIES, Bind, Function
from ..rule import ANY_PARTIAL, BoundRule, Group, PassThrough, Term

_JOINTLY_LINEAR = {"foreach_add", "foreach_sub"}
_EACH_LINEAR = {"foreach_mul"}
_FIRST_LINEAR = {"foreach_div", "foreach_neg", "foreach_clone"}
NORMS: dict[object, str] = {1: "norm1", 2: "norm2", float("inf"): "max"}


@FAMILIES.append
def on_lists(target: Any) -> Function | None:
    """Ops of torch on lists, and its fused optimizers."""
    return by_entry if is_list_op(target) else None


def by_entry(call: Call) -> Bind | None:
    """Entry i of each list is computed from entry i of the others; single tensors are shared by all."""
    lists = [slot for slot in call.slots if slot.is_list and slot.positions]
    name = _name(call)
    if not lists or name == "foreach_mm" or not _one_for_each(call, lists):
        return None
    inputs = ["[...]" if slot.is_list else "*" for slot in call.slots]
    outputs = ["[...]"] * (len(call.outputs) // len(lists[0].positions))
    given = [i for i, slot in enumerate(call.slots) if slot.is_list and slot.positions]
    linear = ""
    if name in _JOINTLY_LINEAR and len(given) > 1:
        linear = "+".join(map(str, given))
    elif name in _EACH_LINEAR:
        linear = " | ".join(map(str, given))
    elif name in _FIRST_LINEAR:
        linear = "0"
    same = {"...": ""}  # counts are the same on all ranks
    return Bind(f"{', '.join(inputs)} -> {', '.join(outputs)}", linear, reduces=same)


def _name(call: Call) -> str:
    return str(call.target._overloadpacket.__name__).removeprefix("_")


def _one_for_each(call: Call, lists: Sequence[Slot]) -> bool:
    """True if every output has the shape to which the entries at its index broadcast (fused ops: or is a count)."""
    count = len(lists[0].positions)
    if any(len(slot.positions) not in (0, count) for slot in call.slots if slot.is_list):
        return False
    entries = [[call.operands[slot.positions[i]] for slot in lists] for i in range(count)]
    shapes = [_broadcast(found) for found in entries]
    made = [m.shape for m in call.outputs if m is not None]
    fused = _name(call).startswith("fused_")
    return (
        bool(made)
        and len(made) == len(call.outputs)
        and len(made) % count == 0
        and all(shape == shapes[i % count] or (fused and not shape) for i, shape in enumerate(made))
    )


def _broadcast(entries: Sequence[TensorMeta]) -> tuple[int, ...]:
    return tuple(cast(torch.Size, torch.broadcast_shapes(*(m.shape for m in entries))))


def foreach_norm(call: Call) -> BoundRule | None:
    """One norm for each tensor of a list."""
    op = NORMS.get(call.argument("ord", 2))
    if op is None:
        return None
    return BoundRule(tuple(norm_group(i, i, m.shape, op) for i, m in enumerate(call.operands)))


def norm_group(operand: int, output: int, shape: Sequence[int], op: str) -> Group:
    """A norm over all dims of one tensor.

    The maximum of no elements is an error, so no piece may be empty; partial maxima may be negative and do not pass.
    """
    term = tuple(f"d{i}" for i in range(len(shape)))
    if op == "max":
        return Group({operand: term}, {output: ()}, dict.fromkeys(term, op), filled=dict(zip(term, shape, strict=True)))
    through = PassThrough(frozenset({operand}), frozenset({op}))
    return Group({operand: term}, {output: ()}, dict.fromkeys(term, op), (through,))


@row("stack")
def stack(call: Call) -> BoundRule:
    """Stacks tensors along a new dim: they are sharded together, and partial results follow from partial operands."""
    ndim = len(call.made()) - 1
    at = call.argument("dim", 0) % (ndim + 1)
    term: Term = tuple(f"d{i}" if size > 1 else None for i, size in enumerate(call.shape(0)))
    positions = range(len(call.operands))
    through = PassThrough(frozenset(positions), ANY_PARTIAL, mixed=True)
    return BoundRule((Group(dict.fromkeys(positions, term), {0: (*term[:at], None, *term[at:])}, partial=(through,)),))


def _norms() -> list[tuple[Any, ...]]:
    tensors = [torch.randn(4, 6), torch.randn(5)]
    return [(tensors,), (tensors, 1), (tensors, float("inf"))]


row("_foreach_norm.Scalar", samples=_norms)(foreach_norm)
