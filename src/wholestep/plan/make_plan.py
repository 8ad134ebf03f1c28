"""The planning stage: from a graph, a mesh and strategies to a Plan. It notes losses and layers whose gradients differ
between per-rank and global semantics, with the user's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.fx import Node

from .. import _torch
from ..cost.compute import precision_of
from ..errors import PlanError
from ..graph import meta
from ..graph.decompose import ROUNDS, expand, expandable
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import node_at
from ..graph.op_kinds import is_batch_norm_in_training
from ..hardware.hardware import Hardware
from ..hardware.presets import one_host
from ..layout import REPLICATED, Layout, replicated
from ..mesh import Mesh
from .balanced_queries import balanced
from .context_parallel import ContextParallel
from .data_parallel import DataParallel
from .decision import Decision, Options
from .for_pieces import for_pieces
from .own_strategies import check_own
from .owned_updates import assigned, whole_updates, with_updates_by_owner
from .plan import Plan
from .propagate import propagate, would_gather
from .propagation_inputs import PropagationInputs, moving, per_rank_buffers, varying
from .repeated_work import repeated_work
from .rows_in_any_order import Apart, check_rows, shares_rows, with_rows_in_any_order
from .stage_of_node import with_lists_by_owner
from .strategies import Strategies
from .strategy import Stored
from .whole_units import mark_units

aten = torch.ops.aten
_SCALE = {
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten._to_copy.default,
    aten.add.Tensor,
}  # fmt: skip
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_SUMMED = "summed loss", "the gradient is averaged over ranks: 1/ranks of what one device computes on the whole batch"
_WEIGHTED = "weighted mean", "each rank divides by its own count: ranks with fewer tokens weigh more for each token"
_CLASS_WEIGHTED = "class-weighted mean", "each rank divides by the weight of its own batch"


@dataclass(frozen=True)
class PlannedStep:
    """A plan, and the step as its decisions are about it (`Plan.decompose`)."""

    plan: Plan
    graph: TrainGraph


def make_plan(
    graph: TrainGraph, mesh: Mesh, strategies: Strategies, placed: Mapping[str, Layout] | None = None,
    hardware: Hardware | None = None,
) -> PlannedStep:  # fmt: skip
    """The plan of `strategies`, none of them open. PlanError or MeshError where they do not fit mesh or graph."""
    check_own(strategies.parts, graph, mesh)
    hardware, mesh = hardware or one_host(), strategies.planning_mesh(graph, mesh)
    strategies = strategies.staged(graph, mesh, hardware)
    owners = strategies.pipeline.owners(mesh) if strategies.pipeline else {}
    owner_axis = strategies.options.owner_axis(mesh)
    axes, options = strategies.axes(mesh), strategies.options
    cut = options.axes(mesh) if strategies.data else ()
    per_rank = frozenset(cut if options.semantics == "per_rank" else ())
    _check_batch_dim(graph, options)
    storage, rest = _placed(graph, mesh, strategies, placed)
    grad_targets = {name: _without_single(r.state, mesh) for name, r in storage.items()}
    op = "avg" if options.reduce == "mean" else "sum"
    planned = for_pieces(graph) if mesh.pieces > 1 or owners else graph
    planned = with_lists_by_owner(planned, owners) if owners else planned
    if owner_axis and options.named_owners:
        planned = with_updates_by_owner(planned, options.named_owners)
    start = PropagationInputs(
        planned, mesh, axes, rest, grad_targets, op, options.kind.shards_gradients, per_rank,
        frozenset(strategies.storage_axes(mesh)), hardware=hardware,
    )  # fmt: skip
    decisions, expanded, planned = _with_rows(start, strategies) or _propagate(start, strategies)
    if owner_axis and options.owners is True:
        names = whole_updates(planned, decisions, rest, owner_axis)
        update_owners = assigned(planned, names, mesh.axis_size(owner_axis), hardware, owners)
        return make_plan(graph, mesh.of_ranks, strategies.owned(update_owners), placed, hardware)
    precision = graph.mixed_precision
    keep = {True: 0, False: None, None: options.keep_gathered_bytes}[options.reshard_after_forward]
    reduce_dtype = str(precision.reduce).removeprefix("torch.") if precision and precision.reduce else None
    each = mesh.pieces > 1 and options.kind.shards_gradients
    order = strategies.pipeline.schedule if strategies.pipeline else ""
    along, exchanged, sent = strategies.regathered_along(mesh), tuple[str, ...](), tuple[str, ...]()
    for context in strategies.of(ContextParallel):
        decisions, calls = balanced(planned, decisions, mesh, hardware, context.axis, context.balance)
        exchanged, sent = exchanged + calls, sent + context.notes(planned, mesh, decisions)
    chosen = Options(
        keep, reduce_dtype, options.broadcast_buffers, options.regathered, each, order, along, exchanged,
        strategies.experts is None or strategies.experts.host_reads,
    )  # fmt: skip
    notes = differences(graph) if per_rank else ()
    if strategies.experts is not None:
        notes += strategies.experts.notes(start.graph, planned, mesh, strategies.own_batches(mesh))
    notes += sent
    stage_axis = strategies.pipeline.axis if strategies.pipeline else ""
    shared = [a.name for a in mesh.of_ranks.axes if a.size > 1 and a.name != stage_axis]
    repeated = repeated_work(planned, decisions, rest, shared)
    created = _created(graph, rest, grad_targets, owner_axis)
    deciders = {axis: part.describe(mesh) for part in strategies.by_storage[::-1] for axis in part.axes(mesh)}
    nodes = {i.name: node.name for i, node in graph.placeholders()}
    plan = Plan(
        mesh, strategies.describe(mesh), graph.inputs, rest, decisions, chosen, notes, created, expanded, deciders,
        nodes, strategies=strategies, mixed_precision=precision, offload=bool(graph.offload), hardware=hardware,
        precision=precision_of(graph), repeated=repeated,
        async_axes=strategies.async_axes(mesh), owners=owners,
        owner_axis=owner_axis if options.named_owners else "", update_owners=options.named_owners if owner_axis else {},
    )  # fmt: skip
    plan.check_inputs(graph)
    plan.check_decisions(planned)
    return PlannedStep(plan, planned)


def stored_bytes(
    graph: TrainGraph, mesh: Mesh, parallel: Strategies, placed: Mapping[str, Layout] | None = None
) -> int:
    """Bytes that the first rank would store between calls, without making a plan. Raises as `make_plan` does."""
    parallel.axes(mesh)
    parallel = parallel.staged(graph, mesh, one_host())
    _, rest = _placed(graph, mesh, parallel, placed)
    first = mesh.coordinate(0)
    stored = [i for i in graph.inputs if i.role in (Role.PARAM, Role.STATE, Role.BUFFER, Role.GRAD)]
    stored = [i for i in stored if rest[i.name].is_held_at(first)]
    return sum(prod(rest[i.name].local_shape(i.meta.shape, mesh, first)) * i.meta.dtype.itemsize for i in stored)


def _placed(
    graph: TrainGraph, mesh: Mesh, strategies: Strategies, placed: Mapping[str, Layout] | None
) -> tuple[dict[str, Stored], dict[str, Layout]]:
    """Storage layouts of parameters with their state, and of every input."""
    params = [i for i in graph.inputs if i.role is Role.PARAM]
    base = {i.name: Stored(replicated(len(i.meta.shape)), replicated(len(i.meta.shape))) for i in params}
    storage = _staying(graph, strategies.storage_layouts(graph, mesh, base), placed or {})
    cut = strategies.options.axes(mesh) if strategies.data else ()
    return storage, _rest(graph, mesh, strategies, storage, cut)


def _with_rows(
    start: PropagationInputs, strategies: Strategies, sends: bool = True
) -> tuple[dict[str, Decision], tuple[str, ...], TrainGraph] | None:
    """As `_propagate`, where ranks that share tokens share the rows that are sorted by expert, or have the rows of
    their own experts; None where none do. Rows are sent where each rank has all of some tokens.
    """
    sorts = strategies.sorts_apart(start.graph, start.mesh).items()
    apart: dict[str, Apart] = {name: (axis, come if sends else "gathered", own) for name, (axis, come, own) in sorts}
    none: Apart = "", "gathered", ""
    graph = with_rows_in_any_order(start.graph, lambda rows: apart.get(rows.sort.name, none), start.mesh)
    shares = any(start.rest[i.name].is_sharded for i in graph.inputs if i.role is Role.BATCH)
    if graph is start.graph or not (apart or shares):
        return None
    decisions, expanded, planned = _propagate(replace(start, graph=graph), strategies)
    try:
        check_rows(planned, decisions)
    except PlanError:  # some op has other pieces
        if any(come != "gathered" and not own for _, come, own in apart.values()):
            return _with_rows(start, strategies, sends=False)
        if apart:
            raise
        return None
    return (decisions, expanded, planned) if shares_rows(decisions, planned) else None


def _propagate(
    start: PropagationInputs, strategies: Strategies
) -> tuple[dict[str, Decision], tuple[str, ...], TrainGraph]:
    """Decisions, the ops that are decomposed because they would need a sharded operand whole, and the graph that the
    decisions are about.
    """
    expanded = list(strategies.pins(start.graph, start.mesh).decomposed)
    start = replace(start, graph=expand(start.graph, expanded)) if expanded else start
    mark_units(start.graph, start.rest)
    for _ in range(ROUNDS):
        start = replace(start, pins=strategies.pins(start.graph, start.mesh))
        decisions = propagate(start, scout=True)
        gathering = [n for n in expandable(would_gather(start, decisions)) if n.name not in start.pins.op_strategies]
        if not gathering:
            break
        expanded += [n.name for n in gathering]
        start = replace(start, graph=expand(start.graph, {n.name for n in gathering}))
        mark_units(start.graph, start.rest)
    else:
        start = replace(start, pins=strategies.pins(start.graph, start.mesh))
        decisions = propagate(start)
    strategies.check(start.graph, start.mesh, decisions)
    return decisions, tuple(expanded), start.graph


def _rest(
    graph: TrainGraph, mesh: Mesh, strategies: Strategies, storage: Mapping[str, Stored], cut: tuple[str, ...]
) -> dict[str, Layout]:
    """Storage layouts of all inputs; with per-rank semantics each rank along `cut` has its own batch."""
    per_rank = strategies.options.semantics == "per_rank"
    owner_axis = strategies.options.owner_axis(mesh)
    varying_buffers = per_rank_buffers(graph) if per_rank else frozenset[str]()
    shapes = {i.name: i.meta.shape for i in graph.inputs}
    rest: dict[str, Layout] = {}
    for spec in graph.inputs:
        ndim = len(spec.meta.shape)
        layout = replicated(ndim)
        if spec.role is Role.PARAM:
            layout = storage[spec.name].param
        elif spec.role in (Role.STATE, Role.GRAD) and spec.meta.shape == shapes[spec.owner]:
            layout = storage[spec.owner].state
        elif spec.role is Role.STATE and spec.meta.shape and owner_axis:
            layout = layout.put(owner_axis, storage[spec.owner].state.owner_on(owner_axis) or REPLICATED)
        elif spec.role is Role.BATCH:
            parts = {c.dim: c.axes for c in strategies.batch_cuts(mesh, spec.name, ndim)}
            layout = varying(spec, cut if per_rank else (), mesh)
            layout = replace(layout, dims=tuple(parts.get(d, ()) for d in range(ndim)))
        elif spec.name in varying_buffers:
            layout = varying(spec, cut, mesh)
        rest[spec.name] = _without_single(layout, mesh)
    return rest


def _staying(graph: TrainGraph, chosen: dict[str, Stored], placed: Mapping[str, Layout]) -> dict[str, Stored]:
    """The layouts of the style, except of inputs that are placed; state follows a placed parameter."""
    shapes = {i.name: i.meta.shape for i in graph.inputs}
    shaped = [i for i in graph.inputs if i.role is Role.STATE and i.meta.shape == shapes[i.owner]]
    states = {i.owner: placed[i.name] for i in shaped if i.name in placed}
    out = dict(chosen)
    for name, storage in chosen.items():
        param = placed.get(name, storage.param)
        out[name] = Stored(param, states.get(name, storage.state if param == storage.param else param))
    return out


def _created(
    graph: TrainGraph, rest: dict[str, Layout], grad_targets: dict[str, Layout], owner_axis: str
) -> dict[str, Layout]:
    """Layouts of state and gradients that the step creates: as the state of their parameter if they have its shape, and
    at its owner.
    """
    shapes = {i.name: i.meta.shape for i in graph.inputs}
    out: dict[str, Layout] = {}
    for output, node in graph.results():
        tensor = meta.tensor(node)
        if output.kind == "update" and output.target not in rest and tensor is not None:
            owner = output.owner
            layout = grad_targets[owner] if tensor.shape == shapes[owner] else replicated(len(tensor.shape))
            if tensor.shape and owner_axis:
                layout = layout.put(owner_axis, grad_targets[owner].owner_on(owner_axis) or layout.state(owner_axis))
            out[output.target] = layout
    return out


def _without_single(layout: Layout, mesh: Mesh) -> Layout:
    """`layout` without axes of size 1."""
    return replace(layout, dims=tuple(tuple(a for a in axes if mesh.axis_size(a) > 1) for axes in layout.dims))


def _check_batch_dim(graph: TrainGraph, parallel: DataParallel) -> None:
    dim = parallel.input_batch_dim
    batch = [i for i in graph.inputs if i.role is Role.BATCH and i.meta.shape]
    if isinstance(dim, int) and batch and all(not -len(i.meta.shape) <= dim < len(i.meta.shape) for i in batch):
        shape = list(batch[0].meta.shape)
        problem = f"input_batch_dim={dim} is out of range for {batch[0].name!r} of shape {shape}"
        raise PlanError(problem, f"a dim from 0 to {len(shape) - 1}", "correct input_batch_dim")


# -- per-rank and global semantics ------------------------------------------------------------------------
def differences(graph: TrainGraph) -> tuple[str, ...]:
    """One sentence for each way in which per-rank gradients differ from those of one device on the whole batch."""
    sentences: dict[str, None] = {}
    by_name = {node.name: node for node in graph.graph.nodes}
    for name in graph.losses:
        reason = _loss_reason(by_name[name], graph)
        if reason:
            node, (kind, effect) = reason
            sentences[f"{kind} at {meta.source_line(node) or '%' + node.name}: {effect}"] = None
    training = [n for n in by_name.values() if is_batch_norm_in_training(n.target) and True in n.args]
    if training:
        where = meta.source_line(training[0]) or "%" + training[0].name
        sentences[f"batch norm at {where}: each rank normalizes over its own batch, one device over the whole"] = None
    return tuple(sentences)


def _loss_reason(loss: Node, graph: TrainGraph) -> tuple[Node, tuple[str, str]] | None:
    """Why the gradient of this loss depends on how the batch is sharded, by the reduction that ends it."""
    node, seen = loss, 0
    while isinstance(node, Node) and seen < 16:  # pyright: ignore[reportUnnecessaryIsInstance]  # a list ends it too
        seen += 1
        if node.target in _SUMS:
            return node, _SUMMED
        if node.target is aten.div.Tensor and node.args[1] in moving(graph):
            return node, _WEIGHTED
        if getattr(node.target, "_overloadpacket", None) is aten.nll_loss_forward:
            if node.args[3] == 2:
                return node, _SUMMED
            return None if node.args[2] is None else (node, _CLASS_WEIGHTED)
        if node.target not in _SCALE and not _torch.is_getitem(node.target):
            return None
        node = node_at(node, 0)
    return None
