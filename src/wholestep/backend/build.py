"""The built-in backends by name, and the check of user-defined backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph

from ..errors import BackendError, shown
from ..graph import meta
from ..graph.counted_rows import counts_rows
from ..graph.graph import Input
from ..partition.rows_by_rank import rows_by_rank
from .eager import Eager
from .inductor.inductor_backend import Inductor
from .protocol import Backend, NodeClock, Run
from .recordings import Recordings

BACKENDS: dict[str, Callable[[], Backend]] = {"eager": Eager, "inductor": Inductor}
"""Makes the backend of a name. An object may hold memory of the steps that it compiled, so each step gets its own."""

CAPABILITIES = ("fused_optimizers", "in_place_buffers", "splits_steps", "times_nodes", "recordable")


def backend_of(backend: Backend | str) -> Backend:
    """The backend of a name; a `Backend` as it is, if it has all parts of the protocol."""
    names = ", ".join(map(repr, BACKENDS))
    if isinstance(backend, str):
        if backend not in BACKENDS:
            problem = f"backend {shown(backend)} is unknown"
            raise BackendError(problem, f"one of {names}, or a Backend", "correct the name")
        return BACKENDS[backend]()
    text = f"backend={shown(backend)}"
    if isinstance(backend, type):
        raise BackendError(f"{text} is a class", "an object", f"give backend={backend.__name__}()")
    lacks = [flag for flag in CAPABILITIES if not isinstance(getattr(backend, flag, None), bool)]
    if not isinstance(getattr(backend, "name", None), str):
        lacks = ["name", *lacks]
    if not callable(getattr(backend, "compile", None)):
        lacks.append("compile")
    if lacks:
        raise BackendError(
            f"{text} lacks {', '.join(lacks)}",
            f"a Backend: name (text), {', '.join(CAPABILITIES)} (bool), compile(graph, inputs, example_inputs, clock)",
            "add them; wholestep.Backend describes each",
        )
    if backend.name in BACKENDS and type(backend) is not BACKENDS[backend.name]:
        raise BackendError(f"{text} has the name {backend.name!r}", f"another name than {names}", "rename it")
    return backend


def compiled(
    backend: Backend, graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any],
    clock: NodeClock | None = None, recordings: Recordings | None = None,
) -> Run:  # fmt: skip
    """`graph`, bound to a rank, as a function of inputs like `example_inputs`; recorded where `recordings` allow it."""
    if clock is not None and not backend.times_nodes:
        problem = f"backend {backend.name!r} does not time nodes"
        needed = "one with times_nodes for measure=True and profile"
        raise BackendError(problem, needed, 'leave out measure=True, or use backend="eager"')

    if (counts := counts_rows(graph)) is not None and not isinstance(backend, Eager):
        problem = f"the step counts rows while it runs, with backend {backend.name!r}"
        needed = "backend 'eager', or a step in which all sizes are known before"
        uncounted = ", or ExpertParallel(..., host_reads=False)" if counts.target is rows_by_rank else ""
        raise BackendError(problem, needed, f'use backend="eager"{uncounted}', meta.source_line(counts))

    def compile(graph: Graph, example_inputs: Sequence[Any]) -> Run:
        outputs = len(cast(Sequence[Any], next(node for node in graph.nodes if node.op == "output").args[0]))
        with torch.no_grad():
            run = cast(object, backend.compile(graph, inputs, example_inputs, clock))
        if not callable(run):
            needed = "a function from the list of inputs to the list of outputs"
            raise BackendError(f"backend {backend.name!r} returned {run!r}", needed, "return one from compile")
        return cast(Run, run) if type(backend) in BACKENDS.values() else _counted(run, outputs, backend.name)

    if recordings is None:
        return compile(graph, example_inputs)
    return recordings.compiled(graph, inputs, example_inputs, compile)


def _counted(run: Callable[..., Any], outputs: int, name: str) -> Run:
    """`run`, checked to return as many values as the graph has outputs."""

    @torch.no_grad()
    def counted(inputs: Sequence[Any]) -> list[Any]:
        out = run(inputs)
        if not isinstance(out, (list, tuple)) or len(cast(Sequence[Any], out)) != outputs:
            actual = f"{len(cast(Sequence[Any], out))} values" if isinstance(out, (list, tuple)) else type(out).__name__
            text = f"backend {name!r} returned {actual} from a step"
            needed = f"a list of {outputs} values, one for each output of the graph"
            raise BackendError(text, needed, "return them in the order of the output node")
        return list(cast(Sequence[Any], out))

    return counted
