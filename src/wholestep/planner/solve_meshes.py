"""Integer programs on the best meshes of a search over meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..mesh import Mesh
from .candidates import Template
from .evaluate import Watch
from .ilp.solve import IlpResult
from .ilp_candidates import IlpCandidates
from .search_result import INFINITE, Candidate, Status


@dataclass
class MeshSolver:
    """Solves on the `count` best meshes, once the outcomes of their templates are known.

    `programs` gives the program of a mesh; its second argument is true where activations may be recomputed: with
    `recompute`, and where no template fits the budget as it is.
    """

    programs: Callable[[Mesh, bool], IlpCandidates]
    count: int
    recompute: bool = True
    watch: Watch | None = None
    solved: dict[Mesh, IlpResult] = field(default_factory=dict[Mesh, IlpResult])

    def __call__(self, rows: Sequence[Candidate]) -> list[tuple[Mesh, Template]]:
        """Further candidates, on the best meshes of `rows`."""
        found: list[tuple[Mesh, Template]] = []
        recomputes = self.recompute and not any(row.status in (Status.SLOWER, Status.BOUNDED) for row in rows)
        for mesh in best_meshes(rows, self.count):
            if self.watch is not None:
                self.watch(f"solve for layouts on {mesh}")
            made = self.programs(mesh, recomputes).templates()
            first = next((t.solved for t in made if t.solved is not None), None)
            self.solved |= {mesh: first} if first is not None else {}
            found += [(mesh, template) for template in made]
        return found

    def program(self, best: Mesh) -> IlpResult | None:
        """The program of the winner's mesh, or else of the most promising mesh."""
        return self.solved.get(best) or next(iter(self.solved.values()), None)


def best_meshes(rows: Sequence[Candidate], count: int) -> list[Mesh]:
    """The meshes with the shortest step for a batch, by simulation or by a bound; meshes on which a candidate fits the
    budget first.
    """
    best: dict[Mesh, tuple[bool, float]] = {}
    for row in rows:
        if row.status in (Status.CHOSEN, Status.SLOWER, Status.BOUNDED, Status.OVER_AT_PEAK):
            key = row.status is Status.OVER_AT_PEAK, row.batch_s if row.batch_s < INFINITE else row.bound_s
            best[row.mesh] = min(best.get(row.mesh, key), key)
    return sorted(best, key=lambda mesh: best[mesh])[:count]
