"""Fits a program into a budget of memory: tensors are rematerialized in the backward, and buckets made smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..cost.memory import peak_memory
from ..cost.schedule import simulate
from ..graph.graph import LocalGraph
from ..hardware.hardware import Hardware
from .base import Pass, run_passes
from .bucket_sizes import SizeBuckets, tighter
from .recompute import Peak, choose, held_by, too_small
from .remat_frontier import RematChoice, choices
from .rematerialize import made_again
from .saved_tensors import SavedTensors

_HIDDEN = 0.1
"""The part of a gather's time that counts as its cost, where most of it is hidden behind computing."""


@dataclass(frozen=True)
class Fitting:
    """What a program is fitted by: `names` of tensors that are rematerialized or gathered again, and which of the
    `tighter` passes follow, by number.
    """

    way: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class FitMemory:
    """Rematerializes tensors until the program holds `budget_bytes` at most.

    What counts is what the passes `after` it make of the program.
    Of all that fits it takes the shortest step by simulation. Where nothing fits with the sizes of `SizeBuckets`,
    buckets are made smaller, and less is in flight. Bitwise the same.

    Args:
        budget_bytes: what the tensors of a rank may take.
        hardware: what arithmetic and links cost.
        gathers: gathered parameters may be gathered again instead of kept.
        after: the passes that follow it.
        peak: the peak of a program as it runs in the end; by default that of any rank.
        agree: gives every rank what the first rank's call of the function it is given returned, for that program.

    Raises:
        PlanError: the budget cannot be met; says how far it can, and what is held there.
    """

    budget_bytes: int
    hardware: Hardware = field(default_factory=Hardware.default)
    gathers: bool = True
    after: tuple[Pass, ...] = ()
    peak: Peak = peak_memory
    agree: Callable[[Callable[[], Fitting], LocalGraph], Fitting] | None = None

    must_precede: ClassVar[tuple[str, ...]] = ("SizeBuckets", "Reinplace")

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """`local` as it is if it fits, else with tensors rematerialized; ranks whose batch asks for more do more."""
        found = self.agree(lambda: self.choose(local), local) if self.agree else self.choose(local)
        after = tighter(self.after)[found.way]
        local = self.applied(local, found)
        saved, peak = SavedTensors(local, gathers=False), self._peak_after(after)
        if self.agree is None or peak(local).size_bytes <= self.budget_bytes:
            return local
        path = choices(saved, held_by(local), self.hardware)
        names = choose(saved, path, self.budget_bytes, peak)
        if names is None:
            raise too_small(saved, path, self.budget_bytes, peak)
        return made_again(saved, names)

    def applied(self, local: LocalGraph, found: Fitting) -> LocalGraph:
        """`local` with what was found; its sizes are decided where they are smaller than `SizeBuckets` would choose."""
        local = made_again(SavedTensors(local, gathers=self.gathers), found.names) if found.names else local
        if not found.way:
            return local
        sizes = next(one for one in tighter(self.after)[found.way] if isinstance(one, SizeBuckets))
        return sizes(replace(local, sizes=None))

    def choose(self, local: LocalGraph) -> Fitting:
        """The shortest simulated step that fits.

        Raises:
            PlanError: nothing fits.
        """
        saved, ways, held = SavedTensors(local, gathers=self.gathers), tighter(self.after), held_by(local)
        path = choices(saved, held, self.hardware)
        found: list[tuple[float, int, tuple[str, ...]]] = []

        def attempt(number: int, path: Sequence[RematChoice]) -> None:
            names = choose(saved, path, self.budget_bytes, self._peak_after(ways[number]))
            if names is not None:
                ran = run_passes(made_again(saved, names), ways[number])
                found.append((simulate(ran, self.hardware).step_us, number, names))

        for number in range(len(ways)):
            attempt(number, path)
            if found and not found[-1][2]:
                break
        if not found:
            least, peak_bytes = self.least(local)
            if peak_bytes <= self.budget_bytes:
                return least
            raise too_small(saved, path, self.budget_bytes, self._peak_after(ways[-1]))
        if self.gathers and local.mesh.size > 1 and min(found)[2]:
            attempt(min(found)[1], choices(saved, held, self.hardware, _HIDDEN))
        _, number, names = min(found)
        return Fitting(number, names)

    def least(self, local: LocalGraph) -> tuple[Fitting, int]:
        """What holds the least, and how many bytes that is: a budget of so many is met."""
        saved = SavedTensors(local, gathers=self.gathers)
        path = choices(saved, held_by(local), self.hardware)
        names = min(path, key=lambda choice: choice.peak_bytes).names
        changed = made_again(saved, names)
        peaks = [self._peak_after(way)(changed).size_bytes for way in tighter(self.after)]
        return Fitting(peaks.index(min(peaks)), names), min(peaks)

    def _peak_after(self, passes: tuple[Pass, ...]) -> Peak:
        return lambda local: self.peak(run_passes(local, passes))


def fitted_with(
    passes: Sequence[Pass], peak: Peak, agree: Callable[[Callable[[], Fitting], LocalGraph], Fitting]
) -> tuple[Pass, ...]:
    """`passes` with another measure of the peak, and ranks that agree; each budget counts what then follows it."""
    found = list(passes)
    for at, one in enumerate(passes):
        if isinstance(one, FitMemory):
            found[at] = replace(one, after=tuple(passes[at + 1 :]), peak=peak, agree=agree)
    return tuple(found)
