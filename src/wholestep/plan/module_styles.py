"""What a tensor-parallel style says about one module: how its parameters are cut, how it reads and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.tensor import Partial, Replicate, Shard, parallel

from ..errors import PlanError
from ..layout import REPLICATED, AxisState

Wanted = tuple[AxisState | None, ...]


@dataclass(frozen=True)
class ModuleStyle:
    """`cut`: `col` by what a module gives, `row` by what it reads, `experts` by dim 0, or not at all.

    `reads` and `gives` are the layouts of its inputs and outputs along the axis, in order; None leaves one open. Dims
    may be negative.
    """

    name: str
    cut: str = ""
    reads: Wanted = ()
    gives: Wanted = ()


_R: Wanted = (REPLICATED,)
_WORDS = (
    ("colwise", "col", _R, ()),
    ("colwise_rep colwise_gather_output", "col", _R, _R),
    ("local_colwise packed_colwise local_packed_colwise embedding_colwise", "col", (), ()),
    ("rowwise rowwise_rep rowwise_split_input embedding_rowwise", "row", (), _R),
    ("local_rowwise packed_rowwise local_packed_rowwise", "row", (), ()),
    ("grouped_gemm", "experts", (), ()),
    ("ep_dispatch_experts moe_tp_experts all_reduce gather", "", (), _R),
    ("replicate replicated_with_grad_allreduce mla_kv_a_proj local_params local", "", (), ()),
    ("moe_identity_expert ep_router", "", (), ()),
)
NAMES = {name: ModuleStyle(name, cut, reads, gives) for names, cut, reads, gives in _WORDS for name in names.split()}


def style_of(style: object, pattern: str, sequence_dim: int) -> ModuleStyle:
    """The meaning of `style`, a name or torch's `ParallelStyle`. Raises PlanError if it has none here."""
    if isinstance(style, ModuleStyle):
        return style
    if isinstance(style, str):
        if style in ("sequence", "sequence_parallel"):
            cut = (AxisState("S", sequence_dim),)
            return ModuleStyle(style, reads=cut, gives=cut)
        if style in NAMES:
            return NAMES[style]
        raise PlanError(
            f"the style {style!r} of {pattern!r} is unknown",
            "one of " + ", ".join(sorted([*NAMES, "sequence"])),
            "correct the name, or leave the module out: what is not named follows from the rest",
        )
    if isinstance(style, parallel.ColwiseParallel):
        gives = _states(style.output_layouts, pattern)
        return ModuleStyle("ColwiseParallel", "col", _R, () if gives == (AxisState("S", -1),) else gives)
    if isinstance(style, parallel.RowwiseParallel):
        return ModuleStyle("RowwiseParallel", "row", gives=_states(style.output_layouts, pattern))
    if isinstance(style, parallel.SequenceParallel):
        cut = _states(style.sequence_sharding, pattern)
        return ModuleStyle("SequenceParallel", reads=cut, gives=cut)
    if isinstance(style, parallel.PrepareModuleInputOutput):
        into, out = style.prepare_module_input, style.prepare_module_output
        return ModuleStyle("PrepareModuleInputOutput", reads=_inputs(into, pattern), gives=_outputs(out, pattern))
    if isinstance(style, parallel.PrepareModuleInput):
        return ModuleStyle("PrepareModuleInput", reads=_inputs(style, pattern))
    if isinstance(style, parallel.PrepareModuleOutput):
        return ModuleStyle("PrepareModuleOutput", gives=_outputs(style, pattern))
    is_style = isinstance(style, parallel.ParallelStyle)
    raise PlanError(
        f"{type(style).__name__} for {pattern!r}",
        "colwise, rowwise or sequence, or ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, "
        "PrepareModuleOutput or PrepareModuleInputOutput of torch.distributed.tensor.parallel",
        "write what this style does in terms of those" if is_style else "give one of them",
    )


def _inputs(style: parallel.PrepareModuleInput, pattern: str) -> Wanted:
    return _states([*(style.desired_input_layouts or ()), *style.desired_input_kwarg_layouts.values()], pattern)


def _outputs(style: parallel.PrepareModuleOutput, pattern: str) -> Wanted:
    return _states(style.desired_output_layouts, pattern)


def _states(placements: Sequence[Any], pattern: str) -> Wanted:
    return tuple(_state(p, pattern) for p in placements)


def _state(placement: object, pattern: str) -> AxisState | None:
    if placement is None or isinstance(placement, Partial):
        return None  # a partial value is reduced where it must be
    if isinstance(placement, Replicate):
        return REPLICATED
    if isinstance(placement, Shard):
        return AxisState("S", cast(int, placement.dim))
    raise PlanError(f"{placement} for {pattern!r}", "Shard(dim) or Replicate()", "correct the layout")
