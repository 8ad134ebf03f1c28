"""The one list of passes between `partition` and the backend, used by compile, Auto and the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

from ..cost.software import OWN, Software
from ..errors import PlanError
from ..hardware.hardware import Hardware
from ..passes.base import Pass
from ..passes.fit_memory import FitMemory
from ..passes.offload import Offload
from ..passes.order_collectives import SameOrder
from ..passes.reinplace import Reinplace
from ..passes.schedule import Schedule
from ..passes.write_into_buckets import WriteIntoBuckets
from ..units import parse_bytes
from .build import backend_of
from .protocol import Backend

Edit = Callable[[tuple[Pass, ...]], Sequence[Pass]]
"""Maps the default list of passes to the list that runs."""
HowScheduled = Schedule | Literal["auto", "across_steps"] | None


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


def default_passes(
    hardware: Hardware | None = None, *, schedule: HowScheduled = "auto", memory_bytes: int | str | None = None,
    may_regather: bool = True, backend: Backend | str = "eager", software: Software = OWN,
) -> tuple[Pass, ...]:  # fmt: skip
    """The passes that `compile` applies after `partition`, in order, as a list to edit.

    Args:
        hardware: prices buckets and the order of collectives; by default a slow CPU on a slow link.
        schedule: as in `compile`; a `Schedule` has its own hardware.
        memory_bytes: bound on the tensors of a rank, e.g. `"3GiB"`; None for no bound.
        may_regather: to meet the bound, gathered parameters may be freed after the forward and re-gathered in the
            backward, as gathered activations may in any case.
        backend: as in `compile`; `WriteIntoBuckets` needs one with `in_place_buffers`.
        software: whose step is predicted: without what it does not overlap, split or coalesce.

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
    in_place = backend_of(backend).in_place_buffers
    passes = () if schedule is None else (*schedule.passes_of(software, in_place), SameOrder())
    write = (WriteIntoBuckets(),) if in_place else ()
    passes: tuple[Pass, ...] = (*passes, Offload(), *write, Reinplace())
    if memory_bytes is None:
        return passes
    return FitMemory(parse_bytes(memory_bytes), hardware, may_regather, passes), *passes
