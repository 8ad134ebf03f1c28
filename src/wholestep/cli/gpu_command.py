"""The work of `wholestep plan --gpus`: how so many GPUs train a model, and sweeps over numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import wholestep as ws
from wholestep.errors import BudgetError, PlanError, WholestepError, shown
from wholestep.graph.graph import TrainGraph
from wholestep.graph.text import human, seconds, table
from wholestep.planner.gpu_search import ALL_KINDS, GpuResult, GpuSearch, Setup
from wholestep.planner.search_result import Watch
from wholestep.planner.short_steps import ShortSteps
from wholestep.planner.staged_plan import ShortPipelines
from wholestep.planner.staged_search import StagedSearch
from wholestep.report.figures import Figures
from wholestep.report.sweep_page import SweepPoint, write_sweep
from wholestep.units import parse_bytes

from .hf import ModelSpec, build
from .planning import capture
from .screen import Screen
from .shared_options import Recompute, Semantics, SharedOptions
from .target import hardware_of, refuse, write_output

_SHOWN = 5
_DOTS = "..."
SWEPT = ("gpus", "seq", "batch")


@dataclass(frozen=True)
class Sweep:
    """What a sweep changes, and to which values."""

    over: str
    values: tuple[int, ...]


def sweep_of(text: str) -> Sweep:
    """The sweep of `gpus=8,16,...,1024`: three dots continue the first two values by their ratio.

    Raises:
        PlanError: the text is malformed.
    """
    over, _, listed = text.partition("=")
    parts = [part.strip() for part in listed.split(",")]
    fault = PlanError(
        f"--sweep {shown(text)}", f"{'|'.join(SWEPT)}=numbers, as gpus=8,16,32 or gpus=8,16,...,1024",
        "correct it",
    )  # fmt: skip
    if over not in SWEPT or not all(part == _DOTS or re.fullmatch("[1-9][0-9]{0,8}", part) for part in parts):
        raise fault
    found: list[int] = []
    for at, part in enumerate(parts):
        if part != _DOTS:
            found.append(int(part))
            continue
        if len(found) < 2 or at + 2 != len(parts) or parts[-1] == _DOTS or found[-1] <= found[-2]:
            raise fault
        times, last = found[-1] / found[-2], int(parts[-1])
        while found[-1] * times < last:
            found.append(round(found[-1] * times))
    if len({*found}) != len(found) or len(found) > 64:
        raise fault
    return Sweep(over, tuple(found))


@dataclass
class GpuPlanner:
    """Searches for a model of `--hf` on the `machine` of `--hardware`; captures are shared by all numbers of GPUs."""

    screen: Screen
    spec: ModelSpec
    options: SharedOptions
    machine: str
    pipelines: bool = False

    def __post_init__(self) -> None:
        self.hardware = hardware_of(self.machine)
        with self.screen.stage("model") as details:
            self.model = build(self.spec)
            details.append(self.model.name)
        module = self.model.args[0]
        self.layers = int(module.config.num_hidden_layers)
        self.param_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        try:
            overlapped = self.options.async_tp
            self.tensor = ws.TensorParallel.of(
                module, axis=self.options.tp_axis, async_tp=cast(Any, overlapped and overlapped.value)
            )
        except PlanError as error:
            self.screen.note(f"without tensor parallelism: {error.found}")
            self.tensor = None
        memory = self.options.memory
        room = parse_bytes(memory, "--memory") if memory else self.hardware.memory_bytes
        if room is None:
            refuse("--gpus on measured hardware: needed --memory, as 80GiB, as it is not known")
        self.memory_bytes = room
        self.searches: dict[int, GpuSearch] = {}

    def _search(self, seq: int) -> GpuSearch:
        if seq not in self.searches:
            chosen = self.options.recompute
            kinds = ALL_KINDS if chosen in (None, Recompute.auto) else (self.options.recomputes(),)
            styles = None if self.options.style is None else (self.options.style.value,)
            steps = ShortSteps(partial(self._capture, seq), self.layers, self.hardware, self.options.software)
            self.searches[seq] = GpuSearch(
                steps, self.hardware, self.memory_bytes, self.tensor, self.param_bytes, kinds, styles
            )
        return self.searches[seq]

    def _capture(self, seq: int, batch: int, micro_batches: int, layers: int) -> TrainGraph:
        spec = replace(self.spec, seq=seq, batch=batch, micro_batches=micro_batches, layers=layers)
        target = build(spec)
        stage = f"capture {layers} layers, {micro_batches} x {batch} sequences of {seq}"
        return capture(self.screen, target, stage, self.options.capture_options(target, self.hardware))

    @property
    def given(self) -> str:
        """The options of the model and the hardware, for another command."""
        names = "layers", "dtype", "optimizer", "precision", "async_tp", "backend", "stack", "profile"
        asked = {name: getattr(self.options, name) for name in names} | {"hardware": self.machine}
        given = {name: getattr(value, "value", value) for name, value in asked.items() if value not in (None, "eager")}
        more = [f"--{name.replace('_', '-')} {value}" for name, value in given.items()]
        return " ".join([f"--hf {self.spec.config} --seq {self.seq}", *more])

    @property
    def seq(self) -> int:
        """Tokens in a sequence."""
        return int(self.model.args[2]["tokens"][0].shape[1])

    def run(self, gpus: int, seq: int, sequences: int) -> GpuResult:
        """The search for one number of GPUs; with `pipelines`, of them too."""
        search = self._search(seq)
        with self.screen.each(0) as watch:
            search.watch = watch
            if not self.pipelines:
                return search.run(gpus, sequences)
            staged, lost = self._staged(seq, watch).run(gpus, sequences)
            try:
                found = search.run(gpus, sequences)
            except BudgetError:
                if not staged:
                    raise
                found = GpuResult((), (), self.memory_bytes)
        best = sorted([*found.best, *staged], key=lambda one: one.costs.step_s if one.costs else 0.0)
        return GpuResult(tuple(best), (*found.lost, *lost), self.memory_bytes)

    def _staged(self, seq: int, watch: Watch) -> StagedSearch:
        kinds = self._search(seq).kinds
        short = {kind: ShortPipelines(partial(self._checkpointed, seq, kind), self.layers, self.hardware)
                 for kind in kinds}  # fmt: skip
        return StagedSearch(
            short.__getitem__, self.layers, self.hardware, self.memory_bytes, self.tensor, self.param_bytes, kinds,
            self.options.software, watch,
        )  # fmt: skip

    def _checkpointed(self, seq: int, kind: str, batch: int, micro_batches: int, layers: int) -> TrainGraph:
        spec = replace(self.spec, seq=seq, batch=batch, micro_batches=1, layers=layers, recompute=kind)
        target = build(spec)
        stage = f"capture {layers} layers, {batch} sequences of {seq}, recompute {kind}"
        return capture(self.screen, target, stage, self.options.capture_options(target, self.hardware))

    def figures(self, setup: Setup, seq: int, sequences: int) -> Figures:
        """Of a setup that was simulated."""
        assert setup.costs is not None, "it was simulated"
        return Figures(
            setup.costs, self.hardware, setup.mesh.size, float(seq * sequences), self.memory_bytes,
            self.options.wanted_tokens, self.options.gpu_hour,
        )  # fmt: skip


def check(options: SharedOptions, gpus: int | None, global_batch: int | None, sweep: Sweep | None) -> None:
    """Refuse what the search decides itself, and what it cannot decide."""
    if options.hf is None:
        refuse("--gpus without --hf: a step with other batches and micro-batches has to be built")
    if gpus is None and (sweep is None or sweep.over != "gpus"):
        refuse("--global-batch and --sweep need --gpus N, or --sweep gpus=...")
    if global_batch is None and (sweep is None or sweep.over != "batch"):
        refuse("--gpus needs --global-batch N, the sequences in a step")
    for name in ("batch", "micro_batches", "tp"):
        if getattr(options, name) is not None:
            refuse(f"--{name.replace('_', '-')} with --gpus: the search chooses that")
    if options.semantics is not Semantics.per_rank:
        refuse("--semantics global with --gpus: only per_rank has a batch for each rank")


def search(screen: Screen, planner: GpuPlanner, gpus: int, global_batch: int, out: Path | None) -> str:
    """The best setups for a number of GPUs as text; written to `out` as JSON."""
    found = planner.run(gpus, planner.seq, global_batch)
    best = [planner.figures(setup, planner.seq, global_batch) for setup in found.best[:_SHOWN]]
    body = {
        "format": "wholestep search", "version": 1, "model": planner.model.name, "hardware": planner.hardware.name,
        "setups": [_as_json(setup) | {"figures": one.as_json()} for setup, one in zip(found.best, best, strict=False)],
        "lost": [_as_json(setup) | {"why": setup.why} for setup in found.lost],
    }  # fmt: skip
    write_output(screen, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))
    return _report(planner, found, best, gpus, global_batch)


def _as_json(setup: Setup) -> dict[str, Any]:
    return {
        "mesh": str(setup.mesh), "style": setup.name, "batch": setup.batch, "micro_batches": setup.micro_batches,
        "recompute": setup.recompute, "schedule": setup.order or None, "chunks": setup.chunks,
    }  # fmt: skip


def _report(planner: GpuPlanner, found: GpuResult, best: Sequence[Figures], gpus: int, global_batch: int) -> str:
    head = ("mesh", "style", "micro-batches", "recompute", "step", "tokens/s/GPU", "MFU", "exposed", "peak")
    cells = [head, *(_cells(*row) for row in zip(found.best, best, strict=False))]
    first = found.best[0]
    slower = [
        f"{setup}: {seconds(setup.costs.step_s)}, {_slower(setup, first)}"
        for setup in found.best[1:] if setup.costs is not None
    ]  # fmt: skip
    lines = [
        f"{planner.model.name} on {gpus} GPUs, {global_batch} sequences of {planner.seq} tokens in a step, "
        f"{planner.hardware}{f', {planner.options.stack}' if planner.options.stack else ''}",
        "",
        *table(cells, left=(0, 1, 2, 3)),
        "",
        f"the first: {first}",
        str(best[0]),
        "",
        f"to plan it: wholestep plan {planner.given} {_options(first)}",
        "",
        "why the others lost",
        *slower,
        *_grouped(found.lost),
        "",
        "times and bytes are extrapolated from steps with few of the layers, and with one and two micro-batches",
    ]
    return "\n".join(lines)


def _cells(setup: Setup, figures: Figures) -> tuple[str, ...]:
    costs = figures.costs
    rate = figures.tokens_per_s_per_gpu or 0.0
    return (
        str(setup.mesh), setup.name, f"{setup.micro_batches} x {setup.batch}", setup.recompute, seconds(costs.step_s),
        f"{rate:,.0f}", f"{costs.mfu:.1%}", f"{costs.exposed_s / costs.step_s:.0%}", human(costs.peak_bytes),
    )  # fmt: skip


def _slower(setup: Setup, first: Setup) -> str:
    """By how much it is slower, and on what most of that time goes."""
    assert setup.costs is not None, "both were simulated"
    assert first.costs is not None, "both were simulated"
    more = setup.costs.step_s - first.costs.step_s
    waits = setup.costs.exposed_s - first.costs.exposed_s
    longer = "waits for collectives" if waits >= more / 2 else "computes"
    return f"{setup.costs.step_s / first.costs.step_s - 1:.1%} more: {longer} longer"


def _grouped(lost: Sequence[Setup]) -> list[str]:
    """A line for each reason, with the setups that share it."""
    rows: dict[str, list[str]] = {}
    for setup in lost:
        rows.setdefault(setup.why, []).append(str(setup))
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}" for why, names in rows.items()
    ]


def _options(setup: Setup) -> str:
    style = setup.template.key.style if setup.template.key else None
    parts = [f"--mesh {setup.mesh}", f"--style {style}" if style else "", f"--batch {setup.batch}"]
    parts += [f"--micro-batches {setup.micro_batches}"] if setup.micro_batches > 1 else []
    parts += [f"--schedule {setup.order} --chunks {setup.chunks}"] if setup.order else []
    return " ".join([*filter(None, parts), f"--recompute {setup.recompute}"])


def swept(
    screen: Screen, planner: GpuPlanner, sweep: Sweep, gpus: int | None, global_batch: int | None,
    html: Path | None, out: Path | None,
) -> str:  # fmt: skip
    """The best setup for each value as a table; written as a page and as JSON. A value with none says why."""
    points = [_point(planner, sweep, value, gpus, global_batch) for value in sweep.values]
    title = f"{planner.model.name} on {planner.hardware.name}"
    write_output(screen, html, lambda path: write_sweep(path, title, sweep.over, points))
    body = {"format": "wholestep sweep", "version": 1, "over": sweep.over, "points": [one.as_json() for one in points]}
    write_output(screen, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))
    head = (
        sweep.over,
        "mesh",
        "style",
        "micro-batches",
        "recompute",
        "step",
        "tokens/s",
        "a GPU",
        "MFU",
        "exposed",
        "peak",
    )
    left = (1, 2, 3, 4)
    cells = [head, *(one.cells for one in points if one.figures is not None)]
    none = [f"{sweep.over}={one.value}: {one.why}" for one in points if one.figures is None]
    return "\n".join([title, "", *table(cells, left), *none])


def _point(planner: GpuPlanner, sweep: Sweep, value: int, gpus: int | None, global_batch: int | None) -> SweepPoint:
    ranks = value if sweep.over == "gpus" else gpus or 0
    seq = value if sweep.over == "seq" else planner.seq
    sequences = value if sweep.over == "batch" else global_batch or 0
    try:
        setup = planner.run(ranks, seq, sequences).best[0]
    except WholestepError as error:
        return SweepPoint(value, why=error.found)
    return SweepPoint(value, setup, planner.figures(setup, seq, sequences))
