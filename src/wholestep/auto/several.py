"""Programs on searched meshes: solved for those few whose templates promise most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..mesh import Mesh
from ..plan.optimal.find import Solved
from .program import Programs
from .search import Considered, Watch
from .templates import Template

_INFINITE = float("inf")


@dataclass
class Several:
    """Solves on the `count` best meshes of a search, once its templates are known; `solved` is what came of it. With
    `again`, values may be made again: where no template fits as it is, what they hold is not counted (`Programs`).
    """

    programs: Callable[[Mesh, bool], Programs]
    count: int
    again: bool = True
    watch: Watch | None = None
    solved: dict[Mesh, Solved] = field(default_factory=dict[Mesh, Solved])

    def __call__(self, rows: Sequence[Considered]) -> list[tuple[Mesh, Template]]:
        """Candidates on the meshes of which `rows` say most."""
        found: list[tuple[Mesh, Template]] = []
        again = self.again and not any(row.fate in ("slower", "bounded") for row in rows)
        for mesh in best_meshes(rows, self.count):
            if self.watch is not None:
                self.watch(f"solve for layouts on {mesh}")
            made = self.programs(mesh, again).templates()
            first = next((t.solved for t in made if t.solved is not None), None)
            self.solved |= {mesh: first} if first is not None else {}
            found += [(mesh, template) for template in made]
        return found

    def program(self, best: Mesh) -> Solved | None:
        """The program of the mesh that won, or else of the one that promised most."""
        return self.solved.get(best) or next(iter(self.solved.values()), None)


def best_meshes(rows: Sequence[Considered], count: int) -> list[Mesh]:
    """The meshes with the shortest step for a batch, by simulation or by a bound; those where something fits before
    those where it does not.
    """
    best: dict[Mesh, tuple[bool, float]] = {}
    for row in rows:
        if row.fate in ("chosen", "slower", "bounded", "peak"):
            key = row.fate == "peak", row.batch_s if row.batch_s < _INFINITE else row.bound_s
            best[row.mesh] = min(best.get(row.mesh, key), key)
    return sorted(best, key=lambda mesh: best[mesh])[:count]
