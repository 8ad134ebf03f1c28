"""Several strategies as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar, cast

from ..errors import PlanError, shown
from ..graph.graph import Role, TrainGraph
from ..hardware.hardware import Hardware
from ..mesh import CONTEXT, STAGES, TIME, Mesh, refuse_time, with_pieces
from .context_parallel import ContextParallel
from .data_parallel import DataParallel
from .decision import Decision
from .expert_parallel import ExpertParallel
from .micro_batches import MicroBatches
from .own_strategies import axes_of
from .pipelines import Pipeline
from .rows_in_any_order import Apart
from .storage_styles import STYLES
from .strategy import BatchCut, Pins, Stored, Strategy
from .tensor_parallel import SolvedLayouts, TensorParallel

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S")


@dataclass(frozen=True)
class Strategies:
    """Strategies for different axes of one mesh; at most one is data parallel, and shards what the others leave."""

    parts: tuple[Strategy, ...]

    def of(self, *kinds: type[S]) -> list[S]:
        """The parts of some classes."""
        return [part for part in self.parts if isinstance(part, kinds)]

    def changed(self, kind: type[S], change: Callable[[S], Strategy]) -> Strategies:
        """These strategies with what `change` makes of those of a class."""
        return Strategies(tuple(change(part) if isinstance(part, kind) else part for part in self.parts))

    @property
    def data(self) -> DataParallel | None:
        """The data-parallel strategy."""
        return next(iter(self.of(DataParallel)), None)

    @property
    def options(self) -> DataParallel:
        """Options of the data-parallel strategy, or the defaults."""
        style = next((part.style for part in self.of(ContextParallel)), None)
        return self.data or DataParallel(style or "replicate", axis=(), semantics="global")

    def storage_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes along which parameters are sharded in storage only."""
        return tuple(axis for part in self.parts for axis in part.storage_axes(mesh))

    def given_whole(self, axis: str) -> bool:
        """True if each rank along an axis that cuts the batch is given all of it, and takes its part."""
        parts = [part for part in self.of(ContextParallel) if part.axis == axis]
        return (*parts, self.options)[0].inputs == "global"

    @property
    def micro_batches(self) -> MicroBatches | None:
        """The strategy that cuts the batch of a rank into pieces."""
        return next(iter(self.of(MicroBatches)), None)

    @property
    def pieces(self) -> int:
        """Number of pieces in which a rank goes through its batch. Raises PlanError while it is to be chosen."""
        pieces = self.micro_batches.pieces if self.micro_batches else 1
        if pieces == "auto":
            raise PlanError(
                'MicroBatches("auto") without a budget of memory',
                "a bound: the number of pieces is the one that fits",
                'give memory_bytes= to compile, plan by Auto(memory_bytes=..., micro_batches=MicroBatches("auto")),'
                " or give a number",
            )
        return pieces

    @property
    def has_open_pieces(self) -> bool:
        """True if the number of pieces is to be chosen."""
        return self.micro_batches is not None and self.micro_batches.pieces == "auto"

    @property
    def open_parts(self) -> list[TensorParallel]:
        """The parts whose layouts are to be solved for."""
        return [part for part in self.of(TensorParallel) if part.is_open]

    def with_open(self, change: Callable[[TensorParallel], Strategy]) -> Strategies:
        """These strategies with `open_parts` changed."""
        return self.changed(TensorParallel, lambda part: change(part) if part.is_open else part)

    def in_pieces(self, micro_batches: MicroBatches) -> Strategies:
        """These strategies with `micro_batches` in place of their micro-batches."""
        parts = tuple(part for part in self.parts if part is not self.micro_batches)
        return Strategies((*parts, micro_batches) if micro_batches.pieces != 1 or not parts else parts)

    def gathering(self, again: bool | None, keep_gathered_bytes: int | None = None) -> Strategies:
        """These strategies with other `reshard_after_forward` and `keep_gathered_bytes` of data parallelism."""
        budget = {} if keep_gathered_bytes is None else {"keep_gathered_bytes": keep_gathered_bytes}
        return self.changed(DataParallel, lambda data: replace(data, reshard_after_forward=again, **budget))

    def owned(self, owners: Mapping[str, int]) -> Strategies:
        """These strategies with these owners of parameters."""
        return self.changed(DataParallel, lambda data: replace(data, owners=owners))

    @property
    def pipeline(self) -> Pipeline | None:
        """The strategy that cuts the step into stages."""
        return next(iter(self.of(Pipeline)), None)

    @property
    def beside_stages(self) -> tuple[Strategy, ...]:
        """The strategies that neither cut the step into stages nor the batch into pieces."""
        return tuple(part for part in self.parts if part not in (self.pipeline, self.micro_batches))

    def staged(self, graph: TrainGraph, mesh: Mesh, hardware: Hardware) -> Strategies:
        """These strategies with the parameters of each stage by name."""
        return self.changed(Pipeline, lambda pipeline: pipeline.resolved(graph, mesh, hardware))

    def planning_mesh(self, graph: TrainGraph, mesh: Mesh) -> Mesh:
        """The mesh of ranks, with an axis `time` if there are micro-batches. Raises MeshError if it has one already.

        A small batch has fewer pieces: 12 samples in 8 are 6 pieces of 2.
        """
        refuse_time(mesh)
        if self.pieces == 1:
            return mesh
        if self.async_axes(mesh):
            problem = f"async_tp with MicroBatches({self.pieces})"
            raise PlanError(problem, "one of them: products inside a loop are not fused", "leave out async_tp")
        most = 1
        for rows in self.rows(graph, mesh):
            pieces = self.pieces_of(rows)
            most = max(most, int(pieces)) if pieces == int(pieces) else most  # compared: a loop has so many
        return with_pieces(mesh, most) if most > 1 else mesh

    def pieces_of(self, rows: int) -> int:
        """In how many pieces a rank goes through `rows` samples, of which there is one at least."""
        return -(-rows // -(-rows // self.pieces))

    def rows(self, graph: TrainGraph, mesh: Mesh) -> list[int]:
        """For each batch tensor that micro-batches cut, the samples that a rank has at most."""
        samples, piece_mesh = list[int](), with_pieces(mesh, 2)
        for spec in graph.inputs:
            for cut in self.batch_cuts(piece_mesh, spec.name, len(spec.meta.shape)) if spec.role is Role.BATCH else ():
                parts = prod(mesh.axis_size(axis) for axis in cut.axes if axis != TIME)
                rows = -(-spec.meta.shape[cut.dim] // parts)
                samples += [rows] if TIME in cut.axes and rows else []
        return samples

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Every axis that a strategy uses, in the order of the mesh. Raises PlanError if two strategies use one."""
        users, experts = dict[str, str](), self.of(ExpertParallel)
        for part in sorted(self.parts, key=experts.__contains__):
            for axis in axes_of(part, mesh):
                if axis in users and part not in experts:
                    problem = f"axis {axis!r} is used by {users[axis]} and by {type(part).__name__}"
                    needed = "a separate axis for each strategy"
                    raise PlanError(problem, needed, f'pass axis=, as in DataParallel(axis="{mesh.names[0]}")')
                users.setdefault(axis, type(part).__name__)
        for axis, kind in ((STAGES, Pipeline.__name__), (CONTEXT, ContextParallel.__name__)):
            if axis in mesh.names and mesh.axis_size(axis) > 1 and users.get(axis) != kind:
                use = f"is used by {users[axis]}" if axis in users else "is used by no strategy"
                next_step = f"give [..., wholestep.{kind}()], or rename the axis"
                raise PlanError(f"axis {axis!r} {use}", f"a {kind} along it", next_step)
        return tuple(axis for axis in mesh.names if axis in users)

    def storage_layouts(self, graph: TrainGraph, mesh: Mesh, base: Mapping[str, Stored]) -> dict[str, Stored]:
        """Storage layouts of each parameter: data parallelism shards what the other strategies leave, and experts are
        apart on each of their ranks.
        """
        out = dict(base)
        for part in self.by_storage:
            if part != self.experts or self._may_be_apart(graph, mesh):
                out = part.storage_layouts(graph, mesh, out)
        return out

    @property
    def experts(self) -> ExpertParallel | None:
        """The strategy whose ranks have experts."""
        return next(iter(self._read_by_host().of(ExpertParallel)), None)

    @property
    def by_storage(self) -> tuple[Strategy, ...]:
        """The strategies in the order in which they say where parameters are stored."""
        return tuple(sorted(self._read_by_host().parts, key=lambda p: (p == self.experts, p is self.data)))

    def _read_by_host(self) -> Strategies:
        """These strategies; in pieces and stages the host reads no numbers of rows."""
        return self.without_host_reads() if self.micro_batches or self.pipeline else self

    def without_host_reads(self) -> Strategies:
        """These strategies, of which none chooses that the host reads numbers of rows."""
        return self.changed(ExpertParallel, lambda p: replace(p, host_reads=False) if p.method == "auto" else p)

    def sorts_apart(self, graph: TrainGraph, mesh: Mesh) -> dict[str, Apart]:
        """Sorts of rows by expert of which each rank has those of its own experts. Raises PlanError."""
        if not self.experts or not self._may_be_apart(graph, mesh):
            return {}
        return self.experts.sorts(graph, mesh, self.options.reduce if self.own_batches(mesh) else "")

    def own_batches(self, mesh: Mesh) -> bool:
        """Whether each rank of experts has a batch of its own."""
        data = self.data.axes(mesh) if self.data and self.data.semantics == "per_rank" else ()
        return self.experts is not None and self.experts.axis in data

    def _may_be_apart(self, graph: TrainGraph, mesh: Mesh) -> bool:
        """Whether ranks of experts share one batch, or send rows. Raises PlanError: they have to, and cannot."""
        axis, method = (self.experts.axis, self.experts.method) if self.experts else ("", "auto")
        batch = (i for i in graph.inputs if i.role is Role.BATCH)
        cuts = [cut.axes for i in batch for cut in self.batch_cuts(mesh, i.name, len(i.meta.shape))]
        own = self.own_batches(mesh)
        if not own and not any(TIME in axes and axis in axes for axes in cuts):
            return True
        if method == "gather_rows":
            problem = f"ExpertParallel along {axis!r}, of which each rank has a batch or micro-batches of its own"
            needed = "ranks that share one batch: each computes the rows of all for its experts"
            next_step = 'give method="rows", or semantics="global" without MicroBatches, or another axis'
            raise PlanError(problem, needed, next_step)
        return method == "rows"

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """Pins of all strategies."""
        pins = [part.pins(graph, mesh) for part in self.parts]
        decomposed = tuple(dict.fromkeys(name for p in pins for name in p.decomposed))
        return Pins(
            _merged(p.results for p in pins),
            _merged(p.reads for p in pins),
            _merged(p.op_strategies for p in pins),
            decomposed,
            _merged(p.owners for p in pins),
        )

    @property
    def shares_batches(self) -> bool:
        """True if ranks along some axis may get parts of one batch."""
        return any(part.shares_batches for part in self.parts if part is not self.micro_batches)

    def batch_cuts(self, mesh: Mesh, name: str, ndim: int) -> tuple[BatchCut, ...]:
        """The sharded dims of the batch tensor `name`, each once, data parallel axes outermost, `time` innermost."""
        dims: dict[int, tuple[str, ...]] = {}
        for part in sorted(self.parts, key=lambda p: (p is not self.data, p is self.micro_batches)):
            cut = part.batch_cut(mesh, name, ndim)
            if cut is not None:
                dims[cut.dim] = dims.get(cut.dim, ()) + tuple(a for a in cut.axes if mesh.axis_size(a) > 1)
        return tuple(BatchCut(dim, axes) for dim, axes in dims.items() if axes)

    def async_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes along which products may be fused with collectives."""
        return tuple(p.axis for p in self._tensor(mesh) if p.async_tp)

    def regathered_along(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes along which activations are re-gathered for the backward."""
        return tuple(p.axis for p in self._tensor(mesh) if p.reshard_after_forward)

    def _tensor(self, mesh: Mesh) -> list[TensorParallel | SolvedLayouts]:
        return [part for part in self.of(TensorParallel, SolvedLayouts) if mesh.axis_size(part.axis) > 1]

    def check(self, graph: TrainGraph, mesh: Mesh, decisions: Mapping[str, Decision]) -> None:
        """Raise PlanError if the completed plan breaks a promise of one of the strategies."""
        for part in self.parts:
            part.check(graph, mesh, decisions)

    def describe(self, mesh: Mesh) -> str:
        """All strategies in one line, for the head of a plan."""
        return "; ".join(part.describe(mesh) for part in self.parts)


def _merged(several: Iterable[Mapping[K, Mapping[str, V]]]) -> dict[K, Mapping[str, V]]:
    merged: dict[K, Mapping[str, V]] = {}
    for mapping in several:
        merged |= {key: {**merged.get(key, {}), **by_axis} for key, by_axis in mapping.items()}
    return merged


def compose(parallel: Strategy | Sequence[Strategy] | Strategies | None) -> Strategies:
    """One or several strategies as `Strategies`. Raises PlanError if there is none, or two are data parallel."""
    if isinstance(parallel, Strategies):
        return parallel
    if parallel is None:
        parallel = DataParallel()
    parts = tuple(parallel) if isinstance(parallel, (list, tuple)) else (cast("Strategy", parallel),)
    entries = cast(tuple[object, ...], parts)  # whatever a user passes, also a class in place of its instance
    wrong = [p for p in entries if not isinstance(p, Strategy) or isinstance(p, type)]
    if wrong or not parts:
        style = parallel if isinstance(parallel, str) and parallel in STYLES else "fully_shard"
        problem = f"parallel={shown(wrong[0] if wrong else parts)}"
        needed = "a strategy, as DataParallel or TensorParallel, or a list of them"
        raise PlanError(problem, needed, f'pass parallel=wholestep.DataParallel("{style}")')
    strategies = Strategies(parts)
    for kind, cure in _ONE_OF.items():
        if len(strategies.of(kind)) > 1:
            raise PlanError(f"two {kind.__name__} strategies", *cure)
    style = strategies.data.style if strategies.data and isinstance(strategies.data.style, str) else "fully_shard"
    return _with_pieces_of_pipeline(strategies.changed(ContextParallel, lambda p: replace(p, style=p.style or style)))


_ONE_OF: dict[type[Strategy], tuple[str, str]] = {
    DataParallel: ("one, over one or several axes", "pass one with axis=(...)"),
    ExpertParallel: ("one, over one axis", "pass one"),
    MicroBatches: ("one number of pieces", "pass one with the product of both"),
    Pipeline: ("one axis of stages", "pass one, with chunks= for several a rank"),
}


def _with_pieces_of_pipeline(strategies: Strategies) -> Strategies:
    """`strategies` with the `MicroBatches` that a `Pipeline` asks for."""
    pipeline, micro_batches = strategies.pipeline, strategies.micro_batches
    if pipeline is None or micro_batches is None:
        pieces = pipeline.micro_batches if pipeline else 1
        return replace(strategies, parts=(*strategies.parts, MicroBatches(pieces))) if pieces > 1 else strategies
    if micro_batches.pieces == "auto":
        problem, needed = 'MicroBatches("auto") with Pipeline', "a number of pieces: stages share them"
        raise PlanError(problem, needed, "give a number, as Pipeline(micro_batches=8)")
    if pipeline.micro_batches not in (1, micro_batches.pieces):
        problem = f"Pipeline(micro_batches={pipeline.micro_batches}) beside MicroBatches({micro_batches.pieces})"
        raise PlanError(problem, "one number of pieces", "leave out one of them")
    return strategies
