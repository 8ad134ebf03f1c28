"""A pass is a frozen dataclass: LocalGraph in, LocalGraph out, checked after each.

It may name passes that it `must_follow` or `must_precede`, as a class attribute or a property.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import GraphError, WholestepError
from ..graph.gc_control import collector_paused
from ..graph.graph import LocalGraph, copy_graph
from ..graph.verify import check_local_graph

Pass = Callable[[LocalGraph], LocalGraph]
Watch = Callable[[str, LocalGraph], None]


class InPlace(ABC):
    """A pass that changes the graph it is given, or when it is called, a copy. `run_passes` copies once for several of
    these that follow each other: for deep steps copies take as long as the passes.
    """

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """A changed copy."""
        return self.change(replace(local, graph=copy_graph(local.graph)))

    @abstractmethod
    def change(self, local: LocalGraph) -> LocalGraph:
        """`local` with its graph changed; nobody else holds that."""


@collector_paused()
def run_passes(
    local: LocalGraph, passes: Sequence[Pass], watch: Watch | None = None, owned: bool = False
) -> LocalGraph:
    """Apply `passes` in order, checking the graph after each; `watch` is told the name of each and what it made.
    `owned`: nobody else holds the graph of `local`, so it may be changed. A pass with `passes` stands for these.

    Once the end of a step is left to the next call (`AcrossSteps`), each further pass changes all three programs; a
    pass with `orders = True` does so itself.

    Example:
        >>> local = wholestep.run_passes(wholestep.partition(graph, plan), wholestep.pipeline(hardware))

    Raises:
        GraphError: a pass stands at the wrong place, or left a malformed graph; names the pass.
    """
    for one in (single for listed in passes for single in getattr(listed, "passes", (listed,))):
        name = getattr(one, "__name__", type(one).__name__)
        check_order(local, name, getattr(one, "must_follow", ()), getattr(one, "must_precede", ()))
        given, ends = local, local.across
        local = one.change(local) if owned and isinstance(one, InPlace) else one(local)
        if not isinstance(local, LocalGraph):  # pyright: ignore[reportUnnecessaryIsInstance]  # users write passes
            raise GraphError(
                f"pass {name} returned {type(local).__name__}",
                "a LocalGraph",
                "return the graph you were given or a changed copy",
            )
        if ends is not None and not getattr(one, "orders", False):
            local = replace(local, across=(one(ends[0]), one(ends[1])))
        if isinstance(one, InPlace) or _program_of(local) != _program_of(given):
            _check(name, local)
        owned = isinstance(one, InPlace) and watch is None
        local = replace(local, passes=(*given.passes, name))
        if watch is not None:
            watch(name, local)
    return local


def _program_of(local: LocalGraph) -> tuple[int, ...]:
    """What its invariants are about, by identity: deciding sizes changes none of it."""
    return id(local.graph), id(local.inputs), id(local.outputs), id(local.layouts), id(local.across)


def _check(name: str, made: LocalGraph) -> None:
    for local in (made, *(made.across or ())):
        try:
            check_local_graph(local)
        except (WholestepError, RuntimeError) as error:
            raise GraphError(
                f"pass {name} left a malformed graph: {error}",
                "a graph that keeps LocalGraph's invariants",
                "mend the pass",
            ) from error


def check_order(local: LocalGraph, name: str, follows: Sequence[str], precedes: Sequence[str]) -> None:
    """Raise GraphError where `name` cannot be applied to `local` any more, or not yet."""
    so_far = ", ".join(local.passes) or "none"
    for other in follows:
        if other not in local.passes:
            raise GraphError(
                f"pass {name} must be applied after {other}; applied so far: {so_far}",
                f"{other} before {name}",
                f"put {other} before it in the list of passes",
            )
    for other in precedes:
        if other in local.passes:
            raise GraphError(
                f"pass {name} must be applied before {other}; applied so far: {so_far}",
                f"a graph that {other} has not changed yet",
                f"put {other} behind it in the list of passes",
            )
