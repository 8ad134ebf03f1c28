"""Searches pipelines for a number of GPUs: tensor parallelism, stages, chunks, order and recomputation together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from wholestep.cost.software import OWN, Software
from wholestep.cost.stage_costs import BlockPrices
from wholestep.errors import WholestepError
from wholestep.graph.gc_control import existing_objects_frozen
from wholestep.graph.text import seconds
from wholestep.hardware.hardware import Hardware
from wholestep.mesh import STAGES, Axis, Mesh
from wholestep.plan.data_parallel import DataParallel
from wholestep.plan.pipelines import Pipeline
from wholestep.plan.tensor_parallel import TensorParallel
from wholestep.planner.candidates import Template, TemplateKey
from wholestep.planner.recompute_kinds import RecomputeKind
from wholestep.planner.search_result import Watch, first_line, unwatched
from wholestep.planner.staged_plan import ShortPipelines, StagedSetup, costs_of_staged

from .gpu_search import ESTIMATE_SHARE, MEMORY_SHARE, MOST_SETUPS, Setup, holding

_STYLE = "zero1"  # gathers nothing while pieces run, and keeps least of the styles that do not
_CHUNKS = (1, 2, 4, 8)
_FAR = 1.15  # times the fastest estimate: a formula is as far from those
_SLOWER = 3  # of a group in a row, and the rest, with larger bubbles, is slower too


@dataclass
class StagedSearch:
    """Pipelines of a model on any number of GPUs of one hardware.

    Args:
        pipelines: those of the model with a kind of recomputation.
        layers: of the model.
        hardware: that is simulated.
        memory_bytes: that the tensors of a rank may take.
        tensor: tensor parallelism that may be used inside a node.
        param_bytes: of the model.
        kinds: of recomputation, of which the first that fits is the fastest.
        software: that the prices are of.
    """

    pipelines: Callable[[RecomputeKind], ShortPipelines]
    layers: int
    hardware: Hardware
    memory_bytes: int
    tensor: TensorParallel | None
    param_bytes: int
    kinds: Sequence[RecomputeKind]
    software: Software = OWN
    watch: Watch = unwatched

    @existing_objects_frozen()
    def run(self, ranks: int, sequences: int) -> tuple[list[Setup], list[Setup]]:
        """Pipelines that fit and were simulated, and why others lost. The short stages of one setup estimate all setups
        with the same computation. The setups with the shortest estimates are then planned and simulated.
        """
        best, lost, waiting = list[Setup](), list[Setup](), list[Setup]()
        for setup in self._estimated(self._setups(ranks, sequences)):
            (lost if setup.why else waiting).append(setup)
        for setup in sorted(waiting, key=lambda candidate: candidate.estimate_s):
            fastest = min((candidate.costs.step_s for candidate in best if candidate.costs), default=float("inf"))
            late = setup.estimate_s > fastest * (1 + ESTIMATE_SHARE)
            if late or len(best) >= MOST_SETUPS:
                lost.append(replace(setup, why=f"not simulated: about {seconds(setup.estimate_s)} by a quick estimate"))
                continue
            simulated = self._simulated(setup)
            (best if simulated.costs else lost).append(simulated)
        return best, lost

    def _estimated(self, setups: Iterable[Setup]) -> Iterator[Setup]:
        """`setups` with estimates and a kind of recomputation that seems to fit, or why they lost: group by
        group of equal computation, smallest bubble first. Groups that split a layer less come later and recompute at
        least as much. A setup that is far slower by the bubble formula is not estimated; after several slower results
        the rest of the group is skipped. A group without data parallelism has the computation of the one with it, so
        the formula bounds it before anything of it is planned.
        """
        groups, fastest, kinds = dict[tuple[int, bool, int], list[Setup]](), float("inf"), self.kinds
        works = dict[tuple[int, int, RecomputeKind], float]()  # seconds of all stages for a piece
        for setup in setups:
            groups.setdefault((-self._split(setup), "dp" not in setup.mesh.names, setup.batch), []).append(setup)
        for (split, _, batch), several in sorted(groups.items(), key=lambda item: item[0]):
            similar, slower = min(several, key=self._bubble), 0
            work_s = works.get((split, batch, kinds[0]), 0.0)
            for setup in sorted(several, key=self._bubble):
                rough_s = setup.micro_batches * work_s * self._longest(setup) / (1 - self._bubble(setup))
                why = setup.why
                if not why and rough_s > fastest * _FAR:
                    why = f"not simulated: about {seconds(rough_s)} by formula"
                elif not why and slower >= _SLOWER:
                    why = f"not simulated: {_SLOWER} of the same computation, with smaller bubbles, lost"
                if why:
                    yield replace(setup, recompute=kinds[0], estimate_s=rough_s, why=why)
                    continue
                estimated, busy_us = self._estimate(setup, similar, kinds)
                kinds = kinds[kinds.index(estimated.recompute) :]
                work_s = work_s or busy_us / setup.micro_batches / 1e6
                works.setdefault((split, batch, estimated.recompute), work_s)
                late = bool(estimated.why) or estimated.estimate_s > fastest * (1 + ESTIMATE_SHARE)
                slower = slower + 1 if late else 0
                fastest = fastest if estimated.why else min(fastest, estimated.estimate_s)
                yield estimated

    def _estimate(self, setup: Setup, similar: Setup, kinds: Sequence[RecomputeKind]) -> tuple[Setup, float]:
        """With an estimate, and the microseconds in which its stages do something."""
        prices, estimated, busy_us = BlockPrices(self.hardware, setup.mesh, self.software), setup, 0.0
        for kind in kinds:
            estimated = replace(setup, recompute=kind)
            self.watch(f"about {estimated}")
            staged, other = (StagedSetup(candidate.mesh, candidate.strategies) for candidate in (estimated, similar))
            try:
                step = self.pipelines(kind).estimate(staged, other, setup.batch, prices)
            except WholestepError as error:
                return replace(estimated, why=f"no plan: {first_line(error)}"), 0.0
            if step is None:
                return estimated, 0.0  # stages are not alike: it is simulated
            busy_us, peak = sum(stage.busy_us + stage.waited_us for stage in step.stages), step.fullest.peak_bytes
            if peak <= self.memory_bytes * MEMORY_SHARE:
                return replace(estimated, estimate_s=step.step_us / 1e6), busy_us
            estimated = holding(estimated, peak, self.memory_bytes, "holds about {} at its peak by a quick estimate")
        return estimated, busy_us

    def _split(self, setup: Setup) -> int:
        axis = self.tensor.axis if self.tensor else ""
        return setup.mesh.axis_size(axis) if axis in setup.mesh.names else 1

    def _longest(self, setup: Setup) -> float:
        """The share of all layers that the rank with most of them has at least."""
        return ceil(self.layers / setup.mesh.axis_size(STAGES)) / self.layers

    def _bubble(self, setup: Setup) -> float:
        """The share of idle time of equal stages, by formula."""
        idle = (setup.mesh.axis_size(STAGES) - 1) / setup.chunks
        return idle / (setup.micro_batches + idle)

    def _setups(self, ranks: int, sequences: int) -> Iterator[Setup]:
        node = min(self.hardware.ranks_per_node or ranks, ranks)
        for split in (size for size in range(1, node + 1) if node % size == 0 and (size == 1 or self.tensor)):
            for stages in (1 << power for power in range(1, ranks.bit_length())):
                data, rest = divmod(ranks, split * stages)
                if rest or not data or sequences % data or stages > self.layers + 2:
                    continue
                yield from self._of_mesh(split, stages, data, sequences // data)

    def _of_mesh(self, split: int, stages: int, data: int, each: int) -> Iterator[Setup]:
        tensor = self.tensor if split > 1 else None
        sizes = (("dp", data), (STAGES, stages), (tensor.axis if tensor else "tp", split))
        mesh = Mesh(tuple(Axis(name, size) for name, size in sizes if size > 1))
        rest = self.param_bytes // (split * stages)
        for batch in (size for size in (1, 2) if each % size == 0 and each // size >= stages):
            for chunks in _CHUNKS:
                pieces = each // batch
                order = "1f1b" if chunks == 1 else "interleaved"
                if chunks > 1 and (pieces % stages or stages * chunks > self.layers + 2):
                    continue
                pipe = Pipeline(STAGES, None, pieces, order, chunks)
                around = [DataParallel(_STYLE, axis="dp")] if data > 1 else []
                key = TemplateKey(_STYLE if data > 1 else None, None, ("dp",) if data > 1 else ())
                template = Template(order, (*around, pipe, *([tensor] if tensor else [])), key)
                setup = Setup(mesh, template, batch, pieces, self.kinds[0], order=order, chunks=chunks)
                if 2 * rest > self.memory_bytes:
                    setup = holding(setup, 2 * rest, self.memory_bytes, "holds {} of parameters and gradients")
                yield setup

    def _simulated(self, setup: Setup) -> Setup:
        """With simulated costs and the first kind of recomputation that fits, from its own on."""
        tried = setup
        for kind in self.kinds[self.kinds.index(setup.recompute) :]:
            tried = replace(setup, recompute=kind)
            self.watch(str(tried))
            try:
                prices = BlockPrices(self.hardware, setup.mesh, self.software)
                staged = StagedSetup(setup.mesh, tried.strategies)
                step = self.pipelines(kind).step(staged, setup.batch, prices=prices)
            except WholestepError as error:
                return replace(tried, why=f"no plan: {first_line(error)}")
            costs = costs_of_staged(step)
            if costs.peak_bytes <= self.memory_bytes:
                return replace(tried, costs=costs, staged=step)
            tried = holding(tried, costs.peak_bytes, self.memory_bytes, "holds about {} at its peak")
        return tried
