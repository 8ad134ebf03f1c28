"""Bounds the peak memory of a step: what the forward keeps for the backward is made again there, as far as it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..cost.memory import PeakMemory, bytes_held, peak_memory
from ..errors import PlanError
from ..graph.graph import LocalGraph
from ..graph.text import human
from ..hardware.hardware import Hardware
from .reinplace import Reinplace
from .remat_frontier import RematChoice, choices
from .rematerialize import made_again
from .saved_tensors import SavedTensors

Peak = Callable[[LocalGraph], PeakMemory]
_WORTH, _NEAR = 0.998, 0.01
_MOST_TRIES = 6


@dataclass(frozen=True)
class Recompute:
    """Makes values again in the backward until the peak is at most `budget_bytes`, the fewest microseconds added.

    Random numbers are not drawn again, and nothing is sent again but, with `gathers`, parameters that are gathered.
    Bitwise the same. The peak is that of `peak_memory`, once updates are in place.

    Args:
        budget_bytes: of a rank, at most.
        hardware: that prices arithmetic and the link.
        compute: values that depend on the batch may be made again.
        gathers: gathered parameters may be gathered again instead of kept.

    Example:
        >>> fitted = ws.run_passes(local, [ws.Recompute(ws.peak_memory(local).size_bytes, gathers=True)])

    Raises:
        PlanError: the budget cannot be met; says how far it can, and what is held there.
    """

    budget_bytes: int
    hardware: Hardware = field(default_factory=Hardware.default)
    compute: bool = True
    gathers: bool = False

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The same step under the budget, as it was if it fits."""
        saved = SavedTensors(local, self.compute, self.gathers)
        path = choices(saved, held_by(local), self.hardware)
        names = choose(saved, path, self.budget_bytes, in_place_peak)
        if names is None:
            raise too_small(saved, path, self.budget_bytes, in_place_peak)
        return made_again(saved, names)


def in_place_peak(local: LocalGraph) -> PeakMemory:
    """The peak of the functional graph `local` once its updates are in place."""
    return peak_memory(Reinplace()(local))


def choose(saved: SavedTensors, path: Sequence[RematChoice], budget_bytes: int, peak: Peak) -> tuple[str, ...] | None:
    """Names of the values to be made again so that `peak` of the graph is `budget_bytes` at most; None if none do.

    It is the cheapest of `path`, which is the same for all budgets: a larger one takes no dearer choice.
    """
    now = peak(saved.local).size_bytes
    if now <= budget_bytes:
        return ()
    path = _worth_trying(path)
    differs = now - path[0].peak_bytes
    found = _cheapest(path, budget_bytes, differs, lambda choice: _peak(saved, choice, peak).size_bytes)
    return None if found is None else path[found].names


def _worth_trying(path: Sequence[RematChoice]) -> list[RematChoice]:
    """Without choices that bring next to nothing over the one before."""
    found = list(path[:1])
    for choice in path[1:]:
        if choice.peak_bytes < found[-1].peak_bytes * _WORTH:
            found.append(choice)
    return found if found[-1] is path[-1] else [*found, path[-1]]


def _cheapest(
    path: Sequence[RematChoice], budget_bytes: int, differs: int, peak_of: Callable[[RematChoice], int]
) -> int | None:
    """The first of `path`, but for doing nothing, whose true peak fits, if true peaks fall along it as expected ones
    do; or one that holds nearly as much. Few are looked at: each tells how far the true peak is from the expected one.
    """
    low, high = 0, len(path)
    for _ in range(_MOST_TRIES):
        near = high < len(path) and path[low].peak_bytes - path[high].peak_bytes < budget_bytes * _NEAR
        if near or low + 1 >= high:
            break
        likely = (i for i in range(low + 1, high) if path[i].peak_bytes + differs <= budget_bytes)
        at = next(likely, high - 1) if high == len(path) else (low + high) // 2
        found = peak_of(path[at])
        differs = found - path[at].peak_bytes
        low, high = (low, at) if found <= budget_bytes else (at, high)
    return high if high < len(path) else None


def held_by(local: LocalGraph) -> list[int]:
    """Bytes held at each call of the functional graph `local` once its updates are in place."""
    after = Reinplace()(local)
    calls = [n.name for n in after.graph.nodes if n.op == "call_function"]
    at = dict(zip(calls, bytes_held(after), strict=True))
    found, last = list[int](), 0
    for node in local.graph.nodes:
        if node.op == "call_function":
            last = at.get(node.name, last)
            found.append(last)
    return found


def _peak(saved: SavedTensors, choice: RematChoice, peak: Peak) -> PeakMemory:
    return peak(made_again(saved, choice.names))


def too_small(saved: SavedTensors, path: Sequence[RematChoice], budget_bytes: int, peak: Peak) -> PlanError:
    """What to say when no choice fits."""
    lowest = _peak(saved, min(path, key=lambda choice: choice.peak_bytes), peak)
    held = "\n".join(f"    {line}" for line in str(lowest).splitlines()[:6])
    return PlanError(
        f"the step needs {lowest.size_bytes} bytes on a rank at least, {human(lowest.rest_bytes)} of them at rest; "
        f"with all made again that helps it holds\n{held}",
        f"at most {budget_bytes} bytes",
        "give more, a smaller batch, more ranks, or a style that shards what is held",
    )
