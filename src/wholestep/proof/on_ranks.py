"""The program of a plan on all ranks, in one process, beside one device: how far the result of each op is from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from ..backend.rank_binding import bound_arguments
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import LocalGraph, TrainGraph
from ..layout import Layout, cut
from ..mesh import TIME
from ..plan.plan import Plan
from .interpret import as_traced, run_all
from .one_device import OpResult, cleared, flat
from .sketch import SUMS, distance, places_of, sums_of

Key = tuple[str, int]
Far = tuple[float, str]
"""A distance, and where it is so far: layout and ranks."""
_UNKNOWN: Far = -1.0, ""


class PlanOnRanks:
    """The ranks of a program; `inputs[rank]` are what a rank has, of the device whose number is `device(rank)`."""

    def __init__(self, plan: Plan, local: LocalGraph, axes: Sequence[str], inputs: Sequence[Sequence[Tensor]]) -> None:
        self.plan, self.local, self.axes, self.mesh = plan, local, axes, local.mesh
        self.inputs = [
            [self._part(each, at, rank) for each, at in zip(inputs[self.device(rank)], local.layouts, strict=True)]
            for rank in range(self.mesh.size)
        ]

    def device(self, rank: int) -> int:
        """The number of the device whose batch a rank has."""
        at, number = self.mesh.coordinate(rank), 0
        for axis in self.axes:
            number = number * self.mesh.axis_size(axis) + at[axis]
        return number

    def _part(self, value: Tensor, layout: Layout, rank: int) -> Tensor:
        order = torch.contiguous_format if layout.is_sharded else torch.preserve_format
        return cut(value, layout, self.mesh, self.mesh.coordinate(rank)).clone(memory_format=order)

    def call(self, results: Sequence[OpResult], drawn: Mapping[str, Sequence[Any]]) -> dict[Key, Far]:
        """How far results of ops, and of the step, are from those of devices in a call, which have `drawn` the random
        numbers. Raises PlanError: the program cannot run.
        """
        expected = {(result.name, result.index): result for result in results}
        distances = dict[Key, Far]()

        def watch(node: Node, envs: Sequence[dict[Node, Any]]) -> None:
            computed = meta.computes(node) or ()
            if not computed or meta.rows(node) or any(len(_tensors(node, env)) != len(computed) for env in envs):
                return  # no op of the plan, or rows in an order of the rank's
            for rank, env in enumerate(envs):
                env[node] = self._drawn(node, env[node], drawn, rank) if computed[0][0] in drawn else env[node]
                env[node] = cleared(node, env[node])
            for position, key in enumerate(computed):
                values, result = [_tensors(node, env)[position] for env in envs], expected.get(key)
                if result is not None and all(isinstance(value, Tensor) for value in values):
                    self._note(result, values, self.plan.decisions[key[0]].outputs[key[1]], distances)

        try:
            rows = run_all(self.local, self.inputs, bound_arguments, watch)
        except (RuntimeError, ValueError, IndexError) as error:
            problem = f"the program of ranks raises {type(error).__name__}: {error}"
            raise PlanError(problem, "passes that keep its numbers", "leave passes= out") from error
        put_state(self.inputs, self.local, rows)
        places = {spec.name: place for place, spec in enumerate(self.local.inputs)}
        returned = {out.target: place for place, out in enumerate(self.local.outputs) if out.kind == "result"}
        for result in results:
            if result.op == "update" and result.module in places:
                values = [row[places[result.module]] for row in self.inputs]
                self._note(result, values, self.local.layouts[places[result.module]], distances)
            elif result.op == "result" and result.module in returned:
                values = [row[returned[result.module]] for row in rows]
                decision = self.plan.decisions.get(result.reads[0] if result.reads else "")
                layout = Layout(((),) * len(result.shape), (), decision.given[0].varies if decision else ())
                self._note(result, values, layout, distances)
        return {key: far for key, far in distances.items() if far[0] >= 0}

    def _note(self, result: OpResult, values: Sequence[Tensor], layout: Layout, distances: dict[Key, Far]) -> None:
        """Add the distance of a result, or -1 where these values are not in its layout."""
        sums = [result.sums_of_device(number) for number in range(len(result.sums))]
        key, far = (result.name, result.index), self._far(sums, values, layout, result.shape)
        distances[key] = max(distances.get(key, _UNKNOWN), far or _UNKNOWN)

    def _drawn(self, node: Node, value: Any, drawn: Mapping[str, Sequence[Any]], rank: int) -> Any:
        """The random numbers of the device in place of those of a rank, if it has a part of them."""
        name = (meta.computes(node) or (("", 0),))[0][0]
        layouts, full = self.plan.decisions[name].outputs, flat(drawn[name][self.device(rank)])
        if any(layout.partial or TIME in layout.axes for layout in layouts) or len(flat(value)) != len(full):
            return value
        parts = [self._part(each, layout, rank) for each, layout in zip(full, layouts, strict=True)]
        if any(part.shape != each.shape for part, each in zip(parts, flat(value), strict=True)):
            return value
        return as_traced(node, parts[0]) if isinstance(value, Tensor) else type(value)(parts)

    def _far(
        self, sums: Sequence[Tensor], values: Sequence[Tensor], layout: Layout, shape: Sequence[int]
    ) -> Far | None:
        """The largest distance of a tensor on ranks; None if these values are not in its layout."""
        mesh, share, totals, devices = self.mesh, 1.0, dict[str, Tensor](), dict[str, int]()
        for axis, op in layout.partial:
            share /= mesh.axis_size(axis) if op == "avg" else 1
        is_known = {op for _, op in layout.partial} <= {"sum", "avg"} and TIME not in layout.axes
        if not is_known or len(layout.dims) != len(shape):
            return None
        joined = layout.axes - {*layout.varies}
        for rank, value in enumerate(values):
            at = mesh.coordinate(rank)
            if not layout.is_held_at(at):
                continue
            if tuple(value.shape) != layout.local_shape(shape, mesh, at):
                return None
            here = ",".join(f"{axis}={n}" for axis, n in at.items() if axis not in joined)
            part = sums_of(value, shape, places_of(layout, shape, mesh, at)) * share
            totals[here] = totals[here] + part if here in totals else part
            devices[here] = 0 if joined & {*self.axes} else self.device(rank)
        if layout.partial and any(bool(each[SUMS:].any()) for each in (*sums, *totals.values())):
            return None  # of what is not finite, sums over ranks say little
        far, here = max((distance(total, sums[devices[at]]), at) for at, total in totals.items())
        return far, f"({layout.show(shape)}{here and ', ranks ' + here})"


def _tensors(node: Node, env: Mapping[Node, Any]) -> list[Any]:
    """The outputs of an op; if it returns none, the list that it has written."""
    is_written = env[node] is None and isinstance(node.args[0], (tuple, list))
    return [env[operand] for operand in cast("Sequence[Node]", node.args[0])] if is_written else flat(env[node])


def put_state(
    inputs: Sequence[list[Tensor]], graph: TrainGraph | LocalGraph, rows: Sequence[Sequence[Any]]
) -> None:  # fmt: skip
    """Put the state that a call leaves in place of that with which it began."""
    places = {spec.name: position for position, spec in enumerate(graph.inputs)}
    for values, row in zip(inputs, rows, strict=True):
        for out, value in zip(graph.outputs, row, strict=True):
            if out.kind == "update" and out.target in places:
                values[places[out.target]] = value.detach().clone()
