"""Pipelines: an axis of stages. A parameter is owned by one coordinate of it; nodes run where that leads them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Literal

from torch.fx import Node

from ..cost.compute import node_us
from ..cost.stage_orders import NAMED
from ..errors import PlanError, shown
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..hardware.hardware import Hardware
from ..layout import owned_by
from ..mesh import Mesh
from .module_map import Modules
from .propagation_inputs import moving
from .stage_of_node import first_readers, forward_nodes, stages_of_nodes
from .strategy import Pins, Stored, Strategy

Placement = Literal["loop", "v"]
"""Which rank has each of several stages; see `Pipeline`."""


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Cuts the step into stages along `axis`: each rank has the parameters and the optimizer state of its stage, and
    runs what belongs to them. The numbers are those of one device.

    Activations and their gradients are sent from stage to stage. With `micro_batches`, stages work on
    different micro-batches at the same time (as with `MicroBatches`, which may be given beside it instead).

    Args:
        axis: the mesh axis of the stages.
        stages: for each stage the modules and parameters that it has: paths or globs, as in `TensorParallel`. Modules
            in none go where the parameters beside them are read first. By default the forward is split into parts of
            equal time, where little has to be sent.
        micro_batches: the number of micro-batches.
        schedule: the order of blocks on each rank. `gpipe`: all forwards, then all backwards. `1f1b`: a backward as
            soon as there is one, with as few micro-batches in flight as keep all stages busy. `interleaved`: the same
            with several chunks of the model on each rank. `zero_bubble`: weight gradients wait for idle time. `auto`:
            the fastest of these and of list schedules, by simulation, that holds at most a tenth more than `1f1b`. Or
            a name of your own (`stage_order`).
        chunks: stages on each rank; 2 with `interleaved` and with `placement="v"`, else 1.
        placement: the rank of each stage. `loop`: stage `s` is on rank `s % ranks`. `v`: stages go forth and back, so
            that of 2 p stages on p ranks rank `r` has `r` and `2 p - 1 - r`: the first rank has the last stage too.

    Example:
        >>> step = ws.compile(train_step, parallel=ws.Pipeline(micro_batches=8), mesh="pp=4")
        >>> plan = ws.plan(graph, "pp=2", ws.Pipeline(stages=[["0"], ["1"]], micro_batches=4))

    Raises:
        PlanError: a pattern matches nothing, matches in two stages, or the number of stages does not fit the mesh.
    """

    axis: str = "pp"
    stages: Sequence[Sequence[str]] | None = None
    micro_batches: int = 1
    schedule: str = "auto"
    chunks: int | None = None
    placement: Placement = "loop"

    def __post_init__(self) -> None:
        if self.stages is not None:
            object.__setattr__(self, "stages", tuple(map(tuple, self.stages)))
        if self.schedule != "auto" and self.schedule not in NAMED:
            names = ", ".join(map(repr, ("auto", *NAMED)))
            next_step = "register it with wholestep.stage_order, or correct the name"
            raise PlanError(f"Pipeline(schedule={self.schedule!r})", f"one of {names}", next_step)
        for name in ("micro_batches", "chunks"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise PlanError(f"Pipeline({name}={number})", "at least one", "correct the number")

    @property
    def chunks_of_rank(self) -> int:
        """Stages on each rank."""
        return self.chunks or (2 if self.schedule == "interleaved" or self.placement == "v" else 1)

    def rank_of(self, stage: int, ranks: int) -> int:
        """The coordinate, of `ranks` along the axis, that has a stage."""
        turn, at = divmod(stage, ranks)
        return ranks - 1 - at if turn % 2 and self.placement == "v" else at

    def resolved(self, graph: TrainGraph, mesh: Mesh, hardware: Hardware) -> Pipeline:
        """This pipeline with the parameters of each stage by name."""
        return replace(self, stages=self._cut(graph, mesh, hardware))

    def _cut(self, graph: TrainGraph, mesh: Mesh, hardware: Hardware) -> tuple[tuple[str, ...], ...]:
        ranks = mesh.axis_size(self.axis)
        count = ranks * self.chunks_of_rank
        if self.stages is not None and self.chunks is None and len(self.stages) % ranks == 0:
            count = len(self.stages)
        if self.stages is None:
            of_param = balanced(graph, count, hardware)
        else:
            if len(self.stages) != count:
                problem = f"Pipeline has {len(self.stages)} stages, axis {self.axis!r} of mesh {mesh} has {ranks} ranks"
                needed = f"{count} stages: {self.chunks_of_rank} for each rank"
                raise PlanError(problem, needed, "give as many lists of patterns, or chunks=")
            of_param = self._named(graph)
        return tuple(tuple(name for name, at in of_param.items() if at == stage) for stage in range(count))

    def _named(self, graph: TrainGraph) -> dict[str, int]:
        """Stages of all parameters: the longest path that a pattern matches; without one, that of the next reader."""
        modules, stages = Modules(graph), dict[str, int]()
        by_path: dict[str, int] = {}
        for stage, patterns in enumerate(self.stages or ()):
            for pattern in patterns:
                paths = modules.matching(pattern)
                if not paths:
                    needed = f"the path of a module or a parameter, as {modules.near(pattern)}"
                    raise PlanError(f"stage {stage} names {shown(pattern)}, which nothing has", needed, "correct it")
                for path in paths:
                    if by_path.setdefault(path, stage) != stage:
                        text = f"stages {by_path[path]} and {stage} both have {path!r}"
                        raise PlanError(text, "one stage for each module", "correct the patterns")
        order = first_readers(graph)
        names = sorted(modules.params, key=lambda name: order.get(name, -1))
        for name in names:
            path = name
            while path and path not in by_path:
                path = path.rpartition(".")[0]
            if path:
                stages[name] = by_path[path]
        last = 0
        for name in names:
            last = stages.setdefault(name, last)
        return stages

    def of_params(self) -> dict[str, int]:
        """The stage of each parameter, once they are known."""
        return {name: stage for stage, names in enumerate(self.stages or ()) for name in names}

    def owners(self, mesh: Mesh) -> dict[str, int]:
        """The coordinate that owns each parameter, once stages are known."""
        ranks = mesh.axis_size(self.axis)
        return {name: self.rank_of(stage, ranks) for name, stage in self.of_params().items()}

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axis of the stages. Raises MeshError if the mesh does not have it."""
        mesh.axis_size(self.axis)
        return (self.axis,)

    def storage_layouts(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Stored]) -> dict[str, Stored]:
        """Each parameter and its state are owned by the coordinate of their stage."""
        if mesh.axis_size(self.axis) == 1:
            return dict(before)
        owners, out = self.owners(mesh), dict(before)
        for name, have in before.items():
            state = owned_by(owners[name])
            out[name] = Stored(have.param.put(self.axis, state), have.state.put(self.axis, state))
        return out

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """The owner of every node that has one."""
        ranks = mesh.axis_size(self.axis)
        if ranks == 1:
            return Pins()
        rank_of = partial(self.rank_of, ranks=ranks)
        at = stages_of_nodes(graph, self.of_params(), rank_of)
        return Pins(owners={name: {self.axis: owned_by(rank_of(stage))} for name, stage in at.items()})

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        ranks = mesh.axis_size(self.axis)
        count = len(self.stages) if self.stages is not None else ranks * self.chunks_of_rank
        return f"{count} stages on {self.axis}{self.on_each_rank(count // ranks)}, {self.schedule}"

    def on_each_rank(self, chunks: int) -> str:
        """How several stages are on each rank, in words."""
        return f", {chunks} on each rank{' in a V' if self.placement == 'v' else ''}" if chunks > 1 else ""


_NARROW = 1.05  # of the least that is sent nearby, a place to cut may send so much


def balanced(graph: TrainGraph, stages: int, hardware: Hardware) -> dict[str, int]:
    """The stage of each parameter. Stages follow the forward; the longest one is as short as it can be, by the cost
    model. A cut is in front of a node that reads a parameter for the first time. Raises PlanError where the forward has
    fewer such places.
    """
    calls, first = forward_nodes(graph), first_readers(graph)
    times = [node_us(node, hardware) for node in calls]
    until = [0.0, *accumulate(times)]
    sent = _sent(graph, calls)
    starts = sorted({position for position in first.values() if 0 < position < len(calls)})
    fits = _narrow(starts, until, sent, until[-1] / (2 * stages))
    if len(fits) < stages - 1:
        fits = starts
    if len(fits) < stages - 1:
        problem = f"a forward that can be cut in {len(fits)} places, between modules with parameters"
        raise PlanError(problem, f"{stages - 1} places for {stages} stages", "give fewer stages, or stages=")
    cuts = _cuts(fits, until, stages)
    return {i.name: bisect_right(cuts, first.get(i.name, 0)) for i in graph.inputs if i.role is Role.PARAM}


def _sent(graph: TrainGraph, calls: tuple[Node, ...]) -> list[int]:
    """For each position, the bytes of samples that nodes in front of it leave to those behind it."""
    moves, at = moving(graph), {node: i for i, node in enumerate(calls)}
    change = [0] * (len(calls) + 1)
    for node in calls:
        last = max((at[user] for user in node.users if user in at), default=at[node])
        tensor = meta.tensor(node)
        if node in moves and tensor is not None and tensor.dtype.is_floating_point:
            change[at[node] + 1] += tensor.size_bytes
            change[last + 1 if last < len(calls) else last] -= tensor.size_bytes
    return list(accumulate(change))


def _narrow(starts: list[int], until: list[float], sent: list[int], window_us: float) -> list[int]:
    """The places where about as little is sent as anywhere within the window."""
    places: list[int] = []
    for position in starts:
        low = bisect_left(until, until[position] - window_us)
        high = bisect_right(until, until[position] + window_us)
        near = [sent[p] for p in starts if low <= p < high]
        if sent[position] <= _NARROW * min(near):
            places.append(position)
    return places


def _cuts(places: list[int], until: list[float], stages: int) -> list[int]:
    """The places of `stages - 1` cuts that make the longest part the shortest: dynamic programming over places."""
    ends = [*places, len(until) - 1]
    best: list[tuple[float, tuple[int, ...]]] = [(until[end], ()) for end in ends]
    for _ in range(stages - 1):
        after: list[tuple[float, tuple[int, ...]]] = []
        for number, end in enumerate(ends):
            candidates = [
                (max(best[before][0], until[end] - until[ends[before]]), (*best[before][1], ends[before]))
                for before in range(number)
            ]
            after.append(min(candidates, default=(float("inf"), ())))
        best = after
    return list(best[-1][1])
