"""Searches how a number of GPUs trains a model: mesh, style, micro-batch and recomputation together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ..errors import BudgetError, PlanError, WholestepError
from ..graph.gc_control import existing_objects_frozen
from ..graph.text import human, human_at_least, seconds
from ..hardware.hardware import Hardware
from ..mesh import Mesh
from ..plan.data_parallel import DataParallel
from ..plan.strategies import Strategies, compose
from ..plan.tensor_parallel import TensorParallel
from ..tuning import TUNING
from .bounds import Costs
from .candidates import Template, meshes, templates
from .recompute_kinds import RecomputeKind, passes_of
from .search_result import Watch, first_line, unwatched
from .setup_estimate import SetupEstimate
from .short_steps import MadeStep, ShortSteps, repeated

ALL_KINDS: tuple[RecomputeKind, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Setup:
    """One way to train: `batch` sequences of a rank at a time, `micro_batches` of them in a step.

    Args:
        estimate_s: quick estimate of a step, by which setups are tried in order.
        costs: simulated; None where `why` says why not.
        why: it lost.
    """

    mesh: Mesh
    template: Template
    batch: int
    micro_batches: int
    recompute: RecomputeKind
    estimate_s: float = 0.0
    costs: Costs | None = None
    why: str = ""

    @property
    def strategies(self) -> Strategies:
        """What is planned."""
        assert not isinstance(self.template.strategies, WholestepError), "templates with errors are no setups"
        return compose(self.template.strategies)

    @property
    def name(self) -> str:
        """The template without the axes, which the mesh has."""
        key = self.template.key
        assert key is not None, "a template of the table"
        how = "" if key.regathers is None else ", re-gathered" if key.regathers else ", kept"
        return f"{key.style or 'tensor parallel'}{how}"

    def __str__(self) -> str:
        return f"{self.name} on {self.mesh}, {self.micro_batches} x {self.batch}, recompute {self.recompute}"


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
    simulated: dict[tuple[object, ...], Costs] = field(default_factory=dict[tuple[object, ...], Costs])

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
                "a batch that some number of ranks divides", "give another --global-batch, or other --gpus",
            )  # fmt: skip
        best, alike, put_off = list[Setup](), Counter[tuple[object, ...]](), list[Setup]()
        ordered = sorted(fit, key=lambda one: one.estimate_s)
        for again, setup in chain(((False, one) for one in ordered), ((True, one) for one in put_off)):
            fastest = min((one.costs.step_s for one in best if one.costs), default=float("inf"))
            late = len(best) >= TUNING.setups_shown and setup.estimate_s > fastest * (1 + TUNING.setup_estimate_share)
            late = late or len(best) >= TUNING.most_setups
            group = self.estimate.split(setup.mesh), setup.batch
            if not (late or again) and alike[group] >= TUNING.setups_alike:
                put_off.append(setup)  # of a kind that is shown already: if others do not fill the page
                continue
            if late or (again and len(best) >= TUNING.setups_shown):
                lost.append(replace(setup, why=f"not simulated: about {seconds(setup.estimate_s)} by a quick estimate"))
                continue
            found = self._simulated(setup, fastest if len(best) >= TUNING.setups_shown else float("inf"))
            alike[group] += found.costs is not None
            (lost if found.why else best).append(found)
        if not best:
            raise self._nothing(ranks, lost)
        best.sort(key=lambda one: one.costs.step_s if one.costs else float("inf"))
        return GpuResult(tuple(best), tuple(lost), self.memory_bytes)

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
            yield replace(first, why=f"keeps {human(rest)} between steps, {human(rest - self.memory_bytes)} too much")
            return
        if key.regathers is False:  # between forward and backward all parameters are whole
            rest += self.param_bytes // self.estimate.split(mesh)
        if rest > self.memory_bytes:
            text = f"holds {human(rest)} with its parameters gathered"
            yield replace(first, why=f"{text}, {human(rest - self.memory_bytes)} too much")
            return
        sizes = [size for size in (1 << power for power in range(each.bit_length())) if each % size == 0]
        for size in sizes:
            setup = replace(first, batch=size, micro_batches=each // size)
            if key.style == "zero2" and setup.micro_batches == 1:
                continue  # the program of zero1
            found = self._with_kind(setup, rest)
            yield found
            if found.why:
                return  # a larger micro-batch needs more

    def _with_kind(self, setup: Setup, rest: int) -> Setup:
        probe, beside = self._probe(setup), 0
        try:
            self.estimate.probe(probe.mesh, probe.strategies, setup.batch)
            for kind in self.kinds:
                beside = self.estimate.beside_rest_bytes(setup.mesh, setup.batch, kind)
                if rest + beside <= self.memory_bytes * TUNING.setup_memory_share:
                    us = self.estimate.step_us(
                        setup.mesh, setup.strategies, setup.batch, setup.micro_batches, kind, self.param_bytes
                    )
                    return replace(setup, recompute=kind, estimate_s=us / 1e6)
        except WholestepError as error:
            return replace(setup, why=f"no plan: {first_line(error)}")
        text = f"holds about {human(rest + beside)} at most, {human(rest + beside - self.memory_bytes)} too much"
        return replace(setup, recompute=self.kinds[-1], why=text)

    def _probe(self, setup: Setup) -> Setup:
        """Parameters sharded over all data-parallel ranks, beside the same tensor parallelism."""
        data = replace(DataParallel(), style="fully_shard", axis=setup.strategies.data.axes(setup.mesh),
                       reshard_after_forward=True) if setup.strategies.data else None  # fmt: skip
        parts = (
            *([data] if data else []),
            *(part for part in setup.strategies.parts if part is not setup.strategies.data),
        )
        return replace(setup, template=replace(setup.template, strategies=parts))

    def _simulated(self, setup: Setup, fastest_s: float) -> Setup:
        """With simulated costs and the first kind of recomputation, from the estimated one on, that fits. One that is
        slower than `fastest_s` by its first micro-batch alone is not simulated further.
        """
        self.watch(str(setup))
        made: dict[int, MadeStep] = {}
        needs = 0
        for kind in self.kinds[self.kinds.index(setup.recompute) :]:
            try:
                found = self._costs(replace(setup, recompute=kind), made, fastest_s)
            except WholestepError as error:
                return replace(setup, why=f"no plan: {first_line(error)}")
            if not isinstance(found, Costs):
                return replace(setup, recompute=kind, why=f"takes {seconds(found)} at least")
            needs = found.peak_bytes
            if needs <= self.memory_bytes:
                return replace(setup, recompute=kind, costs=found)
        text = f"holds about {human(needs)} at most, {human(needs - self.memory_bytes)} too much"
        return replace(setup, recompute=self.kinds[-1], costs=None, why=text)

    def _costs(self, setup: Setup, made: dict[int, MadeStep], fastest_s: float) -> Costs | float:
        """Costs with one micro-batch, or of all, from those with one and what a second adds; or a bound above
        `fastest_s`. What it adds is known from the fewest layers.
        """

        def of(count: int) -> Costs:
            key = setup.mesh, setup.template.name, setup.batch, count, setup.recompute
            if key not in self.simulated:
                if count not in made:
                    make = self.steps.fewest if count else self.steps.made
                    made[count] = make(setup.mesh, setup.strategies, setup.batch, count or 1)
                self.simulated[key] = made[count].costs(passes_of(setup.recompute, self.hardware), self.hardware)
            return self.simulated[key]

        one = of(0)
        if setup.micro_batches == 1 or one.peak_bytes > self.memory_bytes:
            return one
        more_us = self.estimate.batch_us(setup.mesh, setup.batch)
        least_s = one.step_s + (setup.micro_batches - 1) * more_us / 1e6
        return least_s if least_s > fastest_s else repeated(one, one.grown(of(1), of(2)), setup.micro_batches)

    def _nothing(self, ranks: int, lost: Sequence[Setup]) -> PlanError:
        over = [setup for setup in lost if setup.why.endswith("too much")]
        if not over:
            raise PlanError(
                f"no setup of {ranks} GPUs can be planned: {lost[0]}: {lost[0].why}",
                "GPUs by which the batch and the heads of the model divide", "give other --gpus or --global-batch",
            )  # fmt: skip
        return BudgetError(
            f"nothing fits on {ranks} GPUs: {len(lost)} setups, the first of them {over[0]}: {over[0].why}",
            f"at most {human(self.memory_bytes)} on a rank",
            f"give more --gpus, more --memory than {human_at_least(self.memory_bytes)}, or a shorter --seq",
        )
