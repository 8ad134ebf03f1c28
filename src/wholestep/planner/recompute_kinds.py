"""What a step recomputes in its backward, by name, as passes."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ..backend.default_passes import default_passes
from ..cost.software import OWN, Software
from ..hardware.hardware import Hardware
from ..passes.base import Pass
from ..passes.recompute_layers import RecomputeLayers

RecomputeKind: TypeAlias = Literal["none", "selective", "full", "auto"]


def passes_of(
    kind: RecomputeKind, hardware: Hardware, memory_bytes: int | str | None = None, software: Software = OWN
) -> tuple[Pass, ...]:
    """The standard pipeline of `software`, with `RecomputeLayers` before it; for `auto`, with what fits the step into
    `memory_bytes`, the memory of the hardware if None.

    Raises:
        PlanError: `memory_bytes` is not a size.
    """
    if kind == "auto":
        return default_passes(hardware, memory_bytes=memory_bytes or hardware.memory_bytes, software=software)
    return (*recomputing(kind), *default_passes(hardware, software=software))


def recomputing(kind: RecomputeKind) -> tuple[Pass, ...]:
    """The pass that comes before the standard pipeline; none for "none"."""
    assert kind != "auto", "that is a budget"
    return () if kind == "none" else (RecomputeLayers(kind),)
