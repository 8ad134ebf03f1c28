"""What differs between ranks, or between starts, and changes no number: proposed, agreed on, and kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..graph.graph import LocalGraph
from ..passes.context import Choice

T = TypeVar("T")


@dataclass
class Decisions:
    """What ranks have decided for the programs of one step. All ranks ask for the same decisions in the same order.

    A decision is kept for a `key`, under which ranks have compared programs: one that some ranks compile alone, for a
    batch of another size, has the decisions of the first. `label`: under which ranks exchange what they decide now.
    """

    world: World
    rendezvous: Rendezvous
    label: Callable[[], str]
    _kept: dict[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any])

    def decide(
        self, choice: Choice[T], key: str, propose: Callable[[], T], about: LocalGraph | None = None,
        extra_s: float = 0.0,
    ) -> T:  # fmt: skip
        """The decision for `key`, on all ranks. For the program of a stage it is that of the first rank of this stage.

        `extra_s`: seconds that the first rank may need longer than the timeout of the job to make its proposal.

        Raises:
            RankMismatchError: a rank does not make its proposal in time.
            PlanError: the first rank could not make one.
        """
        if (choice.name, key) not in self._kept:
            rendezvous = replace(self.rendezvous, timeout_s=self.rendezvous.timeout_s + extra_s)
            label = f"{self.label()}/{choice.name}"
            if choice.combine is None and (about is None or about.stage is None):
                decision = rendezvous.choose(label, propose, choice.what, choice.kind)
            else:
                proposals = rendezvous.gather(label, propose(), choice.what, choice.kind)
                first = proposals[self._first_of_stage(about)]
                decision = first if choice.combine is None else choice.combine(first, proposals)
            self._kept[choice.name, key] = decision
        return self._kept[choice.name, key]

    def has(self, choice: Choice[Any], key: str) -> bool:
        """Whether ranks have decided on a choice for `key`."""
        return (choice.name, key) in self._kept

    def forget(self, knows: Callable[[str], bool]) -> None:
        """Drop the decisions for keys that are not known any more."""
        self._kept = {(name, key): decision for (name, key), decision in self._kept.items() if knows(key)}

    def _first_of_stage(self, about: LocalGraph | None) -> int:
        """The first rank of the stage that this rank runs of a program."""
        if about is None or not about.stage_axis:
            return 0
        mesh, axis = self.world.mesh, about.stage_axis
        return next(r for r in range(mesh.size) if mesh.coordinate(r)[axis] == self.world.coordinate[axis])
