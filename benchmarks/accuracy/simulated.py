"""Step time and peak memory of a published run, by the functions that `wholestep simulate` calls.

A row is captured with few layers: costs are linear in layers, as `planner.folded_step` has it. Further micro-batches
cost what the first does but for its update, without reductions where gradients are reduced once. Rows of one model and
batch share captures, rows of one mesh their programs, and rows that differ in layers and micro-batches alone all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

import wholestep as ws
from benchmarks.accuracy import model
from benchmarks.accuracy.config import Run
from wholestep.cost.memory import bytes_held
from wholestep.cost.simulation import priced, steady_start
from wholestep.cost.timeline import phase
from wholestep.graph.graph import Role
from wholestep.passes.base import Pass
from wholestep.passes.bucket import CollectiveTraffic, collective_traffic
from wholestep.passes.bucket_sizes import resized
from wholestep.passes.overlap import Overlap
from wholestep.passes.sink_waits import SinkWaits
from wholestep.passes.split_optimizer import SplitOptimizer

TIMED, HELD = (2, 3), (4, 6)
"""Layers that are simulated: of peaks more, since some gradients may wait to be reduced until the link is free."""
HALF = ws.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
_ABOUT = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Microseconds:
    """Of a step with one micro-batch, of its update, and of adding its gradients to others: two reads, one write."""

    step: float
    update: float
    adding: float


def step_s(run: Run, hardware: ws.Hardware) -> float:
    """Seconds of one step."""
    return sum(share * _step_us(one, hardware) for share, one in _kinds_of_layers(run)) / 1e6


def peak_gib(run: Run, hardware: ws.Hardware) -> float:
    """GiB of the tensors that one rank holds at the peak. That of a step with more layers may lie in another phase."""
    total = 0.0
    for share, one in _kinds_of_layers(run):
        peaks = zip(*(_peaks(_shape(one), hardware, layers) for layers in HELD), strict=True)
        total += share * max(_line(HELD, pair, run.layers) for pair in peaks)
    return total / 2**30


def _kinds_of_layers(run: Run) -> list[tuple[float, Run]]:
    """`run`, or two where some layers alone are recomputed, each with its share of the layers."""
    if run.checkpointed == 1:
        return [(1.0, run)]
    again, kept = replace(run, checkpointed=1.0), replace(run, checkpointed=1.0, ac="none")
    return [(run.checkpointed, again), (1 - run.checkpointed, kept)]


def _step_us(run: Run, hardware: ws.Hardware) -> float:
    shape = _shape(run)
    first = [_microseconds(shape, hardware, layers, run.stack) for layers in TIMED]
    whole = _line(TIMED, [one.step for one in first], run.layers)
    if run.accumulate == 1:
        return whole
    once = run.style != "full" and run.replicate * run.shard > 1
    alone = replace(shape, replicate=1, shard=1, style="replicate")
    more = [_microseconds(alone, hardware, layers, run.stack) for layers in TIMED] if once else first
    return whole + (run.accumulate - 1) * _line(TIMED, [m.step - m.update + m.adding for m in more], run.layers)


def _line(at: tuple[int, int], found: list[float] | tuple[float, ...], layers: int) -> float:
    return found[0] + (found[1] - found[0]) * (layers - at[0]) / (at[1] - at[0])


def _shape(run: Run) -> Run:
    """What programs follow from. Buckets follow from the layers roughly: from the next larger of a few numbers."""
    return replace(
        run, source="", ref="", hardware="", device="", model="", step_s=None, memory_gib=None, device_gib=0.0,
        layers=next((count for count in _ABOUT if count >= run.layers), _ABOUT[-1]), accumulate=1, per_node=0,
        stack=replace(run.stack, name="", source="", compiled=False, recorded=False, start_us=0.0,
                      backward_start_us=0.0, flash_attention=2),
    )  # fmt: skip


@cache
def _microseconds(shape: Run, hardware: ws.Hardware, layers: int, stack: ws.Stack) -> Microseconds:
    local = _program(shape, hardware, layers, TIMED)
    clock = steady_start(local, priced(local, hardware, stack=stack))
    update = 0.0
    for node in local.graph.nodes:
        if node.op == "call_function":
            before = clock.now
            clock.run(node)
            update += clock.now - before if phase(node) == "update" else 0.0
    gradients = sum(given.meta.size_bytes for given in local.inputs if given.role is Role.STATE) / 2
    return Microseconds(clock.now, update, hardware.bytes_us(3 * gradients))


@cache
def _peaks(shape: Run, hardware: ws.Hardware, layers: int) -> tuple[float, ...]:
    """Bytes at the peak of each phase."""
    local = _program(shape, hardware, layers, HELD)
    found: dict[str, float] = dict.fromkeys(("forward", "backward", "update"), 0.0)
    calls = (node for node in local.graph.nodes if node.op == "call_function")
    for node, size in zip(calls, bytes_held(local), strict=True):
        found[phase(node)] = max(found[phase(node)], size)
    return tuple(found.values())


def _program(shape: Run, hardware: ws.Hardware, layers: int, pair: tuple[int, int]) -> ws.LocalGraph:
    """The program of one rank, with the buckets of the whole model."""
    one = replace(shape, layers=0)
    few, more = (vars(collective_traffic(_planned(one, hardware, count))).values() for count in pair)
    whole = CollectiveTraffic(*(round(_line(pair, two, shape.layers)) for two in zip(few, more, strict=True)))
    several = resized(passes(hardware, shape.stack), whole=whole, may_coalesce=not shape.stack.copies)
    return ws.run_passes(_planned(one, hardware, layers), several)


def passes(hardware: ws.Hardware, stack: ws.Stack) -> list[Pass]:
    """The pipeline without what a stack lacks: an update in parts, and overlap."""
    lacks = (SplitOptimizer, *(() if stack.overlaps else (Overlap, SinkWaits)))
    return [one for one in ws.pipeline(hardware) if not isinstance(one, lacks)]


@cache
def _planned(run: Run, hardware: ws.Hardware, layers: int) -> ws.LocalGraph:
    graph = _captured(replace(run, replicate=1, shard=1, tp=1, style="", sequence=False), layers)
    made = model.strategies(run)
    plan = ws.plan(graph, model.mesh(run), made or ws.DataParallel("replicate"), hardware=hardware)
    return ws.partition(graph, plan)


@cache
def _captured(run: Run, layers: int) -> ws.TrainGraph:
    step, *given = model.build(run, layers)
    half = replace(HALF, reduce=torch.bfloat16) if run.pure else HALF
    options = ws.CaptureOptions(mixed_precision=half, float8=ws.Float8() if run.eight else None)
    return ws.capture(step, *given, options=options)
