"""What `run_passes` tells passes beside the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..cost.memory import PeakMemory, peak_memory
from ..graph.graph import LocalGraph

Pass = Callable[[LocalGraph], LocalGraph]
T = TypeVar("T")


@dataclass(frozen=True)
class CollectiveTraffic:
    """Full sizes of the tensors that a step reduces, and of the parameters that it gathers more than once."""

    reduced_bytes: int
    regathered_bytes: int


@dataclass(frozen=True)
class Fitting:
    """A choice that meets a budget: tensors to recompute or re-gather, after them number `way` of `smaller_buckets`."""

    way: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Choice(Generic[T]):
    """Something that may differ between ranks and changes no number: `what` it says, of the type `kind`.

    `combine` makes the decision of the first rank's proposal and those of all ranks; without it, that of the first rank
    is taken, and no other rank makes one. What is `kept` is taken by a later start (the compile cache).
    """

    name: str
    what: str
    kind: Any
    combine: Callable[[T, Sequence[T]], T] | None = None
    kept: bool = False


Decide = Callable[[Choice[Any], Callable[[], Any], LocalGraph], Any]
"""From a choice, and what proposes one for a program, to the decision of all ranks that run this program."""


@dataclass(frozen=True)
class Context:
    """What ranks decide together, and what a part of a step stands for.

    Args:
        decide: decides on choices with other ranks; None where there are none.
        calls: puts the calls of a program into the order of another one.
        peak: peak memory of a finished program.
        traffic: what the collectives of the whole step carry, where the program is a part.
        following: the passes behind the one that runs.
    """

    decide: Decide | None = None
    calls: Pass | None = None
    peak: Callable[[LocalGraph], PeakMemory] = peak_memory
    traffic: CollectiveTraffic | None = None
    following: tuple[Pass, ...] = ()
