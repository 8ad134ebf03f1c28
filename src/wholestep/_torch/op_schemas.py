"""Op overloads, their schemas, and operands of nodes."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeGuard, cast

import torch
from torch.utils._pytree import tree_leaves

from ..errors import GraphError

OpOverload = torch._ops.OpOverload
identity: Callable[[object], int] = object.__hash__
"""Like `id`, which audit hooks hear of: a call of Python each time."""
SUBTRACTIONS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.sub: torch.Tensor.add, torch.Tensor.sub_: torch.Tensor.add_, torch.sub: torch.add,
    torch._foreach_sub: torch._foreach_add, torch._foreach_sub_: torch._foreach_add_,
}  # fmt: skip
"""Subtractions, whose `alpha` cannot be a traced tensor, and the additions, whose `alpha` can."""
METADATA = frozenset({
    torch.ops.prim.device.default, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.is_complex,
    *(getattr(torch.Tensor, name).__get__ for name in (
        "device", "requires_grad", "grad", "layout", "shape", "dtype", "is_sparse", "is_quantized", "ndim", "is_leaf",
    )),
})  # fmt: skip
"""Functions of a tensor that make no node: they are half of the torch calls of a step."""
FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def is_op(target: object) -> TypeGuard[OpOverload[..., Any]]:
    """Return whether `target` is an overload of a torch op."""
    return isinstance(target, OpOverload)


def is_library_op(target: object) -> TypeGuard[OpOverload[..., Any]]:
    """Return whether `target` is an op of a library other than torch and wholestep."""
    return is_op(target) and target.namespace not in ("aten", "prims", "wholestep", "c10d", "_c10d_functional")


def directly(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a call of an op calls, without the Python in front of it; another function as it is."""
    return cast(Any, function)._op if type(function) is OpOverload else function


def overload_of(op: object) -> Any:
    """Return the only or default overload of a custom op or packet; any other value unchanged."""
    overload: Any = getattr(op, "_opoverload", op)
    if not isinstance(overload, torch._ops.OpOverloadPacket):
        return overload
    packet = cast(Any, overload)
    names: list[str] = packet.overloads()
    return getattr(packet, names[0] if len(names) == 1 else "default")


def schema_of(target: object) -> Any:
    """Return the schema of an op overload; raise GraphError for any other target."""
    if not is_op(target):
        raise GraphError(f"{target!r} is not a torch op overload")
    return target._schema


@cache
def position_of(target: OpOverload[..., Any], argument: str) -> int | None:
    """Return the position of an argument of an op; None if it has none of this name."""
    names = [a.name for a in target._schema.arguments]
    return names.index(argument) if argument in names else None


@cache
def functional_form(target: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    """Return the functional form of an in-place or out op; None if it has none or is functional."""
    schema = target._schema
    if not schema.is_mutable:
        return None
    base = schema.name.partition("::")[2]
    plain = base[:-1] if base.endswith("_") and not base.endswith("__") else base
    argument_types = [str(a.type) for a in schema.arguments if not a.is_out]
    for full in (plain, f"{plain}_functional"):
        packet = getattr(getattr(torch.ops, target.namespace), full, None)
        for name in packet.overloads() if packet is not None else ():
            overload = getattr(packet, name)
            if not overload._schema.is_mutable and [str(a.type) for a in overload._schema.arguments] == argument_types:
                return overload
    return _out_of_place(target) if is_library_op(target) else None


def _out_of_place(target: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    """Return an op that computes what `target`, an op of a library, writes: what `target` returns anew, then what each
    written argument becomes. None if it writes into lists, or what may be None, returns some of its writes, or takes
    tensors by keyword alone.
    """
    schema = target._schema
    writes = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    changed = [schema.arguments[i] for i in writes]
    returned = [r.alias_info for r in schema.returns]
    in_order = [a and a.before_set for a in returned] == [a.alias_info and a.alias_info.before_set for a in changed]
    by_keyword = any(a.kwarg_only and "Tensor" in str(a.type) for a in schema.arguments)  # no custom op has these
    if by_keyword or any(str(a.type) != "Tensor" for a in changed) or (any(returned) and not in_order):
        return None

    def compute(*args: Any, **kwargs: Any) -> Any:
        values = [value.clone() if i in writes else value for i, value in enumerate(args)]
        result = target(*values, **kwargs)
        fresh = tree_leaves(result) if returned and not any(returned) else []
        results = [*fresh, *(values[i] for i in writes)]
        return tuple(results) if len(results) > 1 else results[0]

    arguments = re.sub(r"\(\w+!?( -> \w+)?\)", "", str(schema).partition("(")[2].rpartition(") -> ")[0])
    types = [str(r.type) for r in schema.returns if r.alias_info is None] + ["Tensor"] * len(writes)
    name = "__".join(filter(None, (schema.name.replace("::", "_copies::"), schema.overload_name)))
    form = torch.library.custom_op(name, compute, mutates_args=(), schema=f"({arguments}) -> ({', '.join(types)})")
    form.register_fake(compute)
    return cast(Any, form)._opoverload


def changes_shape(target: OpOverload[..., Any]) -> bool:
    """Return whether an in-place op changes the shape of its tensor, like `unsqueeze_`."""
    return torch.Tag.inplace_view in target.tags


def is_fused_optimizer(target: OpOverload[..., Any]) -> bool:
    """Return whether an op is the functional form of a fused optimizer."""
    return f"{target._schema.name.removeprefix('aten::')}_" in FUSED


def runs_fused_optimizer(target: object) -> bool:
    """Return whether a target is a fused optimizer, functional or in place."""
    return is_op(target) and target._schema.name.removeprefix("aten::").rstrip("_") + "_" in FUSED


GETITEM = operator.getitem
_update: Callable[..., None] = cast(Any, torch.fx.Node)._update_args_kwargs


def set_operands(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set `node.args` and `node.kwargs` of a new node; most of the time of copying a graph is spent here.

    `Graph.create_node` searches all arguments for symbolic numbers (since torch 2.13), and assigning `node.args`
    removes and re-adds the node in a table. `_update_args_kwargs` (2.11 to 2.15) does neither.
    """
    _update(node, args, kwargs)


def rename(node: torch.fx.Node, name: str) -> None:
    """Set `node.name` without torch's update of its table of ops, where names do not matter; no later node gets it."""
    object.__setattr__(node, "name", name)
    node.graph._graph_namespace._used_names.add(name)


def is_getitem(target: object) -> bool:
    """Return whether a node selects one output of an op with several."""
    return target is GETITEM
