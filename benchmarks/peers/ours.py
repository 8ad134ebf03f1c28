"""Our peers: the step as written, compiled; and what is simulated."""

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from wholestep.hardware.hardware_file import from_json, to_json
from wholestep.passes.schedule import Schedule
from wholestep.profiling.measure_hardware import measure_hardware

from . import models
from .job import Job
from .spec import Spec


def compiled(model: nn.Module, job: Job) -> tuple[ws.CompiledStep, str]:
    """The step for the mesh, and a note."""
    if job.spec.is_pipe:
        kind: Any = next(name for name in ("auto", "gpipe", "1f1b", "interleaved", "zero_bubble") if job.spec.has(name))
        placement = "v" if job.spec.has("v") else "loop"
        pipeline = ws.Pipeline(micro_batches=job.spec.pieces, schedule=kind, placement=placement)
        return ws.compile(models.train_step, parallel=pipeline, mesh=f"pp={job.world}"), ""
    if job.spec.shares_tokens:
        method: Any = job.spec.options[0][0]
        return ws.compile(models.train_step, parallel=ws.ContextParallel(method=method), mesh=f"cp={job.world}"), ""
    return ws.compile(models.train_step, **_options(job)), ""


def _options(job: Job) -> dict[str, Any]:
    spec = job.spec
    reshard = True if spec.has("reshard") else False if spec.has("keep") else None
    style: Any = spec.style
    return {
        "parallel": ws.DataParallel(style, reshard_after_forward=reshard),
        "mesh": f"dp={job.world}",
        "backend": "inductor" if spec.has("inductor") else "eager",
        "schedule": _schedule(spec),
    }


def _schedule(spec: Spec) -> Any:
    if spec.has("bucket"):
        size = int(spec.number("bucket", 25.0) * (1 << 20))
        return Schedule(bucket_bytes=size, first_bucket_bytes=size)
    if spec.has("unscheduled"):
        return None
    return "across_steps" if spec.has("across") else "auto"


def measured_hardware(step: ws.CompiledStep) -> str:
    """The machine as the ranks of a step that has run measure it now, as JSON."""
    assert step.world is not None, "the step has run"
    assert step.plan is not None, "the step has run"
    return json.dumps(to_json(measure_hardware(step.world, step.plan.stage_axis)))


def program_of(step: ws.CompiledStep) -> ws.LocalGraph:
    """The program of all stages of a step that has run, in the order in which it runs."""
    assert step.train_graph is not None, "the step has run"
    assert step.plan is not None, "the step has run"
    return ws.partition(step.train_graph, step.plan)


def program_alone(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> ws.LocalGraph:
    """The program of one rank that computes the step on this batch."""
    models.train_step(model, optimizer, x, y)  # now there is optimizer state, as in every later step
    graph = ws.capture(models.train_step, model, optimizer, x, y)
    return ws.partition(graph, ws.plan(graph, "dp=1"))


def simulated_ms(local: ws.LocalGraph, hardware: Sequence[str]) -> list[float]:
    """What the program takes by simulation on each of these machines, given as JSON."""
    return [ws.simulate(local, from_json(json.loads(text))).step_us / 1e3 for text in hardware]
