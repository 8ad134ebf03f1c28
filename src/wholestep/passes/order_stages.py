"""Puts the blocks of stages into an order, by what they take after the passes that run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from ..cost.memory import peak_beside
from ..cost.stage_orders import NAMED
from ..graph import meta
from ..graph.gc_control import collector_paused
from ..graph.graph import LocalGraph, TrainGraph
from ..graph.loop import Loop, loop_of
from ..graph.nodes import is_collective
from ..graph.stage_part import StageParts
from ..graph.written_out import calls_in
from ..hardware.hardware import Hardware
from ..partition.lower import written
from ..partition.stage_blocks import NamedOrder, StageCut, cuts_for, in_order_of, is_staged, stages_of
from ..partition.stage_program import orders_in, stage_program
from ..plan.check_plan import check_plan
from ..plan.plan import Plan
from .bucket_sizes import SizeBuckets
from .context import Choice
from .in_bodies import InBodies

BLOCKS: Choice[tuple[NamedOrder, ...]] = Choice("blocks", "in which order stages run blocks", tuple[NamedOrder, ...])


@collector_paused()
def partition(graph: TrainGraph, plan: Plan) -> LocalGraph:
    """Rewrite `graph` for one rank: local shapes, explicit collectives, each reshard once.

    Collectives on gradients start when the gradient is complete; the wait is before the first use.

    Example:
        >>> local = ws.partition(graph, ws.plan(graph, "dp=8"))
        >>> print(local.collectives())

    Raises:
        PlanError, LayoutError: the plan was not made for this graph, or the step cannot be computed by its layouts.
    """
    return ordered(written(check_plan(plan, graph), plan), plan)


@collector_paused()
def lowered(graph: TrainGraph, plan: Plan, chosen: Sequence[NamedOrder] = ()) -> LocalGraph:
    """`partition` by a plan that was made for this graph just now. Stages have an order of `chosen` where they fit."""
    return ordered(written(plan.decompose(graph), plan), plan, chosen)


def ordered(local: LocalGraph, plan: Plan, chosen: Sequence[NamedOrder] = ()) -> LocalGraph:
    """`local`, which `written` returned, with the order of blocks that the plan says."""
    return with_orders(local, plan.options.order, plan.hardware, chosen) if plan.owners else local


def with_orders(local: LocalGraph, order: str, hardware: Hardware, chosen: Sequence[NamedOrder] = ()) -> LocalGraph:
    """`local`, the program of all stages, with the order in which stages run the pieces of its loops: that of one of
    `chosen` which has the same blocks, else the one of this name for blocks that a `Schedule` for `hardware` has
    scheduled. Loops that have that order keep it, or without a name their own.
    """
    todo, mesh, axis = dict[Node, Loop](), local.mesh, local.stage_axis
    for node in local.graph.nodes:
        loop = loop_of(node)
        if loop is None or not is_staged(loop):
            continue
        shared = (in_order_of(loop, named, mesh, axis, hardware, _device(local)) for named in chosen)
        if (stages := next(filter(None, shared), None)) is not None:
            node.target = replace(loop, stages=stages)
        elif loop.stages is None or order not in ("", loop.stages.order):
            todo[node] = loop
    cuts = {node: cuts_for(loop, mesh, axis, order) for node, loop in todo.items()}
    beside = dict[Node, list[int]]()
    for several in zip(*cuts.values(), strict=True) if order != "gpipe" else ():  # which is the same at all prices
        beside |= _schedule(local, dict(zip(cuts, several, strict=True)), hardware, order)
    for node, loop in todo.items():
        stages = stages_of(*cuts[node], mesh, axis, order, hardware, _device(local), beside.get(node, ()))
        node.target = replace(loop, stages=stages)
    return local


def _device(local: LocalGraph) -> str:
    return meta.one_tensor(next(iter(local.graph.nodes))).device


def _schedule(
    local: LocalGraph, cuts: Mapping[Node, StageCut], hardware: Hardware, order: str
) -> dict[Node, list[int]]:  # fmt: skip
    """Schedule the blocks of `cuts`, of the loops of `local`, as `InBodies` will when they run. Returns the bytes that
    each stage holds meanwhile besides those of pieces, where an order is chosen by these.
    """
    blocks = [block for cut in cuts.values() for stage_blocks in cut.blocks for block in stage_blocks]
    if order in NAMED and all(block.scheduled or not any(map(is_collective, block.body.nodes)) for block in blocks):
        return {}
    for node, cut in cuts.items():
        node.target = replace(cut.loop, stages=StageParts(cut.parts(local.stage_axis, _device(local)), ""))
    sizes, inside = SizeBuckets(hardware), InBodies(hardware)
    held_bytes = {node: [0] * len(cut.blocks) for node, cut in cuts.items()}
    for stage in range(local.mesh.axis_size(local.stage_axis)):
        program = sizes(stage_program(local, stage))
        calls = calls_in(program.graph)
        for node, cut in cuts.items():
            if node.name in calls:
                held_bytes[node][stage] = peak_beside(program, node.name).size_bytes
                cut.blocks[stage] = tuple(inside.scheduled(program, calls[node.name]))
    return held_bytes


def named_orders(local: LocalGraph) -> tuple[NamedOrder, ...]:
    """The orders of the loops of a program."""
    return tuple((stages.order, stages.tasks) for stages in orders_in(local))
