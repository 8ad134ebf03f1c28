"""`Auto`: the strategy that chooses a strategy, by simulated time of a step under a budget of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..cost.software import OWN, Software
from ..errors import MeshError, PlanError, WholestepError, shown
from ..graph.gc_control import existing_objects_frozen
from ..graph.graph import TrainGraph
from ..hardware.hardware import Hardware
from ..layout import Layout
from ..mesh import Mesh
from ..passes.base import Pass
from ..passes.offload_saved import OffloadSaved
from ..passes.tile_rows import TileRows
from ..plan.context_parallel import ContextParallel
from ..plan.data_parallel import DataParallel
from ..plan.micro_batches import MicroBatches
from ..plan.pipelines import Pipeline
from ..plan.plan import Plan
from ..plan.storage_styles import STYLES
from ..plan.strategies import Strategies
from ..plan.tensor_parallel import SolvedLayouts, TensorParallel
from ..typed_values import is_a
from ..units import parse_bytes
from .candidates import Template, is_open, meshes, templates
from .evaluate import Evaluator
from .folded_step import fold_step
from .ilp.solve import IlpResult
from .ilp_candidates import IlpCandidates, MeshSolver, Symmetrizer
from .recompute_kinds import passes_of
from .search import Search
from .search_result import Candidate, SearchResult, Watch, explained, unwatched
from .staged_auto import StagedCandidates, staged_meshes

Candidates = list[tuple[Mesh, Template]]


@dataclass(frozen=True)
class Auto:
    """Chooses the strategy with the shortest simulated step whose tensors fit into `memory_bytes`. Give it as
    `parallel=` to `plan` and `compile`.

    `plan` compares all uses of a mesh, by time for each captured batch. `compile` compares the ones that leave the
    batch of each rank as it is: data parallelism over all axes, or over the axes that `tensor` leaves.

    Candidates are templates (the styles of data parallelism, alone and beside `tensor`) and solutions of an integer
    program (HiGHS): the storage of each parameter by itself, and, on a mesh of several axes, layouts of all operations
    along the axis of `tensor`, or else along `tp` or the last axis.

    Args:
        memory_bytes: bytes that the tensors of a rank may take, activations included, as "80GiB"; None for no bound.
        hardware: to predict times for. By default `compile` measures it, and `plan` takes `Hardware.default()`, a slow
            CPU and a slow link.
        tensor: tensor parallelism that may be used along its axis; `TensorParallel("auto")` is solved for.
        data: options of data parallelism that are not searched, as `semantics` or `mixed_precision`; its `style`,
            `axis` and `reshard_after_forward` are not read.
        styles: the styles that may be used; all if None.
        micro_batches: of the batch of a rank, with `MicroBatches(4)` in every candidate. `MicroBatches("auto")`
            tries more and more of them in candidates that do not fit otherwise.
        pipeline: stages that may be used along its axis, in `plan`: on a mesh with that axis, or `"auto=N"`. What it
            leaves open is chosen: `schedule="auto"` and no `chunks` the order and the stages on each rank, one
            micro-batch their number. Candidates are planned with all layers; recomputation is that of the step.
        recompute: tensors may be rematerialized in the backward where candidates that fit are slower, or none fits.
        solve: False compares templates alone.
        solved_meshes: on a mesh `"auto=N"`, the number of meshes on which integer programs are solved: the ones whose
            templates do best. A program takes seconds, and meshes far behind with templates do not catch up.
        context: ranks may share sequences along its axis: on a mesh with that axis, or `"auto=N"`. There, no integer
            program is solved.
        saves: where a candidate exceeds the budget, long products may be computed in tiles of rows (`TileRows`), and
            what layers save may wait on the host (`OffloadSaved`) of hardware with GPUs.

    Example:
        >>> wholestep.plan(graph, "dp=16", wholestep.Auto("80GiB", wholestep.Hardware.preset("dgx-h100")))

    Raises:
        PlanError: an option is malformed.
    """

    memory_bytes: int | str | None = None
    hardware: Hardware | None = None
    tensor: TensorParallel | None = None
    data: DataParallel = field(default_factory=DataParallel)
    styles: Sequence[str] | None = None
    micro_batches: MicroBatches | None = None
    pipeline: Pipeline | None = None
    recompute: bool = True
    solve: bool = True
    solved_meshes: int = 3
    context: ContextParallel | None = None
    saves: bool = True

    def __post_init__(self) -> None:
        if self.solved_meshes < 0:
            raise PlanError(f"Auto(solved_meshes={shown(self.solved_meshes)})", "a number of meshes", "give 3, say")
        if self.memory_bytes is not None:
            object.__setattr__(self, "memory_bytes", parse_bytes(self.memory_bytes))
        if self.may_cut and self.memory_bytes is None and self.pipeline is None:
            finding = 'Auto(micro_batches=MicroBatches("auto")) without memory_bytes'
            needed = "a budget: the number of pieces is the one that fits"
            raise PlanError(finding, needed, 'give memory_bytes="80GiB", say, or a number of pieces')
        if self.styles is not None and not (
            is_a(self.styles, Sequence[str]) and {*self.styles} and {*self.styles} <= {*STYLES}
        ):
            problem = f"Auto(styles={shown(self.styles)})"
            raise PlanError(problem, f"some of {', '.join(map(repr, STYLES))}", "correct the names")
        if not isinstance(self.data.style, str):
            problem = f"Auto(data=DataParallel(style={self.data.kind.name}))"
            needed = f"no style: Auto chooses among {', '.join(STYLES)}"
            raise PlanError(problem, needed, "leave out the style, or give the DataParallel as parallel=")

    @property
    def budget_bytes(self) -> int | None:
        """`memory_bytes` as a number."""
        return None if self.memory_bytes is None else parse_bytes(self.memory_bytes)

    @property
    def may_cut(self) -> bool:
        """True if the number of micro-batches is to be chosen."""
        return self.micro_batches is not None and self.micro_batches.pieces == "auto"

    def choose(self, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout] | None = None) -> Plan:
        """The plan that `search` finds, with notes on all candidates.

        Raises:
            PlanError: none fits, or none can be made.
        """
        return explained(self.search(graph, mesh, placed=placed))

    @existing_objects_frozen()
    def search(
        self, graph: TrainGraph, mesh: Mesh | str, placed: Mapping[str, Layout] | None = None,
        same_batches: bool = False, hardware: Hardware | None = None, passes: Sequence[Pass] | None = None,
        watch: Watch | None = None, software: Software = OWN,
    ) -> SearchResult:  # fmt: skip
        """Every candidate with its outcome, and the winner's plan. On a mesh `"auto=N"`, axes are chosen too.

        Args:
            graph: the step.
            mesh: the mesh, or `"auto=N"`.
            placed: layouts of inputs that are placed already.
            same_batches: consider only candidates that give ranks the batches of `base`.
            hardware: replaces the option.
            passes: replace `default_passes(hardware)`, as `software` runs it.
            watch: called with the name of each candidate that is planned.
            software: runs the step, where that is not wholestep.

        Raises:
            PlanError: none fits, or none can be made.
        """
        mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
        hardware = hardware or self.hardware or Hardware.default()
        passes = tuple(passes_of("none", hardware, software=software) if passes is None else passes)
        watch = watch or unwatched
        folded = fold_step(graph, hardware, placed, software=software)
        evaluator = Evaluator(
            graph, hardware, self.budget_bytes, passes, self.recompute, placed, watch, folded, software,
            self.micro_batches if self.may_cut else None,
            saves=self.saves and not any(isinstance(each, TileRows | OffloadSaved) for each in passes),
        )  # fmt: skip
        stages = self._stages(graph, mesh, hardware)
        if stages is not None and not is_open(mesh):
            return Search(evaluator).run([], stages=stages.tried)
        symmetrize = Symmetrizer(graph, folded.repeats) if folded is not None else None

        def programs(on: Mesh, free: str | None = None) -> IlpCandidates:
            """The programs of one mesh: along the axis of `tensor` where the mesh has it, or else along `free`."""
            axis = free if self.tensor is None else self.tensor.axis if self.tensor.axis in on.names else None
            tensor = self.tensor if self.tensor is not None and self.tensor.is_open and axis else None
            tensor = tensor or (TensorParallel("auto", axis) if axis else None)
            return IlpCandidates(
                graph, on, hardware, self.data, tensor, self.styles, self.budget_bytes, placed, symmetrize=symmetrize
            )

        def rough(on: Mesh, recomputes: bool) -> IlpCandidates:
            return replace(programs(on), recomputes=recomputes, rough=True)

        layouts, solved, program = self._solved(mesh, same_batches, programs, watch)
        solver = MeshSolver(rough, self.solved_meshes, self.recompute and self.memory_bytes is not None, watch)
        chosen = [*self.candidates(mesh, same_batches, hardware, layouts), *self._cut(solved)]

        def more(rows: Sequence[Candidate]) -> Candidates:
            return self._cut(solver([row for row in rows if not self._shares_sequences(row.mesh)]))

        further = more if is_open(mesh) and self.solve else None
        search = Search(evaluator).run(chosen, further, stages and stages.tried)
        return replace(search, solved=program or solver.program(search.best.mesh))

    def _stages(self, graph: TrainGraph, mesh: Mesh, hardware: Hardware) -> StagedCandidates | None:
        """The pipelines that are tried; on an open mesh beside all that has no stages. None without `pipeline`."""
        if self.pipeline is None:
            return None
        if not is_open(mesh):
            mesh.axis_size(self.pipeline.axis)  # raises where there is none
        meshes = staged_meshes(mesh, self.pipeline.axis, self.meshes(mesh.size, hardware))
        return StagedCandidates(graph, meshes, self.pipeline, self._beside, self.micro_batches)

    def _beside(self, mesh: Mesh) -> list[Template]:
        """The templates beside a pipeline: all axes of `mesh`, which has none of stages, are used."""
        tensor = self.tensor if self.tensor and self.tensor.axis in mesh.names else None
        axis = tensor.axis if tensor else "tp"
        candidates = templates(mesh, tensor, axis, self.data, alone=tensor is None, context=self.context)
        return [template for template in candidates if self._allows(template)]

    def meshes(self, ranks: int, hardware: Hardware | None = None) -> list[Mesh]:
        """The meshes of `ranks` that are searched: tensor parallelism inside a node, hybrid groups of whole nodes."""
        axis = self.tensor.axis if self.tensor else None
        context = self.context.axis if self.context else None
        return meshes(ranks, hardware or self.hardware or Hardware.default(), axis, context)

    def _shares_sequences(self, mesh: Mesh) -> bool:
        return self.context is not None and self.context.axis in mesh.names

    def candidates(
        self, mesh: Mesh, same_batches: bool = False, hardware: Hardware | None = None,
        layouts: tuple[SolvedLayouts | None, SolvedLayouts | None] = (None, None),
    ) -> Candidates:  # fmt: skip
        """The templates that are compared on `mesh`; with `same_batches`, the ones that share batches as `base` does.
        `layouts` take the place of `TensorParallel("auto")`: the solution, and the symmetrized one.

        Raises:
            MeshError: the mesh has no axis for `tensor`.
        """
        if is_open(mesh):
            return self._cut(row for searched in self.meshes(mesh.size, hardware) for row in self._open(searched))
        tensor = self.tensor.axis if self.tensor else "tp"
        exact, symmetric = layouts
        candidates = templates(mesh, exact or self.tensor, tensor, self.data, not same_batches, symmetric, self.context)
        return self._cut((mesh, template) for template in candidates if self._allows(template))

    def _cut(self, candidates: Iterable[tuple[Mesh, Template]]) -> Candidates:
        """Candidates with the number of pieces that was given."""
        micro_batches = () if self.micro_batches is None or self.may_cut else (self.micro_batches,)
        return [
            (mesh, t if isinstance(t.strategies, WholestepError) else replace(
                t, strategies=(*t.strategies, *micro_batches), symmetric=t.symmetric and (*t.symmetric, *micro_batches)
            )) for mesh, t in candidates
        ]  # fmt: skip

    def _solved(
        self, mesh: Mesh, same_batches: bool, programs_on: Callable[[Mesh, str | None], IlpCandidates], watch: Watch
    ) -> tuple[tuple[SolvedLayouts | None, SolvedLayouts | None], Candidates, IlpResult | None]:
        """Layouts that go beside any style, candidates, and the first program; none where axes are to be chosen."""
        is_asked = self.tensor is not None and self.tensor.is_open
        by_hand = self.tensor is not None and not self.tensor.is_open
        no_programs = is_open(mesh) or self._shares_sequences(mesh)
        if no_programs or not (self.solve or is_asked) or (by_hand and same_batches):
            return (None, None), [], None
        watch("solve for layouts")
        # the axis that is solved for by default; none where it would be the only one
        free = None if len(mesh.names) < 2 else "tp" if "tp" in mesh.names else mesh.names[-1]
        programs = programs_on(mesh, None if same_batches else free)
        solutions = programs.templates() if self.solve and (programs.storages or programs.tensor) else []
        if self.solve and programs.tensor is not None and not same_batches:
            solutions += replace(programs, tensor=None).templates()
        first = next((t.solved for t in solutions if t.solved is not None), None)
        return programs.layouts() if is_asked else (None, None), [(mesh, t) for t in solutions], first

    def _open(self, mesh: Mesh) -> Candidates:
        """Templates on one of several meshes: they use all of its axes, and `hybrid` exactly the meshes with groups."""
        tensor = self.tensor if self.tensor and self.tensor.axis in mesh.names else None
        axis = tensor.axis if tensor else "tp"
        candidates = templates(mesh, tensor, axis, base=self.data, alone=False, context=self.context)
        grouped = {style.name for style in STYLES.values() if style.grouped}
        return [(mesh, t) for t in candidates if self._allows(t) and (_style(t) in grouped) == ("shard" in mesh.names)]

    def _allows(self, template: Template) -> bool:
        return self.styles is None or _style(template) is None or _style(template) in self.styles

    def describe(self, mesh: Mesh) -> str:
        """One line that is the same on all ranks that ask for the same."""
        among = "all styles" if self.styles is None else ", ".join(self.styles)
        options = (self.micro_batches, self.context)
        asked = "".join(f", {option!r}" for option in options if option)
        within = "" if self.memory_bytes is None else f" within {self.memory_bytes:,} bytes"
        return f"Auto of {among}{within}{asked}; {self.base(mesh).describe(mesh)}"

    def base(self, mesh: Mesh | None) -> Strategies:
        """How ranks share batches in every candidate that `compile` may choose.

        Raises:
            MeshError: there is no mesh to divide between `data` and `tensor`, or axes are left to be chosen.
        """
        if self.pipeline is not None:
            needed = "a plan, which says in what stages the parameters of a rank are"
            how = 'plan(graph, mesh, Auto(...)).save("plan.json"), and parallel=Plan.load("plan.json")'
            raise PlanError("Auto(pipeline=...) in compile", needed, how)
        if mesh is not None and is_open(mesh):
            raise MeshError(
                f"mesh {mesh} in compile", "axes, as ranks are given batches by them",
                f'plan(graph, "{mesh}", Auto(...)).mesh says which are best',
            )  # fmt: skip
        context = self.context if mesh is not None and self._shares_sequences(mesh) else None
        beside = [strategy for strategy in (self.tensor, context) if strategy is not None]
        if not beside:
            return Strategies((replace(self.data, style="replicate", axis=None),))
        if mesh is None:
            raise MeshError("Auto(tensor=...) without a mesh", "a mesh with its axis", 'give mesh="dp=2,tp=2", say')
        used = {axis for strategy in beside for axis in strategy.axes(mesh)}
        data_axes = tuple(name for name in mesh.names if name not in used)
        data = replace(self.data, style="replicate", axis=data_axes)
        return Strategies((data, *beside) if data_axes else tuple(beside))


def _style(template: Template) -> str | None:
    return template.key.style if template.key else None
