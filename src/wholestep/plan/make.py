"""The planning stage: a graph, a mesh and a strategy -> Plan."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..layout import Layout, replicated
from ..mesh import Mesh
from .data_parallel import DataParallel, Resting
from .plan import Options, Plan
from .propagate import Situation, batch_layout, propagate
from .semantics import differences


def plan(
    graph: TrainGraph,
    mesh: Mesh | str,
    parallel: DataParallel | None = None,
    placed: Mapping[str, Layout] | None = None,
) -> Plan:
    """Decide where every tensor of `graph` rests on `mesh`. Needs no process group, no device and no weights.

    `placed` names inputs that rest somewhere already (another step put them there): they stay.

    Raises:
        PlanError, MeshError: the strategy does not fit the mesh or the graph.
    """
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    parallel = parallel or DataParallel()
    axes = parallel.axes(mesh)
    _check_batch_dim(graph, parallel)
    resting = _staying(graph, parallel.resting(graph, mesh), placed or {})
    mutated = {o.target for o in graph.outputs if o.kind == "update"}
    shapes = {i.name: i.meta.shape for i in graph.inputs}
    rest: dict[str, Layout] = {}
    for given in graph.inputs:
        whole = replicated(len(given.meta.shape))
        follows = given.owner and given.meta.shape == shapes[given.owner]
        if given.role is Role.PARAM:
            rest[given.name] = resting[given.name].param
        elif given.role in (Role.STATE, Role.GRAD):
            rest[given.name] = resting[given.owner].state if follows else whole
        elif given.role is Role.BATCH or (given.role is Role.BUFFER and given.name in mutated):
            rest[given.name] = batch_layout(given, axes, mesh)
        else:
            rest[given.name] = whole
    rest = {name: _without_single(layout, mesh) for name, layout in rest.items()}
    homes = {name: _without_single(r.state, mesh) for name, r in resting.items()}
    op = "avg" if parallel.reduce == "mean" else "sum"
    decisions = propagate(
        Situation(graph, mesh, axes, rest, homes, op, parallel.style == "zero2", frozenset(axes), frozenset(axes))
    )
    precision = parallel.mixed_precision
    keep = {True: 0, False: None, None: parallel.keep_gathered_bytes}[parallel.reshard_after_forward]
    reduce_dtype = str(precision.reduce).removeprefix("torch.") if precision and precision.reduce else None
    options = Options(keep, reduce_dtype, parallel.broadcast_buffers)
    strategy = f"{parallel.style} on {', '.join(axes)}, {parallel.reduce} over ranks"
    created = _created(graph, rest, homes)
    made = Plan(mesh, strategy, graph.inputs, rest, decisions, options, differences(graph), created)
    made.check(graph)
    return made


def _staying(graph: TrainGraph, chosen: dict[str, Resting], placed: Mapping[str, Layout]) -> dict[str, Resting]:
    """The style's choice, but for what is placed already; state that is not follows its parameter."""
    states = {i.owner: placed[i.name] for i in graph.inputs if i.role is Role.STATE and i.name in placed}
    out = dict(chosen)
    for name, resting in chosen.items():
        param = placed.get(name, resting.param)
        out[name] = Resting(param, states.get(name, resting.state if param == resting.param else param))
    return out


def _created(graph: TrainGraph, rest: dict[str, Layout], homes: dict[str, Layout]) -> dict[str, Layout]:
    """State and gradients that the step makes rest as the state of their parameter would, where they have its shape."""
    shapes = {i.name: i.meta.shape for i in graph.inputs}
    out: dict[str, Layout] = {}
    for output, node in graph.results():
        made = meta.tensor(node)
        if output.kind == "update" and output.target not in rest and made is not None:
            owner = output.target.rpartition("/")[0]
            out[output.target] = homes[owner] if made.shape == shapes[owner] else replicated(len(made.shape))
    return out


def _without_single(layout: Layout, mesh: Mesh) -> Layout:
    """Axes of one rank cut nothing."""
    return Layout(
        tuple(tuple(a for a in axes if mesh.axis_size(a) > 1) for axes in layout.dims), layout.partial, layout.varies
    )


def _check_batch_dim(graph: TrainGraph, parallel: DataParallel) -> None:
    batch = [i for i in graph.inputs if i.role is Role.BATCH and i.meta.shape]
    short = [i for i in batch if not -len(i.meta.shape) <= parallel.input_batch_dim < len(i.meta.shape)]
    if short and len(short) == len(batch):
        shape = list(short[0].meta.shape)
        raise PlanError(
            f"input_batch_dim={parallel.input_batch_dim} is out of range for {short[0].name!r} of shape {shape}",
            f"a dim from 0 to {len(short[0].meta.shape) - 1}",
            "correct input_batch_dim",
        )
