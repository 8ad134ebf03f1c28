"""Random numbers that are not torch's: drawn once, while a step is captured, they would be the same in every step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..errors import CaptureError

_FROM_PYTHON: tuple[Any, ...] = tuple(getattr(torch, name) for name in ("tensor", "as_tensor", "from_numpy"))


class HostRngGuard:
    """Watches the global generators of Python and numpy during a trace."""

    def __init__(self) -> None:
        self._before = _positions()

    def before(self, func: Any) -> None:
        """Called with each torch function: looks when values of Python are about to become a tensor."""
        if func in _FROM_PYTHON:
            self.refuse_draws()

    def refuse_draws(self) -> None:
        """Raise CaptureError when numbers were drawn since the trace began."""
        drawn = [name for name, position in _positions().items() if position != self._before[name]]
        if drawn:
            raise CaptureError(
                f"the step draws numbers from {drawn[0]} while it is captured: all later steps would use the same",
                "random numbers that torch draws (torch.rand, dropout), which are drawn anew in each step",
                "draw them before the step and pass them in, or switch off what needs them",
            )


def _positions() -> dict[str, Any]:
    """How far each generator has come."""
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    numpy = (inner["pos"], int(inner["key"][0])) if "pos" in inner else str(inner)
    return {"random": random.getstate()[1][-2:], "numpy.random": numpy}
