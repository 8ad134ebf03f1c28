"""The one list of passes between `partition` and the backend, used by compile, Auto and the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, cast

from ..cost.stack import Stack
from ..errors import PlanError
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..passes.async_tensor_parallel import Agree, AsyncTensorParallel
from ..passes.base import Pass
from ..passes.bucket_sizes import resized
from ..passes.contiguous_shards import ContiguousShards
from ..passes.fit_memory import FitMemory
from ..passes.fold_repeats import FoldRepeats
from ..passes.in_bodies import InBodies
from ..passes.offload import Offload
from ..passes.order_collectives import SameOrder
from ..passes.overlap import Overlap
from ..passes.peel_pieces import PeelPieces
from ..passes.reinplace import Reinplace
from ..passes.schedule import Schedule
from ..passes.sink_waits import SinkWaits
from ..passes.split_optimizer import SplitOptimizer
from ..passes.write_into_buckets import WriteIntoBuckets
from ..units import parse_bytes
from .build import backend_of
from .protocol import Backend

Edit = Callable[[tuple[Pass, ...]], Sequence[Pass]]
"""Maps the default list of passes to the list that runs."""
HowScheduled = Schedule | Literal["auto", "across_steps"] | None


def with_fused_by(passes: Sequence[Pass], agree: Agree) -> tuple[Pass, ...]:
    """`passes` whose `AsyncTensorParallel` fuses what `agree` returns."""
    return tuple(replace(each, agree=agree) if isinstance(each, AsyncTensorParallel) else each for each in passes)


def edited(passes: tuple[Pass, ...], edit: Edit | None) -> tuple[Pass, ...]:
    """`edit(passes)`, checked. Raises PlanError: an element is no pass, or `SameOrder` is missing."""
    returned: object = passes if edit is None else edit(passes)
    checked = cast("tuple[object, ...]", tuple(returned)) if isinstance(returned, (list, tuple)) else (returned,)
    wrong = [each for each in checked if not callable(each)]
    if wrong:
        needed = "a list of passes: functions from LocalGraph to LocalGraph"
        raise PlanError(f"passes= gives {wrong[0]!r}", needed, "return the given list with passes added or removed")
    if any(isinstance(each, SameOrder) for each in passes) and not any(isinstance(each, SameOrder) for each in checked):
        text = "passes= leaves out SameOrder"
        needed = "one order of collectives on all ranks: otherwise ranks wait for each other forever"
        raise PlanError(text, needed, "keep SameOrder after the passes that order collectives")
    return cast("tuple[Pass, ...]", checked)


def stage_pipeline(
    mesh: Mesh, axis: str, schedule: Callable[[], Schedule | None], *, backend: Backend | str = "eager"
) -> tuple[Pass, ...]:
    """The passes that `compile` applies to the program of a stage along `axis`: with a schedule, which is asked for
    where ranks of one stage have something to exchange.
    """
    alone = all(mesh_axis.size == 1 or mesh_axis.name == axis for mesh_axis in mesh.axes)
    return default_passes(schedule=None if alone else schedule(), backend=backend)


def as_run_by(stack: Stack | None, passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """`passes` with what the stack overlaps, splits and copies; as they are for None. One that hides nothing reduces
    gradients, in buckets, once all are there, and updates once all are reduced.
    """
    if stack is None:
        return tuple(passes)
    lacks = (*(() if stack.overlaps else OVERLAPPING), *(() if stack.splits_update else (SplitOptimizer,)))
    adapted = tuple(_run_by(stack, each) for each in passes if not isinstance(each, lacks))
    return resized(adapted, may_coalesce=False) if stack.copies else adapted


def _run_by(stack: Stack, original: Pass) -> Pass:
    if isinstance(original, FitMemory):
        return replace(original, after=as_run_by(stack, original.after))
    return replace(original, fills=stack.fills) if isinstance(original, (InBodies, Overlap)) else original


OVERLAPPING = (InBodies, PeelPieces, SplitOptimizer, Overlap, SinkWaits)


def default_passes(
    hardware: Hardware | None = None,
    *,
    schedule: HowScheduled = "auto",
    memory_bytes: int | str | None = None,
    may_regather: bool = True,
    backend: Backend | str = "eager",
) -> tuple[Pass, ...]:
    """The passes that `compile` applies after `partition`, in order, as a list to edit.

    Args:
        hardware: prices buckets and the order of collectives; by default a slow CPU on a slow link.
        schedule: as in `compile`; a `Schedule` has its own hardware.
        memory_bytes: bound on the tensors of a rank, e.g. `"3GiB"`; None for no bound.
        may_regather: to meet the bound, gathered parameters may be freed after the forward and re-gathered in the
            backward, as gathered activations may in any case.
        backend: as in `compile`; `WriteIntoBuckets` and `ContiguousShards` need one with `in_place_buffers`.

    Raises:
        PlanError: `memory_bytes` is not a size.
        BackendError: the backend is unknown, or lacks a part of the protocol.

    Example:
        >>> passes = wholestep.default_passes(wholestep.Hardware.preset("dgx-h100"))
        >>> local = wholestep.run_passes(wholestep.partition(graph, plan), passes)
    """
    hardware = hardware or (schedule.hardware if isinstance(schedule, Schedule) else Hardware.default())
    if isinstance(schedule, str):
        schedule = Schedule(hardware, across_steps=schedule == "across_steps")
    passes: tuple[Pass, ...] = (*schedule.passes, SameOrder()) if schedule is not None else ()
    if backend_of(backend).in_place_buffers:
        passes = (*passes, Offload(), WriteIntoBuckets(), Reinplace(), ContiguousShards())
    else:
        passes = (*resized(passes, may_coalesce=False), Offload(), Reinplace())
    if memory_bytes is None:
        return passes if backend_of(backend).name == "inductor" else (FoldRepeats(), *passes)  # which runs no loops
    return FitMemory(parse_bytes(memory_bytes), hardware, may_regather, passes), *passes
