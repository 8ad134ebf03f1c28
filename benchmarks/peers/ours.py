"""Our peers: the step as written, compiled; and what is simulated."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
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
    options = _options(job)
    note = _prepare(model, job, options) if job.spec.has("tuned") or job.spec.has("disturbed") else ""
    return ws.compile(models.train_step, **options), note


def _options(job: Job) -> dict[str, Any]:
    spec = job.spec
    reshard = True if spec.has("reshard") else False if spec.has("keep") else None
    style: Any = spec.style
    return {
        "parallel": ws.DataParallel(style, reshard_after_forward=reshard),
        "mesh": f"dp={job.world}",
        "backend": "inductor" if spec.has("inductor") else "eager",
        "schedule": _schedule(spec),
        "tune": "auto" if spec.has("tuned") else "off",
    }


def _schedule(spec: Spec) -> Any:
    if spec.has("bucket"):
        size = int(spec.number("bucket", 25.0) * (1 << 20))
        return Schedule(bucket_bytes=size, first_bucket_bytes=size)
    if spec.has("unscheduled"):
        return None
    return "across_steps" if spec.has("across") else "auto"


def _prepare(model: nn.Module, job: Job, options: dict[str, Any]) -> str:
    """Make the first calls with a copy of the model, and let the step that counts read what they found (`cache`)."""
    name = "".join(c if c.isalnum() else "-" for c in str(job.spec))
    options["cache"] = Path(job.corpus).with_name(f"choices-{name}-{job.rank}")
    shutil.rmtree(options["cache"], ignore_errors=True)  # of a run before
    trial, step = copy.deepcopy(model), ws.compile(models.train_step, **options)
    optimizer, (x, y) = models.adamw(trial, job.config), models.zeros(job)
    burns = job.spec.has("disturbed") and job.rank == 0
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) if burns else nullcontext() as burning:
        step(trial, optimizer, x, y)
        if burning is not None:
            burning.kill()
    while job.spec.has("tuned") and step.tuning.chosen is None and not step.tuning.why_not:
        step(trial, optimizer, x, y)
    return str(step.tuning) if job.spec.has("tuned") else ""


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
