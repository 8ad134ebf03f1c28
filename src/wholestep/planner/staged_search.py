"""Searches pipelines for a number of GPUs: tensor parallelism, stages, chunks, order and recomputation together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..cost.software import OWN, Software
from ..cost.stage_costs import BlockPrices
from ..errors import WholestepError
from ..graph.text import human
from ..hardware.hardware import Hardware
from ..mesh import STAGES, Axis, Mesh
from ..plan.data_parallel import DataParallel
from ..plan.pipelines import Pipeline
from ..plan.tensor_parallel import TensorParallel
from ..tuning import TUNING
from .candidates import Template, TemplateKey
from .gpu_search import Setup
from .recompute_kinds import RecomputeKind
from .search_result import Watch, first_line, unwatched
from .staged_plan import ShortPipelines, StagedSetup, costs_of_staged

_STYLE = "zero1"  # gathers nothing while pieces run, and keeps least of the styles that do not
_CHUNKS = (1, 2, 4, 8)


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
    piece_us: dict[int, float] = field(default_factory=dict[int, float])

    def run(self, ranks: int, sequences: int) -> tuple[list[Setup], list[Setup]]:
        """Pipelines that fit and were simulated, and why others lost. Of each number of ranks that share a layer, the
        one with the smallest bubble is simulated first; its time for a piece orders all others.
        """
        best, lost, waiting = list[Setup](), list[Setup](), list[Setup]()
        for setup in self._setups(ranks, sequences):
            (lost if setup.why else waiting).append(setup)
        self.piece_us.clear()
        for split in sorted({self._split(one) for one in waiting}, reverse=True):
            alike = [one for one in waiting if self._split(one) == split]
            first = min(alike, key=self._bubble)
            waiting.remove(first)
            found = self._simulated(first)
            (best if found.costs else lost).append(found)
        waiting = [replace(one, estimate_s=self._estimate_s(one)) for one in waiting]
        for setup in sorted(waiting, key=lambda one: one.estimate_s):
            fastest = min((one.costs.step_s for one in best if one.costs), default=float("inf"))
            late = setup.estimate_s > fastest * (1 + TUNING.setup_estimate_share)
            if late or len(best) >= TUNING.most_setups:
                lost.append(replace(setup, why="not simulated: a pipeline that is slower by a quick estimate"))
                continue
            found = self._simulated(setup)
            (best if found.costs else lost).append(found)
        return best, lost

    def _split(self, setup: Setup) -> int:
        axis = self.tensor.axis if self.tensor else ""
        return setup.mesh.axis_size(axis) if axis in setup.mesh.names else 1

    def _bubble(self, setup: Setup) -> float:
        """The share of idle time of equal stages, by formula."""
        idle = (setup.mesh.axis_size(STAGES) - 1) / setup.chunks
        return idle / (setup.micro_batches + idle)

    def _estimate_s(self, setup: Setup) -> float:
        each = self.piece_us.get(self._split(setup), 0.0) * setup.batch / setup.mesh.axis_size(STAGES)
        return setup.micro_batches * each / (1 - self._bubble(setup)) / 1e6

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
                    yield replace(setup, why=f"holds {human(2 * rest)} of parameters and gradients, too much")
                else:
                    yield setup

    def _simulated(self, setup: Setup) -> Setup:
        """With simulated costs and the first kind of recomputation that fits."""
        found = setup
        for kind in self.kinds:
            found = replace(setup, recompute=kind)
            self.watch(str(found))
            try:
                prices = BlockPrices(self.hardware, setup.mesh, self.software)
                staged = StagedSetup(setup.mesh, found.strategies)
                step = self.pipelines(kind).step(staged, setup.batch, prices=prices)
            except WholestepError as error:
                return replace(found, why=f"no plan: {first_line(error)}")
            spent = sum(one.busy_us + one.waited_us for one in step.stages)
            self.piece_us[self._split(setup)] = spent / setup.micro_batches / setup.batch
            costs = costs_of_staged(step)
            if costs.peak_bytes <= self.memory_bytes:
                return replace(found, costs=costs)
            over = human(costs.peak_bytes - self.memory_bytes)
            found = replace(found, why=f"holds about {human(costs.peak_bytes)} at its peak, {over} too much")
        return found
