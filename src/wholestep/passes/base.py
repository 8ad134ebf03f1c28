"""Runs passes, functions from LocalGraph to LocalGraph, which may name others that they must follow or precede."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from torch.fx import Node

from ..errors import GraphError, WholestepError
from ..graph.gc_control import collector_paused
from ..graph.graph import LocalGraph
from ..graph.messages import POINT_TO_POINT, SENDS, STARTED, complete
from ..graph.nodes import copy_graph, is_collective, node_at
from ..graph.region import region_of
from ..graph.verify import check_local_graph
from .context import Context, Pass

Watch = Callable[[str, LocalGraph], None]
_PACKAGE = f"{__name__.partition('.')[0]}."


class InPlace(ABC):
    """A pass whose `change` edits the graph; called as a function it edits a copy. `run_passes` copies once for a run
    of such passes: a copy of a deep step takes as long as a pass.
    """

    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)
    keeps_nothing: ClassVar[bool] = True

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """A changed copy."""
        return self.change(replace(local, graph=copy_graph(local.graph)))

    @abstractmethod
    def change(self, local: LocalGraph) -> LocalGraph:
        """Edit the graph of `local`, to which the caller has no other reference."""


class InContext(ABC):
    """A pass that a context may tell something; called as a function it is told nothing."""

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The changed program."""
        return self.within(local, Context())

    @abstractmethod
    def within(self, local: LocalGraph, context: Context) -> LocalGraph:
        """The changed program, as `context` says."""


@collector_paused()
def run_passes(
    local: LocalGraph, passes: Sequence[Pass], watch: Watch | None = None, owned: bool = False,
    context: Context | None = None,
) -> LocalGraph:  # fmt: skip
    """Apply `passes` in order. The graph is checked after each pass of the user's and each that is watched, and at the
    end.

    A pass with an attribute `passes` is replaced by these. After `CrossStep` each pass is applied to all three
    programs; a pass with `orders = True` does that itself. One with `keeps_nothing = True` keeps no reference to the
    graphs that it is given and returns, so that they are edited without a copy.

    Args:
        local: the program.
        passes: functions from LocalGraph to LocalGraph.
        watch: called with the name of each pass and its result.
        owned: the graph of `local` may be edited: the caller does not use it again.
        context: what `compile` and planners tell passes.

    Example:
        >>> local = wholestep.run_passes(wholestep.partition(graph, plan), wholestep.default_passes(hardware))

    Raises:
        GraphError: a pass is out of order, or one left a malformed graph; names the passes since the last check.
    """
    if local.stage_axis and local.stage is None:
        problem = "passes on the program of all stages, which does not run"
        raise GraphError(problem, "the program of one stage", "give wholestep.stage_program(local, coordinate)")
    unchecked = list[str]()
    single_passes = [single for listed in passes for single in getattr(listed, "passes", (listed,))]
    for at, pass_ in enumerate(single_passes):
        if not _is_own(pass_):
            _check(unchecked, local)
        name = getattr(pass_, "__name__", type(pass_).__name__)
        check_order(local, name, getattr(pass_, "must_follow", ()), getattr(pass_, "must_precede", ()))
        before, ends, exchanged = local, local.across, _exchanged(local)
        here = replace(context or Context(), following=tuple(single_passes[at + 1 :]))
        local = pass_.change(local) if owned and isinstance(pass_, InPlace) else _applied(pass_, local, here)
        if not isinstance(local, LocalGraph):  # pyright: ignore[reportUnnecessaryIsInstance]  # users write passes
            problem = f"pass {name} returned {type(local).__name__}"
            raise GraphError(problem, "a LocalGraph", "return the graph you were given or a changed copy")
        if _exchanged(local) != exchanged:
            problem = f"pass {name} changed what stages of a pipeline exchange, or its order"
            needed = "the order of other stages: it was proven to end"
            raise GraphError(problem, needed, "leave the pass out: default_passes(schedule=None) has none that does")
        if ends is not None and not getattr(pass_, "orders", False):
            local = replace(local, across=(_applied(pass_, ends[0], here), _applied(pass_, ends[1], here)))
        if isinstance(pass_, InPlace) or _program_of(local) != _program_of(before):
            unchecked.append(name)
        if watch is not None or not _is_own(pass_):
            _check(unchecked, local)
        new = isinstance(pass_, InPlace) or local.graph is not before.graph
        owned = watch is None and getattr(pass_, "keeps_nothing", False) and (owned or new)
        local = replace(local, passes=(*before.passes, name))
        if watch is not None:
            watch(name, local)
    _check(unchecked, local)
    return local


def _applied(pass_: Pass, local: LocalGraph, context: Context) -> LocalGraph:
    return pass_.within(local, context) if isinstance(pass_, InContext) else pass_(local)


def _is_own(pass_: Pass) -> bool:
    """True for a pass of wholestep, which its tests have checked."""
    return getattr(pass_, "__module__", "").startswith(_PACKAGE)


def meets_stages(local: LocalGraph, node: Node) -> bool:
    """True for a node in which a stage of a pipeline exchanges something with others."""
    if local.stage is None:
        return False
    shares_all = is_collective(node) and node.args[-1] == local.stage_axis
    runs = region_of(node) is not None or node.target is complete
    return shares_all or node.target in POINT_TO_POINT or runs


def _exchanged(local: LocalGraph) -> list[object]:
    """What a stage of a pipeline exchanges with others, in order."""
    exchanges: list[object] = []
    for node in local.graph.nodes if local.stage is not None else ():
        if node.target in STARTED:
            is_end = node.target is complete
            begun = node_at(node, 0) if is_end else node
            exchanges.append((is_end, begun.args[2 if begun.target in SENDS else 4]))
        elif meets_stages(local, node) and region_of(node) is None:
            exchanges.append(node.name)
    return exchanges


def _program_of(local: LocalGraph) -> tuple[int, ...]:
    """The identities of the parts that LocalGraph's invariants concern: a pass that decides sizes changes none."""
    return id(local.graph), id(local.inputs), id(local.outputs), id(local.layouts), id(local.across)


def _check(unchecked: list[str], program: LocalGraph) -> None:
    """Check `program`, which the passes `unchecked` have made; `unchecked` is empty afterwards."""
    for local in (program, *(program.across or ())) if unchecked else ():
        try:
            check_local_graph(local)
        except (WholestepError, RuntimeError) as error:
            problem = f"pass{'es' * (len(unchecked) > 1)} {', '.join(unchecked)} left a malformed graph: {error}"
            raise GraphError(problem, "a graph that keeps LocalGraph's invariants", "fix the pass") from error
    unchecked.clear()


def check_order(local: LocalGraph, name: str, follows: Sequence[str], precedes: Sequence[str]) -> None:
    """Raise GraphError if pass `name` must come before or after passes that `local` has been through."""
    so_far = ", ".join(local.passes) or "none"
    for other in follows:
        if other not in local.passes:
            problem = f"pass {name} must be applied after {other}; applied so far: {so_far}"
            raise GraphError(problem, f"{other} before {name}", f"put {other} before it in the list of passes")
    for other in precedes:
        if other in local.passes:
            problem = f"pass {name} must be applied before {other}; applied so far: {so_far}"
            needed = f"a graph that {other} has not changed yet"
            raise GraphError(problem, needed, f"put {other} after it in the list of passes")
