"""The first setup of a search that fits with what the allocator of a device reserves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from wholestep.graph.gc_control import existing_objects_frozen

from .gpu_search import GpuResult, Setup, holding, step_s


class Reserves(Protocol):
    """A search that plans a setup with all layers."""

    def reserved(self, setup: Setup) -> int | None:
        """What the allocator of a device reserves; None where nobody knows."""
        ...

    def heavier(self, setup: Setup) -> Sequence[Setup]:
        """The setup with the kinds of recomputation that follow its own, each with costs or the reason why it lost. The
        last one may have costs.
        """
        ...


@existing_objects_frozen()
def first_fits(setups: GpuResult, search: Reserves) -> GpuResult:
    """`setups` without the setups before the first that fits into a device. They lost, and are tried with more
    recomputation. Searches bound tensors, which is linear in layers; what is reserved besides follows from all layers.
    """
    best, lost = list(setups.best), list(setups.lost)
    while best:
        first = best.pop(0)
        assert first.costs is not None, "it was simulated"
        needs = search.reserved(first)
        if needs is None or needs <= setups.memory_bytes:
            best.insert(0, replace(first, costs=replace(first.costs, reserved_bytes=needs)))
            break
        over = holding(first, needs, setups.memory_bytes, "makes torch's allocator reserve {}")
        over = replace(over, costs=None, staged=None)
        heavier = search.heavier(over)
        best = sorted([*best, *(setup for setup in heavier if setup.costs)], key=step_s)
        lost += [over, *(setup for setup in heavier if not setup.costs)]
    return GpuResult(tuple(best), tuple(lost), setups.memory_bytes)
