"""The pipelines that `Auto` tries: stages, chunks, order, micro-batches and the style beside them.

Each is planned with all layers, and its stages are simulated after the passes that run them. So they are few: of a
mesh, chunks and micro-batches are chosen with one style, and others are tried with the best of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import WholestepError
from ..graph.graph import TrainGraph
from ..mesh import Axis, Mesh
from ..plan.micro_batches import MicroBatches
from ..plan.pipelines import Pipeline
from ..plan.strategies import compose
from .candidates import Template, is_open
from .search_result import INFINITE, Candidate, Status

_CHUNKS = (1, 2, 4)
_FIRST = "zero1"  # gathers nothing while pieces run, and keeps least of the styles that do not
Attempt = Callable[[Mesh, Template], Candidate]


@dataclass(frozen=True)
class StagedCandidates:
    """The pipelines of one step on `meshes`.

    Args:
        pipeline: what the user fixed of stages, order, chunks and micro-batches. Options that are None are searched.
        beside: the templates of a mesh without the axis of stages.
        micro_batches: their number, where the user gave it.
    """

    graph: TrainGraph
    meshes: Sequence[Mesh]
    pipeline: Pipeline
    beside: Callable[[Mesh], Sequence[Template]]
    micro_batches: MicroBatches | None = None

    def tried(self, attempt: Attempt) -> list[Candidate]:
        """Try pipelines with `attempt`, and return the outcomes. A count of micro-batches that lost ends its series."""
        return [row for mesh in self.meshes for row in self._on(mesh, attempt)]

    def _on(self, mesh: Mesh, attempt: Attempt) -> list[Candidate]:
        rows, best = list[Candidate](), None
        for template in self._templates(mesh):
            variants = [(best[1], [best[2]])] if best is not None else self._variants(mesh, template)
            for pipe, counts in variants:
                last_s = INFINITE
                for pieces in counts:
                    rows.append(row := attempt(mesh, _with_stages(template, pipe, pieces)))
                    if row.status is not Status.NO_PLAN and (best is None or row.rank < best[0].rank):
                        best = row, pipe, pieces
                    if row.status is Status.BOUNDED or (row.status is Status.SLOWER and row.batch_s > last_s):
                        break  # in more pieces it is slower still
                    last_s = row.batch_s
        return rows

    def _templates(self, mesh: Mesh) -> list[Template]:
        """Those beside the stages, the first one first."""
        axes = tuple(axis for axis in mesh.axes if axis.name != self.pipeline.axis)
        beside = self.beside(Mesh(axes)) if mesh.size > mesh.axis_size(self.pipeline.axis) else [Template("", ())]
        return sorted(beside, key=lambda template: template.key is None or template.key.style != _FIRST)

    def _variants(self, mesh: Mesh, template: Template) -> list[tuple[Pipeline, list[int]]]:
        """Orders and chunks, each with growing numbers of pieces."""
        fixed, stages = self.pipeline, mesh.axis_size(self.pipeline.axis)
        pipes = [fixed]
        if fixed.schedule == "auto" and fixed.chunks is None and fixed.stages is None and fixed.placement == "loop":
            pipes = [fixed if n == 1 else replace(fixed, schedule="interleaved", chunks=n) for n in _CHUNKS]
            pipes.append(replace(fixed, placement="v"))
        elif fixed.schedule == "interleaved" and fixed.chunks is None and fixed.stages is None:
            pipes = [replace(fixed, chunks=n) for n in _CHUNKS[1:]]
        pieces = self.micro_batches.pieces if self.micro_batches is not None else fixed.micro_batches
        if isinstance(pieces, int) and pieces > 1:
            return [(pipe, [pieces]) for pipe in pipes]
        if isinstance(template.strategies, WholestepError):
            return [(pipes[0], [stages])]
        probe = compose([*template.strategies, replace(fixed, micro_batches=2)])
        most = max(probe.rows(self.graph, mesh), default=1)
        counts = [n for n in (stages << power for power in range(most.bit_length())) if 1 < n <= most]
        return [(pipe, counts or [most]) for pipe in pipes]


def _with_stages(template: Template, pipe: Pipeline, pieces: int) -> Template:
    shape = " in a V" if pipe.placement == "v" else ""
    chunks = f", {pipe.chunks_of_rank} chunks{shape}" if pipe.chunks_of_rank > 1 else ""
    name = ", ".join(filter(None, (template.name, f"{pipe.schedule}{chunks}", f"{pieces} micro-batches")))
    if isinstance(template.strategies, WholestepError):
        return Template(name, template.strategies)
    return Template(name, (*template.strategies, replace(pipe, micro_batches=pieces)))


def staged_meshes(mesh: Mesh, axis: str, flat: Iterable[Mesh]) -> list[Mesh]:
    """`mesh`, or of an open one those of `flat`, of as many ranks, whose first axis leaves 2, 4 or more to `axis`."""
    if not is_open(mesh):
        return [mesh]
    meshes: list[Mesh] = []
    for flat_mesh in flat:
        first, *rest = flat_mesh.axes
        for stages in (1 << power for power in range(1, first.size.bit_length())):
            if first.size % stages == 0 and "shard" not in flat_mesh.names:
                outer = [Axis(first.name, first.size // stages)] if first.size > stages else []
                axes = [*outer, Axis(axis, stages), *rest]
                meshes.append(Mesh(tuple(axes)))
    return meshes
