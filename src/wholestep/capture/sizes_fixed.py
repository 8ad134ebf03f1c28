"""Steps that cannot be captured with symbols for the sizes of their batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import _torch
from ..errors import CaptureError
from .effects import Effects


class SizesFixedError(CaptureError):
    """A step cannot be captured with symbols; it is captured for each size."""

    def __init__(self, found: str, where: str = "") -> None:
        super().__init__(found, "a step that computes alike for all sizes", "none: it is captured for each", where)


def refuse_symbolic(leaves: Iterable[Any], effects: Effects) -> None:
    """Raise SizesFixedError if Python would get a symbolic number: among the results, or by an effect."""
    made = [w.made for w in effects.writes if w.made is not None] + [c.made for c in effects.calls]
    host = [argument for line in effects.program.instructions for argument in line.args]
    if any(isinstance(leaf, _torch.SYMBOLIC) for leaf in (*leaves, *host, *(v for one in made for v in one.leaves))):
        raise SizesFixedError("the step gives a size of the batch to Python: as a result, or as what it assigns")
