"""`wholestep simulate --seq 2048,4096,8192`: one step at several sizes, captured once with sizes as symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import wholestep as ws
from wholestep.capture.capture import Capture, capture_step, find_state
from wholestep.graph.sizes_in_graph import instantiated
from wholestep.graph.text import human, seconds, table
from wholestep.report.figures import Figures

from . import planning
from .hf import with_sizes
from .planning import PlanRequest
from .screen import Screen
from .target import Target

_TOKENS = "batch['tokens']"  # how the batches of `hf.train_step` are called
_WORTH = 2  # sizes that are still to come: a capture with symbols takes longer than one for a size
Simulate = Callable[..., tuple[ws.Timeline, Figures]]


@dataclass(frozen=True)
class SizeRow:
    """The step for a batch of `batch` sequences of `seq` tokens."""

    batch: int
    seq: int
    made: ws.Timeline
    figures: Figures


def simulated(
    shown: Screen, asked: PlanRequest, batches: Sequence[int], lengths: Sequence[int] | None, simulate: Simulate
) -> list[SizeRow]:
    """The step at each size: `simulate` takes a request and its graph."""
    (longest,) = {tokens.shape[1] for tokens in asked.target.args[2]["tokens"]}
    sizes = list(product(batches, lengths or (longest,)))
    steps, rows = _Steps(sizes), list[SizeRow]()
    for batch, seq in sizes:
        at = replace(asked, target=with_sizes(asked.target, batch, seq))
        options = at.options.capture_options(at.target, at.hardware)
        with shown.stage(f"step of batch {batch}, seq {seq}") as details:
            graph = planning.of_few_layers(at.target, at.hardware, partial(steps.of, options, (batch, seq)))
            details.append(steps.how)
        rows.append(SizeRow(batch, seq, *simulate(at, graph=graph)))
    for why in steps.whys():
        shown.note(f"each size is captured: {why}")
    return rows


@dataclass
class _Steps:
    """A step as a graph, for each of `sizes` and for several numbers of layers; `how` the last one was made."""

    sizes: Sequence[tuple[int, int]]
    known: dict[str, _Graphs] = field(default_factory=dict[str, "_Graphs"])
    how: str = ""

    def of(self, options: ws.CaptureOptions, size: tuple[int, int], target: Target) -> ws.TrainGraph:
        """The graph for a size, which `target` has."""
        graphs = self.known.setdefault(target.name, _Graphs(self.sizes))
        known, tried = len(graphs.captured), graphs.tried
        graph = graphs.of(target, options, size)
        captured = "captured" if len(graphs.captured) > known else ""
        self.how = captured or ("filled in" if tried else "captured for all sizes, filled in")
        return graph

    def whys(self) -> set[str]:
        """Why no graph has symbols."""
        return {graphs.why for graphs in self.known.values() if graphs.why}


@dataclass
class _Graphs:
    """A step as a graph, for each of `sizes`. With symbols it is, for a size that was captured, to the letter what was
    captured; else each size is captured, and `why` says why.
    """

    sizes: Sequence[tuple[int, int]]
    symbolic: Capture | None = None
    captured: dict[tuple[int, int], ws.TrainGraph] = field(default_factory=dict[tuple[int, int], ws.TrainGraph])
    why: str = ""
    done: int = 0
    tried: bool = False

    def of(self, target: Target, options: ws.CaptureOptions, size: tuple[int, int]) -> ws.TrainGraph:
        """The graph for a size, which `target` has."""
        left, self.done = len(self.sizes) - self.done, self.done + 1
        against = next(filter(self._has_no_one, self.captured), None)
        if left >= _WORTH and not self.tried and against is not None and self._has_no_one(size):
            self.tried = True
            self.symbolic = self._with_symbols(target, options, against)
        if self.symbolic is not None and (sizes := _sizes(self.symbolic, *size)) is not None:
            return instantiated(self.symbolic.graph, sizes)
        self.captured[size] = ws.capture(target.step, *target.args, options=options, **target.kwargs)
        return self.captured[size]

    @property
    def _vary(self) -> tuple[int, ...]:
        """The dims in which sizes differ."""
        return tuple(dim for dim, found in enumerate(zip(*self.sizes, strict=True)) if len(set(found)) > 1)

    def _has_no_one(self, size: tuple[int, int]) -> bool:
        """Whether symbols apply to a size: torch treats 1 apart."""
        return all(size[dim] > 1 for dim in self._vary)

    def _with_symbols(self, target: Target, options: ws.CaptureOptions, against: tuple[int, int]) -> Capture | None:
        """The step for all sizes; None where that is not, for one of them, what was captured."""
        names = find_state(target.step, target.args, target.kwargs, {})[-1]
        dims = {name: self._vary for name in names if name.startswith(_TOKENS)}
        self.why = "another graph is captured with symbols"
        try:
            made = capture_step(target.step, target.args, target.kwargs, options, dynamic=dims)
            sizes = _sizes(made, *against)
            if sizes is not None and str(instantiated(made.graph, sizes)) == str(self.captured[against]):
                self.why = ""
                return made
        except ws.WholestepError as error:
            self.why = error.found.splitlines()[0]
        return None


def _sizes(made: Capture, batch: int, seq: int) -> dict[str, int] | None:
    """The sizes of the symbols of a capture for such a batch; None where it does not apply to it."""
    assert made.symbols is not None, "captured with symbols"
    places = made.symbols.record.dims
    for given in made.graph.inputs:
        for dim, size in enumerate((batch, seq) if given.name.startswith(_TOKENS) else ()):
            if (given.name, dim) not in places.values() and int(given.meta.shape[dim]) != size:
                return None
    sizes = {symbol: (batch, seq)[dim] for symbol, (_, dim) in places.items()}
    return sizes if made.symbols.hold(sizes) else None


def show(rows: Sequence[SizeRow]) -> str:
    """A table with a line for each size."""
    lines = [("batch", "seq", "step", "tokens/s", "MFU", "peak a GPU", "exposed")]
    for row in rows:
        costs = row.figures.costs
        rate = f"{row.figures.tokens_per_s:,.0f}" if row.figures.tokens_per_s else "-"
        room = row.figures.memory_bytes
        over = ", too much" if room is not None and costs.peak_bytes > room else ""
        cells = str(row.batch), str(row.seq), seconds(costs.step_s), rate, f"{costs.mfu:.1%}"
        lines.append((*cells, human(costs.peak_bytes) + over, seconds(costs.exposed_s)))
    return "\n".join(table(lines, left=()))
