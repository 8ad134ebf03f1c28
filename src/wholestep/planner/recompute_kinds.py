"""What a step recomputes in its backward, by name, tiles of rows, and what the host keeps, as passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from ..backend.default_passes import default_passes
from ..cost.software import OWN, Software
from ..hardware.hardware import Hardware
from ..passes.base import Pass
from ..passes.fit_memory import FitMemory
from ..passes.offload_saved import OffloadSaved
from ..passes.recompute_layers import RecomputeLayers
from ..passes.tile_rows import TileRows
from ..plan.decision import Saving

RecomputeKind: TypeAlias = Literal["none", "selective", "full", "auto"]


def passes_of(
    kind: RecomputeKind, hardware: Hardware, memory_bytes: int | str | None = None, software: Software = OWN,
    tiles: int = 1, offload_saved: int = 0,
) -> tuple[Pass, ...]:  # fmt: skip
    """The standard pipeline of `software`, with `RecomputeLayers` before it; for `auto`, with what fits the step into
    `memory_bytes`, the memory of the hardware if None. Long products are computed in `tiles` of rows. What layers save
    waits on the host, for so many layers `offload_saved` ahead of its use; on the device for 0.

    Raises:
        PlanError: `memory_bytes` is not a size; `tiles` is not positive.
    """
    tiled: tuple[Pass, ...] = () if tiles == 1 else (TileRows(tiles),)
    tiled = (*tiled, OffloadSaved(offload_saved)) if offload_saved else tiled
    budget = memory_bytes or hardware.memory_bytes if kind == "auto" else None
    passes = default_passes(hardware, memory_bytes=budget, software=software)
    return _behind_recomputation(passes if kind == "auto" else (*recomputing(kind), *passes), tiled)


def saving_passes(passes: Sequence[Pass], saving: Saving) -> tuple[Pass, ...]:
    """`passes` with what a search chose."""
    added: tuple[Pass, ...] = () if saving.tiles == 1 else (TileRows(saving.tiles, None),)
    return _behind_recomputation(passes, (*added, OffloadSaved(saving.ahead, None)) if saving.ahead else added)


def _behind_recomputation(passes: Sequence[Pass], added: Sequence[Pass]) -> tuple[Pass, ...]:
    count = next((i for i, each in enumerate(passes) if not isinstance(each, FitMemory | RecomputeLayers)), len(passes))
    after = (*added, *passes[count:])
    return (*(replace(each, after=after) if isinstance(each, FitMemory) else each for each in passes[:count]), *after)


def recomputing(kind: RecomputeKind) -> tuple[Pass, ...]:
    """The pass that comes before the standard pipeline; none for "none"."""
    assert kind != "auto", "that is a budget"
    return () if kind == "none" else (RecomputeLayers(kind),)
