"""A pass is a frozen dataclass: LocalGraph in, LocalGraph out, checked after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import GraphError, WholestepError
from ..graph.graph import LocalGraph
from ..graph.verify import check_local_graph

Pass = Callable[[LocalGraph], LocalGraph]


def run_passes(local: LocalGraph, passes: Sequence[Pass]) -> LocalGraph:
    """Apply `passes` in order, checking the graph after each.

    Raises:
        GraphError: a pass left a malformed graph; names the pass.
    """
    for one in passes:
        name = getattr(one, "__name__", type(one).__name__)
        local = one(local)
        if not isinstance(local, LocalGraph):  # pyright: ignore[reportUnnecessaryIsInstance]  # users write passes
            raise GraphError(
                f"pass {name} returned {type(local).__name__}",
                "a LocalGraph",
                "return the graph you were given or a changed copy",
            )
        try:
            check_local_graph(local)
        except (WholestepError, RuntimeError) as error:
            raise GraphError(
                f"pass {name} left a malformed graph: {error}",
                "a graph that keeps LocalGraph's invariants",
                "mend the pass",
            ) from error
    return local
