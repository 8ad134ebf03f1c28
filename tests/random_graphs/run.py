"""Runs a case for all ranks and on one device, and says where they differ."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.random_graphs.case import Case
from tests.random_graphs.program import error
from tests.simulate import cut, join, run_one
from wholestep import partition
from wholestep.backend.rank_binding import bound_arguments
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.layout import Layout
from wholestep.mesh import Mesh
from wholestep.passes.base import run_passes
from wholestep.passes.reinplace import Reinplace
from wholestep.plan.plan import Plan
from wholestep.proof.interpret import run_all

TOLERANCE, COARSE = 1e-9, 1e-4
SUMMED_OTHERWISE = 1e-12


@dataclass(frozen=True)
class Problem:
    """`kind` tells failures apart while a case is made smaller: where it failed and how."""

    kind: str
    text: str


def problem(case: Case) -> Problem | None:
    """What is wrong with a case; None where all ranks compute what one device does."""
    stage = "planning"
    try:
        plan = case.plan()
        stage = "partitioning"
        local = partition(case.program.graph, plan)
        stage = "running"
        pieces = pieces_of(case, plan)
        made = run_all(local, _given(local, pieces), bound_arguments)
        stage = "comparing"
        found = _compared(case, plan, local, made)
        if found is not None:
            return found
        stage = "reinplacing"
        return _in_place(local, pieces, made)
    except Exception as caught:
        frame = traceback.extract_tb(caught.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.name}"
        return Problem(f"{stage} {type(caught).__name__} {place}", "".join(traceback.format_exception(caught)[-6:]))


# -- inputs --------------------------------------------------------------------------------
def pieces_of(case: Case, plan: Plan) -> dict[str, list[Tensor]]:
    """What each rank holds of each input."""
    source = torch.Generator().manual_seed(case.parts)
    whole = case.program.values
    return {name: shared(whole[name], layout, case.mesh, source) for name, layout in plan.storage.items()}


def shared(whole: Tensor, layout: Layout, mesh: Mesh, source: torch.Generator) -> list[Tensor]:
    """Pieces of a tensor, a piece of a partial value for each rank."""
    if not layout.partial:
        return cut(whole, layout, mesh)
    names = [a for a, _ in layout.partial]
    op = layout.partial[0][1]
    places = list(product(*(range(mesh.axis_size(a)) for a in names)))
    parts = dict(zip(places, parts_of(whole, op, len(places), source), strict=True))
    by_place = {place: cut(part, layout, mesh) for place, part in parts.items()}
    ranks = range(mesh.size)
    return [by_place[tuple(mesh.coordinate(r)[a] for a in names)][r] for r in ranks]


def parts_of(whole: Tensor, op: str, count: int, source: torch.Generator) -> list[Tensor]:
    """`count` tensors that reduce to `whole`."""
    if op in ("max", "min"):
        sign = 1 if op == "min" else -1
        keeper = torch.randint(count, whole.shape, generator=source)
        return [torch.where(keeper == i, whole, whole + sign * _positive(whole, source)) for i in range(count)]
    scale = count if op == "avg" else 1
    parts = [_positive(whole, source) for _ in range(count - 1)]
    return [*parts, whole * scale - torch.stack(parts).sum(0, dtype=whole.dtype)]


def _positive(like: Tensor, source: torch.Generator) -> Tensor:
    return (torch.rand(like.shape, generator=source, dtype=torch.float64) * 4 + 1).to(like.dtype)


def _given(local: LocalGraph, pieces: Mapping[str, Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[pieces[i.name][rank].clone() for i in local.inputs] for rank in range(local.mesh.size)]


# -- outputs -------------------------------------------------------------------------------
def _compared(case: Case, plan: Plan, local: LocalGraph, made: Sequence[Sequence[Any]]) -> Problem | None:
    expected = run_one(case.program.graph, list(case.program.values.values()))
    limit = COARSE if case.program.coarse else TOLERANCE
    for position, (output, whole) in enumerate(zip(local.outputs, expected, strict=True)):
        layout = plan.storage[output.target] if output.kind == "update" else Layout(((),) * whole.dim())
        own = [row[position] for row in made]
        name = f"{output.kind} {output.target!r}"
        try:
            joined = join(own, layout, case.mesh, whole.shape)
        except AssertionError as wrong:
            return Problem("pieces", f"{name} of shape {list(whole.shape)}: {wrong}")
        off = error(joined, whole)
        if off > limit:
            return Problem("values", f"{name} differs by {off:.1e}\nfound    {joined}\nexpected {whole}")
    return None


def _in_place(
    local: LocalGraph, pieces: Mapping[str, Sequence[Tensor]], made: Sequence[Sequence[Any]]
) -> Problem | None:
    """Updates in place give the same bits; where strides are not known, the same up to rounding."""
    limit = SUMMED_OTHERWISE if any(map(meta.is_strided, local.graph.nodes)) else 0.0
    changed = run_passes(local, [Reinplace()])
    given = _given(changed, pieces)
    results = run_all(changed, given, bound_arguments)
    places = {i.name: n for n, i in enumerate(changed.inputs)}
    kept = {(o.kind, o.target): n for n, o in enumerate(changed.outputs)}
    for position, output in enumerate(local.outputs):
        for rank, row in enumerate(made):
            at = kept.get((output.kind, output.target))
            own = given[rank][places[output.target]] if at is None else results[rank][at]
            if error(own, row[position]) > limit:
                text = f"{output.kind} {output.target!r} on rank {rank} is {own} in place, {row[position]} before"
                return Problem("in place", text)
    return None
