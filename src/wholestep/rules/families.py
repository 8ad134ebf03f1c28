"""Rules by family: elementwise ops by their tag, foreach and fused optimizer ops by index, norms, stacks, factories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch.fx import Node

from ..graph import meta
from ..graph.graph import operands
from ..graph.meta import TensorMeta
from .rule import ANY_PARTIAL, LINEAR, BoundRule, Group, PassThrough, Term

aten = torch.ops.aten

_ADDITIVE = {"add", "sub", "rsub", "foreach_add", "foreach_sub"}
_SCALING = {"mul", "foreach_mul"}
_FIRST_ONLY = {"div", "foreach_div", "neg", "foreach_neg", "_to_copy", "to_copy", "clone", "positive"}
_ANY_FIRST = {"clone"}
NORMS: dict[object, str] = {1: "norm1", 2: "norm2", float("inf"): "max"}


def base_name(node: Node) -> str:
    """`add` for `aten.add.Tensor`, `foreach_add` for `aten._foreach_add.List`."""
    packet = getattr(node.target, "_overloadpacket", None)
    return getattr(packet, "__name__", getattr(node.target, "__name__", str(node.target))).removeprefix("_")


def elementwise(node: Node) -> BoundRule:
    """Every output element comes from the operand elements at its place; operands broadcast from the right."""
    given = operands(node)
    shapes = [_shape(n) for n in given]
    made = [m.shape for m in meta.tensors(node) if m is not None]
    out = made[0] if made else ()
    group = Group(
        {i: _aligned(shape, out) for i, shape in enumerate(shapes)},
        {i: _aligned(shape, out) for i, shape in enumerate(made)},
        partial=_pass_through(base_name(node), [i for i, n in enumerate(given) if meta.tensor(n) is not None]),
    )
    return BoundRule((group,))


def _aligned(shape: Sequence[int], out: Sequence[int]) -> Term:
    """Factors d0, d1, ... of the output for one operand; a broadcast dim has none."""
    lead = len(out) - len(shape)
    return tuple(f"d{lead + i}" if size == out[lead + i] and size > 1 else None for i, size in enumerate(shape))


def _pass_through(name: str, positions: Sequence[int]) -> tuple[PassThrough, ...]:
    """Ways for partial values to pass; `positions` are those of tensors (a number is never partial)."""
    if not positions:
        return ()
    first = PassThrough(frozenset(positions[:1]), ANY_PARTIAL if name in _ANY_FIRST else LINEAR)
    if name in _ADDITIVE:
        return (PassThrough(frozenset(positions)),) if len(positions) > 1 else ()
    if name in _SCALING:
        return (
            tuple(PassThrough(frozenset({p})) for p in dict.fromkeys(positions))
            if len(set(positions)) == len(positions)
            else ()
        )
    return (first,) if name in _FIRST_ONLY and positions.count(positions[0]) == 1 else ()


def indexed(node: Node) -> BoundRule:
    """Foreach and fused ops: entry i of each list is computed from entry i of the others; single tensors are shared."""
    lists = [
        a
        for a in (*node.args, *node.kwargs.values())
        if isinstance(a, (list, tuple)) and any(isinstance(x, Node) for x in a)
    ]
    count = len(lists[0]) if lists else 0
    members: list[dict[int, Term]] = [{} for _ in range(count)]
    position = 0
    made, name = meta.tensors(node), base_name(node)
    outs = [m.shape for m in made if m is not None]
    main = outs if len(outs) == count else [_shape(cast(Node, n)) for n in lists[0]] if lists else []
    for argument in (*node.args, *node.kwargs.values()):
        entries = argument if isinstance(argument, (list, tuple)) else [argument]
        for i, entry in enumerate(entries):
            if isinstance(entry, Node):
                if isinstance(argument, (list, tuple)):
                    shape = _shape(entry)
                    members[i][position] = (
                        _aligned(shape, main[i]) if len(shape) <= len(main[i]) else (None,) * len(shape)
                    )
                position += 1
    groups: list[Group] = []
    for i, group_operands in enumerate(members):
        outputs = {j: _aligned(m.shape, main[i]) for j, m in enumerate(made) if m is not None and j % count == i}
        partial = _pass_through(name, list(group_operands))
        groups.append(Group(group_operands, outputs, partial=partial if name.startswith("foreach") else ()))
    return BoundRule(tuple(groups))


def foreach_norm(node: Node) -> BoundRule | None:
    """One norm for each tensor of a list."""
    order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
    op = NORMS.get(order)
    if op is None:
        return None
    return BoundRule(tuple(_norm_group(i, i, len(_shape(n)), op) for i, n in enumerate(operands(node))))


def vector_norm(node: Node) -> BoundRule | None:
    """A norm over all elements; over some dims there is no rule yet."""
    order = node.args[1] if len(node.args) > 1 else node.kwargs.get("ord", 2)
    dims = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    op = NORMS.get(order)
    made = meta.tensor(node)
    if op is None or dims or made is None or made.shape:
        return None
    return BoundRule((_norm_group(0, 0, len(_shape(operands(node)[0])), op),))


def _norm_group(operand: int, output: int, ndim: int, op: str) -> Group:
    term = tuple(f"d{i}" for i in range(ndim))
    return Group(
        {operand: term}, {output: ()}, dict.fromkeys(term, op), (PassThrough(frozenset({operand}), frozenset({op})),)
    )


def stack(node: Node) -> BoundRule:
    """Places tensors side by side: whatever they are partial in, the result is."""
    given = operands(node)
    whole: dict[int, Term] = {i: (None,) * len(_shape(n)) for i, n in enumerate(given)}
    made = meta.tensor(node)
    assert made is not None, "stack makes one tensor"
    return BoundRule(
        (
            Group(
                whole, {0: (None,) * len(made.shape)}, partial=(PassThrough(frozenset(whole), ANY_PARTIAL, mixed=True),)
            ),
        )
    )


def like(node: Node) -> BoundRule:
    """A new tensor shaped like the operand, whose values are never read."""
    rule = elementwise(node)
    return BoundRule(rule.groups, by_shape=frozenset({0}))


def _shape(node: Node) -> tuple[int, ...]:
    found: TensorMeta | None = meta.tensor(node)
    return found.shape if found else ()


BY_NAME: dict[str, Callable[[Node], BoundRule | None]] = {
    "foreach_norm": foreach_norm,
    "linalg_vector_norm": vector_norm,
    "stack": stack,
    "to_copy": elementwise,
    "clone": elementwise,
    "lerp": elementwise,
    "zeros_like": like,
    "ones_like": like,
    "full_like": like,
    "empty_like": like,
}
