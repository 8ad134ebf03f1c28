"""The work of `wholestep gpus`: how so many GPUs train a model, and sweeps over numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import wholestep as ws
from wholestep.cli.hf import ModelSpec, build
from wholestep.cli.planning import capture
from wholestep.cli.screen import Screen
from wholestep.cli.shared_options import Recompute, Semantics, SharedOptions
from wholestep.cli.staged_setups import as_json as staged_json
from wholestep.cli.target import hardware_of, refuse, write_output
from wholestep.errors import BudgetError, PlanError, WholestepError, shown
from wholestep.graph.graph import TrainGraph
from wholestep.graph.text import human, seconds, table
from wholestep.mesh import STAGES
from wholestep.planner.search_result import Watch
from wholestep.planner.staged_plan import ShortPipelines
from wholestep.report.figures import Figures
from wholestep.units import parse_bytes

from .gpu_search import ALL_KINDS, GpuResult, GpuSearch, Setup, first_fits, step_s
from .short_steps import ShortSteps
from .staged_search import StagedSearch
from .sweep_page import SweepPoint, write_sweep

_SHOWN = 5
_NEAREST = 6  # of each kind of reason
_LEGEND = (
    "micro-batches: in a step x sequences of a rank in each; exposed: waits for collectives; peak: of the fullest rank"
)
_OF_STAGES = "bubble: waits for other stages, of a rank on average"
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
    needed = f"{'|'.join(SWEPT)}=numbers, as gpus=8,16,32 or gpus=8,16,...,1024"
    fault = PlanError(f"--sweep {shown(text)}", needed, "correct it")
    if over not in SWEPT or not all(part == _DOTS or re.fullmatch("[1-9][0-9]{0,8}", part) for part in parts):
        raise fault
    values: list[int] = []
    for at, part in enumerate(parts):
        if part != _DOTS:
            values.append(int(part))
            continue
        if len(values) < 2 or at + 2 != len(parts) or parts[-1] == _DOTS or values[-1] <= values[-2]:
            raise fault
        times, last = values[-1] / values[-2], int(parts[-1])
        while values[-1] * times < last:
            values.append(round(values[-1] * times))
    if len({*values}) != len(values) or len(values) > 64:
        raise fault
    return Sweep(over, tuple(values))


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
            self.tensor = ws.TensorParallel.of(
                module, axis=self.options.tp_axis, async_tp=self.options.async_tp,
                reshard_after_forward=self.options.tp_regather,
            )  # fmt: skip
        except PlanError as error:
            self.screen.note(f"without tensor parallelism: {error.found}")
            self.tensor = None
        room = parse_bytes(memory, "--memory") if (memory := self.options.memory) else self.hardware.memory_bytes
        if room is None:
            refuse("measured hardware: needed --memory, as 80GiB, as it is not known")
        self.memory_bytes = room
        self.searches: dict[int, GpuSearch] = {}

    def _search(self, seq: int) -> GpuSearch:
        if seq not in self.searches:
            chosen = self.options.recompute
            kinds = ALL_KINDS if chosen in (None, Recompute.auto) else (self.options.recomputes(),)
            styles = None if self.options.style is None else (self.options.style.value,)
            model, capture = self.model.args[0], partial(self._capture, seq, "none")
            steps = ShortSteps(capture, self.layers, self.hardware, self.options.software, model)
            self.searches[seq] = GpuSearch(
                steps, self.hardware, self.memory_bytes, self.tensor, self.param_bytes, kinds, styles
            )
        return self.searches[seq]

    def _capture(self, seq: int, kind: str, batch: int, micro_batches: int, layers: int) -> TrainGraph:
        spec = replace(self.spec, seq=seq, batch=batch, micro_batches=micro_batches, layers=layers, recompute=kind)
        target, checkpoints = build(spec), f", recompute {kind}" if kind != "none" else ""
        stage = f"capture {layers} layers, {micro_batches} x {batch} sequences of {seq}{checkpoints}"
        return capture(self.screen, target, stage, self.options.capture_options(target, self.hardware))

    @property
    def flags(self) -> str:
        """The options of the model and the hardware, for another command."""
        names = "layers", "dtype", "optimizer", "precision", "backend", "stack", "profile"
        options = {name: getattr(self.options, name) for name in names} | {"hardware": self.machine}
        chosen = {name: getattr(v, "value", v) for name, v in options.items() if v not in (None, "eager")}
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in chosen.items()]
        flags += ["--async-tp"] * self.options.async_tp + ["--tp-regather"] * self.options.tp_regather
        return " ".join([f"--hf {self.spec.config} --seq {self.seq}", *flags])

    @property
    def seq(self) -> int:
        """Tokens in a sequence."""
        return int(self.model.args[2]["tokens"][0].shape[1])

    def run(self, gpus: int, seq: int, sequences: int) -> GpuResult:
        """The search for one number of GPUs; with `pipelines`, of them too."""
        search = self._search(seq)
        with self.screen.each(0) as watch:
            search.watch, staged, lost = watch, list[Setup](), list[Setup]()
            if self.pipelines:
                staged, lost = self._staged(seq, watch).run(gpus, sequences)
                watch("setups without stages")
            try:
                outcome = search.run(gpus, sequences)
            except BudgetError:
                if not staged:
                    raise
                outcome = GpuResult((), (), self.memory_bytes)
            best = tuple(sorted([*outcome.best, *staged], key=step_s))
            outcome = first_fits(GpuResult(best, (*outcome.lost, *lost), self.memory_bytes), search)
        if not outcome.best:
            raise search.nothing(gpus, outcome.lost)
        return outcome

    def _staged(self, seq: int, watch: Watch) -> StagedSearch:
        kinds = self._search(seq).kinds
        short = {kind: ShortPipelines(lambda batch, layers, kind=kind: self._capture(seq, kind, batch, 1, layers),
                                      self.layers, self.hardware, self.model.args[0])
                 for kind in kinds}  # fmt: skip
        return StagedSearch(
            short.__getitem__, self.layers, self.hardware, self.memory_bytes, self.tensor, self.param_bytes, kinds,
            self.options.software, watch,
        )  # fmt: skip

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
        refuse("no --hf: a step with other batches and micro-batches has to be built")
    if gpus is None and (sweep is None or sweep.over != "gpus"):
        refuse("no number of GPUs: needed one, or --sweep gpus=8,16,32")
    if global_batch is None and (sweep is None or sweep.over != "batch"):
        refuse("no --global-batch: needed the sequences in a step")
    whys = dict.fromkeys(("batch", "micro_batches", "tp"), "the search chooses that")
    whys |= dict.fromkeys(("cp", "tile_rows", "offload_saved"), "the search has none; `wholestep simulate` takes it")
    for name, why in whys.items():
        if getattr(options, name) != getattr(SharedOptions, name):
            refuse(f"--{name.replace('_', '-')}: {why}")
    if options.semantics is not Semantics.per_rank:
        refuse("--semantics global: only per_rank has a batch for each rank")


def search(screen: Screen, planner: GpuPlanner, gpus: int, global_batch: int, out: Path | None) -> str:
    """The best setups for a number of GPUs as text; written to `out` as JSON."""
    ranked = planner.run(gpus, planner.seq, global_batch)
    best = [planner.figures(setup, planner.seq, global_batch) for setup in ranked.best[:_SHOWN]]
    body = {
        "format": "wholestep search", "version": 1, "model": planner.model.name, "hardware": planner.hardware.name,
        "setups": [_as_json(setup) | {"figures": row.as_json()} for setup, row in zip(ranked.best, best, strict=False)],
        "lost": [_as_json(setup) | {"why": setup.why} for setup in ranked.lost],
    }  # fmt: skip
    write_output(screen, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))
    return _report(planner, ranked, best, gpus, global_batch)


def _as_json(setup: Setup) -> dict[str, Any]:
    return {
        "mesh": str(setup.mesh), "style": setup.name, "batch": setup.batch, "micro_batches": setup.micro_batches,
        "recompute": setup.recompute, "schedule": setup.order or None, "chunks": setup.chunks,
    } | ({"pipeline": staged_json(setup.staged)} if setup.staged else {})  # fmt: skip


def _report(planner: GpuPlanner, ranked: GpuResult, best: Sequence[Figures], gpus: int, global_batch: int) -> str:
    first, rows = ranked.best[0], list(zip(ranked.best, best, strict=False))
    staged = any(setup.order for setup, _ in rows)
    lines = [
        f"{planner.model.name} on {gpus} GPUs, {global_batch} sequences of {planner.seq} tokens in a step, "
        f"{planner.hardware}{f', {planner.options.stack}' if planner.options.stack else ''}",
        "",
        *table([head_of(staged), *(cells_of(*row, staged) for row in rows)], left=range(5 if staged else 3)),
        _LEGEND + (f"; {_OF_STAGES}" if staged else ""),
        "",
        f"the first: {first}",
        str(best[0]),
        *(["", f"its stages, by coordinate of {STAGES}", str(first.staged)] if first.staged else []),
        "",
        f"to plan it: wholestep plan {planner.flags} {_options(first)}",
        *([f"to draw its stages: wholestep simulate {planner.flags} {_options(first)} --trace step.json"]
          if first.order else []),
        "",
        f"why the others lost{' (--json has all)' if len(ranked.lost) > _NEAREST else ''}",
        *slower_than_first(ranked.best),
        *losers_of(ranked.lost),
        "",
        "times and bytes are extrapolated from steps with few of the layers, and with one and two micro-batches",
    ]  # fmt: skip
    return "\n".join(lines)


def head_of(staged: bool) -> tuple[str, ...]:
    """The columns of setups; `staged`: some are pipelines."""
    pipeline = ("schedule", "stages") if staged else ()
    waits = ("exposed", "bubble") if staged else ("exposed",)
    return "mesh", "style", *pipeline, "micro-batches", "recompute", "step", "tokens/s/GPU", "MFU", *waits, "peak"


def cells_of(setup: Setup, figures: Figures, staged: bool) -> tuple[str, ...]:
    """The row of a setup."""
    costs, rate = figures.costs, figures.tokens_per_s_per_gpu or 0.0
    ranks = setup.mesh.axis_size(STAGES) if setup.order else 1
    stages = f"{ranks * setup.chunks}{f' ({setup.chunks} a rank)' if setup.chunks > 1 else ''}"
    pipeline = (setup.order or "-", stages if setup.order else "-") if staged else ()
    waits = [f"{costs.exposed_s / costs.step_s:.0%}"]
    waits += [f"{costs.idle_s / costs.step_s:.0%}" if setup.order else "-"] if staged else []
    return (
        str(setup.mesh), setup.style or "-", *pipeline, f"{setup.micro_batches} x {setup.batch}", setup.recompute,
        seconds(costs.step_s), f"{rate:,.0f}", f"{costs.mfu:.1%}", *waits,
        human(costs.peak_bytes),
    )  # fmt: skip


def slower_than_first(best: Sequence[Setup]) -> list[str]:
    """By how much setups that were simulated are slower than the first, and on what most of that time goes."""
    lines, first = list[str](), best[0].costs
    assert first is not None, "it was simulated"
    for setup in best[1:]:
        assert setup.costs is not None, "it was simulated"
        exposed, idle = setup.costs.exposed_s - first.exposed_s, setup.costs.idle_s - first.idle_s
        computes = setup.costs.step_s - first.step_s - exposed - idle
        waits = {"waits for collectives": exposed, "waits for other stages": idle, "computes": computes}
        longer = max(waits, key=waits.__getitem__)
        slower = setup.costs.step_s / first.step_s - 1
        lines.append(f"{setup}: {seconds(setup.costs.step_s)}, {slower:.1%} more: {longer} longer")
    return lines


def losers_of(lost: Sequence[Setup]) -> list[str]:
    """Setups that were not simulated to their end, by kind of reason, the nearest first."""
    over = sorted((setup for setup in lost if setup.over_bytes), key=lambda setup: setup.over_bytes)
    none = [setup for setup in lost if setup.why.startswith("no plan")]
    slow = sorted((s for s in lost if s not in over and s not in none), key=lambda setup: setup.estimate_s)
    return [
        *_nearest("slower by an estimate or a bound", slow),
        *_nearest("over the memory", over),
        *_nearest("without a plan", none),
    ]


def _nearest(kind: str, lost: Sequence[Setup]) -> list[str]:
    """A line for each reason, with the setups that share it."""
    rows: dict[str, list[str]] = {}
    for setup in lost:
        rows.setdefault(setup.why, []).append(str(setup))
    shown = [
        f"  {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"
        for why, names in list(rows.items())[:_NEAREST]
    ]
    return [f"{len(lost)} {kind}{', the nearest' if len(rows) > _NEAREST else ''}", *shown] if lost else []


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
    body = {"format": "wholestep sweep", "version": 1, "over": sweep.over, "points": [p.as_json() for p in points]}
    write_output(screen, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))
    columns = "mesh", "style", "micro-batches", "recompute", "step", "tokens/s", "a GPU", "MFU", "exposed", "peak"
    head = sweep.over, *columns
    cells = [head, *(point.cells for point in points if point.figures is not None)]
    none = [f"{sweep.over}={point.value}: {point.why}" for point in points if point.figures is None]
    return "\n".join([title, "", *table(cells, left=(1, 2, 3, 4)), *none])


def _point(planner: GpuPlanner, sweep: Sweep, value: int, gpus: int | None, global_batch: int | None) -> SweepPoint:
    ranks = value if sweep.over == "gpus" else gpus or 0
    seq = value if sweep.over == "seq" else planner.seq
    sequences = value if sweep.over == "batch" else global_batch or 0
    try:
        setup = planner.run(ranks, seq, sequences).best[0]
    except WholestepError as error:
        return SweepPoint(value, why=error.found)
    return SweepPoint(value, setup, planner.figures(setup, seq, sequences))
