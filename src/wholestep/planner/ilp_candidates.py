"""Candidates from an integer program: layouts of all operations and the storage of each parameter, chosen together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar

from ..errors import WholestepError
from ..graph.folding.repeats import Repeats
from ..graph.graph import TrainGraph
from ..hardware.hardware import Hardware
from ..layout import AxisState, Layout
from ..mesh import Mesh
from ..plan.data_parallel import STORAGE_OPTIONS, DataParallel, PerParameterStorage, StorageOption
from ..plan.storage_styles import reduced_once
from ..plan.strategies import Strategies
from ..plan.strategy import Strategy
from ..plan.tensor_parallel import SolvedLayouts, TensorParallel
from ..tuning import TUNING
from .candidates import Template
from .ilp.build_problem import ProblemSpec, problem_spec
from .ilp.prices import Prices
from .ilp.solve import IlpResult, solve_layouts
from .search_result import INFINITE, Candidate, Status, Watch, unwatched

V = TypeVar("V")


@dataclass(frozen=True)
class IlpCandidates:
    """Solves for layouts along the axis of `tensor`, if given, and for the storage of each parameter over other axes.

    Args:
        styles: the styles that parameters may have; all if None.
        recomputes: activations may be recomputed, so that their bytes are not counted.
        rough: solve to a larger gap, and use symmetrized solutions only.
        symmetrize: makes equal layers of a solution equal. Unless `rough`, a candidate has both solutions: the
            symmetrized one is used where layers are folded.
    """

    graph: TrainGraph
    mesh: Mesh
    hardware: Hardware
    data: DataParallel
    tensor: TensorParallel | None = None
    styles: Sequence[str] | None = None
    budget_bytes: int | None = None
    placed: Mapping[str, Layout] | None = None
    recomputes: bool = False
    rough: bool = False
    symmetrize: Callable[[IlpResult], IlpResult] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Data-parallel axes."""
        return tuple(a for a in self.mesh.names if self.tensor is None or a != self.tensor.axis)

    @property
    def storages(self) -> tuple[StorageOption, ...]:
        """The storage options of parameters."""
        named = None if self.styles is None else {reduced_once(style) for style in self.styles}
        options = (s for s in STORAGE_OPTIONS if len(self.axes) > 1 or not s.kind.grouped)
        return tuple(s for s in options if named is None or s.style in named) if self.axes else ()

    def templates(self) -> list[Template]:
        """Distinct solutions as templates, the best by the model first."""
        title = f"solved for {self._over}"
        try:
            gap = TUNING.rough_gap if self.rough else TUNING.close_gap
            solutions = solve_layouts(self.graph, self._spec(), self._budgets(), gap)
        except WholestepError as error:
            return [Template(title, error)]
        solutions = list(map(self.symmetrize, solutions)) if self.symmetrize is not None and self.rough else solutions
        templates: list[Template] = []
        for number, solution in enumerate(self._distinct(solutions)):
            symmetrize = None if self.rough else self.symmetrize
            symmetric = self._strategies(symmetrize(solution)) if symmetrize is not None else None
            name = f"{title}, {number + 1}" if number else title
            templates.append(Template(name, self._strategies(solution), solved=solution, symmetric=symmetric))
        return templates

    def layouts(self) -> tuple[SolvedLayouts | None, SolvedLayouts | None]:
        """Layouts along the axis of `tensor` beside which any style may be used, and the symmetrized ones."""
        solutions = solve_layouts(self.graph, self._spec())
        if not solutions:
            return None, None
        return self._layouts(solutions[0]), self._layouts(self.symmetrize(solutions[0])) if self.symmetrize else None

    def _budgets(self) -> list[float | None]:
        if self.budget_bytes is None:
            return [None]
        parts = TUNING.solved_budgets[:1] if self.recomputes else TUNING.solved_budgets
        return [self.budget_bytes * part for part in parts]

    def _spec(self) -> ProblemSpec:
        if self.tensor is not None:
            beside = (replace(self.data, axis=self.axes),) if self.axes else ()
            tensor = replace(self.tensor, hardware=self.hardware)
            spec = problem_spec(tensor, Strategies((*beside, tensor)), self.graph, self.mesh, self.placed or {})
        else:
            ranks = prod(self.mesh.axis_size(a) for a in self.axes)
            share = 1 / ranks if self.data.semantics == "global" else 1.0
            axes = tuple(a for a in self.axes if self.mesh.axis_size(a) > 1)
            spec = ProblemSpec(Prices(self.hardware, self.mesh, "", share), axes, rest=dict[str, AxisState]())
        return replace(spec, storages=self.storages, recomputes=self.recomputes)

    def _distinct(self, solutions: Sequence[IlpResult]) -> Iterator[IlpResult]:
        seen: list[tuple[object, ...]] = []
        for solution in solutions:
            mark = (solution.params, solution.storage, solution.pins)
            if mark not in seen:
                seen.append(mark)
                yield solution

    @property
    def _over(self) -> str:
        if self.tensor is None:
            return f"each parameter on {','.join(self.axes)}"
        return f"each op on {self.tensor.axis}" + (f" and parameter on {','.join(self.axes)}" if self.axes else "")

    def _strategies(self, solution: IlpResult) -> tuple[Strategy, ...]:
        parts: list[Strategy] = []
        if self.axes:
            data = replace(self.data, style="fully_shard", axis=self.axes, reshard_after_forward=False)
            parts.append(PerParameterStorage(**vars(data), storage=solution.storage, solution=str(solution)))
        if self.tensor is not None:
            parts.append(self._layouts(solution))
        return tuple(parts)

    def _layouts(self, solution: IlpResult) -> SolvedLayouts:
        assert self.tensor is not None, "only an axis that is solved for has layouts"
        return solution.layouts(self.tensor)


# -- equal layers ----------------------------------------------------------------------------------
@dataclass
class Symmetrizer:
    """Gives every equal layer the layouts of the layer in the middle. The first and the last layer may have had others,
    as their neighbours differ; the loss is small for a deep step, and it is simulated.
    """

    graph: TrainGraph
    repeats: Repeats
    slots: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    middle: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        params = {node: graph_input.name for graph_input, node in self.graph.placeholders()}
        for node, (block, slot) in self.repeats.places.items():
            name = params.get(node, node.name)
            self.slots.setdefault(slot, []).append(name)
            if block == self.repeats.count // 2:
                self.middle[name] = slot
        self.inside = {name for names in self.slots.values() for name in names}

    def __call__(self, solution: IlpResult) -> IlpResult:
        """The symmetrized solution."""
        pins, expanded = solution.pins, tuple(self._names(solution.pins.decomposed))
        pins = replace(
            pins, results=self._spread(pins.results), op_strategies=self._spread(pins.op_strategies),
            decomposed=expanded,
        )  # fmt: skip
        params, storage = self._spread(solution.params), self._spread(solution.storage)
        return replace(solution, pins=pins, params=params, storage=storage)

    def _spread(self, by_name: Mapping[str, V]) -> dict[str, V]:
        out: dict[str, V] = {}
        for name, value in by_name.items():
            out |= dict.fromkeys(self._names([name]), value)
        return out

    def _names(self, names: Iterable[str]) -> dict[str, None]:
        """The names outside of equal layers, and the equals of the names in the middle layer."""
        out: dict[str, None] = {}
        for name in names:
            base, dashes, part = (name, "", "") if name in self.inside else name.partition("__")
            if base in self.middle:
                out |= dict.fromkeys(f"{equal}{dashes}{part}" for equal in self.slots[self.middle[base]])
            elif base not in self.inside:
                out[name] = None
        return out


# -- several meshes --------------------------------------------------------------------------------
@dataclass
class MeshSolver:
    """Solves on the `count` best meshes, once the outcomes of their templates are known.

    `programs` gives the program of a mesh; its second argument is true where activations may be recomputed: with
    `recompute`, and where no template fits the budget as it is.
    """

    programs: Callable[[Mesh, bool], IlpCandidates]
    count: int
    recompute: bool = True
    watch: Watch = unwatched
    solved: dict[Mesh, IlpResult] = field(default_factory=dict[Mesh, IlpResult])

    def __call__(self, rows: Sequence[Candidate]) -> list[tuple[Mesh, Template]]:
        """Further candidates, on the best meshes of `rows`."""
        candidates: list[tuple[Mesh, Template]] = []
        recomputes = self.recompute and not any(row.status in (Status.SLOWER, Status.BOUNDED) for row in rows)
        for mesh in best_meshes(rows, self.count):
            self.watch(f"solve for layouts on {mesh}")
            templates = self.programs(mesh, recomputes).templates()
            first = next((t.solved for t in templates if t.solved is not None), None)
            self.solved |= {mesh: first} if first is not None else {}
            candidates += [(mesh, template) for template in templates]
        return candidates

    def program(self, best: Mesh) -> IlpResult | None:
        """The program of the winner's mesh, or else of the most promising mesh."""
        return self.solved.get(best) or next(iter(self.solved.values()), None)


def best_meshes(rows: Sequence[Candidate], count: int) -> list[Mesh]:
    """The meshes with the shortest step for a batch, simulated or bounded; first those on which a candidate fits."""
    best: dict[Mesh, tuple[bool, float]] = {}
    for row in rows:
        if row.status in (Status.CHOSEN, Status.SLOWER, Status.BOUNDED, Status.OVER_AT_PEAK):
            key = row.status is Status.OVER_AT_PEAK, row.batch_s if row.batch_s < INFINITE else row.bound_s
            best[row.mesh] = min(best.get(row.mesh, key), key)
    return sorted(best, key=lambda mesh: best[mesh])[:count]
