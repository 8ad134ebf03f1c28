"""Candidates that a solver finds: layouts of all operations and the storage of each parameter, chosen together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ..errors import WholestepError
from ..graph.graph import TrainGraph
from ..hardware.hardware import Hardware
from ..layout import AxisState, Layout
from ..mesh import Mesh
from ..plan.data_parallel import DataParallel
from ..plan.optimal.build import Asked
from ..plan.optimal.cuts import Cuts
from ..plan.optimal.find import Solved, find
from ..plan.optimal.mixed import Mixed
from ..plan.optimal.prices import Prices
from ..plan.optimal.storage import STORAGES, Storage, storages_of
from ..plan.optimal.tensor import asked as asked_of
from ..plan.storage_styles import STYLES
from ..plan.strategy import Strategies, Strategy
from ..plan.tensor_parallel import TensorParallel
from ..tuning import TUNING
from .templates import Template
from .wanted import Wanted

_CLOSELY, _ROUGHLY = TUNING.close_gap, TUNING.rough_gap
"""By how much a solution may be longer than the shortest step, by the model."""
_TIGHTER = TUNING.solved_budgets
"""Parts of the budget that are solved for: the model does not count what ops hold while they run."""


@dataclass(frozen=True)
class Programs:
    """What is solved for on one mesh: layouts along the axis of `tensor`, if any, and over the other axes the storage
    of each parameter, by those of `styles` where it is not `asked` to be stored otherwise.

    With `again`, what is held from the forward to the backward is not counted, as it may be made again. Solutions are
    within `gap` of the shortest step by the model. Where `even` makes equal layers alike, a solution is used as it is
    and evened for steps with few of them; evened only, where it was solved `roughly`.
    """

    graph: TrainGraph
    mesh: Mesh
    hardware: Hardware
    data: DataParallel
    tensor: TensorParallel | None = None
    styles: Sequence[str] | None = None
    budget_bytes: int | None = None
    placed: Mapping[str, Layout] | None = None
    asked: Wanted = field(default_factory=Wanted)
    again: bool = False
    roughly: bool = False
    even: Callable[[Solved], Solved] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Data-parallel axes."""
        return tuple(a for a in self.mesh.names if self.tensor is None or a != self.tensor.axis)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Ways in which parameters may be stored."""
        if not self.axes:
            return ()
        allowed = {s for style in STYLES.values() if style.name in (self.styles or STYLES) for s in storages_of(style)}
        return tuple(s for s in STORAGES if s in allowed and (len(self.axes) > 1 or not s.grouped))

    def templates(self) -> list[Template]:
        """Candidates, the best by the model first; those that differ from each other."""
        try:
            found = find(self.graph, self._asked(), self._budgets(), _ROUGHLY if self.roughly else _CLOSELY)
        except WholestepError as error:
            return [Template(f"solved for {self._over}", error)]
        found = [self.even(one) for one in found] if self.even is not None and self.roughly else found
        made = [self._template(one) for one in self._distinct(found)]
        return [replace(t, name=f"{t.name}, {n + 1}") if n else t for n, t in enumerate(made)]

    def layouts(self) -> tuple[Cuts | None, Cuts | None]:
        """The layouts along the axis of `tensor` beside which any style may be used, and these evened; None for either
        if there is none.
        """
        assert self.tensor is not None, "asked where there is an axis"
        found = find(self.graph, self._asked())
        return self._cuts(found[0]) if found else None, self._cuts(self.even(found[0])) if found and self.even else None

    def _budgets(self) -> list[float | None]:
        if self.budget_bytes is None:
            return [None]
        return [self.budget_bytes * part for part in (_TIGHTER[:1] if self.again else _TIGHTER)]

    def _asked(self) -> Asked:
        if self.tensor is not None:
            beside = (replace(self.data, axis=self.axes),) if self.axes else ()
            tensor = replace(self.tensor, hardware=self.hardware)
            made = asked_of(tensor, Strategies((*beside, tensor)), self.graph, self.mesh, self.placed or {})
            return replace(made, storages=self.storages, only=self._only(), again=self.again)
        ranks = prod(self.mesh.axis_size(a) for a in self.axes)
        share = 1 / ranks if self.data.semantics == "global" else 1.0
        axes = tuple(a for a in self.axes if self.mesh.axis_size(a) > 1)
        prices = Prices(self.hardware, self.mesh, "", share)
        return Asked(prices, axes, self.storages, dict[str, AxisState](), only=self._only(), again=self.again)

    def _only(self) -> dict[str, tuple[Storage, ...]]:
        """Of `storages`, what is left for some parameters; where that is nothing, any other that is left."""
        found = self.asked.storages(self.graph, self.mesh, self.axes)
        return {name: tuple(s for s in ways if s in self.storages) or ways for name, ways in found.items()}

    def _distinct(self, found: Sequence[Solved]) -> Iterator[Solved]:
        seen: list[tuple[object, ...]] = []
        for one in found:
            mark = (one.found.params, one.found.storage, one.found.pins)
            if mark not in seen:
                seen.append(mark)
                yield one

    @property
    def _over(self) -> str:
        if self.tensor is None:
            return f"each parameter on {','.join(self.axes)}"
        return f"each op on {self.tensor.axis}" + (f" and parameter on {','.join(self.axes)}" if self.axes else "")

    def _template(self, made: Solved) -> Template:
        alike = self._parts(self.even(made)) if self.even is not None and not self.roughly else None
        return Template(f"solved for {self._over}", self._parts(made), made, alike)

    def _parts(self, made: Solved) -> tuple[Strategy, ...]:
        parts: list[Strategy] = []
        if self.axes:
            fields = {name: getattr(self.data, name) for name in self.data.__dataclass_fields__}
            fields |= {"style": "fully_shard", "axis": self.axes, "reshard_after_forward": False}
            storage = {name: how.name for name, how in made.found.storage.items()}
            parts.append(Mixed(**fields, storage=storage, said=str(made)))
        if self.tensor is not None:
            parts.append(self._cuts(made))
        return tuple(parts)

    def _cuts(self, made: Solved) -> Cuts:
        assert self.tensor is not None, "asked where there is an axis"
        return Cuts(self.tensor.axis, made.found.params, made.found.pins, str(made), self.tensor.input_dim)
