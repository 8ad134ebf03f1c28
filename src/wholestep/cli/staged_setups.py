"""Pipelines on the command line: simulated from few layers of a model of `--hf`, and as a whole for a function's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import wholestep as ws
from wholestep.cost.stage_costs import BlockPrices
from wholestep.cost.staged import StagedStep
from wholestep.errors import WholestepError, first_line
from wholestep.plan.strategies import compose
from wholestep.plan.strategy import Strategy
from wholestep.planner.bounds import Costs
from wholestep.planner.candidates import batches
from wholestep.planner.fit_stages import fit_stages
from wholestep.planner.search_result import Candidate, Status
from wholestep.planner.staged_plan import ShortPipelines, StagedSetup, costs_of_staged, staged
from wholestep.report.compare import as_json as as_rows
from wholestep.report.compare import show
from wholestep.report.figures import Figures

from . import planning
from .hf import ModelSpec, build
from .planning import PlanRequest
from .screen import Screen
from .shared_options import SharedOptions
from .target import refuse

STYLES = ("replicate", "zero1", "zero2")  # of a comparison: the others gather parameters for each piece
ORDERS: tuple[Any, ...] = ("1f1b", "interleaved", "zero_bubble", "auto")


@dataclass
class StagedSetups:
    """Pipelines for a request. `spec`: of a model of `--hf`, for a micro-batch of a rank; it is captured with few
    layers. None: the step of the request has the whole batch, and is captured as a whole.
    """

    shown: Screen
    request: PlanRequest
    spec: ModelSpec | None

    def __post_init__(self) -> None:
        kind = self.request.options.recomputes()
        if kind == "auto" and self.spec is not None:
            refuse("--recompute auto with --hf and an axis pp: needed none, selective or full, or plan --auto")
        if self.spec is None and kind not in ("none", "auto"):
            refuse(f"--recompute {kind} with MODEL and an axis pp: needed activation checkpointing in its modules")
        self.graph: ws.TrainGraph | None = None
        if self.spec is not None:
            layers = getattr(self.request.target.args[0].config, "num_hidden_layers", None)
            if not isinstance(layers, int):
                refuse(f"{self.spec.config} has no num_hidden_layers: needed with an axis pp")
            self.spec = replace(self.spec, micro_batches=1, recompute=kind)
            self.short = ShortPipelines(self._capture, layers, self.request.hardware, self.request.target.args[0])

    def _capture(self, batch: int, layers: int) -> ws.TrainGraph:
        assert self.spec is not None, "a model of --hf"
        target = build(replace(self.spec, batch=batch, layers=layers))
        stage = f"capture {layers} layers, {batch} sequences"
        return planning.capture(
            self.shown, target, stage, self.request.options.capture_options(target, self.request.hardware)
        )

    def step(self, strategies: Sequence[Strategy]) -> StagedStep:
        """The simulated step with `strategies`.

        Raises:
            PlanError: it cannot be planned.
        """
        mesh, several, hardware = ws.Mesh(self.request.mesh), compose(list(strategies)), self.request.hardware
        prices, setup = BlockPrices(hardware, mesh, self.request.options.software), StagedSetup(mesh, several)
        with self.shown.stage("plan and simulate stages"):
            if self.spec is not None:
                return self.short.step(setup, self.spec.batch, prices=prices)
            self.graph = self.graph or planning.captured(self.shown, self.request)
            local = ws.partition(self.graph, ws.plan(self.graph, mesh, several, hardware=hardware))
            if (room := self.request.fitted_bytes) is not None:
                return fit_stages(local, room, prices).step(prices)
            return staged(local, prices, setup.pipeline.schedule)

    def _batches(self, step: StagedStep, strategies: Sequence[Strategy]) -> int:
        """Captured batches in a step: with `spec` one for each micro-batch, else the batch is that of all pieces."""
        pieces = step.pieces if self.spec is not None else 1
        return pieces * batches(compose(list(strategies)), ws.Mesh(self.request.mesh))

    def planned(self) -> planning.Report:
        """The plan of the step with all layers and stages, and where the user named the hardware, its figures."""
        request = self.request
        graph = planning.captured(self.shown, request)
        if self.spec is None:
            self.graph = graph
        with self.shown.stage("plan"):
            plan = ws.plan(graph, request.mesh, request.strategies, hardware=request.planned_on)
        text = "\n".join([str(plan), *planning.asked_of(self.shown, plan, graph, request)])
        if request.planned_on is not None:
            step, figures = self.simulated()
            text += f"\n\non {request.on}\n{summary(step, request)}\n{figures}"
        return planning.Report(text, request.target, graph, plan)

    def simulated(self) -> tuple[StagedStep, Figures]:
        """The step of the request."""
        strategies = self.request.strategies
        step = self.step(strategies)
        return step, self._figures(costs_of_staged(step), self._batches(step, strategies))

    def _figures(self, costs: Costs, count: int) -> Figures:
        return replace(self.request.figures(costs, ws.Mesh(self.request.mesh), 1), step_tokens=self._tokens(count))

    def _tokens(self, count: int) -> float | None:
        """Tokens in so many batches of a rank."""
        if self.spec is None:
            return None if self.request.batch_tokens is None else self.request.batch_tokens * count
        return float(self.spec.batch * self.request.target.args[2]["tokens"][0].shape[1] * count)

    def compared(self) -> planning.Report:
        """Styles and orders as a table, and the figures of the fastest."""
        request, on = self.request, ws.Mesh(self.request.mesh)
        rows, name = self.rows(), request.target.name
        text = f"{name} on mesh {on}\n{show(rows, 'style, order', batch_tokens=self._tokens(1), ranks=on.size)}"
        if rows[0].costs is not None:
            text += f"\n\n{rows[0].name} on {request.on}\n{self._figures(rows[0].costs, rows[0].batches)}"
        table = json.dumps(as_rows(rows, on, name, request.hardware), indent=1) + "\n"
        return planning.Report(text, request.target, None, None, rows, table)

    def rows(self) -> list[Candidate]:
        """A row for each style and order, the fastest first; of an order that the user names, for that alone."""
        schedule, rows, on = self.request.options.schedule, list[Candidate](), ws.Mesh(self.request.mesh)
        for strategies, name in self._templates(ORDERS if schedule is None else (schedule.value,)):
            try:
                step = self.step(strategies)
            except WholestepError as error:
                rows.append(Candidate(name, on, None, status=Status.NO_PLAN, why=first_line(error)))
                continue
            rows.append(
                Candidate(name, on, None, batches=self._batches(step, strategies)).priced(costs_of_staged(step))
            )
        return sorted(rows, key=lambda row: row.batch_s)

    def _templates(self, orders: Sequence[Any]) -> list[tuple[list[Strategy], str]]:
        templates: list[tuple[list[Strategy], str]] = []
        strategies = self.request.strategies
        data = any(isinstance(part, ws.DataParallel) for part in strategies)
        for style in STYLES if data else ("",):
            for order in orders:
                several = [
                    replace(part, style=style) if isinstance(part, ws.DataParallel)
                    else replace(part, schedule=order, chunks=self._chunks(order)) if isinstance(part, ws.Pipeline)
                    else part for part in strategies
                ]  # fmt: skip
                templates.append((several, f"{style + ', ' if style else ''}{order}"))
        return templates

    def _chunks(self, order: str) -> int | None:
        """`--chunks` is for orders that take several."""
        return self.request.options.chunks if order in ("interleaved", "auto") else None


def whole_spec(spec: ModelSpec, options: SharedOptions, stages: int) -> ModelSpec:
    """The model with the batch of all pieces, of which a pipeline takes its parts."""
    pieces = options.pipeline(stages).micro_batches
    return replace(spec, batch=spec.batch * pieces, micro_batches=1, recompute=options.recomputes())


def summary(step: StagedStep, request: PlanRequest) -> str:
    """The stages of a step as text."""
    pipeline = request.pipeline
    assert pipeline is not None, "a request with stages"
    order = pipeline.schedule if step.order == pipeline.schedule else f"{pipeline.schedule}: {step.order}"
    pieces = f"{step.pieces} micro-batch{'es' if step.pieces > 1 else ''}"
    chunks = pipeline.chunks_of_rank
    head = f"{len(step.stages) * chunks} stages{pipeline.on_each_rank(chunks)}, {order}, {pieces}"
    return f"{head}\n{step}"


def as_json(step: StagedStep) -> dict[str, Any]:
    """The numbers of the stages."""
    return {
        "order": step.order, "micro_batches": step.pieces, "bubble": step.bubble, "tried_us": dict(step.tried),
        "stages": [
            {"layers": stage.layers or None, "busy_us": stage.busy_us, "waited_us": stage.waited_us,
             "idle_us": stage.idle_us, "in_flight": stage.in_flight, "rest_bytes": stage.rest_bytes,
             "peak_bytes": stage.peak_bytes}
            for stage in step.stages
        ],
    }  # fmt: skip
