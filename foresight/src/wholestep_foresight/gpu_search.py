"""Searches how a number of GPUs trains a model: mesh, style, micro-batch and recomputation together."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from wholestep.cost.reserved import reserved_bytes
from wholestep.cost.staged import StagedStep
from wholestep.errors import BudgetError, PlanError, WholestepError
from wholestep.graph.gc_control import collector_paused, existing_objects_frozen
from wholestep.graph.text import human, human_at_least, seconds
from wholestep.hardware.hardware import Hardware
from wholestep.mesh import Mesh
from wholestep.plan.data_parallel import DataParallel
from wholestep.plan.strategies import Strategies, compose
from wholestep.plan.tensor_parallel import TensorParallel
from wholestep.planner.bounds import Costs
from wholestep.planner.candidates import Template, meshes, templates
from wholestep.planner.recompute_kinds import RecomputeKind
from wholestep.planner.search_result import Watch, first_line, unwatched

from .setup_estimate import SetupEstimate
from .short_steps import ShortSteps


def step_s(setup: Setup) -> float:
    """Simulated seconds of a step."""
    return setup.costs.step_s if setup.costs else float("inf")


SETUPS_SHOWN, MOST_SETUPS = 5, 6  # are simulated at least and at most, some 4 s each for 70B
ESTIMATE_SHARE = 0.05  # by which a quick estimate may miss the simulated time: a guess
MEMORY_SHARE = 1.1  # of the memory, by which a quick estimate of the peak may miss it: a guess
SETUPS_ALIKE = 2  # of equal computation are simulated: what they send hides alike
ALL_KINDS: tuple[RecomputeKind, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Setup:
    """One way to train: `batch` sequences of a rank at a time, `micro_batches` of them in a step.

    Args:
        estimate_s: quick estimate of a step, by which setups are tried in order.
        rest_bytes: that a rank holds besides one micro-batch: between steps, and as gathered and summed.
        costs: simulated; None where `why` says why not.
        why: it lost.
        over_bytes: that it holds beyond the memory, where it lost for that.
        order, chunks: of a pipeline, its blocks' order and its stages on each rank.
        staged: the simulated step of a pipeline.
    """

    mesh: Mesh
    template: Template
    batch: int
    micro_batches: int
    recompute: RecomputeKind
    estimate_s: float = 0.0
    rest_bytes: int = 0
    costs: Costs | None = None
    why: str = ""
    over_bytes: int = 0
    order: str = ""
    chunks: int = 1
    staged: StagedStep | None = None

    @property
    def strategies(self) -> Strategies:
        """What is planned."""
        assert not isinstance(self.template.strategies, WholestepError), "templates with errors are no setups"
        return compose(self.template.strategies)

    @property
    def style(self) -> str:
        """How data-parallel ranks store the model."""
        key = self.template.key
        assert key is not None, "a template of the table"
        how = "" if key.regathers is None else ", re-gathered" if key.regathers else ", kept"
        return f"{key.style}{how}" if key.style else ""

    @property
    def name(self) -> str:
        """The template without the axes, which the mesh has."""
        chunks = f"{self.chunks} chunks" if self.chunks > 1 else ""
        return ", ".join(filter(None, (self.style, self.order, chunks))) or "tensor parallel"

    def __str__(self) -> str:
        return f"{self.name} on {self.mesh}, {self.micro_batches} x {self.batch}, recompute {self.recompute}"


def holding(setup: Setup, needs_bytes: int, memory_bytes: int, what: str) -> Setup:
    """`setup`, which lost as it needs more than the memory; `what` says for what, with a `{}` for the bytes."""
    over = needs_bytes - memory_bytes
    return replace(setup, why=f"{what.format(human(needs_bytes))}, {human(over)} too much", over_bytes=over)


@dataclass(frozen=True)
class GpuResult:
    """The setups that fit and were simulated, the fastest first, and why all others lost."""

    best: tuple[Setup, ...]
    lost: tuple[Setup, ...]
    memory_bytes: int


@dataclass
class GpuSearch:
    """Setups of a model on any number of GPUs of one hardware. Captures and profiles are shared by all calls.

    Args:
        steps: the model's steps.
        hardware: that is simulated.
        memory_bytes: that the tensors of a rank may take.
        tensor: tensor parallelism that may be used inside a node.
        param_bytes: of the model.
        kinds: of recomputation, of which the first that fits is the fastest.
        styles: that may be used; all if None.
    """

    steps: ShortSteps
    hardware: Hardware
    memory_bytes: int
    tensor: TensorParallel | None
    param_bytes: int
    kinds: tuple[RecomputeKind, ...] = ALL_KINDS
    styles: Sequence[str] | None = None
    watch: Watch = unwatched

    def __post_init__(self) -> None:
        self.estimate = SetupEstimate(self.steps, self.hardware, self.tensor.axis if self.tensor else "")

    @existing_objects_frozen()
    def run(self, ranks: int, sequences: int) -> GpuResult:
        """The best setups for `sequences` in a step of `ranks`.

        Raises:
            PlanError: no mesh divides the batch; of kind BudgetError where nothing fits.
        """
        fit, lost = list[Setup](), list[Setup]()
        for setup in self._setups(ranks, sequences):
            (lost if setup.why else fit).append(setup)
        if not fit and not lost:
            raise PlanError(
                f"{sequences} sequences on {ranks} GPUs: no mesh has a number of data-parallel ranks that divides them",
                "a batch that some number of ranks divides", "give another --global-batch, or another number",
            )  # fmt: skip
        best = self._raced(fit, lost)
        if not best:
            raise self.nothing(ranks, lost)
        return GpuResult(tuple(sorted(best, key=step_s)), tuple(lost), self.memory_bytes)

    def heavier(self, setup: Setup) -> Sequence[Setup]:
        """`setup` with the kinds of recomputation that follow its own, each with costs or the reason why it lost. The
        last one may have costs.
        """
        setups, heavier = list[Setup](), self._recomputing_more(setup)
        while heavier is not None:
            setups.append(self._simulated(heavier, float("inf")))
            heavier = self._recomputing_more(setups[-1]) if setups[-1].why else None
        return setups

    @collector_paused()
    def reserved(self, setup: Setup) -> int | None:
        """What the allocator of a device reserves: for one micro-batch with all layers, and what several hold besides.
        None where nobody knows: of pipelines, and without GPUs.
        """
        if not self.hardware.has_gpus or setup.order:
            return None
        self.watch(f"all layers of {setup}")
        local = self.steps.whole(setup.mesh, setup.strategies, setup.batch, setup.recompute)
        peaks = [self._costs(candidate).peak_bytes for candidate in (setup, replace(setup, micro_batches=1))]
        return (reserved_bytes(local, self.hardware, self.steps.software) or 0) + peaks[0] - peaks[1]

    def _raced(self, fit: Iterable[Setup], lost: list[Setup]) -> list[Setup]:
        """Those of `fit` that were simulated, the quickest by estimate first; all others are `lost`."""
        best, alike = list[Setup](), Counter[tuple[int, int]]()
        waiting, put_off = sorted(fit, key=lambda candidate: candidate.estimate_s), list[Setup]()
        while waiting or put_off:
            again = not waiting  # others do not fill the page
            setup = put_off.pop(0) if again else waiting.pop(0)
            full, fastest = len(best) >= SETUPS_SHOWN, min(map(step_s, best), default=float("inf"))
            late = full and setup.estimate_s > fastest * (1 + ESTIMATE_SHARE)
            if late or (full and again) or len(best) >= MOST_SETUPS:
                lost.append(replace(setup, why=f"not simulated: about {seconds(setup.estimate_s)} by a quick estimate"))
                continue
            group = self._group(setup)
            if not again and alike[group] >= SETUPS_ALIKE:
                put_off.append(setup)  # of a kind that is shown already
                continue
            simulated = self._simulated(setup, fastest if full else float("inf"))
            if simulated.why and (heavier := self._recomputing_more(simulated)) is not None:
                insort(put_off if again else waiting, heavier, key=lambda candidate: candidate.estimate_s)
                continue
            alike[group] += simulated.costs is not None
            (lost if simulated.why else best).append(simulated)
        return best

    def _group(self, setup: Setup) -> tuple[int, int]:
        """Equal for setups whose ranks compute the same."""
        return self.estimate.split(setup.mesh), setup.batch

    def _setups(self, ranks: int, sequences: int) -> Iterator[Setup]:
        """A setup for each mesh, template and size of micro-batch, with the least recomputation that seems to fit."""
        axis = self.tensor.axis if self.tensor else None
        for mesh in meshes(ranks, self.hardware, axis):
            split = mesh.axis_size(axis) if axis in mesh.names and axis else 1
            each, rest = divmod(sequences, ranks // split)
            if rest or not each:
                continue
            tensor = self.tensor if split > 1 else None
            for template in templates(mesh, tensor, axis or "tp", DataParallel(), alone=False):
                yield from self._of_template(mesh, template, each)

    def _of_template(self, mesh: Mesh, template: Template, each: int) -> Iterator[Setup]:
        key = template.key
        grouped = key is not None and key.style == "hybrid"
        if key is None or grouped != ("shard" in mesh.names) or (self.styles and key.style not in self.styles):
            return
        first = Setup(mesh, template, 1, each, self.kinds[0])
        try:
            rest = self.steps.stored_bytes(mesh, first.strategies)
        except WholestepError as error:
            yield replace(first, why=f"no plan: {first_line(error)}")
            return
        if rest > self.memory_bytes:
            yield self._holding(first, rest, "keeps {} between steps")
            return
        if key.regathers is False:  # between forward and backward all parameters are whole
            rest += self.param_bytes // self.estimate.split(mesh)
        if rest > self.memory_bytes:
            yield self._holding(first, rest, "holds {} with its parameters gathered")
            return
        sizes = [size for size in (1 << power for power in range(each.bit_length())) if each % size == 0]
        for size in sizes:
            setup = replace(first, batch=size, micro_batches=each // size, rest_bytes=rest)
            if key.style == "zero2" and setup.micro_batches == 1:
                continue  # the program of zero1
            if setup.micro_batches > 1:
                setup = replace(setup, rest_bytes=rest + self.accumulated(setup))
            if setup.rest_bytes > self.memory_bytes:
                yield self._holding(setup, setup.rest_bytes, "holds {} with the gradients of micro-batches")
                continue
            least = setup.rest_bytes + self._least_bytes(setup, sizes[:2])
            if least > self.memory_bytes:
                yield self._holding(replace(setup, recompute=self.kinds[-1]), least, "holds about {} at least")
                continue
            yield self._with_kind(setup)

    def _least_bytes(self, setup: Setup, small: Sequence[int]) -> int:
        """Bytes of a micro-batch at least. Those of a large one follow from `small` ones, so that it is captured only
        where it may fit.
        """
        probe = self._probe(setup)
        try:
            for size in small if setup.batch > max(small) else ():
                self.estimate.probe(probe.mesh, probe.strategies, size)
        except WholestepError:
            return 0  # `_with_kind` says why
        return self.estimate.least_bytes_of(setup.mesh, setup.batch, self.kinds[-1])

    def accumulated(self, setup: Setup) -> int:
        """Bytes of the gradients that a rank holds at least while it works on a second micro-batch: they are reduced
        once, at the end, unless a style reduces each. `held_between` has them as the program does.
        """
        data = setup.strategies.data
        ranks = prod(map(setup.mesh.axis_size, data.axes(setup.mesh))) if data and data.kind.shards_gradients else 1
        return self.param_bytes // self.estimate.split(setup.mesh) // ranks

    def _holding(self, setup: Setup, needs_bytes: int, what: str) -> Setup:
        return holding(setup, needs_bytes, self.memory_bytes, what)

    def _with_kind(self, setup: Setup) -> Setup:
        """With the first kind of recomputation, from its own on, that seems to fit, and the time of that."""
        probe, least, likely = self._probe(setup), 0, 0
        try:
            self.estimate.probe(probe.mesh, probe.strategies, setup.batch)
            for kind in self.kinds[self.kinds.index(setup.recompute) :]:
                batch_bytes = self.estimate.batch_bytes(setup.mesh, setup.batch, kind)
                least, likely = setup.rest_bytes + batch_bytes.least, setup.rest_bytes + batch_bytes.likely
                if least <= self.memory_bytes and likely <= self.memory_bytes * MEMORY_SHARE:
                    us = self.estimate.step_us(
                        setup.mesh, setup.strategies, setup.batch, setup.micro_batches, kind, self.param_bytes
                    )
                    return replace(setup, recompute=kind, estimate_s=us / 1e6)
        except WholestepError as error:
            return replace(setup, why=f"no plan: {first_line(error)}")
        needs, how = (least, "at least") if least > self.memory_bytes else (likely, "by a quick estimate")
        return self._holding(replace(setup, recompute=self.kinds[-1]), needs, f"holds {{}} {how}")

    def _recomputing_more(self, setup: Setup) -> Setup | None:
        """The next kind for a setup that held too much; None where there is none."""
        later = self.kinds[self.kinds.index(setup.recompute) + 1 :]
        if not later or not setup.over_bytes:
            return None
        heavier = self._with_kind(replace(setup, recompute=later[0], why="", over_bytes=0))
        return None if heavier.why else heavier

    def _probe(self, setup: Setup) -> Setup:
        """Parameters sharded over all data-parallel ranks, beside the same tensor parallelism."""
        data = replace(DataParallel(), style="fully_shard", axis=setup.strategies.data.axes(setup.mesh),
                       reshard_after_forward=True) if setup.strategies.data else None  # fmt: skip
        beside = (part for part in setup.strategies.parts if part is not setup.strategies.data)
        parts = *([data] if data else []), *beside
        return replace(setup, template=replace(setup.template, strategies=parts))

    def _simulated(self, setup: Setup, fastest_s: float) -> Setup:
        """With simulated costs, if it fits. One whose ops alone take longer than `fastest_s` is not simulated."""
        self.watch(str(setup))
        least_s = setup.micro_batches * self.estimate.batch_us(setup.mesh, setup.batch) / 1e6
        if least_s > fastest_s:
            return replace(setup, why=f"takes {seconds(least_s)} at least")
        try:
            costs = self._costs(setup)
        except WholestepError as error:
            return replace(setup, why=f"no plan: {first_line(error)}")
        if costs.peak_bytes <= self.memory_bytes:
            return replace(setup, costs=costs)
        return self._holding(setup, costs.peak_bytes, "holds about {} at its peak")

    def _costs(self, setup: Setup) -> Costs:
        return self.steps.costs(setup.mesh, setup.strategies, setup.batch, setup.micro_batches, setup.recompute)

    def nothing(self, ranks: int, lost: Sequence[Setup]) -> PlanError:
        """Why no setup is left."""
        over = [setup for setup in lost if setup.over_bytes]
        if not over:
            raise PlanError(
                f"no setup of {ranks} GPUs can be planned: {lost[0]}: {lost[0].why}",
                "GPUs by which the batch and the heads of the model divide", "give another number or --global-batch",
            )  # fmt: skip
        return BudgetError(
            f"nothing fits on {ranks} GPUs: {len(lost)} setups, the first of them {over[0]}: {over[0].why}",
            f"at most {human(self.memory_bytes)} on a rank",
            f"give more GPUs, more --memory than {human_at_least(self.memory_bytes)}, or a shorter --seq",
        )


@existing_objects_frozen()
def first_fits(setups: GpuResult, search: GpuSearch) -> GpuResult:
    """`setups` without the setups before the first that fits into a device. They lost, and are tried with more
    recomputation. Searches bound tensors, which is linear in layers; what is reserved besides follows from all layers.
    """
    best, lost = list(setups.best), list(setups.lost)
    while best:
        first = best.pop(0)
        assert first.costs is not None, "it was simulated"
        needs = search.reserved(first)
        if needs is None or needs <= setups.memory_bytes:
            best.insert(0, replace(first, costs=replace(first.costs, reserved_bytes=needs)))
            break
        over = holding(first, needs, setups.memory_bytes, "makes torch's allocator reserve {}")
        over = replace(over, costs=None, staged=None)
        heavier = search.heavier(over)
        best = sorted([*best, *(setup for setup in heavier if setup.costs)], key=step_s)
        lost += [over, *(setup for setup in heavier if not setup.costs)]
    return GpuResult(tuple(best), tuple(lost), setups.memory_bytes)
