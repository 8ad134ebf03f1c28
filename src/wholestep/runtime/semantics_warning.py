"""Warns where averaging over ranks differs from what one device computes on the whole batch."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from ..distributed.launch import World
from ..plan.plan import Plan

_OURS = str(Path(__file__).parent.parent)


def warn_of_semantics(planned: Plan, world: World) -> None:
    """Warn on the first rank, at the user's line that calls the step."""
    if planned.notes and world.rank == 0 and world.mesh.size > 1:
        lines = "\n".join(f"  {note}" for note in planned.notes)
        choice = (
            "This is what DDP computes too. For what one device computes on the whole batch give "
            'DataParallel(..., semantics="global"), for the sum over ranks reduce="sum".'
        )
        warnings.warn(f"semantics='per_rank':\n{lines}\n  {choice}", stacklevel=_level())


def _level() -> int:
    """How many frames up from `warn_of_semantics` the user's code is."""
    level, frame = 0, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    return level + 1
