"""Ops that treat every element alike: ATen's pointwise ops by their tag, casts, copies, tensors shaped like others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .. import _torch
from .call import Call
from .lists import by_entry
from .matmul import LATE
from .registry import Bind, Function, rule
from .rule import ANY_PARTIAL, BoundRule, Group, PassThrough
from .terms import aten, ints, moves, ops, rand

_JOINTLY_LINEAR = {"add", "sub", "rsub", "complex"}
_EACH_LINEAR = {"mul"}
_FIRST_LINEAR = {"div", "neg", "to_copy", "clone", "positive", "real", "conj_physical", "conj", "neg_view"}
_IN_GRADIENT = {"threshold_backward", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward",
                "relu_backward", "leaky_relu_backward", "elu_backward", "hardtanh_backward", "hardswish_backward",
                "softplus_backward", "native_dropout_backward", "log_sigmoid_backward", "mish_backward",
                "hardshrink_backward", "hardsigmoid_backward", "softshrink_backward", "prelu_kernel_backward",
                "rrelu_with_noise_backward", "masked_scale"}  # fmt: skip
# Pointwise, and ATen has not tagged them so.
_UNTAGGED = (
    "_add_relu.Tensor", "_add_relu.Scalar", "_prelu_kernel", "_prelu_kernel_backward", "complex", "polar",
    "floor_divide", "floor_divide.Scalar", "elu_backward", "hardshrink_backward", "hardsigmoid_backward", "hardswish",
    "hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_forward", "log_sigmoid_backward",
    "softplus_backward", "softshrink_backward", "rrelu_with_noise_backward", "rsub.Tensor", "_standard_gamma_grad",
    "isin.Tensor_Scalar", "lerp.Tensor", "lerp.Scalar", "_to_copy", "native_dropout_backward", "fill.Scalar",
    "masked_fill.Scalar", "masked_fill.Tensor",
)  # fmt: skip


def base_name(target: Any) -> str:
    """`add` for `aten.add.Tensor`, `foreach_add` for `aten._foreach_add.List`."""
    packet = getattr(target, "_overloadpacket", None)
    return getattr(packet, "__name__", getattr(target, "__name__", str(target))).removeprefix("_")


def elementwise(call: Call) -> Bind | BoundRule | None:
    """Every output element comes from the operand elements at its place; operands broadcast from the right."""
    tensors = list(call.slots)
    given = [i for i, slot in enumerate(tensors) if slot.positions]
    if not given or None in call.outputs or any(slot.is_list for slot in tensors):
        return None
    text = f"{', '.join(['...'] * len(tensors))} -> {', '.join(['...'] * len(call.outputs))}"
    name = base_name(call.target)
    bind = Bind(text, "" if _rounds(call) else linear_inputs(name, given))
    return _scalars(bind, call) if name in _JOINTLY_LINEAR and not call.made() else bind


def _scalars(bind: Bind, call: Call) -> BoundRule:
    """Sums of scalars, as of losses: a whole one may stand for one rank's share, and waits for the others."""
    (group,) = bind.on(call).groups
    return BoundRule((replace(group, partial=tuple(replace(p, mixed=True) for p in group.partial)),))


def _rounds(call: Call) -> bool:
    """True for results cut to whole numbers or to booleans: not linear, whatever the op."""
    exact = any(m and not (m.dtype.is_floating_point or m.dtype.is_complex) for m in call.outputs)
    return exact or bool(call.argument("rounding_mode"))


def linear_inputs(name: str, given: list[int]) -> str:
    """Inputs that may stay partial; `given` are those that hold tensors (a number is never partial)."""
    if name in _JOINTLY_LINEAR:
        return "+".join(map(str, given)) if len(given) > 1 else ""
    if name in _EACH_LINEAR:
        return " | ".join(map(str, given))
    if name in _FIRST_LINEAR:
        return str(given[0]) if given[0] == 0 else ""
    return "0" if name in _IN_GRADIENT and given[0] == 0 else ""


def copy(call: Call) -> BoundRule | None:
    """Copies keep whatever partial value they are given."""
    said = elementwise(call)
    if said is None:
        return None
    group = (said.on(call) if isinstance(said, Bind) else said).groups[0]
    through = (PassThrough(frozenset({0}), ANY_PARTIAL),)
    return BoundRule((Group(group.operands, group.outputs, group.reduces, through),))


def family(target: Any) -> Function | None:
    """The rule of every op of a family, by its tag or its name."""
    name = base_name(target)
    if name.startswith(("foreach_", "fused_")):
        return by_entry
    if str(target) in LATE:
        return LATE[str(target)]
    pointwise = _torch.is_op(target) and torch.Tag.pointwise in target.tags
    return elementwise if pointwise else None


rule(
    [aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default],
    samples=lambda: [(torch.randn(4, 6, dtype=torch.float64),)],
)(copy)
rule(ops(*_UNTAGGED))(elementwise)
rule(ops("_standard_gamma_grad"), samples=lambda: [(rand(5, 7).exp(), rand(5, 7, seed=1).exp())])(elementwise)
rule(ops("_prelu_kernel"), samples=lambda: [(rand(5, 7), rand(5, 7, seed=1))])(elementwise)
rule(ops("zero", "_neg_view", "hardswish"), samples=lambda: [(rand(5, 7),)])(elementwise)
rule(ops("fill.Tensor"), samples=lambda: [(rand(5, 7), rand())])(elementwise)
rule(ops("_add_relu.Tensor"), samples=lambda: [(rand(5, 7), rand(5, 7, seed=1))])(elementwise)
rule(ops("_add_relu.Scalar", "floor_divide.Scalar"), samples=lambda: [(rand(5, 7), 0.3)])(elementwise)
rule(ops("isin.Tensor_Scalar"), samples=lambda: [(ints(9, 5, 7), 3)])(elementwise)
rule(ops("_masked_scale"), samples=lambda: [(rand(5, 7), (rand(5, 7) > 0).byte(), 2.0)])(elementwise)
rule(ops("floor_divide"), samples=lambda: [(rand(5, 7), rand(7)), (rand(5, 7), 0.3)])(elementwise)
rule(ops("lift", "lift_fresh", "_lazy_clone", "lift_fresh_copy"), samples=lambda: [(rand(5, 7),)])(copy)


@rule(aten.copy.default, samples=lambda: [(rand(5, 7, 6), rand(7, 1, seed=1)), (rand(5, 7), rand(5, 7, seed=1))])
def copy_into(call: Call) -> BoundRule:
    """The second operand, of the shape and type of the first."""
    return moves(call, Bind("..., ... -> ..."), 1)


@rule(ops("view.dtype"), samples=lambda: [(rand(5, 6), torch.int64), (rand(5, 6), torch.int32)])
def reinterpreted(call: Call) -> Bind:
    """The same bits as another type: the last dim stays whole where sizes differ."""
    return Bind("... -> ..." if call.shape(0) == call.made() else "... a! -> ... b")


rule(ops("view_as_complex"), "... c! -> ...", linear="0", samples=lambda: [(rand(5, 6, 2),)])
rule(ops("view_as_real"), "... -> ... c", linear="0", samples=lambda: [(torch.complex(rand(5, 6), rand(5, 6)),)])
rule(
    aten.rrelu_with_noise_backward.default,
    samples=lambda: [(*torch.randn(3, 2, 5, 4).double(), 0.1, 0.3, False, False)],
)(elementwise)
rule(aten._conj.default, samples=lambda: [(torch.randn(4, 6, dtype=torch.complex128),)])(elementwise)
rule(
    [aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default],
    "... -> ...", by_shape=[0],
)  # fmt: skip
