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
from wholestep.planner.staged_plan import ShortPipelines, StagedSetup, costs_of_staged, staged
from wholestep.report.compare import PlanRow, show
from wholestep.report.compare import as_json as as_rows
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
    asked: PlanRequest
    spec: ModelSpec | None

    def __post_init__(self) -> None:
        kind = self.asked.options.recomputes()
        if kind == "auto" and self.spec is not None:
            refuse("--recompute auto with --hf and an axis pp: needed none, selective or full, or plan --auto")
        if self.spec is None and kind not in ("none", "auto"):
            refuse(f"--recompute {kind} with MODEL and an axis pp: needed activation checkpointing in its modules")
        self.graph: ws.TrainGraph | None = None
        if self.spec is not None:
            layers = getattr(self.asked.target.args[0].config, "num_hidden_layers", None)
            if not isinstance(layers, int):
                refuse(f"{self.spec.config} has no num_hidden_layers: needed with an axis pp")
            self.spec = replace(self.spec, micro_batches=1, recompute=kind)
            self.short = ShortPipelines(self._capture, layers, self.asked.hardware, self.asked.target.args[0])

    def _capture(self, batch: int, micro_batches: int, layers: int) -> ws.TrainGraph:
        assert self.spec is not None, "a model of --hf"
        target = build(replace(self.spec, batch=batch, layers=layers))
        stage = f"capture {layers} layers, {batch} sequences"
        return planning.capture(
            self.shown, target, stage, self.asked.options.capture_options(target, self.asked.hardware)
        )

    def step(self, strategies: Sequence[Strategy]) -> StagedStep:
        """The simulated step with `strategies`.

        Raises:
            PlanError: it cannot be planned.
        """
        mesh, several, hardware = ws.Mesh(self.asked.mesh), compose(list(strategies)), self.asked.hardware
        prices, setup = BlockPrices(hardware, mesh, self.asked.options.software), StagedSetup(mesh, several)
        with self.shown.stage("plan and simulate stages"):
            if self.spec is not None:
                return self.short.step(setup, self.spec.batch, prices=prices)
            self.graph = self.graph or planning.captured(self.shown, self.asked)
            local = ws.partition(self.graph, ws.plan(self.graph, mesh, several, hardware=hardware))
            if (room := self.asked.fitted_bytes) is not None:
                return fit_stages(local, room, prices).step(prices)
            return staged(local, prices, setup.pipeline.schedule)

    def _batches(self, made: StagedStep, strategies: Sequence[Strategy]) -> int:
        """Captured batches in a step: with `spec` one for each micro-batch, else the batch is that of all pieces."""
        pieces = made.pieces if self.spec is not None else 1
        return pieces * batches(compose(list(strategies)), ws.Mesh(self.asked.mesh))

    def planned(self) -> planning.Done:
        """The plan of the step with all layers and stages, and where the user named the hardware, its figures."""
        asked = self.asked
        graph = planning.captured(self.shown, asked)
        if self.spec is None:
            self.graph = graph
        with self.shown.stage("plan"):
            made = ws.plan(graph, asked.mesh, asked.strategies, hardware=asked.planned_on)
        text = "\n".join([str(made), *planning.asked_of(self.shown, made, graph, asked)])
        if asked.planned_on is not None:
            step, figures = self.simulated()
            text += f"\n\non {asked.on}\n{summary(step, asked)}\n{figures}"
        return planning.Done(text, asked.target, graph, made)

    def simulated(self) -> tuple[StagedStep, Figures]:
        """The step of the request."""
        strategies = self.asked.strategies
        made = self.step(strategies)
        return made, self._figures(costs_of_staged(made), self._batches(made, strategies))

    def _figures(self, costs: Costs, count: int) -> Figures:
        return replace(self.asked.figures(costs, ws.Mesh(self.asked.mesh), 1), step_tokens=self._tokens(count))

    def _tokens(self, count: int) -> float | None:
        """Tokens in so many batches of a rank."""
        if self.spec is None:
            return None if self.asked.batch_tokens is None else self.asked.batch_tokens * count
        return float(self.spec.batch * self.asked.target.args[2]["tokens"][0].shape[1] * count)

    def compared(self) -> planning.Done:
        """Styles and orders as a table, and the figures of the fastest."""
        asked, on = self.asked, ws.Mesh(self.asked.mesh)
        rows, name = self.rows(), asked.target.name
        text = f"{name} on mesh {on}\n{show(rows, 'style, order', batch_tokens=self._tokens(1), ranks=on.size)}"
        if rows[0].costs is not None:
            text += f"\n\n{rows[0].name} on {asked.on}\n{self._figures(rows[0].costs, rows[0].batches)}"
        table = json.dumps(as_rows(rows, on, name, asked.hardware), indent=1) + "\n"
        return planning.Done(text, asked.target, None, None, rows, table)

    def rows(self) -> list[PlanRow]:
        """A row for each style and order, the fastest first; of an order that the user names, for that alone."""
        given, rows = self.asked.options.schedule, list[PlanRow]()
        for strategies, name in self._templates(ORDERS if given is None else (given.value,)):
            try:
                made = self.step(strategies)
            except WholestepError as error:
                rows.append(PlanRow(name, 1, None, first_line(error)))
                continue
            rows.append(PlanRow(name, self._batches(made, strategies), costs_of_staged(made)))
        return sorted(rows, key=lambda row: row.batch_s)

    def _templates(self, orders: Sequence[Any]) -> list[tuple[list[Strategy], str]]:
        found: list[tuple[list[Strategy], str]] = []
        given = self.asked.strategies
        data = any(isinstance(one, ws.DataParallel) for one in given)
        for style in STYLES if data else ("",):
            for order in orders:
                several = [
                    replace(one, style=style) if isinstance(one, ws.DataParallel)
                    else replace(one, schedule=order, chunks=self._chunks(order)) if isinstance(one, ws.Pipeline)
                    else one for one in given
                ]  # fmt: skip
                found.append((several, f"{style + ', ' if style else ''}{order}"))
        return found

    def _chunks(self, order: str) -> int | None:
        """`--chunks` is for orders that take several."""
        return self.asked.options.chunks if order in ("interleaved", "auto") else None


def whole_spec(spec: ModelSpec, options: SharedOptions, stages: int) -> ModelSpec:
    """The model with the batch of all pieces, of which a pipeline takes its parts."""
    pieces = options.pipeline(stages).micro_batches
    return replace(spec, batch=spec.batch * pieces, micro_batches=1, recompute=options.recomputes())


def summary(made: StagedStep, asked: PlanRequest) -> str:
    """The stages of a step as text."""
    pipeline = asked.pipeline
    assert pipeline is not None, "a request with stages"
    order = pipeline.schedule if made.order == pipeline.schedule else f"{pipeline.schedule}: {made.order}"
    pieces = f"{made.pieces} micro-batch{'es' if made.pieces > 1 else ''}"
    chunks = pipeline.chunks_of_rank
    head = f"{len(made.stages) * chunks} stages{pipeline.on_each_rank(chunks)}, {order}, {pieces}"
    return f"{head}\n{made}"


def as_json(made: StagedStep) -> dict[str, Any]:
    """The numbers of the stages."""
    return {
        "order": made.order, "micro_batches": made.pieces, "bubble": made.bubble, "tried_us": dict(made.tried),
        "stages": [
            {"layers": one.layers or None, "busy_us": one.busy_us, "waited_us": one.waited_us, "idle_us": one.idle_us,
             "in_flight": one.in_flight, "rest_bytes": one.rest_bytes, "peak_bytes": one.peak_bytes}
            for one in made.stages
        ],
    }  # fmt: skip
