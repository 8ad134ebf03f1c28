"""Step time and peak memory of a published run, by the functions that `wholestep simulate` calls.

A row is captured with few layers: costs are linear in layers, as `planner.folded_step` has it. Further micro-batches
cost what the first does but for its update, without reductions where gradients are reduced once. Rows of one model and
batch share captures, rows of one mesh their programs, and rows that differ in layers and micro-batches alone all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.fx import Node

import wholestep as ws
from foresight.accuracy import model
from foresight.accuracy.config import Run
from wholestep.cost.reserved import Reserved, reserved
from wholestep.cost.simulation import priced, run_all, steady_start
from wholestep.cost.stage_costs import BlockPrices
from wholestep.cost.staged import StagedStep
from wholestep.cost.timeline import phase
from wholestep.graph.graph import Role
from wholestep.graph.meta import module_path, size_bytes
from wholestep.graph.op_kinds import collective_kind, packet_name
from wholestep.passes.bucket import collective_traffic
from wholestep.passes.bucket_sizes import resized
from wholestep.passes.context import CollectiveTraffic, Context
from wholestep.passes.reinplace import Reinplace
from wholestep.plan.strategies import compose
from wholestep.planner.recompute_kinds import passes_of
from wholestep.planner.staged_plan import ShortPipelines, StagedSetup
from wholestep_foresight import Stack

TIMED = 2, 3
"""Layers that are simulated."""
HALF = ws.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
_ABOUT = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Microseconds:
    """Of a step with one micro-batch, of its update, and of adding its gradients to others: two reads, one write."""

    step: float
    update: float
    adding: float


PREDICTED = ws.KernelTimes((), device=1.0)
"""Nothing is measured."""


def step_s(run: Run, hardware: ws.Hardware, rates: ws.KernelTimes = PREDICTED) -> float:
    """Seconds of one step. `rates`: what the device and the host take, as multiples of what is predicted."""
    if run.stages > 1:
        return staged_step(run, hardware, rates).step_us / 1e6
    return sum(share * _step_us(one, hardware, rates) for share, one in _kinds_of_layers(run)) / 1e6


def peak_gib(run: Run, hardware: ws.Hardware) -> float:
    """GiB that the allocator of one rank reserves at the peak, which is what trainers report. Blocks are not linear in
    layers: all of them are captured. Of a pipeline: of the tensors of the stage that holds most.
    """
    if run.stages > 1:
        return staged_step(run, hardware).fullest.peak_bytes / 2**30
    found = _reserved(replace(_shape(run), layers=run.layers, stack=run.stack), hardware, run.accumulate > 1)
    return found.reserved_bytes / 2**30


def _kinds_of_layers(run: Run) -> list[tuple[float, Run]]:
    """`run`, or two where some layers alone are recomputed, each with its share of the layers."""
    if run.checkpointed == 1:
        return [(1.0, run)]
    again, kept = replace(run, checkpointed=1.0), replace(run, checkpointed=1.0, ac="none")
    return [(run.checkpointed, again), (1 - run.checkpointed, kept)]


def _step_us(run: Run, hardware: ws.Hardware, rates: ws.KernelTimes) -> float:
    shape = _shape(run)
    first = [_microseconds(shape, hardware, layers, run.stack, rates) for layers in TIMED]
    whole = _line(TIMED, [one.step for one in first], run.layers)
    one_by_one = run.style != "full" and run.ac == "full" and run.stack.call_us(hardware) > 0
    if run.accumulate == 1 and not one_by_one:
        return whole
    once = run.style != "full" and run.replicate * run.shard > 1
    alone = replace(shape, replicate=1, shard=1, style="replicate") if once else shape
    more = [_microseconds(alone, hardware, layers, run.stack, rates) for layers in TIMED] if once else first
    adding = _line(TIMED, [m.adding for m in more], run.layers)
    batch = _line(TIMED, [m.step - m.update for m in more], run.layers)
    if not one_by_one:
        return whole + (run.accumulate - 1) * (batch + adding)
    begun, then = _batches(alone, hardware, run.layers, run.stack, rates)
    return whole + begun - batch + (run.accumulate - 1) * (then + adding)


@cache
def _batches(
    shape: Run, hardware: ws.Hardware, layers: int, stack: Stack, rates: ws.KernelTimes
) -> tuple[float, float]:
    """Microseconds of the first micro-batch and of each further one where the host starts ops one by one. They are not
    linear in layers: it gets ahead where kernels are long, as in the loss, and lives on that for some layers. Of three
    layers, which are recomputed, the middle one stands for all but the first and the last.
    """
    local = _program(shape, hardware, 3)
    calls = [node for node in local.graph.nodes if node.op == "call_function" and phase(node) != "update"]

    def first(layer: int, kind: str) -> int:
        return next(i for i, node in enumerate(calls) if phase(node) == kind and _is_in(node, f"layers.{layer}"))

    forward, behind = first(1, "forward"), first(2, "forward")
    backward, before = first(1, "backward"), first(0, "backward")
    turn = next(i for i, node in enumerate(calls) if phase(node) == "backward")
    passes = (
        [*calls[:forward], *(layers - 2) * calls[forward:behind], *calls[behind:turn]],
        [*calls[turn:backward], *(layers - 2) * calls[backward:before], *calls[before:]],
    )
    clock, begun = priced(local, hardware, stack.measured(False, rates)), list[float]()
    for _ in range(2):
        for one in passes:
            clock.host = clock.now if stack.waits else clock.host
            run_all(clock, one)
        begun.append(clock.now)
    return begun[0], begun[1] - begun[0]


def _line(at: tuple[int, int], found: list[float] | tuple[float, ...], layers: int) -> float:
    return found[0] + (found[1] - found[0]) * (layers - at[0]) / (at[1] - at[0])


def _shape(run: Run) -> Run:
    """What programs follow from. Buckets follow from the layers roughly: from the next larger of a few numbers."""
    return replace(
        run, source="", hardware="", links="", device="", model="", step_s=None, memory_gib=None,
        device_gib=0.0, layers=next((count for count in _ABOUT if count >= run.layers), _ABOUT[-1]), accumulate=1,
        per_node=0,
        stack=replace(run.stack, name="", source="", compiled=False, recorded=False, start_us=0.0, traced=False,
                      backward_start_us=0.0, flash_attention=2, expandable_segments=False, keeps_logits=False,
                      waits=False, fused_loss=True, accumulates="own", to_the_end=False),
    )  # fmt: skip


@cache
def _microseconds(shape: Run, hardware: ws.Hardware, layers: int, stack: Stack, rates: ws.KernelTimes) -> Microseconds:
    local = _program(shape, hardware, layers)
    clock = steady_start(local, priced(local, hardware, stack.measured(False, rates)))
    update = 0.0
    for node in local.graph.nodes:
        if node.op == "call_function":
            late = clock.host + (clock.starts or {}).get(node, 0.0)  # for what ran before
            before = max(clock.now, late)
            clock.run(node)
            update += clock.now - before if phase(node) == "update" else 0.0
    gradients = sum(size_bytes(node) for given, node in local.placeholders() if given.role is Role.STATE) / 2
    step = clock.now + (_ends_us(local, clock.times or {}) if stack.to_the_end else 0.0)
    return Microseconds(step, update, rates.device * hardware.bytes_us(3 * gradients))


def _ends_us(local: ws.LocalGraph, times: Mapping[Node, float]) -> float:
    """Microseconds of what recomputed layers lack of their forward, since nobody reads it."""
    took = {"forward": 0.0, "backward": 0.0, "update": 0.0}  # modules are entered again in a backward that recomputes
    for node, us in times.items():
        took[phase(node)] += us if module_path(node).startswith("layers.") else 0.0
    return max(took["forward"] - took["backward"], 0.0) if took["backward"] else 0.0


@cache
def _reserved(run: Run, hardware: ws.Hardware, accumulates: bool) -> Reserved:
    shape = replace(run, layers=0, stack=_shape(run).stack)
    several = passes_of("none", hardware, software=run.stack)
    if not run.stack.compiled:  # a result has memory of its own
        several = tuple(replace(one, temporaries=False) if isinstance(one, Reinplace) else one for one in several)
    if run.stack.copies:
        unit = _layer_bytes(run)  # which FSDP gathers and reduces at a time; gradients travel in float32
        several = resized(several, bucket_bytes=unit, in_flight_bytes=2 * unit)
    local = ws.run_passes(_planned(shape, hardware, run.layers), several)
    params = [size_bytes(node) for given, node in local.placeholders() if given.role is Role.PARAM]
    return reserved(local, run.stack, until=_held(run, local), added=params if accumulates else ())


def _layer_bytes(run: Run) -> int:
    """Bytes of the parameters of one layer in half precision, of a rank that has them gathered."""
    heads = (run.heads + run.kv_heads) * run.head
    return 2 * run.width * (2 * heads + (3 if run.gated else 2) * run.hidden) // run.tp


def _held(run: Run, local: ws.LocalGraph) -> dict[Node, Node]:
    """What a stack holds though nobody reads it, and until when: of a layer's forward what selective recomputation
    marks, until the layer's backward ends; logits in float32, until the last backward begins its update; what the
    backward of a loss of sharded logits was given, until it returns (`torch.distributed.tensor.parallel.loss`).
    """
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    backward = [node for node in calls if phase(node) == "backward"]
    forward = [node for node in calls if phase(node) == "forward"]
    found: dict[Node, Node] = {}
    if run.ac in ("products", "ops") and not run.stack.traced:
        every = 1 if run.ac == "products" else 2
        for number in range(run.layers):
            layer = f"layers.{number}"
            ends = [node for node in backward if _is_in(node, layer)]
            own = [node for node in forward if _is_in(node, layer)]
            marked = [node for node in own if node.target is torch.ops.aten.mm.default][::every]
            marked += [node for node in own if collective_kind(node.target) == "reduce_scatter"]
            found |= dict.fromkeys(marked, ends[-1]) if ends else {}
    logits = max(forward, key=lambda node: size_bytes(node) * (node.target is torch.ops.aten._to_copy.default))
    if run.stack.keeps_logits:
        found[logits] = backward[-1]
    if run.tp > 1 and not run.stack.traced:
        gradient = next(node for node in backward if packet_name(node.target) == "_to_copy")
        inside = calls[calls.index(logits) : calls.index(gradient)]
        whole = [node for node in inside if size_bytes(node) == size_bytes(logits)]
        saved = [node for node in whole if phase(node) == "forward" and any(map(_is_backward, node.users))]
        first = next(node for node in whole if phase(node) == "backward")
        found |= dict.fromkeys([*saved, first], whole[-1])
    return found


def _is_backward(node: Node) -> bool:
    return phase(node) == "backward"


def _is_in(node: Node, module: str) -> bool:
    return f"{module_path(node)}.".startswith(f"{module}.")


@cache
def _program(shape: Run, hardware: ws.Hardware, layers: int) -> ws.LocalGraph:
    """The program of one rank, with the buckets of the whole model."""
    one = replace(shape, layers=0)
    few, more = (vars(collective_traffic(_planned(one, hardware, count))).values() for count in TIMED)
    whole = CollectiveTraffic(*(round(_line(TIMED, two, shape.layers)) for two in zip(few, more, strict=True)))
    several = passes_of("none", hardware, software=shape.stack)
    return ws.run_passes(_planned(one, hardware, layers), several, context=Context(traffic=whole))


@cache
def _planned(run: Run, hardware: ws.Hardware, layers: int) -> ws.LocalGraph:
    graph = _captured(replace(run, replicate=1, shard=1, cp=1, tp=1, balanced=True, style="", sequence=False), layers)
    made = model.strategies(run)
    plan = ws.plan(graph, model.mesh(run), made or ws.DataParallel("replicate"), hardware=hardware)
    return ws.partition(graph, plan)


@cache
def _captured(run: Run, layers: int) -> ws.TrainGraph:
    step, *given = model.build(run, layers)
    half = replace(HALF, reduce=torch.bfloat16) if run.pure else HALF
    options = ws.CaptureOptions(mixed_precision=half, float8=ws.Float8() if run.eight else None)
    return ws.capture(step, *given, options=options)


def staged_step(run: Run, hardware: ws.Hardware, rates: ws.KernelTimes = PREDICTED) -> StagedStep:
    """The step of a pipeline, by what `wholestep simulate` calls for one: short stages stand for all. Stages have equal
    numbers of layers where these divide, as Megatron has them, whose order is 1F1B, or of several chunks interleaved.
    """
    alike = replace(
        _shape(run), layers=0, replicate=1, shard=1, tp=1, micro=1, style="", sequence=False, stages=1, chunks=1
    )
    mesh, (each, rest) = ws.Mesh(model.mesh(run)), divmod(run.layers, run.stages * run.chunks)
    pipeline = ws.Pipeline(micro_batches=run.accumulate, schedule="1f1b")
    if run.chunks > 1:
        pipeline = replace(pipeline, schedule="interleaved", chunks=run.chunks)
    layers = None if rest else (each,) * run.stages * run.chunks
    setup = StagedSetup(mesh, compose([*model.strategies(run), pipeline]), layers)
    prices, short = (
        BlockPrices(hardware, mesh, run.stack.measured(False, rates)),
        replace(_pipelines(alike, hardware), layers=run.layers),
    )
    return short.step(setup, run.micro, passes_of("none", hardware, software=run.stack), prices)


@cache
def _pipelines(run: Run, hardware: ws.Hardware) -> ShortPipelines:
    return ShortPipelines(lambda batch, layers: _captured(replace(run, micro=batch), layers), 0, hardware)
