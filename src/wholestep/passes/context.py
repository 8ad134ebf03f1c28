"""What `run_passes` tells passes beside the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from ..cost.memory import PeakMemory, peak_memory
from ..graph.graph import LocalGraph

Pass = Callable[[LocalGraph], LocalGraph]


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
class Context:
    """What ranks decide together, and what a part of a step stands for.

    Args:
        order: returns the names of the collectives of a program in the order of all ranks.
        calls: puts the calls of a program into the order of another one.
        fused: maps the collectives that this rank would fuse, by name, to those that all ranks fuse.
        fitting: broadcasts the first rank's result of the given function, for the given program, to all ranks.
        peak: peak memory of a finished program.
        traffic: what the collectives of the whole step carry, where the program is a part.
        following: the passes behind the one that runs.
    """

    order: Callable[[LocalGraph], Sequence[str]] | None = None
    calls: Pass | None = None
    fused: Callable[[Sequence[str]], Set[str]] | None = None
    fitting: Callable[[Callable[[], Fitting], LocalGraph], Fitting] | None = None
    peak: Callable[[LocalGraph], PeakMemory] = peak_memory
    traffic: CollectiveTraffic | None = None
    following: tuple[Pass, ...] = ()
