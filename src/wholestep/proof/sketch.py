"""A tensor as a few sums of its elements with random signs: sums of its parts add up to those of the tensor.

The mean square of the difference of two tensors' sums is the square of their distance, on average: signs of different
elements are independent in pairs. So tensors on ranks are compared, and kept, without being gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..layout import Layout, cut
from ..mesh import Mesh

SUMS = 8
_MOST = 1 << 22  # elements that are summed at once
Places = Sequence[Tensor | None]
"""The places of each dim of a tensor that a part of it has; None for all."""


@lru_cache(maxsize=512)
def _signs(dim: int, size: int) -> Tensor:
    """1 or -1 for each place of a dim, for each sum: (size, SUMS)."""
    generator = torch.Generator().manual_seed(dim * 1_000_003 + size)
    return torch.randint(2, (size, SUMS), generator=generator).double() * 2 - 1


def sums_of(value: Tensor, shape: Sequence[int] | None = None, places: Places = ()) -> Tensor:
    """Sums of the finite elements of a tensor, and of marks at the others; or of a part of one of global `shape`."""
    value, shape = value.detach().resolve_conj().resolve_neg().cpu(), value.shape if shape is None else shape
    if value.is_complex():
        value, shape, places = torch.view_as_real(value), (*shape, 2), (*places, None) if places else ()
    dims = enumerate(zip(shape, places or (None,) * value.dim(), strict=True))
    signs = [_signs(dim, size) if at is None else _signs(dim, size)[at] for dim, (size, at) in dims]
    marks = value.isnan() * 1 + value.isposinf() * 2 + value.isneginf() * 3
    return torch.cat([_summed(value.where(marks == 0, 0), signs), _summed(marks, signs)])


def _summed(value: Tensor, signs: Sequence[Tensor]) -> Tensor:
    if value.dim() == 0:
        return value.double().expand(SUMS)
    if value.numel() > _MOST and (half := len(value) // 2):
        first, second = [signs[0][:half], *signs[1:]], [signs[0][half:], *signs[1:]]
        return _summed(value[:half], first) + _summed(value[half:], second)
    total: Tensor = value.double() @ signs[-1]
    for each in reversed(signs[:-1]):
        total = torch.sum(total * each, -2)
    return total


def norm_of(value: Tensor) -> float:
    """The root of the sum of squares of the finite elements."""
    value = value.detach().resolve_conj().resolve_neg()
    elements = (torch.view_as_real(value) if value.is_complex() else value).double()
    return float(elements.where(elements.isfinite(), 0).square().sum().sqrt())


def distance(first: Tensor, second: Tensor) -> float:
    """The distance of two tensors, from their sums; infinite if other elements are not finite."""
    if not torch.equal(first[SUMS:], second[SUMS:]):
        return float("inf")
    return float((first - second).square()[:SUMS].mean().sqrt())


def places_of(layout: Layout, shape: Sequence[int], mesh: Mesh, at: Mapping[str, int]) -> Places:
    """The places that the rank at a coordinate has."""
    places: list[Tensor | None] = []
    for dim, axes in enumerate(layout.dims):
        blocks = tuple((axis, count) for axis, count in layout.blocks if axis in axes)
        along = replace(layout, dims=(axes,), partial=(), varies=(), owned=(), blocks=blocks)
        places.append(cut(torch.arange(shape[dim]), along, mesh, at) if axes else None)
    return places
