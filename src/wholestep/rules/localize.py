"""Turns a call on global shapes into the call of one rank; shape arguments follow from factors, not from sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph.op_kinds import FREE, priced_like
from ..graph.storage import shares
from ..layout import Extent, Layout
from ..mesh import Mesh
from .call import Call
from .rule import OF_WHOLE, BoundRule, Group

aten = torch.ops.aten


@priced_like(FREE)
@shares("view")
def as_complex(x: Tensor) -> Tensor:
    """`view_as_complex` of a tensor with any strides: that of torch refuses odd offsets and strides."""
    odd = x.stride(-1) != 1 or any(n % 2 for n in (x.storage_offset(), *x.stride()[:-1]))
    return aten.view_as_complex.default(x.clone(memory_format=torch.contiguous_format) if odd else x)


VIEWS_OF_PIECES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view_as_complex.default: as_complex,
}
"""Replacements for views that torch refuses if the strides of a piece differ from those of the whole."""


class Local(NamedTuple):
    """The call of a rank; `args` and `kwargs` may hold `Extent`s."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def localize(
    rule: BoundRule, call: Call, takes: Sequence[Layout], gives: Sequence[Layout], mesh: Mesh,
    args: tuple[Any, ...], kwargs: Mapping[str, Any],
) -> Local:  # fmt: skip
    """`call` for one rank, with operands in the layouts `takes` and outputs in `gives`; `args` are the local ones."""
    replaced = rule.local or rule.sizes or rule.instead
    if not replaced or not any(layout.is_sharded for layout in (*takes, *gives)):
        return Local(call.target, args, kwargs)
    pieces = {f: piece for group in rule.groups for f, piece in _pieces(group, call, takes, gives, mesh).items()}
    values: dict[str, Any] = {}
    for name, source in rule.sizes.items():
        if match := re.fullmatch(r"(out|in|start)(\d+)", source):
            number = int(match[2])
            layout, shape = (
                (takes[number], call.shape(number)) if match[1] == "in" else (gives[number], call.made(number))
            )
            starts = (_start(n, axes, mesh) for n, axes in zip(shape, layout.dims, strict=True))
            values[name] = list(starts) if match[1] == "start" else layout.extents(shape, mesh)
        elif source in pieces:
            values[name] = pieces[source][1]
    if rule.instead is not None:
        return Local(rule.instead, (args[0], *values.values()), {})
    args, kwargs = call.replace(values, args, kwargs)
    for factor in rule.local:
        if factor in pieces:
            piece = pieces[factor][: 3 if rule.local[factor] in OF_WHOLE else 2]
            return Local(rule.local[factor], (*piece, *args), kwargs)
    return Local(call.target, args, kwargs)


def _start(size: int, axes: Sequence[str], mesh: Mesh) -> int | Extent:
    """The index of the first entry of a rank's piece of a dim."""
    return Extent(size, tuple((axis, mesh.axis_size(axis)) for axis in axes), start=True) if axes else 0


def _pieces(
    group: Group, call: Call, takes: Sequence[Layout], gives: Sequence[Layout], mesh: Mesh
) -> dict[str, tuple[int | Extent, int | Extent, int]]:
    """For each sharded factor the index of the first entry of this rank's piece, its length, and that of the whole."""
    pieces: dict[str, tuple[int | Extent, int | Extent, int]] = {}
    for terms, layouts, shape in ((group.operands, takes, call.shape), (group.outputs, gives, call.made)):
        for position, term in terms.items():
            for dim, factor in enumerate(term):
                axes = layouts[position].dims[dim] if factor else ()
                if factor and axes and factor not in pieces:
                    size, length = shape(position)[dim], layouts[position].extents(shape(position), mesh)[dim]
                    pieces[factor] = _start(size, axes, mesh), length, size
    return pieces
