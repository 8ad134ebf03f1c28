"""Pointwise ops, by their tag or by name; ops on lists, entry by entry (`_foreach_*`, `_fused_*`); casts and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ... import _torch
from ...graph.op_kinds import is_list_op, packet_name
from ...graph.ops import ROUND_AT_RANDOM
from ..call import Call, Slot
from ..dsl import ints, rand, row, sample
from ..registry import FAMILIES, Bind, Function
from ..rule import BoundRule

_JOINTLY_LINEAR = {"add", "sub", "rsub", "complex"}
_EACH_LINEAR = {"mul"}
_FIRST_LINEAR = {"div", "neg", "to_copy", "positive", "real", "conj_physical", "clone"}
_IN_GRADIENT = {"threshold_backward", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward",
                "relu_backward", "mish_backward"}  # fmt: skip


@FAMILIES.append
def family(target: Any) -> Function | None:
    """Ops that ATen tags as pointwise; ops of torch on lists, and its fused optimizers."""
    if is_list_op(target):
        return by_entry
    return elementwise if _torch.is_op(target) and torch.Tag.pointwise in target.tags else None


@row("complex rsub.Tensor _to_copy")
def elementwise(call: Call) -> Bind | BoundRule | None:
    """Every output element depends on the operand elements at its position; operands broadcast from the right."""
    tensors = [i for i, slot in enumerate(call.slots) if slot.positions]
    if not tensors or None in call.outputs or any(slot.is_list for slot in call.slots):
        return None
    name = _name(call)
    bind = Bind(", ".join(["..."] * len(call.slots)) + " -> ...+", "" if _rounds(call) else _linear(name, tensors))
    if name not in _JOINTLY_LINEAR or call.made():
        return bind
    # sums of scalars, such as losses: a whole one may count as one rank's share of a partial value
    (group,) = bind.on(call).groups
    return BoundRule((replace(group, partial=tuple(replace(p, mixed=True) for p in group.partial)),))


def by_entry(call: Call) -> Bind | None:
    """Entry i of each list is computed from entry i of the others; single tensors are shared by all."""
    tensors = [i for i, slot in enumerate(call.slots) if slot.is_list and slot.positions]
    lists = [call.slots[i] for i in tensors]
    name = _name(call)
    if not lists or name == "foreach_mm" or not _one_for_each(call, lists):
        return None
    inputs = ["[...]" if slot.is_list else "*" for slot in call.slots]
    outputs = ["[...]"] * (len(call.outputs) // len(lists[0].positions))
    same = {"...": ""}  # counts are the same on all ranks
    linear = _linear(name.removeprefix("foreach_"), tensors)
    return Bind(f"{', '.join(inputs)} -> {', '.join(outputs)}", linear, reduces=same)


def _name(call: Call) -> str:
    """`add` for `aten.add.Tensor`, `foreach_add` for `aten._foreach_add.List`."""
    return packet_name(call.target).removeprefix("_")


def _linear(name: str, tensors: list[int]) -> str:
    """Inputs that may stay partial; `tensors`: the inputs that are tensors (a number is never partial)."""
    if name in _JOINTLY_LINEAR:
        return "+".join(map(str, tensors)) if len(tensors) > 1 else ""
    if name in _EACH_LINEAR:
        return " | ".join(map(str, tensors))
    return "0" if name in _FIRST_LINEAR | _IN_GRADIENT and tensors[0] == 0 else ""


def _rounds(call: Call) -> bool:
    """True for results rounded to integers or booleans, which are never linear."""
    exact = any(m and not (m.dtype.is_floating_point or m.dtype.is_complex) for m in call.outputs)
    return exact or bool(call.argument("rounding_mode"))


def _one_for_each(call: Call, lists: Sequence[Slot]) -> bool:
    """True if every output has the shape to which the entries at its index broadcast (fused ops: or is a count)."""
    count = len(lists[0].positions)
    if any(len(slot.positions) != count for slot in lists):
        return False
    entries = [[call.shape(slot.positions[i]) for slot in lists] for i in range(count)]
    shapes = [cast(torch.Size, torch.broadcast_shapes(*entry)) for entry in entries]
    output_shapes = [m.shape for m in call.outputs if m is not None]
    fused = _name(call).startswith("fused_")
    return (
        bool(output_shapes)
        and len(output_shapes) == len(call.outputs)
        and len(output_shapes) % count == 0
        and all(shape == shapes[i % count] or (fused and not shape) for i, shape in enumerate(output_shapes))
    )


# -- pointwise, without the tag -------------------------------------------------------------
row(
    "_add_relu.Tensor _add_relu.Scalar _prelu_kernel polar floor_divide floor_divide.Scalar hardswish"
    " log_sigmoid_forward _standard_gamma_grad isin.Tensor_Scalar lerp.Tensor lerp.Scalar fill.Scalar fill.Tensor zero"
    " masked_fill.Scalar masked_fill.Tensor",
    "...+ -> ...+",
)
row(
    "elu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward"
    " log_sigmoid_backward softplus_backward softshrink_backward rrelu_with_noise_backward _prelu_kernel_backward"
    " native_dropout_backward _masked_scale _neg_view _conj",
    "...+ -> ...+",
    linear="0",
)
sample("_standard_gamma_grad", lambda: [(rand(5, 7).exp(), rand(5, 7, seed=1).exp())])
sample("_add_relu.Tensor", lambda: [(rand(5, 7), rand(5, 7, seed=1))])
sample("_neg_view lift lift_fresh lift_fresh_copy _lazy_clone alias contiguous", lambda: [(rand(5, 7),)])
sample("fill.Tensor", lambda: [(rand(5, 7), rand())])
sample("_add_relu.Scalar floor_divide.Scalar", lambda: [(rand(5, 7), 0.3)])
sample("isin.Tensor_Scalar", lambda: [(ints(9, 5, 7), 3)])
sample("rrelu_with_noise_backward", lambda: [(*torch.randn(3, 2, 5, 4).double(), 0.1, 0.3, False, False)])
sample("_conj", lambda: [(torch.randn(4, 6, dtype=torch.complex128),)])

# -- rounding: of the element at a place of the whole tensor ------------------------------------
row(ROUND_AT_RANDOM, "..., () -> ...", sizes={"starts": "start0"})
sample(ROUND_AT_RANDOM, lambda: [(rand(5, 6, 7).float(), torch.tensor(3.0), [0, 0, 0], [5, 6, 7], 11)])

# -- copies, and the same bits as another type ---------------------------------------------
row("clone alias detach contiguous lift lift_fresh lift_fresh_copy _lazy_clone", "... -> ...", moves="0")
row("copy", "..., ... -> ...", moves="1")  # the second, of the shape and type of the first
row("view.dtype", "...? -> ...?")
row("view_as_complex", "... c! -> ...", linear="0")
row("view_as_real", "... -> ... c", linear="0")
sample("view.dtype", lambda: [(rand(5, 6), torch.int64), (rand(5, 6), torch.int32)])
