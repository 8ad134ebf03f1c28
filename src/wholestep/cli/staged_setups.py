"""Pipelines on the command line: simulated from few layers of a model of `--hf`, and as a whole for a function's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import wholestep as ws
from wholestep.cost.stage_costs import BlockPrices
from wholestep.cost.staged import StagedStep
from wholestep.errors import WholestepError, first_line
from wholestep.plan.strategies import compose
from wholestep.plan.strategy import Strategy
from wholestep.planner.candidates import batches
from wholestep.planner.staged_plan import ShortPipelines, StagedSetup, costs_of_staged, staged
from wholestep.report.compare import PlanRow
from wholestep.report.figures import Figures

from . import planning
from .hf import ModelSpec, build
from .planning import PlanRequest
from .screen import Screen
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
    prices: dict[str, Any]

    def __post_init__(self) -> None:
        kind = self.asked.options.recomputes()
        if kind == "auto":
            refuse("--recompute auto with an axis pp: needed none, selective or full")
        if self.spec is None and kind != "none":
            refuse(f"--recompute {kind} with MODEL and an axis pp: needed activation checkpointing in its modules")
        self.graph: ws.TrainGraph | None = None
        if self.spec is not None:
            layers = getattr(self.asked.target.args[0].config, "num_hidden_layers", None)
            if not isinstance(layers, int):
                refuse(f"{self.spec.config} has no num_hidden_layers: needed with an axis pp")
            self.spec = replace(self.spec, micro_batches=1, recompute=kind)
            self.short = ShortPipelines(self._capture, layers, self.asked.hardware)

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
        prices, setup = BlockPrices(hardware, mesh, **self.prices), StagedSetup(mesh, several)
        with self.shown.stage("plan and simulate stages"):
            if self.spec is not None:
                return self.short.step(setup, self.spec.batch, prices=prices)
            self.graph = self.graph or planning.captured(self.shown, self.asked)
            local = ws.partition(self.graph, ws.plan(self.graph, mesh, several, hardware=hardware))
            return staged(local, prices, setup.pipeline.schedule)

    def figures(self, made: StagedStep, strategies: Sequence[Strategy]) -> Figures:
        """Of a simulated step; the batch of a function of the user's is that of all its pieces."""
        mesh, several = ws.Mesh(self.asked.mesh), compose(list(strategies))
        pieces = made.pieces if self.spec is not None else 1
        return self.asked.figures(costs_of_staged(made), mesh, pieces * batches(several, mesh))

    def simulated(self) -> tuple[StagedStep, Figures]:
        """The step of the request."""
        strategies = self.asked.strategies
        made = self.step(strategies)
        return made, self.figures(made, strategies)

    def compared(self) -> list[PlanRow]:
        """A row for each style and order, the fastest first; of styles and orders that the user names, these alone."""
        options, rows = self.asked.options, list[PlanRow]()
        styles = STYLES if options.style is None else (options.style.value,)
        orders = ORDERS if options.schedule is None else (options.schedule.value,)
        for strategies, name in self._templates(styles, orders):
            try:
                made = self.step(strategies)
            except WholestepError as error:
                rows.append(PlanRow(name, 1, None, first_line(error)))
                continue
            figures = self.figures(made, strategies)
            rows.append(
                PlanRow(name, made.pieces * batches(compose(strategies), ws.Mesh(self.asked.mesh)), figures.costs)
            )
        return sorted(rows, key=lambda row: row.batch_s)

    def _templates(self, styles: Sequence[Any], orders: Sequence[Any]) -> list[tuple[list[Strategy], str]]:
        found: list[tuple[list[Strategy], str]] = []
        given = self.asked.strategies
        data = any(isinstance(one, ws.DataParallel) for one in given)
        for style in styles if data else ("",):
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


def summary(made: StagedStep, asked: PlanRequest) -> str:
    """The stages of a step as text."""
    pipeline = asked.pipeline
    assert pipeline is not None, "a request with stages"
    chunks = f", {pipeline.chunks_of_rank} on each rank" if pipeline.chunks_of_rank > 1 else ""
    order = pipeline.schedule if made.order == pipeline.schedule else f"{pipeline.schedule}: {made.order}"
    head = f"{len(made.stages) * pipeline.chunks_of_rank} stages{chunks}, {order}, {made.pieces} micro-batches"
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
