"""The built-in backends by name, and the check of user-defined backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph

from ..errors import BackendError, shown
from ..graph.graph import Input
from .eager import Eager
from .inductor.inductor_backend import Inductor
from .protocol import Backend, NodeClock, Run
from .recordings import Recordings

BACKENDS: dict[str, Callable[[], Backend]] = {"eager": Eager, "inductor": Inductor}
"""Makes the backend of a name. An object may hold memory of the steps that it compiled, so each step gets its own."""

CAPABILITIES = ("fused_optimizers", "in_place_buffers", "splits_steps", "times_nodes", "recordable")


def backend_of(given: Backend | str) -> Backend:
    """The backend of a name; a `Backend` as it is, if it has all parts of the protocol."""
    known = ", ".join(map(repr, BACKENDS))
    if isinstance(given, str):
        if given not in BACKENDS:
            raise BackendError(
                f"backend {shown(given)} is unknown", f"one of {known}, or a Backend", "correct the name"
            )
        return BACKENDS[given]()
    found = f"backend={shown(given)}"
    if isinstance(given, type):
        raise BackendError(f"{found} is a class", "an object", f"give backend={given.__name__}()")
    lacks = [flag for flag in CAPABILITIES if not isinstance(getattr(given, flag, None), bool)]
    if not isinstance(getattr(given, "name", None), str):
        lacks = ["name", *lacks]
    if not callable(getattr(given, "compile", None)):
        lacks.append("compile")
    if lacks:
        raise BackendError(
            f"{found} lacks {', '.join(lacks)}",
            f"a Backend: name (text), {', '.join(CAPABILITIES)} (bool), compile(graph, inputs, example_inputs, clock)",
            "add them; wholestep.Backend describes each",
        )
    if given.name in BACKENDS and type(given) is not BACKENDS[given.name]:
        raise BackendError(f"{found} has the name {given.name!r}", f"another name than {known}", "rename it")
    return given


def compiled(
    backend: Backend,
    graph: Graph,
    inputs: Sequence[Input],
    example_inputs: Sequence[Any],
    clock: NodeClock | None = None,
    recordings: Recordings | None = None,
) -> Run:
    """`graph`, bound to a rank, as a function from inputs like `example_inputs` to outputs. With `recordings`, it is
    recorded where it can be.
    """
    if clock is not None and not backend.times_nodes:
        found = f"backend {backend.name!r} does not time nodes"
        needed = "one with times_nodes for measure=True and profile"
        raise BackendError(found, needed, 'leave out measure=True, or use backend="eager"')

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
            found = f"{len(cast(Sequence[Any], out))} values" if isinstance(out, (list, tuple)) else type(out).__name__
            text = f"backend {name!r} returned {found} from a step"
            needed = f"a list of {outputs} values, one for each output of the graph"
            raise BackendError(text, needed, "return them in the order of the output node")
        return list(cast(Sequence[Any], out))

    return counted
