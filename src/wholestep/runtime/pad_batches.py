"""Pads the batch of a call to one of a few lengths, where that is proved to change nothing (`compile(pad_to=...)`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture.call_structure import LENGTHS, StepCall, put_together, take_apart
from ..capture.capture import Capture
from ..errors import PlanError
from ..plan.pad_to import PadTo
from ..plan.padding_proof import PaddedDims, PaddingError, filled_where_padded


@dataclass(frozen=True)
class PaddedCall:
    """A call whose batch was padded. `lengths` are those before, by name and dim."""

    call: StepCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lengths: dict[tuple[str, int], int]


def with_lengths(
    paddings: Sequence[PadTo], call: StepCall, names: Sequence[str]
) -> tuple[StepCall, tuple[Any, ...], dict[str, Any]]:
    """A call with the lengths of its batch as one more argument, which programs read: its leaves, and its arguments.

    Raises PlanError: a tensor that is named is not there, or tensors of one length have several.
    """
    at, leaves = {name: i for i, name in enumerate(names)}, call.leaves
    args, kwargs = put_together(call.structure, leaves)
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    kwargs[LENGTHS] = [torch.full((), _length(pad, leaves, at), device=device) for pad in paddings]
    return take_apart((args, kwargs)), args, kwargs


def padded(
    paddings: Sequence[PadTo], call: StepCall, names: Sequence[str], longest: Callable[[int], int] = int
) -> PaddedCall | None:
    """A call that has its lengths, with its batch padded; None if a length of it is longer than all that it could be
    padded to. `longest`: the greatest of the lengths that ranks give which share a batch.
    """
    at, leaves = {name: i for i, name in enumerate(names)}, list(call.leaves)
    lengths: dict[tuple[str, int], int] = {}
    for pad, length_name in zip(paddings, length_names(paddings), strict=True):
        local_length = _length(pad, leaves, at)
        length = longest(local_length)
        if length > max(pad.lengths):
            return None
        if length != local_length:
            leaves[at[length_name]] = torch.full_like(leaves[at[length_name]], length)
        for name, dim in pad.dims.items():
            lengths[name, dim] = length
            leaves[at[name]] = _longer(leaves[at[name]], dim, pad.length(length), pad.fill.get(name, 0))
    args, kwargs = put_together(call.structure, leaves)
    return PaddedCall(StepCall(call.structure, tuple(leaves)), args, kwargs, lengths)


def length_names(paddings: Sequence[PadTo]) -> list[str]:
    """The inputs of a step that have the lengths before padding."""
    return [f"{LENGTHS}[{i}]" for i in range(len(paddings))]


def refuse_cut(paddings: Sequence[PadTo], cut: Collection[tuple[str, int]]) -> None:
    """Raise PlanError for a dim that ranks share: each has a part, behind which padding would lie."""
    for name, dim in [place for pad in paddings for place in pad.dims.items() if place in cut]:
        problem = f"pad_to: dim {dim} of {name!r}, of which each rank has a part"
        problem, needed = problem, "another dim than that of rows"
        raise PlanError(problem, needed, "leave out pad_to: ranks may have other numbers of rows")


def _length(pad: PadTo, leaves: Sequence[Any], at: dict[str, int]) -> int:
    lengths = {name: _size(name, dim, leaves, at) for name, dim in pad.dims.items()}
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{n} of {name}" for name, n in lengths.items())
        raise PlanError(f"pad_to: lengths {sizes}", "one length", "give each length a PadTo of its own")
    return next(iter(lengths.values()))


def _size(name: str, dim: int, leaves: Sequence[Any], at: dict[str, int]) -> int:
    value = leaves[at[name]] if name in at else None
    if not isinstance(value, torch.Tensor) or value.dim() <= dim:
        tensors = ", ".join(n for n, i in at.items() if isinstance(leaves[i], torch.Tensor)) or "none"
        raise PlanError(f"pad_to: dim {dim} of {name!r}", f"a dim of a tensor of the batch: {tensors}", "correct it")
    return value.shape[dim]


def _longer(value: torch.Tensor, dim: int, length: int, fill: float) -> torch.Tensor:
    if value.shape[dim] == length:
        return value
    if value.requires_grad:
        problem = "pad_to: a tensor of the batch that asks for a gradient"
        raise PlanError(problem, "tensors without gradients", "leave out pad_to, or detach it")
    longer = value.new_full((*value.shape[:dim], length, *value.shape[dim + 1 :]), fill)
    longer.narrow(dim, 0, value.shape[dim]).copy_(value)
    return longer


def exact(paddings: Sequence[PadTo], captured: Capture, sizes: Mapping[str, int]) -> Capture:
    """A captured step that computes on a padded batch what it computes on the batch; PaddingError if there is none.
    It holds for `sizes` beside those of the capture.
    """
    refuse_fixed(paddings, captured)
    symbols = captured.symbols
    assert symbols is not None, "not refused"
    places, batches = {place: symbol for symbol, place in symbols.record.dims.items()}, [symbols.record.hints, sizes]
    dims = [
        PaddedDims(pad.lengths, pad.dims, pad.fill, [places[place] for place in pad.dims.items()], name, batches)
        for pad, name in zip(paddings, length_names(paddings), strict=True)
    ]
    graph = filled_where_padded(captured.graph, dims, symbols)
    symbols.end_of_trace()
    return replace(captured, graph=graph, unfilled=captured.graph)


def refuse_fixed(paddings: Sequence[PadTo], captured: Capture) -> None:
    """Raise PaddingError unless all lengths are symbols of a capture."""
    symbols = captured.symbols
    places = {} if symbols is None else {place: symbol for symbol, place in symbols.record.dims.items()}
    fixed = {} if symbols is None else symbols.fixed()
    for pad in paddings:
        wrong = [place for place in pad.dims.items() if place not in places or place in fixed]
        if wrong or symbols is None:
            name, dim = wrong[0] if wrong else next(iter(pad.dims.items()))
            where = fixed.get((name, dim), "")
            problem = f"pad_to: dim {dim} of {name} is fixed by the step"
            needed = "a step that is the same for all lengths"
            raise PaddingError(problem, needed, "leave out pad_to: each size then has a program", where)
    if captured.values is not None or symbols is None:
        raise PaddingError("pad_to: the step reads values of the batch", "a step that computes with tensors alone")
