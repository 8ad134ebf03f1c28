"""Pointwise ops, by their tag or by name; casts and copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ... import _torch
from ..call import Call
from ..dsl import ints, rand, row, sample
from ..registry import FAMILIES, Bind, Function
from ..rule import BoundRule

_JOINTLY_LINEAR = {"add", "sub", "rsub", "complex"}
_EACH_LINEAR = {"mul"}
_FIRST_LINEAR = {"div", "neg", "to_copy", "positive", "real", "conj_physical"}
_IN_GRADIENT = {"threshold_backward", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward",
                "relu_backward", "mish_backward"}  # fmt: skip


def base_name(target: Any) -> str:
    """`add` for `aten.add.Tensor`, `foreach_add` for `aten._foreach_add.List`."""
    packet = getattr(target, "_overloadpacket", None)
    return getattr(packet, "__name__", getattr(target, "__name__", str(target))).removeprefix("_")


@row("complex rsub.Tensor _to_copy")
def elementwise(call: Call) -> Bind | BoundRule | None:
    """Every output element depends on the operand elements at its position; operands broadcast from the right."""
    given = [i for i, slot in enumerate(call.slots) if slot.positions]
    if not given or None in call.outputs or any(slot.is_list for slot in call.slots):
        return None
    name = base_name(call.target)
    linear = "" if _rounds(call) else linear_inputs(name, given)
    bind = Bind(", ".join(["..."] * len(call.slots)) + " -> ...+", linear)
    return _scalars(bind, call) if name in _JOINTLY_LINEAR and not call.made() else bind


def _scalars(bind: Bind, call: Call) -> BoundRule:
    """Sums of scalars, such as losses: a whole one may count as one rank's share of a partial value."""
    (group,) = bind.on(call).groups
    return BoundRule((replace(group, partial=tuple(replace(p, mixed=True) for p in group.partial)),))


def _rounds(call: Call) -> bool:
    """True for results rounded to integers or booleans, which are never linear."""
    exact = any(m and not (m.dtype.is_floating_point or m.dtype.is_complex) for m in call.outputs)
    return exact or bool(call.argument("rounding_mode"))


def linear_inputs(name: str, given: list[int]) -> str:
    """Inputs that may stay partial; `given`: the inputs that are tensors (a number is never partial)."""
    if name in _JOINTLY_LINEAR:
        return "+".join(map(str, given)) if len(given) > 1 else ""
    if name in _EACH_LINEAR:
        return " | ".join(map(str, given))
    return "0" if name in _FIRST_LINEAR | _IN_GRADIENT and given[0] == 0 else ""


@FAMILIES.append
def pointwise(target: Any) -> Function | None:
    """Ops that ATen tags as pointwise."""
    return elementwise if _torch.is_op(target) and torch.Tag.pointwise in target.tags else None


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
sample("_prelu_kernel _add_relu.Tensor", lambda: [(rand(5, 7), rand(5, 7, seed=1))])
sample("zero _neg_view hardswish", lambda: [(rand(5, 7),)])
sample("fill.Tensor", lambda: [(rand(5, 7), rand())])
sample("_add_relu.Scalar floor_divide.Scalar", lambda: [(rand(5, 7), 0.3)])
sample("floor_divide", lambda: [(rand(5, 7), rand(7)), (rand(5, 7), 0.3)])
sample("isin.Tensor_Scalar", lambda: [(ints(9, 5, 7), 3)])
sample("_masked_scale", lambda: [(rand(5, 7), (rand(5, 7) > 0).byte(), 2.0)])
sample("rrelu_with_noise_backward", lambda: [(*torch.randn(3, 2, 5, 4).double(), 0.1, 0.3, False, False)])
sample("_conj", lambda: [(torch.randn(4, 6, dtype=torch.complex128),)])

# -- copies, and the same bits as another type ---------------------------------------------
row("clone alias detach contiguous lift lift_fresh lift_fresh_copy _lazy_clone", "... -> ...", moves="0")
row("copy", "..., ... -> ...", moves="1")  # the second, of the shape and type of the first
row("view.dtype", "...? -> ...?")
row("view_as_complex", "... c! -> ...", linear="0", samples=lambda: [(rand(5, 6, 2),)])
row("view_as_real", "... -> ... c", linear="0", samples=lambda: [(torch.complex(rand(5, 6), rand(5, 6)),)])
sample("clone alias detach contiguous", lambda: [(torch.randn(4, 6, dtype=torch.float64),)])
sample("lift lift_fresh lift_fresh_copy _lazy_clone", lambda: [(rand(5, 7),)])
sample("copy", lambda: [(rand(5, 7, 6), rand(7, 1, seed=1)), (rand(5, 7), rand(5, 7, seed=1))])
sample("view.dtype", lambda: [(rand(5, 6), torch.int64), (rand(5, 6), torch.int32)])
