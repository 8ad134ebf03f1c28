"""Refuses draws from Python's and numpy's random generators: a captured step would reuse the same numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..errors import CaptureError

_FROM_PYTHON: tuple[Any, ...] = tuple(getattr(torch, name) for name in ("tensor", "as_tensor", "from_numpy"))


class HostRngGuard:
    """Detects draws from the global generators of Python and numpy during a trace."""

    def __init__(self) -> None:
        self._before = _positions()

    def before(self, func: Any) -> None:
        """Check for draws if the torch function `func` is about to convert Python values to a tensor."""
        if func in _FROM_PYTHON:
            self.refuse_draws()

    def refuse_draws(self) -> None:
        """Raise CaptureError if numbers were drawn since the trace began."""
        drawn = [name for name, position in _positions().items() if position != self._before[name]]
        if drawn:
            raise CaptureError(
                f"the step draws numbers from {drawn[0]} while it is captured: all later steps would reuse them",
                "random numbers from torch (torch.rand, dropout), which each step draws again",
                "draw them before the step and pass them in, or switch off the code that needs them",
            )


def _positions() -> dict[str, Any]:
    """Return a cheap fingerprint of each generator's state."""
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    numpy = (inner["pos"], int(inner["key"][0])) if "pos" in inner else str(inner)
    return {"random": random.getstate()[1][-2:], "numpy.random": numpy}
