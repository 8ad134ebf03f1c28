"""Splits real tensors by a layout, and assembles them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.meta import overlaps, span
from ...layout import Layout, cut
from ...mesh import Mesh
from ..call import opened

FORMS = ("as they are", "at an offset", "in rows that lie apart", "turned round, every other element")
"""Memory layouts of the operands of a rank; every rule must hold in each."""
_BEFORE, _AFTER = 3, 2  # elements around a view


def with_tensors(args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """The arguments with their tensors replaced by `tensors`, in order, lists flattened."""
    remaining = iter(tensors)

    def replaced(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(replaced, value))
        return next(remaining) if isinstance(value, Tensor) else value

    return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among values, lists flattened."""
    return (value for value in opened(values) if isinstance(value, Tensor))


def laid(tensor: Tensor, form: int) -> Tensor:
    """A writable copy in the memory layout `FORMS[form]`, with junk around it and in its gaps."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if form == 0:
        return tensor.clone()
    if form == 1 or not shape:
        return _at_an_offset(tensor)
    if form == 2 and len(shape) > 1:
        copy = _junk((*shape[:-1], shape[-1] + _BEFORE), tensor).narrow(-1, 1, shape[-1])
    else:
        copy = _junk((*shape[::-1], 2), tensor)[..., 1].permute(*range(len(shape) - 1, -1, -1))
    return copy.copy_(tensor)


def _at_an_offset(tensor: Tensor) -> Tensor:
    """A copy with the strides of `tensor`, in the middle of more memory."""
    extent = span(tensor.shape, tensor.stride())
    memory = _junk((_BEFORE + extent + _AFTER,), tensor)
    view = memory.as_strided(tensor.shape, tensor.stride(), _BEFORE)
    if not overlaps(tensor.shape, tensor.stride()):
        return view.copy_(tensor)
    places = torch.arange(_BEFORE, _BEFORE + extent).as_strided(tensor.shape, tensor.stride())
    memory.index_put_((places,), tensor)
    return view


def _junk(shape: Sequence[int], template: Tensor) -> Tensor:
    """Memory that no op may read: NaN, or a number that is no valid index."""
    value = float("nan") if template.is_floating_point() or template.is_complex() else 77
    return torch.full(tuple(shape), value, dtype=template.dtype, device=template.device)


def piece(tensor: Tensor, layout: Layout, mesh: Mesh, at: Mapping[str, int]) -> Tensor:
    """The piece of a tensor with `layout` on the rank at position `at`."""
    return cut(tensor, layout, mesh, at).contiguous() if layout.is_sharded else tensor


def assemble(pieces: Sequence[Tensor], layout: Layout, full: Tensor, mesh: Mesh) -> Tensor:
    """One tensor from the pieces of all ranks: concatenated, reduced, or that of rank 0 if it is replicated."""
    if layout.partial:
        return _reduced(torch.stack(list(pieces)), layout.partial[0][1])
    if not layout.is_sharded:
        return pieces[0]
    out, places = pieces[0].new_zeros(full.shape), torch.arange(full.numel()).view(full.shape)
    for rank, part in enumerate(pieces):
        out.view(-1)[cut(places, layout, mesh, mesh.coordinate(rank)).reshape(-1)] = part.reshape(-1)
    return out


def _reduced(stacked: Tensor, op: str) -> Tensor:
    if stacked.dtype == torch.bool and op not in ("max", "min"):
        stacked = stacked.long()  # booleans have no sums: the check then finds another dtype
    if op == "sum" or op == "norm1":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "avg":
        return stacked.to(torch.promote_types(stacked.dtype, torch.float64)).mean(0).to(stacked.dtype)
    if op == "norm2":
        return stacked.square().sum(0).sqrt()
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def parts_of(full: Tensor, op: str, seed: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Two random parts and their reduction by `op`; None for a tensor that cannot be partial in this way.

    Norms are not negative: for these the reduction is `full.abs()`.
    """
    exact = not full.is_floating_point() and not full.is_complex()
    tiny = full.is_floating_point() and full.dtype.itemsize == 1
    if full.dtype == torch.bool or tiny or (op in ("avg", "norm2") and exact) or (op != "sum" and full.is_complex()):
        return None
    if not bool(torch.isfinite(full).all()):
        return None
    source = torch.Generator().manual_seed(seed)
    if exact:
        noise = torch.randint(0, 5, full.shape, generator=source).to(full.dtype)
    else:
        noise = torch.randn(full.shape, generator=source, dtype=torch.float64).to(full.dtype)
        noise = noise * (1 + full.abs().max()) if full.numel() else noise
    first = torch.randint(0, 2, full.shape, generator=source).bool()
    if op == "norm2":
        return full.abs() * noise.cos(), full.abs() * noise.sin(), full.abs()
    if op in ("max", "min", "norm1"):
        full = full.abs() if op == "norm1" else full
        other = {"max": full - noise.abs(), "min": full + noise.abs(), "norm1": 0 * full}[op]
        return torch.where(first, full, other), torch.where(first, other, full), full
    return noise, (2 if op == "avg" else 1) * full - noise, full


def differs(actual: Tensor, expected: Tensor) -> tuple[str, str] | None:
    """(actual, expected) if two tensors differ in shape, dtype or value; None if they agree."""
    if actual.shape != expected.shape:
        return f"has shape {list(actual.shape)}", f"shape {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"is {actual.dtype}", str(expected.dtype)
    if not (expected.is_floating_point() or expected.is_complex()):
        close = actual == expected
    else:
        tight = expected.dtype in (torch.float64, torch.complex128)
        rtol = 1e-8 if tight else 1e-4 if expected.dtype.itemsize >= 4 else 2e-2
        close = torch.isclose(actual, expected, rtol=rtol, atol=rtol, equal_nan=True)
    if bool(close.all()):
        return None
    where = [int(i) for i in (~close).nonzero()[0]]
    share = f"{int((~close).sum())} of {close.numel()} values"
    values = [_number(t[tuple(where)].item()) for t in (actual, expected)]
    return f"differs in {share}, the first at {where}: {values[0]}", values[1]


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
